"""The fused output head: loss and gradients from hidden states, without ever holding all logits.

The engine goes through the rows in chunks. For a chunk it computes the logits, and sums over the tail of exp(z) and of
exp(beta z) (`statistics`); the loss is an ordinary small function of the logs of these sums and of z at the kept ids
and the label, whose autograd gives one coefficient for each, and with them
    dz = g_tail softmax_tail(z) + g_tail_beta beta softmax_tail(beta z) + scatter(g_kept, g_label),
    dHidden = dz W,   dW += dz^T h,
written over the logits. The forward pass thus computes the gradients, with three matrix products as in plain
cross-entropy (`matmul`); the backward pass only multiplies them by the incoming scalar. A new sparse loss is a new
small function.

Dense targets take another path for each chunk (`dense`): the divergence of a row is one of its statistics. Targets of
an online teacher are computed from its hidden states, chunk by chunk.

Given up: the loss can be differentiated once, and the requested gradients, as large as the weight and the hidden
states, are held from forward to backward.

Shape suffixes: N tokens, R rows of a chunk, D model width, V vocabulary (without padding), P rows of the
weight (V and padding), K kept entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kdtrain.objective import matmul
from kdtrain.objective.dense import DenseStatistics, Shift, measure_dense, spread_dense, sum_dense, value_dense
from kdtrain.objective.logits import (
    Head,
    WholeHead,
    bare_logits,
    bounded_bias,
    cap_slope,
    chunk_rows,
    shape_logits,
)
from kdtrain.objective.matmul import Products, maybe_compiled
from kdtrain.objective.statistics import (
    Rows,
    Statistics,
    TailSums,
    reduce_logits,
    safe_ids,
    spread_gradients,
    take_top_k,
)
from kdtrain.objective.targets import DenseTargets, OnlineTargets, SparseTargets

SparseLoss = Callable[[Statistics, Tensor, Rows], tuple[Tensor, Tensor]]
"""(statistics, beta, rows) -> (loss, a differentiable scalar; sums, a vector without gradients)."""
DenseLoss = Callable[[DenseStatistics, Tensor, Rows], tuple[Tensor, Tensor]]
"""(statistics, beta, rows) -> the same pair."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One pass over all rows: what to compute, for which rows, and which gradients are wanted."""

    rows: Rows
    """Labels, mask and targets of the N rows; the losses get them chunk by chunk, see `Rows.harmless`."""
    sparse_loss: SparseLoss
    """For sparse or absent targets."""
    dense_loss: DenseLoss
    """For dense ones."""
    divergence: tuple[str, float]
    """Name and parameter of the divergence from dense targets."""
    sums: int
    """Length of the vector of sums that the losses return."""
    vocab_size: int
    """V; weight rows from V on are padding, take no part and get a zero gradient."""
    at_one: bool = True
    """Measure the divergence from dense targets at T = 1 too; else it is 0."""
    compile: bool = False
    """torch.compile the elementwise work of a chunk."""
    chunk: int | None = None
    """Rows of a chunk, instead of `chunk_rows`."""
    scale: float = 1.0
    softcap: float | None = None
    wanted: dict[str, bool] = field(default_factory=dict)
    """`fused_loss` fills in the last three: those of the head, and whether each input requires a gradient."""

    @property
    def differentiates(self) -> bool:
        return any(self.wanted.values())


