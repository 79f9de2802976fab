"""Reading caches."""
