"""The fused output head: loss and gradients from hidden states, without ever holding all logits.

The engine goes through the rows in chunks. For a chunk it computes the logits, and sums over the tail of exp(z) and of
exp(beta z) (`sparse`); the loss is an ordinary small function of the logs of these sums and of z at the kept ids and
the label, whose autograd gives one coefficient for each, and with them
    dz = g_tail softmax_tail(z) + g_tail_beta beta softmax_tail(beta z) + scatter(g_kept, g_label),
    dHidden = dz W,   dW += dz^T h,
with dz written over the logits, or once in bf16 where the products take that. The forward pass thus computes the
gradients, with three matrix products as in plain cross-entropy (`matmul`); the backward pass only multiplies them by
the incoming scalar. A new sparse loss is a new small function. What depends on the teacher alone is computed once for
all chunks, and nothing is read back from a GPU.

Dense targets take another path for each chunk (`dense`): the divergence of a row is one of its statistics. Targets of
an online teacher are computed from its hidden states, chunk by chunk.

Given up: the loss can be differentiated once, and the requested gradients, as large as the weight and the hidden
states, are held from forward to backward.

Shape suffixes: N tokens, R rows of a chunk, D model width, V vocabulary (without padding), P rows of the
weight (V and padding), K kept entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kdtrain.objective import kernels, matmul
from kdtrain.objective.dense import DenseLoss, measure_dense, spread_dense, sum_dense, value_dense, weigh
from kdtrain.objective.logits import (
    Head,
    WholeHead,
    bare_logits,
    bounded_bias,
    chunk_rows,
    shape_logits,
    weight_chunks,
)
from kdtrain.objective.matmul import Products, maybe_compiled
from kdtrain.objective.sparse import TailSums, differentiate, reduce_logits, spread_gradients
from kdtrain.objective.statistics import Places, Rows, SparseLoss
from kdtrain.objective.targets import DenseTargets, OnlineTargets, SparseTargets


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

    def compile_small(self, device: torch.device) -> bool:
        """Compile the loss of a chunk too: a hundred small operations, slow to start on a GPU; a CPU gains nothing."""
        return self.compile and device.type != "cpu"


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
        ctx.kernels = walk.compile and kernels.available(hidden_ND.device)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_ND, weight_PD, bias_P, beta)]
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        # In place, and without a second reference: dWeight is never copied.
        if ctx.gradients is None:
            raise RuntimeError("the fused loss can be differentiated once; compute it again for a second backward")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in (each for each in gradients if each is not None):
            _scale(gradient, outer[0], ctx.kernels)
        found = [g if g is None else g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True)]
        if found[1] is not None and found[1] is not gradients[1]:
            matmul.return_buffer("weight gradient", gradients[1])
        return None, *found


def _scale(gradient: Tensor, factor: Tensor, use_kernels: bool) -> None:
    """Multiply in place; a factor of 1 costs no pass over dWeight where it can be seen without waiting for a device."""
    if use_kernels:
        kernels.scale_unless_one(gradient, factor)
    elif factor.device.type != "cpu" or factor.item() != 1.0:
        gradient.mul_(factor.to(gradient.dtype))


def _run(walk: Walk, hidden_ND: Tensor, weight_PD: Tensor | None, bias_P: Tensor | None, beta: Tensor) -> Any:
    """Value, sums and the four gradients (None where not wanted)."""
    rows, targets = hidden_ND.shape[0], walk.rows.targets
    head = WholeHead(weight=weight_PD, bias=bias_P, scale=walk.scale, softcap=walk.softcap)
    # A bias sums its gradient over the rows, which must not be rounded before.
    student = _Logits(hidden_ND, head, walk, walk.differentiates and not walk.wanted["bias"])
    beta = beta.detach().double()
    grads = _empty_gradients(walk, hidden_ND, weight_PD, bias_P, beta)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    sparse = targets is None or isinstance(targets, SparseTargets)
    measure = (_Sparse if sparse else _Dense)(walk, beta, student.dtype)
    assert walk.chunk
    for start in range(0, rows, walk.chunk):
        part = slice(start, start + walk.chunk)
        hidden_RD = hidden_ND[part]
        loss, sums, dbeta, dz_RV = measure(student(hidden_RD), part, student.narrow(start, len(hidden_RD)))
        found.append((loss, sums, dbeta))
        if dz_RV is not None:
            _accumulate(grads, part, dz_RV, hidden_ND, student)
    student.close()
    if isinstance(measure, _Dense):
        measure.close()
    found = found or [(beta.new_zeros(()), beta.new_zeros(walk.sums), torch.zeros_like(beta))]
    loss, sums, dbeta = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    if grads["beta"] is not None:
        grads["beta"] += dbeta
    return loss.to(student.dtype), sums, list(grads.values())


class _Logits:
    """Logits of one chunk of rows after another, all in one buffer: fresh memory would take as long as a product."""

    def __init__(self, hidden_ND: Tensor, head: Head, walk: Walk, narrow: bool = False) -> None:
        self.size = walk.vocab_size
        self.dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight_PD = head.weight
        self.products = None if weight_PD is None else Products(hidden_ND, weight_PD[: self.size], walk.compile)
        self.bias_V = bounded_bias(head.bias, self.size, self.dtype)
        self.scale, self.softcap = head.scale, head.softcap
        rows = 0 if self.products is None else min(walk.chunk or 0, len(hidden_ND))
        self.buffer_RV = matmul.take_rows("logits", rows, self.size, dtype=self.dtype, device=hidden_ND.device)
        kind = None if self.products is None else self.products.gradient_dtype
        self.narrow_RV, self.chunk, self.held = None, walk.chunk or 0, walk.chunk or 0
        """`held`: rows whose gradients in the logits wait for one product of dWeight."""
        if narrow and kind not in (None, self.dtype):
            self.held *= weight_chunks(hidden_ND.device.type)
            rows = min(self.held, len(hidden_ND))
            self.narrow_RV = matmul.take_rows("logit gradient", rows, self.size, dtype=kind, device=hidden_ND.device)

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R,V], in at least fp32."""
        if self.products is None:
            u_RV = bare_logits(hidden_RD.to(self.dtype), self.size)
        else:
            u_RV = self.products.logits(hidden_RD, self.buffer_RV[: len(hidden_RD)])
        return shape_logits(u_RV, self.bias_V, self.scale, self.softcap)

    def narrow(self, start: int, rows: int) -> Tensor | None:
        """Where the gradient in the logits of a chunk belongs, [R,V] in 16 bits; None if it replaces the logits."""
        return None if self.narrow_RV is None else self.narrow_RV[start % self.held :][:rows]

    def close(self) -> None:
        """Return the buffers; logits and gradients become invalid."""
        matmul.return_buffer("logits", self.buffer_RV)
        if self.narrow_RV is not None:
            matmul.return_buffer("logit gradient", self.narrow_RV)


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


