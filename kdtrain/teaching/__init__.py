"""What a teacher is: the class `Teacher`, and one file for each kind."""

from kdtrain.teaching import local, recorded

__all__ = ["local", "recorded"]
