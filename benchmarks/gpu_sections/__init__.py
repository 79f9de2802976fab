"""The sections of `benchmarks/gpu.py`, a module each, and what they share.

Where kdtrain is not installed the one of this clone is taken, by the commands that a section starts as well.
"""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("kdtrain") is None:
    _CLONE = str(Path(__file__).resolve().parents[2])
    sys.path.append(_CLONE)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), _CLONE])
