"""Causal attention that keeps packed documents apart and builds no mask where none is needed.

`causal_attention` is an attention function for `transformers.AttentionInterface`. For plain causal attention its models
get no mask, so that PyTorch uses its fastest kernels under `torch.compile` too, where transformers would build a mask;
for packed documents they get `first_seen`, the position at which a token's document starts. `causal_attention` applies
a sliding window itself: it moves that position. What a token sees is then always one run of positions up to itself.

On a GPU, documents and windows go to FlexAttention, which skips the blocks of keys that no query of a block sees: its
`BlockMask` lists pairs of blocks of 128 positions, where SDPA needs a mask of B x T x T and computes all of it.
FlexAttention has no dropout and no heads of fewer than 16 numbers; there, on a CPU, and where a row is one block, SDPA
gets the mask. Scores with a soft cap (Gemma 2) need FlexAttention: on a CPU such a model keeps its own attention.
Grouped queries in fp32 get repeated keys on a GPU, because no fused kernel takes them grouped.

For plain causal attention in 16 bits a GPU has several fused kernels, of which none is the fastest everywhere:
`choose_kernel` times them once a process on the student's own shape, and SDPA tries the faster one first.

A mask is made once a batch and window, for all layers; in a compiled graph the compiler merges equal ones. What it
gives up: `causal_attention` ignores padding masks of transformers. Packed rows have no padding.

Shape suffixes: B batch, T time, Q blocks of queries, K blocks of keys.
"""

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kdtrain.ranks import on_main

CAUSAL = "kdtrain_causal"
FUSED = "kdtrain_fused"
"""Stands for `CAUSAL` on a GPU where a model's memory is measured without one."""
BLOCK = 128
"""Positions in a block of FlexAttention, its default."""
SHORT = 256
"""The longest rows for which `auto` is `eager`, in a compiled student in bf16 on a CPU."""

seen_windows: set[int | None] = set()
"""The sliding windows that models have passed, which a probe shorter than the window cannot show."""

_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By `first_seen` tensor: its masks by kind and window, as long as the tensor lives."""


def resolve_attention(
    attention: str, device: torch.device, mode: str, *, compiled: bool, length: int, document_mask: bool
) -> str:
    """Return what a student's `attention` means: for `auto` the faster of `eager` and `sdpa`, by a rule.

    On a CPU a compiled student of a million parameters goes forward and backward 1.17 times as fast with `eager` in
    bf16 at 256 tokens; in fp32 it takes longer. `eager` holds scores of B x heads x T x T, so that longer rows keep
    `sdpa`. Nothing is timed: all ranks find the same, and every start of a run.

    mode: fp32, bf16, fp16. length: tokens of a row. document_mask: True where documents are kept apart, for which
    `eager` builds a mask.
    """
    if attention != "auto":
        return attention
    faster = device.type == "cpu" and compiled and mode == "bf16" and length <= SHORT and not document_mask
    return "eager" if faster else "sdpa"


def document_positions(segments_BT: Tensor) -> Tensor:
    """Return each token's position within its document, int64 [B, T]; a document is a run of one number."""
    here_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    return here_T - rearrange(first_seen(segments_BT), "b 1 t 1 -> b t")


def first_seen(segments_BT: Tensor) -> Tensor:
    """Return the first position that each position sees, its document's start, int64 [B, 1, T, 1]."""
    here_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    starts_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))
    return rearrange(torch.where(starts_BT, here_T, 0).cummax(dim=1).values, "b t -> b 1 t 1")


def dense_mask(first_B1T1: Tensor) -> Tensor:
    """Return which positions (last axis) a position (third axis) sees, bool [B, 1, T, T]."""
    here_T = torch.arange(first_B1T1.shape[2], device=first_B1T1.device)
    return (here_T >= first_B1T1) & (here_T <= here_T[:, None])