@torch.compiler.disable
def fused_loss(hidden_ND: Tensor, head: Head, beta: Tensor, walk: Walk) -> tuple[Tensor, Tensor]:
    """Sum over chunks of a loss of output-head statistics, differentiable in hidden, weight, bias and beta.

    Args:
        hidden_ND: the student's last hidden states, or [N,P] logits when the head has no weight; any float dtype.
        beta: scalar inverse temperature.
    Returns:
        the loss (scalar, at least fp32) and the vector of sums, detached.
    """
    head = WholeHead.of(head)
    inputs = {"hidden": hidden_ND, "weight": head.weight, "bias": head.bias, "beta": beta}
    wanted = {k: torch.is_grad_enabled() and v is not None and v.requires_grad for k, v in inputs.items()}
    chunk = walk.chunk or chunk_rows(walk.vocab_size, hidden_ND.shape[1], hidden_ND.dtype, hidden_ND.device.type)
    walk = replace(walk, scale=head.scale, softcap=head.softcap, chunk=chunk, wanted=wanted)
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
        # In place, and without a second reference: dWeight is never copied.
        assert ctx.gradients is not None, "the fused loss can be differentiated once"
        gradients, ctx.gradients = ctx.gradients, None
        # Reading the value is free on a CPU only; a pass over dWeight is not.
        whole = outer[0].device.type == "cpu" and outer[0].item() == 1.0
        scaled = [g if g is None or whole else g.mul_(outer[0].to(g.dtype)) for g in gradients]
        found = [g if g is None else g.to(d) for g, d in zip(scaled, ctx.dtypes, strict=True)]
        if found[1] is not None and found[1] is not scaled[1]:
            matmul.return_buffer("weight gradient", scaled[1])
        return None, *found


def _run(walk: Walk, hidden_ND: Tensor, weight_PD: Tensor | None, bias_P: Tensor | None, beta: Tensor) -> Any:
    """Value, sums and the four gradients (None where not wanted)."""
    rows, targets = hidden_ND.shape[0], walk.rows.targets
    head = WholeHead(weight=weight_PD, bias=bias_P, scale=walk.scale, softcap=walk.softcap)
    student = _Logits(hidden_ND, head, walk)
    teacher = _Logits(targets.hidden, targets.head, walk) if isinstance(targets, OnlineTargets) else None
    beta = beta.detach().double()
    grads = _empty_gradients(walk, hidden_ND, weight_PD, bias_P, beta)
    loss, sums = beta.new_zeros(()), beta.new_zeros(walk.sums)
    assert walk.chunk
    for start in range(0, rows, walk.chunk):
        part = slice(start, start + walk.chunk)
        hidden_RD, chunk = hidden_ND[part], walk.rows[part].harmless(walk.vocab_size)
        if teacher is not None:
            assert isinstance(chunk.targets, OnlineTargets)
            logits_RV = teacher(chunk.targets.hidden)  # dense targets need no more than log p + constant
            chunk = replace(chunk, targets=DenseTargets(logits_RV, logits_RV[:, 0]))
        measure = _dense_chunk if isinstance(chunk.targets, DenseTargets) else _sparse_chunk
        chunk_loss, chunk_sums, dz_RV, dbeta = measure(walk, student(hidden_RD), beta, chunk)
        loss += chunk_loss
        sums += chunk_sums
        if dz_RV is not None:
            _accumulate(grads, part, dz_RV, hidden_RD, student.products, walk.vocab_size)
        if dbeta is not None and grads["beta"] is not None:
            grads["beta"] += dbeta
    for each in (student, teacher):
        if each is not None:
            each.close()
    return loss.to(student.dtype), sums, list(grads.values())


