"""The fused output head: loss and gradients from hidden states, without ever holding all logits.

The engine walks the rows in chunks. For a chunk it makes the logits and their statistics (`statistics`); the
loss is an ordinary small function of these, whose autograd gives one coefficient a statistic, and with them
    dz = g_tail softmax_tail(z) + g_tail_beta beta softmax_tail(beta z) + scatter(g_kept, g_label),
    dHidden = dz W,   dW = dz^T h.
Gradients are thus made in the forward pass, with three matrix products as in plain cross-entropy; the
backward pass only multiplies them by the incoming scalar. A new sparse loss is a new small function.

Dense targets take another way through the same walk: the loss is a function of the whole chunk of logits, and
autograd runs through that chunk.

Given up: the loss can be differentiated once, and all gradients that are asked for, as large as the weight
and the hidden states, are held from forward to backward.

Shape suffixes: N tokens, R rows of a chunk, D model width, V vocabulary (without padding), P rows of the
weight (V and padding), K kept entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kdtrain.objective.logits import Head, cap_slope, chunk_rows, make_logits
from kdtrain.objective.statistics import Rows, Statistics, reduce_logits, safe_ids, spread_gradients
from kdtrain.objective.targets import DenseTargets, SparseTargets

SparseLoss = Callable[[Statistics, Tensor, Rows], tuple[Tensor, Tensor]]
"""(statistics, beta, rows) -> (loss, a scalar that is differentiated; sums, a vector that is not)."""
DenseLoss = Callable[[Tensor, Tensor, Rows], tuple[Tensor, Tensor]]
"""(logits_RV, beta, rows) -> the same pair."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One pass over all rows: what is computed, of which rows, and which gradients are wanted."""

    rows: Rows
    sparse_loss: SparseLoss
    dense_loss: DenseLoss
    sums: int
    scale: float
    softcap: float | None
    vocab_size: int
    chunk: int
    compile: bool
    wanted: dict[str, bool] = field(default_factory=dict)

    @property
    def differentiates(self) -> bool:
        return any(self.wanted.values())


