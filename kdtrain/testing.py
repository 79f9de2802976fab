"""Tiny models and tokenizers for tests: kdtrain's own, and those of its users.

The models are random, two layers deep and 32 wide, with the architectures of real ones: grouped queries, soft-capped or
scaled logits, learned positions, sliding windows, recurrent layers. Building one takes milliseconds. The tokenizer is
byte-level: it encodes every text, and unused entries fill its vocabulary up to any size. `run_ranks` starts a script
once for each rank, with the environment variables that torchrun sets.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kdtrain.models.export import export_model
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec

END_OF_TEXT = "<|endoftext|>"

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 8},
    "qwen2": _LLAMA | {"model_type": "qwen2"},
    "qwen3": _LLAMA | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "gemma2": _LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8},
    "granite": _LLAMA | {"model_type": "granite", "logits_scaling": 8.0},
    "cohere": _LLAMA | {"model_type": "cohere", "logit_scale": 0.0625},
    "phi": _LLAMA | {"model_type": "phi", "num_key_value_heads": 4, "tie_word_embeddings": False},
    "gpt2": _GPT2,
    "falcon_h1": _LLAMA | {"model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4},
}


def tiny_model(shape: str = "llama", vocab_size: int = 300, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random float32 model in training mode.

    shape: a key of `SHAPES`. config: entries of the transformers configuration that replace those of the shape.
    """
    spec = ModelSpec(name=f"tiny-{shape}", config=SHAPES[shape] | config, init="scratch")
    return load_student(spec, vocab_size=vocab_size, seed=seed, device="cpu")


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of exactly `vocab_size >= 257` entries, the last of them the end of text.

    Each byte of a text is one token; the entries between the 256 bytes and the last are unused.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size = {vocab_size}: the bytes and the end of text need 257")
    entries = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries += [f"<|unused-{number}|>" for number in range(len(entries), vocab_size - 1)]
    vocabulary = {entry: number for number, entry in enumerate([*entries, END_OF_TEXT])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def write_model_folder(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write a model, and a tokenizer if given, as a model folder for a spec; return the folder."""
    export_model(model, None, path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def run_ranks(script: Path, world: int, *argv: object, seconds: float = 500.0) -> None:
    """Run `python script argv...` in `world` processes on this machine, as ranks of one group.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. All processes have ended when
    the function returns.

    Raises:
        AssertionError: a rank exits with an error; the message is the stderr of all ranks.
        subprocess.TimeoutExpired: a rank takes more than `seconds`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    command = [sys.executable, str(script), *(str(word) for word in argv)]
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        errors = [rank.communicate(timeout=seconds)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
