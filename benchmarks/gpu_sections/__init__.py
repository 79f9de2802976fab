"""The sections of `benchmarks/gpu.py`, a module each, and what they share."""
