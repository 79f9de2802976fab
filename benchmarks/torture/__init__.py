"""Attacks on caches, runs and commands, counted; each writes `results/torture-*.json`."""
