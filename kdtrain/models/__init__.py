"""Teachers and students: the specs that name them, how they are loaded, and how they are split.

`spec` reads the TOML files of `teachers/` and `students/`, `loading` makes a model of a spec and a folder
of a model, `head` splits a model into backbone and output head. Importing the package turns off the
warnings that torchao and torch print when `transformers` is imported; they are about binaries that kdtrain
does not use.
"""

import logging

for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