def _accumulate(grads: dict[str, Any], part: slice, dz_RV: Tensor, hidden_ND: Tensor, student: _Logits) -> None:
    """Carry a chunk's gradient in u = h W^T + b on to hidden, weight and bias; to the weight once for `held` rows."""
    products, size = student.products, student.size
    if grads["bias"] is not None:
        grads["bias"][:size] += dz_RV.sum(0)
    if products is None:
        if grads["hidden"] is not None:
            grads["hidden"][part, :size] = dz_RV.to(grads["hidden"].dtype)
        return
    into_RD = None if grads["hidden"] is None else grads["hidden"][part]
    into_VD = None if grads["weight"] is None else grads["weight"][:size]
    dz_RV, first = dz_RV.to(products.gradient_dtype), part.start - part.start % student.held
    if student.narrow_RV is None or student.held == student.chunk:
        products.gradients(dz_RV, hidden_ND[part], into_RD, into_VD, first=first == 0)
        return
    products.gradients(dz_RV, hidden_ND[part], into_RD, None)
    held = part.start - first + len(dz_RV)
    if into_VD is not None and (held == student.held or first + held == len(hidden_ND)):
        held_ND = hidden_ND[first : first + held]
        products.gradients(student.narrow_RV[:held], held_ND, None, into_VD, first=first == 0)


