"""Weights in 8 bits for a published model, by torchao, in a format that transformers loads.

Each row of the weight of a linear layer is kept as int8 with one scale; the output head, embeddings and norms keep
their format (transformers leaves them out). Activations are not quantised, so a forward multiplies in the format of the
rest. What it gives up: kdtrain itself does not read such a folder, which is for inference elsewhere.
"""

import shutil
from pathlib import Path
from typing import Any

from kdtrain.imports import optional
from kdtrain.models.hub import ask


def refuse_without_torchao() -> None:
    """Raise a UsageError if torchao is not installed."""
    optional("torchao", "fp8", "--quantize int8")


def quantize_folder(folder: Path) -> None:
    """Replace the weights of a model folder by their int8 form. UsageError: torchao is missing or refuses the model."""
    refuse_without_torchao()
    quantization: Any = optional("torchao.quantization", "fp8", "--quantize int8")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    def replace() -> None:
        config = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="auto")
        whole = folder / "whole"
        whole.mkdir()
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
            path.rename(whole / path.name)
        model.save_pretrained(folder)
        shutil.rmtree(whole)

    ask(str(folder), replace)
