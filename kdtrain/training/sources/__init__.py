"""Where the sequences of a step come from: what a source is (`source`), and one file for each kind."""
