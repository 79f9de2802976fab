"""What a run prints and logs."""
