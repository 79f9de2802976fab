"""What a teacher is: the class `Teacher`, and the kinds of `local`."""

from kdtrain.teaching import local

__all__ = ["local"]
