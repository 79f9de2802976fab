"""What a teacher is: the class `Teacher`, and one file for each kind."""

from kdtrain.teaching import itself, local

__all__ = ["itself", "local"]
