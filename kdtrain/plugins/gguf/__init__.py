"""GGUF, the format of llama.cpp: a file of it is a model wherever a model folder is one (docs/models.md)."""

from typing import Any

from kdtrain.config.choices import FORMATS


def gguf(path: str) -> Any:
    """A GGUF file, whose weights transformers reads."""
    from kdtrain.plugins.gguf.read import open_file

    return open_file(path)


FORMATS.add("gguf", gguf, gguf)
