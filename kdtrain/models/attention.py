"""Causal attention that keeps packed documents apart and builds no mask where none is needed.

`causal_sdpa` is an attention function for `transformers.AttentionInterface`. For plain causal attention its models get
no mask, so that PyTorch uses its fastest kernels under `torch.compile` too, where transformers would build a mask; for
packed documents they get a mask from `document_mask`. `causal_sdpa` applies a sliding window itself. What it gives up:
it ignores padding masks of transformers. Packed rows have no padding.

Shape suffixes: B batch, T time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

CAUSAL_SDPA = "kdtrain_causal_sdpa"

seen_windows: set[int | None] = set()
"""The sliding windows that models have passed, which a probe shorter than the window cannot show."""


def document_positions(segments_BT: Tensor) -> Tensor:
    """Return each token's position within its document, int64 [B, T]; a document is a run of one number."""
    here_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    starts_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))
    return here_T - torch.where(starts_BT, here_T, 0).cummax(dim=1).values


def document_mask(segments_BT: Tensor) -> Tensor:
    """Return which positions (last axis) a position (third axis) sees, bool [B, 1, T, T]: its document up to itself."""
    same_BTT = rearrange(segments_BT, "b t -> b 1 t 1") == rearrange(segments_BT, "b t -> b 1 1 t")
    return same_BTT & torch.ones(same_BTT.shape[-2:], dtype=torch.bool, device=segments_BT.device).tril()


def causal_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend by scaled dot products, causally; the interface of `transformers.AttentionInterface`.

    query, key, value: [B, heads, T, head width]. attention_mask: bool [B, 1, T, T], causal itself, or None.
    sliding_window: how many tokens a position sees, itself included; None for all before it.
    """
    length = query.shape[2]
    if not torch.compiler.is_compiling():
        seen_windows.add(sliding_window)
    if sliding_window is not None and length > sliding_window:
        everything_TT = torch.ones(length, length, dtype=torch.bool, device=query.device)
        window_TT = everything_TT.tril() & everything_TT.triu(1 - sliding_window)
        attention_mask = window_TT[None, None] if attention_mask is None else attention_mask & window_TT
    return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)


AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
