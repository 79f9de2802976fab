"""Teachers and students: the specs that name them, how they are loaded, and how they are split.

`spec` reads the TOML files of `teachers/` and `students/`, `loading` makes a model of a spec and a folder
of a model, `head` splits a model into backbone and output head. Importing the package keeps transformers from fetching
kernels from the hub, which it does for some kinds of model where the package `kernels` is installed; set
USE_HUB_KERNELS=YES to have them.
"""

import os

os.environ.setdefault("USE_HUB_KERNELS", "NO")
