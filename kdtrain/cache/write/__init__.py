"""Building caches."""
