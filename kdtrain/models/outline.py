"""What a model is made of, from its spec alone: parameters, layers, and what a token of it costs in memory.

The model is built and run once over one sequence with tensors that have shapes and no numbers (PyTorch's fake
tensors), so that a model of any size takes a tenth of a second and no memory; from the hub comes its configuration
and nothing else. What a forward keeps for the backward is what autograd says it keeps, counted by storage.

What it gives up: a compiled graph keeps less than this counts, about two thirds; emulated formats of few bits keep
copies that it does not see.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kdtrain.models.attention import CAUSAL_SDPA
from kdtrain.models.hub import attention_option
from kdtrain.models.loading import checkpoint_activations
from kdtrain.models.scratch import configuration, layers_config
from kdtrain.models.spec import ModelSpec, read_spec


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Sizes of a model; numbers of parameters are of distinct ones, a tied head counts once."""

    name: str
    parameters: int
    layers: int
    in_layers: int
    """Parameters in all layers; the others are embedding, last norm and output head."""
    width: int
    """D, what the output head takes."""
    vocabulary: int
    """Rows of the output head."""
    tied: bool
    """Whether the head's weight is the embedding's."""
    kept: float
    """Bytes a token that a forward keeps for the backward."""
    kept_by_checkpoints: float
    """The same with activation checkpointing; equal where the model cannot."""
    weight_bytes: int = 4
    """Of a stored weight."""


def outline(spec: ModelSpec, *, vocab_size: int | None, seq_len: int, mode: str, trained: bool) -> Outline:
    """The outline of a student (`trained`) or a teacher.

    vocab_size: of a `[config]` that leaves it out. mode: number format of its forward, fp32, bf16 or fp16.

    Raises:
        UsageError: there is no such model, or transformers does not know its kind.
        Exception: of any kind, where a model does not run without numbers.
    """
    config = _configuration(spec, vocab_size)
    weight_bytes = 4 if trained or mode == "fp32" else torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size()
    found = _measured(spec, config, seq_len, mode, recompute=False)
    found = replace(found, weight_bytes=weight_bytes)
    if trained and found.kept_by_checkpoints:
        recomputed = _measured(spec, config, seq_len, mode, recompute=True)
        return replace(found, kept_by_checkpoints=recomputed.kept)
    return replace(found, kept_by_checkpoints=found.kept)


def _configuration(spec: ModelSpec, vocab_size: int | None) -> PreTrainedConfig:
    if spec.init == "teacher-layers" and spec.config is None:
        return layers_config(_configuration(read_spec(cast(str, spec.teacher)), None), spec.layers)
    return configuration(spec, vocab_size)


def _measured(spec: ModelSpec, config: PreTrainedConfig, seq_len: int, mode: str, recompute: bool) -> Outline:
    """`kept_by_checkpoints` is 1 where the model can recompute its layers, else 0."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        model = _fake(spec, config)
        if recompute:
            checkpoint_activations(model)
        own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        tokens_BT = torch.zeros(1, seq_len, dtype=torch.int64)
        with _kept(own) as kept, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            result = model.base_model(input_ids=tokens_BT, use_cache=False)
        layers = _layers(model)
        head: Any = model.get_output_embeddings()
        return Outline(
            name=spec.name,
            parameters=sum(each.numel() for each in model.parameters()),
            layers=len(layers),
            in_layers=sum(each.numel() for layer in layers for each in layer.parameters()),
            width=int(result.last_hidden_state.shape[-1]),
            vocabulary=int(head.weight.shape[0]),
            tied=head.weight is model.get_input_embeddings().weight,
            kept=sum(kept.values()) / seq_len,
            kept_by_checkpoints=float(model.supports_gradient_checkpointing),
        )


def _fake(spec: ModelSpec, config: PreTrainedConfig) -> Any:
    model: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        attn_implementation=attention_option(spec.attention),
        trust_remote_code=spec.trust_remote_code,
        dtype=torch.float32,
    )
    if model.config._attn_implementation == "sdpa":  # as training does, and without a mask that needs numbers
        model.set_attn_implementation(CAUSAL_SDPA)
    return model.train()


@contextmanager
def _kept(own: set[int]) -> Iterator[dict[int, int]]:
    """Bytes by storage of what autograd keeps while the block runs, the model's own tensors left out."""
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            held.append(storage)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers: the members of the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
