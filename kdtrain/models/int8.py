"""Weights in 8 bits for a published model, by torchao, in a format that transformers loads.

Each row of the weight of a linear layer is kept as int8 with one scale; the output head, embeddings and norms keep
their format (transformers leaves them out). Activations are not quantised, so a forward multiplies in the format of the
rest. What it gives up: kdtrain itself does not read such a folder, which is for inference elsewhere.
"""

from pathlib import Path
from typing import Any

from kdtrain.imports import optional
from kdtrain.models.hub import ask


def int8_config() -> Any:
    """How torchao makes int8 weights: symmetric, a scale for each row; no setting of the compiler changes."""
    quantization: Any = optional("torchao.quantization", "fp8", "int8")
    return quantization.Int8WeightOnlyConfig(version=2, set_inductor_config=False)


def refuse_without_torchao() -> None:
    """Raise a UsageError if torchao is not installed."""
    optional("torchao", "fp8", "--quantize int8")


def quantize_folder(whole: Path, out: Path, most: str) -> None:
    """Write the int8 form of the model in the folder `whole` into `out`, in files of at most `most` ("5GB").

    UsageError: torchao is missing or refuses the model.
    """
    refuse_without_torchao()
    from transformers import AutoModelForCausalLM, TorchAoConfig

    def quantize() -> None:
        options: Any = {"quantization_config": TorchAoConfig(int8_config()), "dtype": "auto"}
        model: Any = AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=False, **options)
        model.save_pretrained(out, max_shard_size=most)

    ask(str(whole), quantize)