class _Logits:
    """Logits of one chunk of rows after another, all in one buffer: fresh memory would take as long as a product."""

    def __init__(self, hidden_ND: Tensor, head: Head, walk: Walk) -> None:
        self.size = walk.vocab_size
        self.dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight_PD = head.weight
        self.products = None if weight_PD is None else Products(hidden_ND, weight_PD[: self.size], walk.compile)
        self.bias_V = bounded_bias(head.bias, self.size, self.dtype)
        self.scale, self.softcap = head.scale, head.softcap
        rows = 0 if self.products is None else min(walk.chunk or 0, len(hidden_ND))
        self.buffer_RV = matmul.take_buffer("logits", rows, self.size, dtype=self.dtype, device=hidden_ND.device)

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R,V], in at least fp32."""
        if self.products is None:
            u_RV = bare_logits(hidden_RD.to(self.dtype), self.size)
        else:
            u_RV = self.products.logits(hidden_RD, self.buffer_RV[: len(hidden_RD)])
        return shape_logits(u_RV, self.bias_V, self.scale, self.softcap)

    def close(self) -> None:
        """Return the buffer; the logits become invalid."""
        matmul.return_buffer("logits", self.buffer_RV)


def _empty_gradients(walk: Walk, hidden_ND: Tensor, weight_PD: Any, bias_P: Any, beta: Tensor) -> dict[str, Any]:
    """Zeros for the wanted gradients; of the weight's only the padding, as the first chunk overwrites the rest."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    # fp16 hidden gradients wait in fp32 for the loss scale that keeps them from underflowing.
    stored = torch.float32 if hidden_ND.dtype == torch.float16 else hidden_ND.dtype
    inputs = {"hidden": hidden_ND, "weight": weight_PD, "bias": bias_P, "beta": beta}
    dtypes = {"hidden": stored, "weight": wide, "bias": wide, "beta": beta.dtype}
    found: dict[str, Any] = dict.fromkeys(inputs)
    for name in (each for each in inputs if walk.wanted[each]):
        like, own = inputs[name], dtypes[name]
        if name == "weight" and like.dtype != own:  # rounded at the end, and returned
            found[name] = matmul.take_buffer("weight gradient", *like.shape, dtype=own, device=like.device)
        else:
            found[name] = torch.empty(like.shape, dtype=own, device=like.device)
        (found[name][walk.vocab_size :] if name == "weight" and len(hidden_ND) else found[name]).zero_()
    return found


def _accumulate(
    grads: dict[str, Any], part: slice, dz_RV: Tensor, hidden_RD: Tensor, products: Products | None, size: int
) -> None:
    """Carry a chunk's gradient in u = h W^T + b on to hidden, weight and bias."""
    if grads["bias"] is not None:
        grads["bias"][:size] += dz_RV.sum(0)
    if products is None:
        if grads["hidden"] is not None:
            grads["hidden"][part, :size] = dz_RV.to(grads["hidden"].dtype)
        return
    into_RD = None if grads["hidden"] is None else grads["hidden"][part]
    into_VD = None if grads["weight"] is None else grads["weight"][:size]
    products.gradients(dz_RV, hidden_RD, into_RD, into_VD, first=part.start == 0)


