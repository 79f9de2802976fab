"""How far a cache is from its teacher, measured at build time on the stored numbers.

The held sample is a set of positions of the first validation sequences, at most 8,192 tokens and 2^25
logits, read back from the finished shard and compared with a fresh forward of the teacher.

Reported at T = 1, 2, 4: KL(full || cache) with the tail as one outcome (`kl_bucket`: the error of the
numbers kept) and with the tail's mass spread evenly (`kl_spread`: what is unknown about the rest); angle
and norm ratio between the KL gradient in the student's logits from the cache and from the full
distribution, by tail rule (`gradient`): `ghost`, `drop` and `renormalize` as far as the top-k allows,
`sampled` and `control-variate` with samples; `dense` for dense targets. A training run reads a cache with samples by
one of the latter two; the others are there for comparison. `student_kl` is the KL from the full distribution to the
student: the larger it is, the better the gradients agree.

The student: the teacher's log-probabilities times 0.7 plus normal noise of 0.5 nats (seed 0).

`temperature_range` is the widest interval of a grid over [2/3, 4] around T = 1 in which the worst error of
log Z over the sample stays below 2e-2 nats. The fresh forward takes one sequence at a time: in bf16 its logits differ
from those of the stored batches, and this difference counts as the cache's error. Samples without a top-k serve T = 1
only, and are measured there.

The gradient of every tail rule in the student's logits is, less the factor beta,
    scale q + extra,   q the student at beta, extra 0 outside the kept ids,
because a sparse loss depends on the tail's logits only through log sum exp(beta z): autograd of the objective's own
loss, of a few numbers per token, gives scale and extra, without a tensor as large as the vocabulary for each rule.
`token` compares the gradients of all tokens as one long vector; `mean` compares their mean over tokens, the gradient of
an output bias, where alone the noise of an estimate falls with the number of tokens.

Shapes: N tokens of the sample, V vocabulary, H top-k entries, D drawn columns, K = H + D.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.cache.format.codec import broken
from kdtrain.config.choices import TAILS
from kdtrain.errors import RunError
from kdtrain.objective.batch import Batch
from kdtrain.objective.divergence import forward_kl
from kdtrain.objective.engine.sparse import reduce_logits
from kdtrain.objective.tails import TailRule
from kdtrain.objective.targets import FLOOR, DenseTargets, SparseTargets, Targets

Gradient = tuple[Tensor, Tensor]
"""scale [N] and extra [N, K]."""


def sparse_gradients(
    targets: SparseTargets, z_NV: Tensor, labels_N: Tensor, beta: float
) -> tuple[dict[str, Gradient], Tensor]:
    """Compute the gradients of forward KL by tail rule, for each rule that these targets allow; and their ids [N, K].

    z_NV: the student's logits.
    """
    wide = torch.tensor(beta, dtype=torch.float64)
    top_k = targets.top_k
    z_NV = z_NV.clone()
    entries = targets.entries(labels_N, z_NV.shape[1]).take(z_NV)
    targets = targets.without_absent(z_NV.shape[1]).double()
    student, _ = reduce_logits(z_NV, wide.to(z_NV.dtype), True, False).statistics(entries, wide)
    leaves = [student.tail_beta.requires_grad_(), student.kept.requires_grad_()]
    with torch.no_grad():
        log_lse_N1 = student.lse_beta(wide)[:, None]
        mass_N = (student.tail_beta - log_lse_N1[:, 0]).exp().clamp(min=1e-38)
        q_NH = (wide * student.kept[:, :top_k] - log_lse_N1).exp()
    found = {}
    for name in TAILS.builtin:
        rule: TailRule = TAILS.get(name)
        if top_k >= rule.least_top_k and (targets.num_samples or not rule.needs_samples):
            loss = forward_kl(targets.events(name, student, wide)).sum()
            along_N, extra_NK = torch.autograd.grad(loss, leaves, materialize_grads=True)
            scale_N, extra_NK = along_N / mass_N, extra_NK / wide
            extra_NK[:, :top_k] -= scale_N[:, None] * q_NH
            found[name] = (scale_N, extra_NK)
    return found, entries.ids[:, :-1]


def outside(values_NV: Tensor, targets: SparseTargets) -> Tensor:
    """Sum the probabilities outside of the top-k, [N], without the cancellation of 1 - sum."""
    return values_NV.scatter(1, targets.ids[:, : targets.top_k], 0).sum(-1)


class Angles:
    """Running inner products of the full gradient with the gradients of several rules."""

    def __init__(self) -> None:
        self.full = 0.0
        self.mean_full: Tensor | float = 0.0
        self.inner: dict[str, float] = {}
        self.square: dict[str, float] = {}
        self.mean: dict[str, Tensor] = {}

    def add_full(self, full_NV: Tensor) -> None:
        """Add the full gradient of some tokens; call it before adding the rules' gradients."""
        self.full += full_NV.square().sum(dtype=torch.float64).item()
        self.mean_full = self.mean_full + full_NV.sum(0, dtype=torch.float64)

    def add(self, name: str, full_NV: Tensor, gradient_NV: Tensor) -> None:
        """Add a gradient [N, V]."""
        inner = (full_NV * gradient_NV).sum(dtype=torch.float64).item()
        self._add(name, inner, gradient_NV.square().sum(dtype=torch.float64).item(), gradient_NV.sum(0).double())

    def add_sparse(self, gradients: dict[str, Gradient], ids_NK: Tensor, full_NV: Tensor, q_NV: Tensor) -> None:
        """Add gradients of the form scale q + extra."""
        full_NK, q_NK = full_NV.gather(1, ids_NK).double(), q_NV.gather(1, ids_NK).double()
        along_N = (full_NV * q_NV).sum(-1, dtype=torch.float64)
        length_N = q_NV.square().sum(-1, dtype=torch.float64)
        scales = torch.stack([scale_N for scale_N, _ in gradients.values()])
        means = (scales.to(q_NV.dtype) @ q_NV).double()
        for mean_V, (name, (scale_N, extra_NK)) in zip(means, gradients.items(), strict=True):
            inner = (scale_N * along_N).sum() + (extra_NK * full_NK).sum()
            square = (scale_N.square() * length_N).sum() + (extra_NK.square()).sum()
            square = square + 2 * (scale_N * (extra_NK * q_NK).sum(-1)).sum()
            mean_V = mean_V.index_add(0, ids_NK.flatten(), extra_NK.flatten())
            self._add(name, inner.item(), square.item(), mean_V)

    def _add(self, name: str, inner: float, square: float, mean_V: Tensor) -> None:
        self.inner[name] = self.inner.get(name, 0.0) + inner
        self.square[name] = self.square.get(name, 0.0) + square
        self.mean[name] = self.mean[name] + mean_V if name in self.mean else mean_V

    def result(self) -> dict[str, dict[str, float]]:
        """Return the angle in degrees and the norm ratio by rule, of the tokens and of their mean."""
        found = {}
        full_V = torch.as_tensor(self.mean_full)
        for name, mean_V in self.mean.items():
            token = compare(self.inner[name], self.full, self.square[name])
            mean = compare((full_V @ mean_V).item(), full_V.square().sum().item(), mean_V.square().sum().item())
            found[name] = {"token_angle": token[0], "token_norm": token[1], "mean_angle": mean[0], "mean_norm": mean[1]}
        return found


