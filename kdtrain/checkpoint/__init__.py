"""Checkpoints: published whole, verified before they are loaded."""
