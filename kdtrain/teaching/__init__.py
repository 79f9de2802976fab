"""What a teacher is: the class `Teacher`, and one file for each kind."""

from kdtrain.teaching import itself, local
from kdtrain.teaching.served import teacher as served

__all__ = ["itself", "local", "served"]
