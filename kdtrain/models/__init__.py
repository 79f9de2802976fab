"""Teachers and students: the specs that name them, how they are loaded, and how they are split.

`spec` reads the TOML files of `teachers/` and `students/`, `loading` makes a model from a spec and exports it to a
folder, `head` splits a model into backbone and output head. Importing the package keeps transformers from fetching
kernels from the hub, as it does for some models if the package `kernels` is installed; set USE_HUB_KERNELS=YES to allow
that.
"""

import os

os.environ.setdefault("USE_HUB_KERNELS", "NO")
