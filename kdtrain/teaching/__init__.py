"""What a teacher is: the class `Teacher`, and one file for each kind."""

from kdtrain.teaching import local, recorded
from kdtrain.teaching.served import teacher as served

__all__ = ["local", "recorded", "served"]