@torch.compiler.disable
def fused_loss(
    hidden_ND: Tensor,
    head: Head,
    beta: Tensor,
    rows: Rows,
    *,
    sparse_loss: SparseLoss,
    dense_loss: DenseLoss,
    sums: int,
    vocab_size: int,
    compile: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over chunks of a loss of output-head statistics, differentiable in hidden, weight, bias and beta.

    Args:
        hidden_ND: the student's last hidden states, or [N,P] logits when the head has no weight; any float dtype.
        beta: scalar inverse temperature.
        rows: labels, mask and targets of the N rows; the losses get a chunk of them, made harmless.
        sparse_loss: for sparse or absent targets.
        dense_loss: for dense ones.
        sums: the length of the vector of sums that the losses return.
        vocab_size: V; weight rows from V on are padding, take no part and get a zero gradient.
        compile: torch.compile the elementwise work of a chunk (of sparse targets; a dense loss compiles itself).
        chunk: rows of a chunk, instead of `chunk_rows`.
    Returns:
        the loss (scalar, at least fp32) and the vector of sums, detached.
    """
    inputs = {"hidden": hidden_ND, "weight": head.weight, "bias": head.bias, "beta": beta}
    walk = Walk(
        rows=rows,
        sparse_loss=sparse_loss,
        dense_loss=dense_loss,
        sums=sums,
        scale=head.scale,
        softcap=head.softcap,
        vocab_size=vocab_size,
        chunk=chunk or chunk_rows(vocab_size, hidden_ND.shape[1], hidden_ND.dtype),
        compile=compile,
        wanted={k: torch.is_grad_enabled() and v is not None and v.requires_grad for k, v in inputs.items()},
    )
    return _Fused.apply(walk, *inputs.values())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, hidden_ND: Tensor, weight_PD: Any, bias_P: Any, beta: Tensor) -> Any:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            loss, sums, ctx.gradients = _run(walk, hidden_ND, weight_PD, bias_P, beta)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_ND, weight_PD, bias_P, beta)]
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        # In place, and the only reference given away: no second copy of dWeight is ever made.
        assert ctx.gradients is not None, "the fused loss can be differentiated once"
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [g if g is None else g.mul_(outer[0].to(g.dtype)) for g in gradients]
        return None, *(g if g is None else g.to(d) for g, d in zip(scaled, ctx.dtypes, strict=True))


def _run(walk: Walk, hidden_ND: Tensor, weight_PD: Tensor | None, bias_P: Tensor | None, beta: Tensor) -> Any:
    """Value, sums and the four gradients (None where not wanted)."""
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    weight_VD = None if weight_PD is None else weight_PD[: walk.vocab_size].to(dtype)
    bias_V = None if bias_P is None else bias_P[: walk.vocab_size].to(dtype)
    beta = beta.detach().to(dtype)
    # fp16 hidden gradients wait in fp32 for the loss scale that keeps them from underflowing.
    stored = torch.float32 if hidden_ND.dtype == torch.float16 else hidden_ND.dtype
    into = {
        "hidden": (hidden_ND, stored),
        "weight": (weight_PD, dtype),
        "bias": (bias_P, dtype),
        "beta": (beta, dtype),
    }
    grads = {
        k: torch.zeros(x.shape, dtype=d, device=x.device) if x is not None and walk.wanted[k] else None
        for k, (x, d) in into.items()
    }
    loss, sums = beta.new_zeros(()), beta.new_zeros(walk.sums)
    for start in range(0, hidden_ND.shape[0], walk.chunk):
        part = slice(start, start + walk.chunk)
        hidden_RD = hidden_ND[part].to(dtype)
        z_RV = make_logits(hidden_RD, weight_VD, bias_V, walk.scale, walk.softcap, walk.vocab_size)
        rows = walk.rows[part].harmless(walk.vocab_size)
        chunk_loss, chunk_sums, dz_RV, dbeta = _chunk(walk, z_RV, beta, rows)
        loss += chunk_loss
        sums += chunk_sums
        if dz_RV is not None:
            _accumulate(grads, part, dz_RV, hidden_RD, weight_VD, walk.vocab_size)
        if dbeta is not None and grads["beta"] is not None:
            grads["beta"] += dbeta
    return loss, sums, list(grads.values())


def _accumulate(
    grads: dict[str, Tensor | None],
    part: slice,
    dz_RV: Tensor,
    hidden_RD: Tensor,
    weight_VD: Tensor | None,
    size: int,
) -> None:
    """Carry a chunk's gradient in u = h W^T + b on to hidden, weight and bias."""
    if (into := grads["hidden"]) is not None:
        if weight_VD is None:
            into[part, :size] = dz_RV.to(into.dtype)
        else:
            into[part] = (dz_RV @ weight_VD).to(into.dtype)
    if (into := grads["weight"]) is not None:
        into[:size].addmm_(dz_RV.T, hidden_RD)
    if (into := grads["bias"]) is not None:
        into[:size] += dz_RV.sum(0)


def _chunk(walk: Walk, z_RV: Tensor, beta: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Loss, sums, gradient in u (if any is wanted) and in beta (if it is wanted) of one chunk."""
    if isinstance(rows.targets, DenseTargets):
        return _dense_chunk(walk, z_RV, beta, rows)
    return _sparse_chunk(walk, z_RV, beta, rows)


def _dense_chunk(walk: Walk, z_RV: Tensor, beta: Tensor, rows: Rows) -> Any:
    leaves = [z_RV.requires_grad_(walk.differentiates), beta.detach().requires_grad_(walk.wanted["beta"])]
    with torch.set_grad_enabled(walk.differentiates):
        loss, sums = walk.dense_loss(leaves[0], leaves[1], rows)
    dz_RV, dbeta = _gradients(loss, leaves)
    if dz_RV is not None:
        dz_RV = dz_RV.mul_(walk.scale * cap_slope(z_RV.detach(), walk.softcap))
    return loss.detach(), sums.detach(), dz_RV, dbeta


def _sparse_chunk(walk: Walk, z_RV: Tensor, beta: Tensor, rows: Rows) -> Any:
    targets = rows.targets if isinstance(rows.targets, SparseTargets) else None
    head = 0 if targets is None else targets.head
    ids_RK, absent_RK = safe_ids(targets, z_RV)
    reduce = maybe_compiled(reduce_logits, walk.compile)
    tail_R, tail_beta_R, mean_R, kept_RK, label_R = reduce(
        z_RV, beta, ids_RK, absent_RK, rows.labels, head, targets is not None, walk.wanted["beta"]
    )
    leaves = [x.requires_grad_(walk.differentiates) for x in (tail_R, tail_beta_R, kept_RK, label_R)]
    leaves.append(beta.detach().requires_grad_(walk.wanted["beta"]))
    with torch.set_grad_enabled(walk.differentiates):
        moving = leaves[1] if mean_R is None else leaves[1] + mean_R * (leaves[4] - beta)
        statistics = Statistics(leaves[0], moving, leaves[2], leaves[3], head)
        loss, sums = walk.sparse_loss(statistics, leaves[4], rows)
    g_tail_R, g_beta_R, g_kept_RK, g_label_R, dbeta = _gradients(loss, leaves)
    dz_RV = None
    if walk.differentiates:
        g_beta_R = None if targets is None or g_beta_R is None else g_beta_R * beta
        spread = maybe_compiled(spread_gradients, walk.compile)
        dz_RV = spread(z_RV, beta, tail_R.detach(), tail_beta_R.detach(), g_tail_R, g_beta_R, walk.scale, walk.softcap)
        for ids, g, z in ((ids_RK, g_kept_RK, kept_RK), (rows.labels[:, None], g_label_R, label_R)):
            if g is not None:
                slope = walk.scale * cap_slope(z.detach(), walk.softcap)
                dz_RV.scatter_add_(1, ids, (g * slope).reshape(ids.shape))
    return loss.detach(), sums.detach(), dz_RV, dbeta


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of `loss` in the leaves that ask for one, None for others and for those it does not use."""
    asking = [x for x in leaves if x.requires_grad]
    if not asking:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(loss, asking, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def maybe_compiled(function: Callable[..., Any], compile: bool) -> Callable[..., Any]:
    """`function`, or its compiled form, which is made once a process; `function` must be a module's own."""
    return _compiled(function) if compile else function
