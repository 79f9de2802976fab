"""GGUF, the file of llama.cpp: a model wherever a model folder is one, and a format of exports (docs/models.md)."""

from typing import Any

from kdtrain.config.choices import EXPORTS, FORMATS


def gguf(path: str) -> Any:
    """Open a GGUF file, whose weights transformers reads."""
    from kdtrain.plugins.gguf.read import open_file

    return open_file(path)


FORMATS.add("gguf", gguf, gguf)


@EXPORTS.registers("gguf", "one file for llama.cpp, checked there if cyllama is installed", traits=("--quantize q8_0",))
def export(of: Any) -> Any:
    """Write a student as a GGUF (`kdtrain.commands.export.Exported`)."""
    from kdtrain.plugins.gguf.write import export_gguf

    return export_gguf(of)
