"""The footprint of a model: sizes that decide its memory, from its spec alone.

The model is built and run over one sequence and over two with tensors that have shapes and no numbers (PyTorch's fake
tensors). A model of any size thus takes a second at most and no memory, and only its configuration is read from the
hub. A model whose code needs numbers is planned without an estimate, which is logged.
"""

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from kdtrain.errors import UsageError, log
from kdtrain.models.attention import CAUSAL, FUSED, fits_causal
from kdtrain.models.head import layers_of
from kdtrain.models.hub import attention_option, never_asking
from kdtrain.models.loading import active_parameters, checkpoint_activations, configuration
from kdtrain.models.spec import ModelSpec
from kdtrain.precision.modes import head_dtype
from kdtrain.ranks import is_main


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """Sizes of a model; a tied head's parameters count once."""

    name: str
    parameters: int
    active: int = 0  # that take part for one token
    layers: int
    in_layers: int  # parameters in all layers; the others are embedding, last norm and output head
    width: int  # D, what the output head takes
    vocabulary: int  # rows of the output head
    tied: bool  # True if the head's weight is the embedding's
    kept: float  # bytes per token that a forward keeps for the backward
    kept_by_checkpoints: float = 0.0  # the same with activation checkpointing; equal if the model does not support it
    kept_once: float = 0.0  # bytes that a forward keeps besides, whatever its number of sequences
    kept_once_by_checkpoints: float = 0.0
    weight_bytes: float = 4  # of a stored weight
    frozen: int = 0  # parameters that are not trained, of a student that trains a part
    frozen_bytes: float = 4  # of one of these
    frozen_in_layers: int = 0
    frozen_head: bool = False
    packed: bool = False  # weights in fewer bits, which are not sharded
    whole_factors: int = 0  # parameters of adapters that each tensor rank has
    cut: int = 1  # tensor ranks, of which these are the sizes of one

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.parameters - self.frozen

    def part(self, ranks: int, whole: float | None) -> "ModelFootprint":
        """Return what one of some tensor ranks has of it: norms are counted as cut too, as they are few.

        whole: bytes per token that each rank keeps of a layer, where the residual stream is cut; else None, and what a
        forward keeps is counted whole.
        """
        same = {"parameters": self.whole_factors, "in_layers": self.whole_factors}
        cut = {
            name: -(-(getattr(self, name) - same.get(name, 0)) // ranks) + same.get(name, 0)
            for name in ("parameters", "in_layers", "vocabulary", "frozen", "frozen_in_layers")
        }
        if whole is None:
            return replace(self, **cut, cut=ranks)
        every = min(whole * self.layers, self.kept)
        kept = every + (self.kept - every) / ranks
        by_checkpoints = self.kept_by_checkpoints / ranks
        once = {name: getattr(self, name) / ranks for name in ("kept_once", "kept_once_by_checkpoints")}
        return replace(self, **cut, **once, cut=ranks, kept=kept, kept_by_checkpoints=by_checkpoints)


def model_footprint(
    spec: ModelSpec,
    *,
    vocab_size: int | None,
    seq_len: int,
    mode: str,
    trained: bool,
    on_gpu: bool = False,
    freeze_head: bool = False,
) -> ModelFootprint:
    """Measure the footprint of a student (`trained`), with the adapters of its spec, or a teacher.

    vocab_size: of a `[config]` that leaves it out. mode: number format of its forward, fp32, bf16 or fp16. on_gpu:
    where it will run: a CPU keeps masks for sliding windows, and the scores of a model with a soft cap. freeze_head:
    the student does not train its output head.

    Raises:
        UsageError: there is no such model, or transformers does not know its type.
        Exception: of any kind, if a model does not run without numbers.
    """
    config = configuration(spec, vocab_size)
    with FakeTensorMode(), torch.random.fork_rng(devices=[]), never_asking(), ExitStack() as after:
        after.callback(setattr, moe, "_can_use_grouped_mm", moe._can_use_grouped_mm)
        moe._can_use_grouped_mm = lambda *_: False  # without numbers, torch's product is for bf16 alone
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation=attention_option(spec.attention, config),
            trust_remote_code=spec.trust_remote_code,
            dtype=torch.float32,
        ).train()
        attention = model.config.get_text_config()
        if attention._attn_implementation == "sdpa" or (on_gpu and fits_causal(attention)):
            model.set_attn_implementation(FUSED if on_gpu else CAUSAL)  # as in training, without masks of numbers
        if spec.lora is not None and trained:
            from kdtrain.models.adapters import sketch

            sketch(model, spec.lora)
        if freeze_head:
            model.get_output_embeddings().requires_grad_(False)
        layers = layers_of(model)
        head = model.get_output_embeddings()
        inside = [each for layer in layers for each in layer.parameters()]
        sizes = {
            "parameters": sum(each.numel() for each in model.parameters()),
            "active": active_parameters(model),
            "in_layers": sum(each.numel() for each in inside),
            "frozen": sum(each.numel() for each in model.parameters() if not each.requires_grad),
            "frozen_in_layers": sum(each.numel() for each in inside if not each.requires_grad),
            "whole_factors": _whole_factors(model),
        }
        if spec.weights is not None or sizes["frozen"]:
            from kdtrain.models.frozen import frozen_bytes, pack
        if spec.weights is not None and trained:
            pack(model, spec.weights, fused=True, outline=True)
        width, kept, kept_once = _forward(model, seq_len, mode)
        by_checkpoints = kept, kept_once
        if trained and model.supports_gradient_checkpointing:
            checkpoint_activations(model)
            by_checkpoints = _forward(model, seq_len, mode)[1:]
        weight_bytes = 4.0 if trained or mode == "fp32" else getattr(torch, spec.dtype).itemsize
        if spec.weights is not None and not trained:
            pack(model.requires_grad_(False), spec.weights, fused=True, outline=True)
            weight_bytes = frozen_bytes(model) / sizes["parameters"]
        return ModelFootprint(
            name=spec.name,
            layers=len(layers),
            **sizes,
            width=width,
            vocabulary=int(head.weight.shape[0]),
            tied=head.weight is model.get_input_embeddings().weight,
            kept=kept,
            kept_by_checkpoints=by_checkpoints[0],
            kept_once=kept_once,
            kept_once_by_checkpoints=by_checkpoints[1],
            weight_bytes=weight_bytes,
            frozen_bytes=frozen_bytes(model) / sizes["frozen"] if sizes["frozen"] else 4.0,
            frozen_head=not head.weight.requires_grad,
            packed=spec.weights is not None,
        )