def block_mask(first_B1T1: Tensor) -> BlockMask:
    """Return the same for FlexAttention; one row of `first_B1T1` serves any batch.

    It never falls along T, so that the first and the last query of a block decide for the block.
    """
    length = first_B1T1.shape[2]
    starts_Q = torch.arange(0, length, BLOCK, device=first_B1T1.device)
    ends_Q = (starts_Q + BLOCK - 1).clamp(max=length - 1)
    before_QK = starts_Q[:, None] > starts_Q
    whole_Q1 = starts_Q[:, None] + BLOCK <= length  # torch counts a shorter last block as seen in part
    all_B1QK = before_QK & whole_Q1 & (first_B1T1[:, :, ends_Q] <= starts_Q)
    some_B1QK = (starts_Q[:, None] == starts_Q) | (before_QK & (first_B1T1[:, :, starts_Q] <= ends_Q) & ~all_B1QK)
    first_BT = rearrange(first_B1T1, "b 1 t 1 -> b t")
    same_rows = len(first_BT) == 1

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_BT[0 if same_rows else row, query]) & (key <= query)

    return BlockMask.from_kv_blocks(
        *_listed(some_B1QK), *_listed(all_B1QK), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _listed(blocks_B1QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are marked, [B, 1, Q], and the places of all, [B, 1, Q, K], marked first."""
    places_B1QK = blocks_B1QK.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_B1QK.sum(-1, dtype=torch.int32), places_B1QK.int()


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend by scaled dot products, causally; the interface of `transformers.AttentionInterface`.

    query, key, value: [B, heads, T, head width]. attention_mask: `first_seen` [B, 1, T, 1], or None: no documents.
    sliding_window: how many tokens a position sees, itself included; None for all before it.
    """
    length = query.shape[2]
    softcap = keywords.get("softcap")
    if not torch.compiler.is_compiling():
        seen_windows.add(sliding_window)
    if sliding_window is not None and length <= sliding_window:
        sliding_window = None
    plain = attention_mask is None and sliding_window is None
    flex = flex_fits(query, keywords.get("dropout", 0.0))
    if flex and (softcap is not None or (not plain and length > BLOCK)):
        mask = _mask(block_mask, attention_mask, sliding_window, query)
        if torch.is_autocast_enabled(query.device.type):  # some releases of torch do not cast for FlexAttention
            kind = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
        output, _ = flex_attention_forward(module, query, key, value, mask, **keywords)
        return output, None
    if softcap is not None:
        raise ValueError("a soft cap of the scores needs FlexAttention: a GPU, and no dropout")
    mask = None if plain else _mask(dense_mask, attention_mask, sliding_window, query)
    if mask is None and grouped_in_fp32(query, key):
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        module = _UNGROUPED
    order = kernel_orders.get(query.shape[3])
    if mask is not None or order is None:
        return sdpa_attention_forward(module, query, key, value, mask, **keywords)
    with sdpa_kernel(order, set_priority=True):
        return sdpa_attention_forward(module, query, key, value, mask, **keywords)


def use_cached_attention(model: Any) -> None:
    """Give a model with `CAUSAL` the attention of transformers again, which looks back at earlier keys and values."""
    config = model.config.get_text_config()
    if config._attn_implementation == CAUSAL:
        model.set_attn_implementation("eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa")


def is_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor lies on a GPU."""
    return tensor.is_cuda


def grouped_in_fp32(query: Tensor, key: Tensor) -> bool:
    """Return whether a GPU would multiply grouped queries in fp32.

    The one kernel for both in some releases of torch is the plain one, which holds all scores of T x T. With repeated
    keys and values the memory-efficient one fits.
    """
    if not is_cuda(query) or query.shape[1] == key.shape[1] or torch.is_autocast_enabled("cuda"):
        return False
    return query.dtype == torch.float32


def fits_causal(config: Any) -> bool:
    """Return whether `CAUSAL` may replace the attention of a model of this configuration, before it is proven equal."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    chunked = getattr(config, "attention_chunk_size", None) is not None
    own = config._attn_implementation
    # transformers has no sdpa for scores with a soft cap; FlexAttention, which has one, has no dropout
    capped = getattr(config, "attn_logit_softcapping", None) and not getattr(config, "attention_dropout", 0.0)
    return bool((own == "sdpa" or (own == "eager" and capped)) and not others and not chunked)


def flex_fits(query: Tensor, dropout: float) -> bool:
    """Return whether FlexAttention has a kernel for these queries."""
    return query.is_cuda and query.shape[3] >= 16 and dropout == 0


_UNGROUPED: Any = SimpleNamespace(is_causal=True)
"""What `sdpa_attention_forward` asks a module whose keys are not grouped."""


def _fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **keywords: Any
) -> tuple[Tensor, None]:
    """Keep what every fused kernel keeps for the backward (its inputs and output), with neither a mask nor scores."""
    others = {name: each for name, each in keywords.items() if name not in ("sliding_window", "softcap")}
    output, _ = sdpa_attention_forward(module, query, key, value, None, **others)
    return output, None


def _mask(make: Any, first_B1T1: Tensor | None, window: int | None, query: Tensor) -> Any:
    """Return the mask that `make` makes for documents and a window; the layers of a batch share it."""
    here_T1 = torch.arange(query.shape[2], device=query.device)[:, None]
    shared: dict[Any, Any] = {}
    if first_B1T1 is None:
        first_B1T1 = torch.zeros_like(here_T1)[None, None]
    elif not torch.compiler.is_compiling():
        shared = _masks.setdefault(first_B1T1, shared)
    if (make, window) not in shared:
        shared[make, window] = make(first_B1T1 if window is None else first_B1T1.maximum(here_T1 - window + 1))
    return shared[make, window]


KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
"""SDPA's kernels for 16 bits. Flash attention 3 takes flash's place where the user has activated it in torch."""
_OTHERS = [*KERNELS.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

kernel_orders: dict[int, list[SDPBackend]] = {}
"""By head width: the order in which SDPA tries its kernels; torch's own where there is none."""


class KernelShape(NamedTuple):
    """The shape of the attention that is timed for a kernel; a group is a head of keys and values."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int


_times: dict[tuple[KernelShape, torch.dtype], dict[str, float]] = {}


def kernel_seconds(kernel: SDPBackend, shape: KernelShape, dtype: torch.dtype, device: torch.device) -> float:
    """Time a layer's causal attention, forward and backward, in seconds; infinite where the kernel does not fit."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (shape.heads, shape.groups, shape.groups)
    made = [torch.empty(shape.batch, shape.length, each, shape.width, dtype=dtype, device=device) for each in heads]
    query, key, value = (each.normal_(generator=generator).transpose(1, 2).requires_grad_() for each in made)
    found = []
    for _ in range(6):  # the first builds plans
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        try:
            with torch.enable_grad(), sdpa_kernel([kernel]):
                grouped = shape.groups != shape.heads
                output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            torch.autograd.grad(output, [query, key, value], torch.ones_like(output))
        except RuntimeError:  # no memory for it, too
            return math.inf
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found[1:])


def choose_kernel(
    config: PreTrainedConfig,
    batch: int,
    length: int,
    dtype: torch.dtype | None,
    device: torch.device,
    seconds: Callable[[SDPBackend, KernelShape, torch.dtype, torch.device], float] = kernel_seconds,
) -> str | None:
    """Let SDPA try first what rank 0 finds to be the fastest kernel for a model, and return a line for the log.

    None, and nothing changes, on a CPU, in fp32, and for a model that does not use `causal_attention`. Under
    torch.use_deterministic_algorithms nothing is timed, so that a resumed run does not depend on a clock.

    Args:
        batch, length: of a micro-batch of one rank; at most 8,192 tokens of it are timed.
        dtype: of queries and keys.
        seconds: times a kernel.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if device.type != "cuda" or dtype is None or config._attn_implementation != CAUSAL or not isinstance(heads, int):
        return None
    if torch.are_deterministic_algorithms_enabled():
        return "attention by torch's own order of kernels: nothing is timed with --deterministic"
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = KernelShape(max(1, min(batch, 8192 // length)), heads, groups, length, width)
    if (shape, dtype) not in _times:
        _times[shape, dtype] = on_main(
            lambda: {name: seconds(kernel, shape, dtype, device) for name, kernel in KERNELS.items()}
        )
    times = _times[shape, dtype]
    fastest = min(times, key=lambda name: times[name])
    if times[fastest] == math.inf:
        return None
    kernel_orders[width] = list(dict.fromkeys([KERNELS[fastest], *_OTHERS]))
    shown = {name: "not possible" if each == math.inf else f"{1e3 * each:.3g} ms" for name, each in times.items()}
    return f"attention by {fastest}: " + ", ".join(f"{name} {text}" for name, text in shown.items()) + " a layer"


AttentionInterface.register(CAUSAL, causal_attention)
AttentionInterface.register(FUSED, _fused_attention)
