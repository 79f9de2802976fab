"""Kills, bit flips and broken-off runs, counted; each writes `benchmarks/results/torture-*.json`."""