def _whole_factors(model: Any) -> int:
    """Count the numbers of the factors of adapters that tensor ranks do not cut (`parallel.cut_adapters`)."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    ends = {path.rpartition(".")[2]: "lora_A" if style == "colwise" else "lora_B" for path, style in plan.items()}
    split = ((name.split("."), each) for name, each in model.named_parameters() if ".lora_" in name)
    return sum(each.numel() for (*_, layer, factor, _), each in split if ends.get(layer) in (None, factor))


def _forward(model: Any, seq_len: int, mode: str) -> tuple[int, float, float]:
    """D of the last hidden states, and the bytes that autograd keeps of other tensors: a token, and once a forward."""
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    dtype = head_dtype(mode)
    sizes = []
    for sequences in (1, 2):
        kept: dict[int, Any] = {}  # the storages themselves, so that no address is reused

        def keep(tensor: torch.Tensor, kept: dict[int, Any] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            result = model.base_model(input_ids=torch.zeros(sequences, seq_len, dtype=torch.int64), use_cache=False)
        sizes.append(sum(each.nbytes() for each in kept.values()))
    one, two = sizes
    return int(result.last_hidden_state.shape[-1]), (two - one) / seq_len, max(2.0 * one - two, 0.0)


def footprint_of(spec: ModelSpec, **how: Any) -> ModelFootprint | None:
    """As `model_footprint`; None, and a line in the log, for a model that does not run without numbers."""
    try:
        return model_footprint(spec, **how)
    except UsageError:
        raise
    except Exception as error:  # a model's own code may raise anything when tensors have no numbers
        if is_main():
            reason = " ".join(str(error).split())[:120]
            log.info("memory of %s not estimated: %s: %s", spec.name, type(error).__name__, reason)
        return None
