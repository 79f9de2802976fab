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

Targets of whole rows take another path for each chunk (`dense`): the divergence of a row is one of its statistics.

Given up: the loss can be differentiated once, and the requested gradients, as large as the weight and the hidden
states, are held from forward to backward.

Shape suffixes: N tokens, R rows of a chunk, D model width, V vocabulary (without padding), P rows of the
weight (V and padding), K kept entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine import matmul
from kdtrain.objective.engine.matmul import maybe_compiled
from kdtrain.objective.engine.sparse import Shares, differentiate, reduce_logits, spread_gradients
from kdtrain.objective.logits import ChunkLogits, chunk_rows
from kdtrain.objective.statistics import Entries
from kdtrain.objective.targets import Supervision, readable

if TYPE_CHECKING:
    from kdtrain.objective.engine.dense import Named


@dataclass(frozen=True, kw_only=True)
class Request:
    """The inputs of the engine: what it computes, and for which rows."""

    head: HeadPart
    """Of the student; `fused_loss` takes weight and bias out of it."""
    rows: Supervision
    """Of the N rows; the losses get it chunk by chunk, see `Supervision.harmless`."""
    loss: Callable[..., tuple[Tensor, Tensor]]
    """A `DenseLoss` for targets of whole rows, else a `SparseLoss`."""
    divergence: Named
    """From targets of whole rows."""
    sums: int
    """Length of the vector of sums that the losses return."""
    vocab_size: int
    """V; weight rows from V on are padding, take no part and get a zero gradient."""
    at_one: bool = True
    """Measure the divergence from whole rows at T = 1 too; else it is 0."""
    stays_one: bool = False
    """True if the host knows that beta is 1, which it cannot read from a GPU."""
    compile: bool = False
    """torch.compile the elementwise work of a chunk."""
    chunk: int = 0
    """Rows of a chunk; 0 for `chunk_rows`."""
    wanted: frozenset[str] = frozenset()
    """The inputs that require a gradient: hidden, weight, bias, beta; `fused_loss` fills this in."""

    def compile_small(self, device: torch.device) -> bool:
        """Compile the loss of a chunk too: a hundred small operations, slow to start on a GPU; a CPU gains nothing."""
        return self.compile and device.type != "cpu"


