"""Teachers and students: the specs that name them, how they are loaded, and how they are split.

`spec` reads the TOML files of `teachers/` and `students/`, `loading` makes a model from a spec and exports it to a
folder, `head` splits a model into backbone and output head. Importing the package turns off the warnings that torchao
and torch print when `transformers` is imported; they are about binaries that kdtrain does not use. It also keeps
transformers from fetching kernels from the hub, as it does for some models if the package `kernels` is installed; set
USE_HUB_KERNELS=YES to allow that.
"""

import logging
import os

for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
os.environ.setdefault("USE_HUB_KERNELS", "NO")
