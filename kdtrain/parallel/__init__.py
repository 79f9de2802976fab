"""Ranks and devices."""