@torch.compiler.disable
def fused_loss(hidden_ND: Tensor, beta: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Sum over chunks of a loss of output-head statistics, differentiable in hidden, weight, bias and beta.

    Args:
        hidden_ND: the student's last hidden states, or [N,P] logits when the head has no weight; any float dtype.
        beta: scalar inverse temperature.
    Returns:
        the loss (scalar, at least fp32) and the vector of sums, detached.
    """
    head = request.head.gathered()
    inputs = {"hidden": hidden_ND, "weight": head.weight, "bias": head.bias, "beta": beta}
    differentiable = [k for k, v in inputs.items() if torch.is_grad_enabled() and v is not None and v.requires_grad]
    chunk = request.chunk or chunk_rows(request.vocab_size, hidden_ND.shape[1], hidden_ND.dtype, hidden_ND.device.type)
    form = replace(head, weight=None, bias=None)
    request = replace(request, head=form, chunk=chunk, wanted=frozenset(differentiable))
    return _Fused.apply(request, *inputs.values())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, hidden_ND: Tensor, weight_PD: Any, bias_P: Any, beta: Tensor) -> Any:
        with torch.autocast(hidden_ND.device.type, enabled=False), matmul.more_graphs(request.compile):
            loss, sums, ctx.gradients = _run(request, hidden_ND, weight_PD, bias_P, beta)
        ctx.kernels = None
        if request.compile:
            from kdtrain.objective.engine import kernels

            ctx.kernels = kernels if kernels.available(hidden_ND.device) else None
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_ND, weight_PD, bias_P, beta)]
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        # In place, and without a second reference: dWeight is never copied.
        if ctx.gradients is None:
            raise RuntimeError("the fused loss can be differentiated once; compute it again for a second backward")
        gradients = ctx.gradients
        ctx.gradients = None
        for gradient in (each for each in gradients if each is not None):
            _scale(gradient, outer[0], ctx.kernels)
        found = [g if g is None else g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True)]
        if found[1] is not None and found[1] is not gradients[1]:
            matmul.return_buffer("weight gradient", gradients[1])
        return None, *found


def _scale(gradient: Tensor, factor: Tensor, kernels: Any) -> None:
    """Multiply in place; a factor of 1 costs no pass over dWeight where it can be seen without waiting for a device."""
    if kernels is not None:
        kernels.scale_unless_one(gradient, factor)
    elif factor.device.type != "cpu" or factor.item() != 1.0:
        gradient.mul_(factor.to(gradient.dtype))


def _run(request: Request, hidden_ND: Tensor, weight_PD: Tensor | None, bias_P: Tensor | None, beta: Tensor) -> Any:
    """Return value, sums and the four gradients (None where not wanted)."""
    targets = request.rows.targets
    head = replace(request.head, weight=weight_PD, bias=bias_P)
    # A bias sums its gradient over the rows, which must not be rounded before.
    narrow = bool(request.wanted) and "bias" not in request.wanted
    weighs = "weight" in request.wanted
    student = ChunkLogits(hidden_ND, head, request.vocab_size, request.chunk, request.compile, narrow, weighs)
    beta = beta.detach().double()
    grads = _empty_gradients(request, hidden_ND, head, beta)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    columns = slice(None) if head.group is None else slice(head.first, head.first + student.size)
    kind = _Entries if targets is None or targets.width is None else _WholeRows
    measure = kind(request, beta, student.dtype, columns)
    for start in range(0, len(hidden_ND), request.chunk):
        part = slice(start, start + request.chunk)
        hidden_RD = hidden_ND[part]
        loss, sums, dbeta, dz_RV = measure(student(hidden_RD), part, student.narrow(start, len(hidden_RD)))
        found.append((loss, sums, dbeta))
        if dz_RV is not None:
            _accumulate(grads, part, dz_RV, hidden_ND, student)
    student.close()
    if measure.reader is not None:
        measure.reader.close()
    found = found or [(beta.new_zeros(()), beta.new_zeros(request.sums), torch.zeros_like(beta))]
    loss, sums, dbeta = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    if grads["hidden"] is not None:
        grads["hidden"] = head.sum(grads["hidden"])
    if grads["beta"] is not None:
        grads["beta"] += dbeta
    return loss.to(student.dtype), sums, list(grads.values())


def _empty_gradients(request: Request, hidden_ND: Tensor, head: HeadPart, beta: Tensor) -> dict[str, Any]:
    """Make zeros for the wanted gradients; of the weight's only the padding, as the first chunk overwrites the rest."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    # fp16 hidden gradients wait in fp32 for the loss scale that keeps them from underflowing, parts for their sum.
    stored = wide if hidden_ND.dtype == torch.float16 or head.group else hidden_ND.dtype
    inputs: dict[str, Any] = {"hidden": hidden_ND, "weight": head.weight, "bias": head.bias, "beta": beta}
    size = head.columns(request.vocab_size)
    dtypes = {"hidden": stored, "weight": wide, "bias": wide, "beta": beta.dtype}
    found: dict[str, Any] = dict.fromkeys(inputs)
    for name in (each for each in inputs if each in request.wanted):
        like, own = inputs[name], dtypes[name]
        if name == "weight" and like.dtype != own:  # rounded at the end, and returned
            found[name] = matmul.take_buffer("weight gradient", *like.shape, dtype=own, device=like.device)
        else:
            found[name] = torch.empty(like.shape, dtype=own, device=like.device)
        (found[name][size:] if name == "weight" and len(hidden_ND) else found[name]).zero_()
    return found


def _accumulate(grads: dict[str, Any], part: slice, dz_RV: Tensor, hidden_ND: Tensor, student: ChunkLogits) -> None:
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
    dz_RV = dz_RV.to(products.gradient_dtype)
    first = part.start - part.start % student.held
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


class _WholeRows:
    """The loss of one chunk after another with targets of whole rows."""

    def __init__(self, request: Request, beta: Tensor, dtype: torch.dtype, columns: slice) -> None:
        self.request = request
        self.beta = beta
        self.beta_z = beta.to(dtype)
        self.slopes = "beta" in request.wanted
        self.columns = columns
        assert request.rows.targets is not None
        self.reader = request.rows.targets.reader(request.chunk, request.compile, columns)

    def __call__(self, z_RV: Tensor, part: slice, into_RV: Tensor | None) -> Chunk:
        from kdtrain.objective.engine import dense

        request, head = self.request, self.request.head
        compiled = request.compile and head.group is None  # a graph would be cut at each exchange
        rows = request.rows[part].harmless(request.vocab_size)
        assert rows.targets is not None
        pair = dense.Pair(z_RV, rows.targets.row_logprobs(self.reader, self.columns), self.beta_z)
        rows = replace(rows, targets=None)
        sums = maybe_compiled(dense.sum_dense, compiled)(pair, request.at_one).of_all(head, self.beta_z)
        values = maybe_compiled(dense.measure_dense, compiled)(pair, sums, request.divergence, self.slopes, head)
        if request.at_one:
            at_one_R = maybe_compiled(dense.value_dense, compiled)(pair, sums, request.divergence, head)
            values = values._replace(at_one=at_one_R)
        found = maybe_compiled(dense.weigh, request.compile_small(z_RV.device) and head.group is None)(
            request.loss, pair, sums, values, self.beta, rows, self.slopes, bool(request.wanted), head
        )
        if not request.wanted:
            return found.loss, found.sums, found.beta, None
        spread = maybe_compiled(dense.spread_dense, compiled)
        spread(pair, sums, values.g, found, rows.labels, request.divergence, request.head, into_RV)
        return found.loss, found.sums, found.beta, z_RV if into_RV is None else into_RV


class _Entries:
    """The loss of one chunk after another with single entries or no targets; what needs no logits is computed once."""

    reader = None

    def __init__(self, request: Request, beta: Tensor, dtype: torch.dtype, columns: slice) -> None:
        self.request = request
        self.beta = beta
        self.beta_z = beta.to(dtype)
        self.slopes = "beta" in request.wanted
        rows = request.rows.harmless(request.vocab_size)
        self.distils = rows.targets is not None
        if rows.targets is None:
            self.entries = Entries.of_labels(rows.labels)
        else:
            self.entries = rows.targets.entries(rows.labels, request.vocab_size)
            targets = rows.targets.at(beta)
            is_one = request.stays_one or (readable(beta) and beta.item() == 1.0)
            if is_one and not self.slopes:  # the sums at beta are the plain ones
                targets = targets.at_one()
            rows = replace(rows, targets=targets)
        self.rows = rows
        self.at_one = rows.targets is not None and rows.targets.known_at_one
        self.lines = torch.arange(request.chunk, device=rows.labels.device)[:, None]
        cells = None if rows.targets is None else rows.targets.cells
        self.cells = None if cells is None else cells.to(rows.labels.device)
        assert self.cells is None or request.head.group is None  # a cell's tokens may be in several parts
        folds = self.cells is not None and self.cells.folds and len(self.rows.labels)
        self.kernels: Any = None
        if request.compile and request.head.group is None:
            from kdtrain.objective.engine import kernels

            self.kernels = kernels
        self.totals = self.cells.totals(self.entries, request.chunk) if self.cells and folds else []

    def __call__(self, z_RV: Tensor, part: slice, into_RV: Tensor | None) -> Chunk:
        rows, entries = self.rows[part], self.entries[part]
        folded = None
        if self.cells is not None and self.totals:
            folded = self.cells.fold(z_RV, entries, rows.labels, self.totals[part.start // self.request.chunk])
        request, head, kernels = self.request, self.request.head, self.kernels
        entries = entries.take(z_RV, head) if folded is None else folded.entries
        fused = kernels is not None and kernels.chosen(z_RV, into_RV, self.slopes, head.softcap)
        reduce = kernels.tail_stats if fused else maybe_compiled(reduce_logits, request.compile)
        tail = reduce(z_RV, self.beta_z, self.distils and not self.at_one, self.slopes).of_all(head, self.beta_z)
        if not request.wanted:
            statistics, _ = tail.statistics(entries, self.beta)
            return *request.loss(statistics, self.beta, rows.double()), torch.zeros_like(self.beta), None
        dz_RV = z_RV if into_RV is None else into_RV
        at_type = dz_RV.dtype if folded is None else z_RV.dtype  # a cell's is not rounded twice
        found = maybe_compiled(differentiate, request.compile_small(z_RV.device))(
            request.loss, tail, self.beta, rows, entries, self.slopes, head, at_type
        )
        shares = Shares(tail.top, found.share, found.share_beta if self.distils else None)
        if fused:
            beta = None if self.at_one else self.beta_z
            kernels.tail_grad(z_RV, beta, shares, entries.ids, found.at_entries, head, dz_RV)
        else:
            spread = maybe_compiled(spread_gradients, request.compile)
            spread(z_RV, self.beta_z, shares, head, into_RV, self.at_one)
            ids_RE, dz_RE = head.places(dz_RV, entries.ids, found.at_entries.to(dz_RV.dtype))
            if dz_RV.device.type == "cpu":
                bits = torch.int16 if dz_RV.itemsize == 2 else dz_RV.dtype  # in bf16 it copies the whole matrix twice
                dz_RV.view(bits).scatter_(1, ids_RE, dz_RE.view(bits))
            else:
                dz_RV[self.lines[: len(z_RV)], ids_RE] = dz_RE
        if folded is not None and found.apart is not None:
            folded.unfold(dz_RV, found.at_entries, found.apart, head)
        return found.loss, found.sums, found.beta, dz_RV
