"""What is done with finished caches: merging, cutting, verifying, looking."""
