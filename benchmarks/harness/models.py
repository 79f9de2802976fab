"""Students, teachers and text of the benchmarks: known shapes on random weights, made on the device.

The shapes are those of Llama 3.2 1B and 3B and Llama 3.1 8B, and on a CPU those of the shipped models, and of a student
of 48 million parameters and its teacher of 109 million. Weights are drawn on the device (a product's students are
drawn on the CPU, the same on every machine; 8 billion of them would take minutes). Text is the standard library of the
running interpreter in the tokens of the shipped teacher: real text, whose ids all lie below 2,048, so that a loss falls
as it does in training, and no figure of time depends on which ids they are.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import ATTENTION, TEACHER
from kdtrain.config.sections import DataConfig
from kdtrain.data.packing import packed_rows
from kdtrain.models.head import SplitModel, split
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.teaching.local import LocalTeacher

VOCABULARY = 128_256
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"num_key_value_heads": 2, "vocab_size": 2048, "head_dim": 16}
_SMALL = _LLAMA | {"max_position_embeddings": 1024, "rope_theta": 10_000.0, "tie_word_embeddings": True}
_DEMO = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
_DEMO_TEACHER = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
_50M = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10, "num_attention_heads": 8}
_100M_TEACHER = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 13, "num_attention_heads": 12}
_100M_TEACHER |= {"num_key_value_heads": 12, "head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": False}
_50M_TEACHER = {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 6, "num_attention_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": _LLAMA | _1B | {"head_dim": 64, "tie_word_embeddings": True},
    "3b": _LLAMA | _3B | {"head_dim": 128, "tie_word_embeddings": True},
    "8b": _LLAMA | _8B | {"head_dim": 128, "tie_word_embeddings": False},
    "demo": _SMALL | _DEMO | {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048},
    "demo-teacher": _SMALL | _DEMO_TEACHER | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048},
    "50m": _SMALL | _50M | {"head_dim": 64, "vocab_size": 32_000},
    "50m-teacher": _SMALL | _50M_TEACHER | {"head_dim": 128, "vocab_size": 32_000},
    "100m-teacher": _SMALL | _100M_TEACHER,
    "tiny": _LLAMA | _TINY | {"tie_word_embeddings": True},
    "tiny-teacher": _LLAMA | _TINY | {"tie_word_embeddings": False},
}


def make_student(shape: str, device: torch.device, seed: int = 0) -> SplitModel:
    """Make a student in fp32 and in training mode, as `load_student` does, split into backbone and head."""
    model = _made(shape, device, torch.float32, seed)
    model.get_input_embeddings().padding_idx = None
    return split(model.train())


def make_teacher(shape: str, device: torch.device, seed: int = 1) -> SplitModel:
    """Make a teacher in bf16 (fp32 on a CPU), without gradients, in evaluation mode, as `LocalTeacher` loads one."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return split(_made(shape, device, dtype, seed).eval().requires_grad_(False))


def _made(shape: str, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    table = dict(SHAPES[shape])
    config = AutoConfig.for_model(table.pop("model_type"), **table)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
        )
        return model.to(device)


def vocabulary(shape: str) -> int:
    """Return V of a shape."""
    return int(SHAPES[shape]["vocab_size"])


def forward_flops(shape: str, seq_len: int, head: bool = True) -> float:
    """Count the FLOPs of one token in one forward: two for each weight of a matrix, and causal attention.

    Causal attention is half of its square. Norms, activations and the embedding count nothing, so that no share of the
    card's rate is flattered.
    """
    of = SHAPES[shape]
    width, inner, layers = of["hidden_size"], of["intermediate_size"], of["num_hidden_layers"]
    heads, kept = of["num_attention_heads"] * of["head_dim"], of["num_key_value_heads"] * of["head_dim"]
    weights = layers * (width * (2 * heads + 2 * kept) + 3 * width * inner)
    attention = layers * 2 * heads * seq_len / 2
    return float(2 * weights + 2 * attention + (2 * width * of["vocab_size"] if head else 0))


def step_flops(shape: str, seq_len: int) -> float:
    """Count the FLOPs of one token in one training step: three forwards."""
    return 3 * forward_flops(shape, seq_len)


@functools.cache
def text(sequences: int, seq_len: int) -> list[Any]:
    """Return packed rows of the standard library, repeated if there are not enough."""
    found = packed(TEACHER, "train", sequences, seq_len)
    return [found[number % len(found)] for number in range(sequences)]


def token_tensor(found: list[Any]) -> torch.Tensor:
    """Stack the tokens [n, T + 1] of rows, int64."""
    return torch.from_numpy(np.stack([row.tokens for row in found]).astype(np.int64))


def open_teacher(name: str = TEACHER) -> SplitModel:
    """Load a teacher in fp32 on the CPU; by default the one that ships."""
    teacher = LocalTeacher(ModelSpec.read(name), torch.device("cpu"), "fp32")
    teacher.load()
    return teacher.model


def teacher_logits(name: str) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Load a teacher as a function: tokens [B, T] to logits [B, T, V], in fp32 on the CPU."""
    return LocalTeacher.of(open_teacher(name)).logits


def packed(name: str, split: str, sequences: int, seq_len: int) -> list[Any]:
    """Pack rows of the standard library in the tokens of a teacher."""
    data = DataConfig(data="stdlib", seq_len=seq_len, num_workers=2)
    return list(packed_rows(data, split, load_tokenizer(ModelSpec.read(name)), sequences))


class CheapTeacher:
    """A teacher whose distribution depends on the token just read, at the price of one narrow product.

    For caches whose content decides nothing that is measured; it is as peaked as a trained model's.
    """

    def __init__(self, vocab_size: int, device: torch.device, width: int = 32) -> None:
        g = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(vocab_size, width, generator=g).to(device)
        self.head = (2.5 * torch.randn(width, vocab_size, generator=g) / width**0.5).to(device)

    def __call__(self, tokens_BT: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """Return logits [B, T, V], fp32, on the device."""
        return self.embedding[tokens_BT.to(self.embedding.device)] @ self.head
