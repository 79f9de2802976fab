"""What a run shows on the terminal and writes about itself."""