Chunk = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Loss, sums, gradient in u (if any gradient is wanted) and in beta (if wanted) of one chunk."""


def _dense_chunk(walk: Walk, z_RV: Tensor, beta: Tensor, rows: Rows) -> Chunk:
    assert isinstance(rows.targets, DenseTargets)
    logprobs_RV, heat = rows.targets.logprobs, beta.to(z_RV.dtype)
    label_R = z_RV.gather(1, rows.labels[:, None]).squeeze(1)
    slopes = walk.wanted["beta"]
    sums_R = maybe_compiled(sum_dense, walk.compile)(z_RV, logprobs_RV, heat, slopes, walk.at_one)
    top_z, top_e, mass_z, mass_e, heated_z, heated_e, mean_z, mean_e = sums_R
    student, teacher = Shift.of(top_z, heated_z), Shift.of(top_e, heated_e)
    measure = maybe_compiled(measure_dense, walk.compile)
    found = measure(z_RV, logprobs_RV, heat, student, teacher, *walk.divergence, slopes)
    value_R, g_R, h_R, moment_q_R, moment_p_R = (each.double() for each in found)
    value_R += student.rounding(heated_z) * g_R + teacher.rounding(heated_e) * h_R
    slope_R = moment_q_R - g_R * mean_z + moment_p_R - h_R * mean_e
    at_one_R = torch.zeros_like(value_R)
    if walk.at_one:
        one, teacher_one = Shift.of(top_z, mass_z), Shift.of(top_e, mass_e)
        at_one = maybe_compiled(value_dense, walk.compile)
        at_one_R = at_one(z_RV, logprobs_RV, one, teacher_one, *walk.divergence).double()

    leaves = [top_z + mass_z.double().log(), label_R.double(), value_R]
    leaves = [each.detach().requires_grad_(walk.differentiates) for each in leaves]
    leaves.append(beta.detach().requires_grad_(walk.wanted["beta"]))
    with torch.set_grad_enabled(walk.differentiates):
        moving_R = leaves[2] + slope_R * (leaves[3] - beta) if walk.wanted["beta"] else leaves[2]
        loss, sums = walk.dense_loss(DenseStatistics(leaves[0], leaves[1], moving_R, at_one_R), leaves[3], rows)
    g_lse_R, g_label_R, weight_R, dbeta = _gradients(loss, leaves)
    if not walk.differentiates:
        return loss, sums, None, None

    assert g_lse_R is not None and g_label_R is not None and weight_R is not None
    spread = maybe_compiled(spread_dense, walk.compile)
    rest = (g_R, weight_R, g_lse_R / mass_z)
    shares = (each.to(z_RV.dtype) for each in rest)
    spread(z_RV, logprobs_RV, heat, student, teacher, *shares, *walk.divergence, walk.scale, walk.softcap)
    _add_at(z_RV, rows.labels[:, None], g_label_R[:, None], label_R[:, None], walk)
    return loss.detach(), sums.detach(), z_RV, dbeta


def _sparse_chunk(walk: Walk, z_RV: Tensor, beta: Tensor, rows: Rows) -> Chunk:
    targets = rows.targets if isinstance(rows.targets, SparseTargets) else None
    top_k = 0 if targets is None else targets.top_k
    ids_RK, absent_RK = safe_ids(targets, z_RV)
    kept_RK, label_R = take_top_k(z_RV, ids_RK, absent_RK, rows.labels, top_k)
    heat = beta.to(z_RV.dtype)
    tail = TailSums(*maybe_compiled(reduce_logits, walk.compile)(z_RV, heat, targets is not None, walk.wanted["beta"]))
    tail_R, tail_beta_R, mean_R = tail.log_sums(beta)

    leaves = [x.double().requires_grad_(walk.differentiates) for x in (tail_R, tail_beta_R, kept_RK, label_R)]
    leaves.append(beta.detach().requires_grad_(walk.wanted["beta"]))
    with torch.set_grad_enabled(walk.differentiates):
        moving_R = leaves[1] + mean_R * (leaves[4] - beta) if walk.wanted["beta"] else leaves[1]
        statistics = Statistics(leaves[0], moving_R, leaves[2], leaves[3], top_k)
        loss, sums = walk.sparse_loss(statistics, leaves[4], rows.double())
    g_tail_R, g_beta_R, g_kept_RK, g_label_R, dbeta = _gradients(loss, leaves)
    if not walk.differentiates:
        return loss, sums, None, None

    share_R = None if g_tail_R is None else (g_tail_R / tail.mass).to(z_RV.dtype)
    share_beta_R = None if g_beta_R is None or targets is None else (beta * g_beta_R / tail.mass_beta).to(z_RV.dtype)
    spread = maybe_compiled(spread_gradients, walk.compile)
    spread(z_RV, heat, tail.top, share_R, share_beta_R, walk.scale, walk.softcap)
    for ids, g, z in ((ids_RK, g_kept_RK, kept_RK), (rows.labels[:, None], g_label_R, label_R)):
        if g is not None:
            _add_at(z_RV, ids, g.reshape(ids.shape), z.reshape(ids.shape), walk)
    return loss.detach(), sums.detach(), z_RV, dbeta


def _add_at(dz_RV: Tensor, ids_RK: Tensor, g_RK: Tensor, z_RK: Tensor, walk: Walk) -> None:
    """Add the gradients `g_RK` in single logits `z_RK` to the gradient in u."""
    slope_RK = walk.scale * cap_slope(z_RK, walk.softcap)
    dz_RV.scatter_add_(1, ids_RK, (g_RK * slope_RK).to(dz_RV.dtype))


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of `loss` in the leaves that require one; None for others and for unused ones."""
    asking = [x for x in leaves if x.requires_grad]
    if not asking:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(loss, asking, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]
