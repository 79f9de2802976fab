"""GGUF, the file of llama.cpp: `kdtrain export --format gguf` (docs/models.md)."""

from typing import Any

from kdtrain.config.choices import EXPORTS


@EXPORTS.registers("gguf", "one file for llama.cpp, checked there if cyllama is installed", traits=("--quantize q8_0",))
def export(of: Any) -> Any:
    """Write a student as a GGUF (`kdtrain.commands.export.Exported`)."""
    from kdtrain.plugins.gguf.write import export_gguf

    return export_gguf(of)
