"""Attacks on commands: what a stranger may hand over, how commands are run on it, and how their end is judged."""
