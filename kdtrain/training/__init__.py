"""The training of one student."""
