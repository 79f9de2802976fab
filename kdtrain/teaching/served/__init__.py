"""A teacher behind an inference server: who it is, what it is asked, and how its answers are checked."""