Chunk = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Loss, sums, gradient in beta (0 if not wanted) and in u (if any gradient is wanted) of one chunk."""


class _Dense:
    """The loss of one chunk after another with a teacher's whole distribution, cached or online."""

    def __init__(self, walk: Walk, beta: Tensor, dtype: torch.dtype) -> None:
        self.walk, self.beta, self.heat, self.slopes = walk, beta, beta.to(dtype), walk.wanted["beta"]
        targets = walk.rows.targets
        self.teacher = _Logits(targets.hidden, targets.head, walk) if isinstance(targets, OnlineTargets) else None

    def __call__(self, z_RV: Tensor, part: slice, into_RV: Tensor | None) -> Chunk:
        walk, heat, slopes = self.walk, self.heat, self.slopes
        rows = walk.rows[part].harmless(walk.vocab_size)
        if self.teacher is None:
            assert isinstance(rows.targets, DenseTargets)
            logprobs_RV = rows.targets.logprobs
        else:
            assert isinstance(rows.targets, OnlineTargets)
            logprobs_RV = self.teacher(rows.targets.hidden)  # no more than log p + constant is needed
        rows = replace(rows, targets=None)
        label_R = z_RV.gather(1, rows.labels[:, None]).squeeze(1)
        sums = maybe_compiled(sum_dense, walk.compile)(z_RV, logprobs_RV, heat, slopes, walk.at_one)
        values = maybe_compiled(measure_dense, walk.compile)(z_RV, logprobs_RV, heat, sums, *walk.divergence, slopes)
        if walk.at_one:
            at_one_R = maybe_compiled(value_dense, walk.compile)(z_RV, logprobs_RV, sums, *walk.divergence)
            values = values._replace(at_one=at_one_R)
        found = maybe_compiled(weigh, walk.compile_small(z_RV.device))(
            walk.dense_loss, label_R, sums, values, self.beta, rows, slopes, walk.differentiates
        )
        if not walk.differentiates:
            return found.loss, found.sums, found.beta, None
        spread, head = maybe_compiled(spread_dense, walk.compile), (walk.scale, walk.softcap)
        spread(z_RV, logprobs_RV, heat, sums, values.g, found, rows.labels, *walk.divergence, *head, into_RV)
        return found.loss, found.sums, found.beta, z_RV if into_RV is None else into_RV

    def close(self) -> None:
        """Return the teacher's buffer."""
        if self.teacher is not None:
            self.teacher.close()


class _Sparse:
    """The loss of one chunk after another with sparse targets or none; what needs no logits is computed once."""

    def __init__(self, walk: Walk, beta: Tensor, dtype: torch.dtype) -> None:
        self.walk, self.beta, self.heat, self.slopes = walk, beta, beta.to(dtype), walk.wanted["beta"]
        rows = walk.rows.harmless(walk.vocab_size)
        self.places = Places.of(rows.targets, rows.labels, walk.vocab_size)
        self.distils = isinstance(rows.targets, SparseTargets)
        if isinstance(rows.targets, SparseTargets):
            rows = replace(rows, targets=rows.targets.at(beta))
        self.rows = rows
        self.lines = torch.arange(walk.chunk or 0, device=rows.labels.device)[:, None]

    def __call__(self, z_RV: Tensor, part: slice, into_RV: Tensor | None) -> Chunk:
        walk, heat, rows, places = self.walk, self.heat, self.rows[part], self.places[part]
        z_RE = places.take(z_RV)
        fused = walk.compile and kernels.chosen(z_RV, into_RV, self.slopes, walk.softcap)
        reduce = kernels.tail_stats if fused else maybe_compiled(reduce_logits, walk.compile)
        tail = TailSums(*reduce(z_RV, heat, self.distils, self.slopes))
        if not walk.differentiates:
            statistics, _ = tail.statistics(z_RE, places, self.beta)
            return *walk.sparse_loss(statistics, self.beta, rows.double()), torch.zeros_like(self.beta), None
        head, dz_RV = (walk.scale, walk.softcap), z_RV if into_RV is None else into_RV
        found = maybe_compiled(differentiate, walk.compile_small(z_RV.device))(
            walk.sparse_loss, z_RE, tail, self.beta, rows, places, self.slopes, *head, dz_RV.dtype
        )
        share_beta_R = found.share_beta if self.distils else None
        shares = (heat, tail.top, found.share, share_beta_R)
        if fused:
            kernels.tail_grad(z_RV, *shares, places.ids, found.at_places, *head, dz_RV)
            return found.loss, found.sums, found.beta, dz_RV
        maybe_compiled(spread_gradients, walk.compile)(z_RV, *shares, *head, into_RV)
        # Not scatter_, which for bf16 on a CPU copies the whole matrix twice.
        dz_RV[self.lines[: len(z_RV)], places.ids] = found.at_places
        return found.loss, found.sums, found.beta, dz_RV
