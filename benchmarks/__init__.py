"""Measurements and studies of kdtrain, run as modules from the repository root; README.md says which."""