def compare(inner: float, full: float, cached: float) -> tuple[float, float]:
    """Compute the angle in degrees and |cached| / |full| from inner products; 90 degrees where one of them is 0."""
    if full <= 0 or cached <= 0:
        return 90.0, 0.0
    cosine = max(-1.0, min(1.0, inner / math.sqrt(full * cached)))
    return math.degrees(math.acos(cosine)), math.sqrt(cached / full)


Teacher = Callable[[Tensor, Tensor | None], Tensor]
"""CPU int64 tokens [B,T] and segments [B,T] (None without a document mask) -> logits [B,T,V], any device."""

TEMPERATURES = (1.0, 2.0, 4.0)
GRID = (2 / 3, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4)
TOLERANCE = 2e-2
MAX_TOKENS = 8192
MAX_LOGITS = 2**25
MAX_SEQUENCES = 16
STUDENT = "0.7 * teacher log p + normal noise of 0.5 nats (seed 0)"
RULE = (
    f"widest interval around T = 1 in [2/3, 4] where the worst error of log Z stays below {TOLERANCE} nats, "
    "rounding of the teacher's forward in its dtype included"
)


def sample_size(sequences: int, seq_len: int, vocab_size: int) -> tuple[int, int]:
    """Return (sequences, positions of each) of the held sample, of a shard with `sequences` sequences."""
    tokens = max(1, min(MAX_TOKENS, MAX_LOGITS // vocab_size))
    taken = max(1, min(sequences, MAX_SEQUENCES, tokens))
    return taken, min(seq_len, max(1, tokens // taken))


def sample_positions(seq_len: int, positions: int) -> Tensor:
    """Return the positions, evenly spread, of a sequence of the held sample."""
    return torch.linspace(0, seq_len - 1, positions).round().long()


def measure(
    batch: Batch, teacher: Teacher, *, document_mask: bool, positions: int, counted: bool = False
) -> tuple[dict, dict]:
    """Measure (fidelity, temperature_range) of the stored sequences in `batch`, at `positions` positions of each.

    counted: only at positions that count in the loss, where others have no distribution.
    teacher: tokens [1,T] int64, segments [1,T] or None -> logits [1,T,V], or [1,positions,V] of `sample_positions`.
    """
    energies, kept = [], []
    length = batch.loss_mask.shape[1]
    chosen = sample_positions(length, positions)
    for b in range(len(batch.tokens)):
        if counted:
            own = batch.loss_mask[b].nonzero()[:, 0]
            chosen = own[sample_positions(len(own), min(len(own), positions))]
        segments = batch.segments[b : b + 1] if document_mask else None
        with torch.no_grad():
            logits_NV = rearrange(teacher(batch.tokens[b : b + 1, :-1], segments), "1 t v -> t v")
        if broken(logits_NV[None]).any():
            continue
        if counted or len(logits_NV) > positions:
            logits_NV = logits_NV[chosen.to(logits_NV.device)]
        energies.append(logits_NV.float().log_softmax(-1).clamp(min=FLOOR).cpu())
        kept.append(b * length + chosen)
    if not kept:
        raise RunError("the teacher gave non-finite logits for every sequence of the held sample")
    targets = batch.targets[torch.cat(kept)]  # type: ignore[index]
    labels_N = batch.tokens[:, 1:].flatten()[torch.cat(kept)]
    energy_NV = torch.cat(energies)
    served = (1.0,) if targets.only_at_one else TEMPERATURES
    errors = []
    for temperature in GRID if len(served) > 1 else served:
        full_N = torch.logsumexp(energy_NV / temperature, -1)
        error_N = (targets.log_partition(1 / temperature) - full_N).abs()
        errors.append({"T": temperature, "worst": error_N.max().item(), "mean": error_N.mean().item()})
    at = {f"T={t:g}": _at_temperature(targets, energy_NV, labels_N, 1 / t) for t in served}
    sample = {"sequences": len(kept), "tokens": len(energy_NV)}
    found = {"sample": sample, "student": STUDENT, **at, "log_partition_error": errors}
    return found, temperature_range(errors)


def temperature_range(errors: list[dict[str, float]]) -> dict[str, Any]:
    """Return the interval of `RULE` from errors by ascending T, which include T = 1: min, max, worst_error, rule."""
    one = next(i for i, row in enumerate(errors) if row["T"] == 1)
    low = high = one
    while low > 0 and errors[low - 1]["worst"] < TOLERANCE:
        low -= 1
    while high + 1 < len(errors) and errors[high + 1]["worst"] < TOLERANCE:
        high += 1
    worst = max(row["worst"] for row in errors[low : high + 1])
    return {"min": float(errors[low]["T"]), "max": float(errors[high]["T"]), "worst_error": worst, "rule": RULE}


def _at_temperature(targets: Targets, energy_NV: Tensor, labels_N: Tensor, beta: float) -> dict[str, Any]:
    """Compute divergences and gradients at one beta, over blocks of rows."""
    noise = torch.Generator().manual_seed(0)
    number = len(energy_NV)
    rows = max(1, 2**20 // energy_NV.shape[1])
    student = bucket = spread = 0.0
    angles = Angles()
    for start in range(0, number, rows):
        energy = energy_NV[start : start + rows]
        part: Any = targets[start : start + rows]
        student_NV = 0.7 * energy + 0.5 * torch.randn(energy.shape, generator=noise)
        log_p_NV, log_q_NV = (beta * energy).log_softmax(-1), (beta * student_NV).log_softmax(-1)
        p_NV, q_NV = log_p_NV.exp(), log_q_NV.exp()
        full_NV = q_NV - p_NV
        angles.add_full(full_NV)
        student += _kl(p_NV, log_p_NV, log_q_NV)
        if isinstance(part, DenseTargets):
            cached_NV = beta * part.logprobs.float() - part.log_partition(beta)[:, None]
            bucket = spread = bucket + _kl(p_NV, log_p_NV, cached_NV)
            angles.add("dense", full_NV, q_NV - cached_NV.exp())
        else:
            found = _sparse_kl(part, p_NV, log_p_NV, beta)
            bucket, spread = bucket + found[0], spread + found[1]
            gradients = sparse_gradients(part, student_NV, labels_N[start : start + rows], beta)
            angles.add_sparse(*gradients, full_NV, q_NV)
    sums = {"student_kl": student, "kl_bucket": bucket, "kl_spread": spread}
    return {**{name: total / number for name, total in sums.items()}, "gradient": angles.result()}


def _kl(p_NV: Tensor, log_p_NV: Tensor, log_other_NV: Tensor) -> float:
    return (p_NV * (log_p_NV - log_other_NV)).sum(dtype=torch.float64).item()


def _sparse_kl(targets: SparseTargets, p_NV: Tensor, log_p_NV: Tensor, beta: float) -> tuple[float, float]:
    """Return sums over rows of KL(full || cache): over top-k and one bucket, and with the bucket spread evenly."""
    log_tail_N1 = (targets.log_tail(beta) - targets.log_partition(beta))[:, None]
    cached_NE = torch.cat([targets.top_logprobs(beta), log_tail_N1], -1)
    top_NH = p_NV.gather(1, targets.ids[:, : targets.top_k])
    outcomes_NE = torch.cat([top_NH, outside(p_NV, targets)[:, None]], -1)
    # Both sides sum to 1 up to rounding; with the difference of the masses no term is below 0.
    p_NE = outcomes_NE.double()
    log_c_NE = cached_NE.double().clamp(min=-87.0)
    bucket = (torch.special.xlogy(p_NE, p_NE) - p_NE * log_c_NE - p_NE + log_c_NE.exp()).sum().item()
    cached_NE[:, -1] -= math.log(max(1, p_NV.shape[1] - targets.top_k))
    own = (p_NV * log_p_NV).sum(dtype=torch.float64)
    return bucket, (own - (outcomes_NE * cached_NE.clamp(min=-87.0)).sum(dtype=torch.float64)).item()
