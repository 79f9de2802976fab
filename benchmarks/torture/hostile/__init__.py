"""The parts of `torture_hostile.py`: what attackers make, how commands are run on it, and how their end is judged."""
