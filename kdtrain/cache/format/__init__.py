"""What a cache is on disk."""
