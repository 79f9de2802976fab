"""How far a cache is from the teacher it came from, measured on the stored numbers at build time.

The held sample is a set of positions of the first validation sequences, at most 8,192 tokens and 2^25
logits, read back from the finished shard and compared with a fresh forward of the teacher.

Reported at T = 1, 2, 4: KL(full || cache) with the tail as one outcome (`kl_bucket`: the error of the
numbers kept) and with the tail's mass spread evenly (`kl_spread`: what is unknown about the rest); angle
and norm ratio between the KL gradient in the student's logits from the cache and from the full
distribution, by tail rule (`gradients`): `ghost`, `drop` and `renormalize` as far as the top-k allows,
`sampled` and `control-variate` with samples, else `dense`. A training run reads a cache with samples by one of
those two; the others stand beside them to be compared with. `student_kl` is the KL from the full
distribution to the student: gradients agree the better the larger it is.

The student: the teacher's log-probabilities times 0.7 plus normal noise of 0.5 nats (seed 0).

`temperature_range` is the widest interval of a grid over [2/3, 4] around T = 1 in which the worst error of
log Z over the sample stays below 2e-2 nats. It is an error against a fresh forward, one sequence at a time: what a
teacher in bf16 gives differs from what it gave in the batches that were stored, and that counts as the cache's error.

Shapes: N tokens of the sample, V vocabulary, H top-k entries, K kept entries.

The gradient in a student's logits that a cache gives under each tail rule, against that of the full distribution.

With p the teacher and q the student at beta, the gradient of forward KL is beta (q - p). That of every tail rule over
sparse targets is, less the factor beta,
    scale q + extra,   extra being 0 outside the kept ids,
so that a rule costs a few numbers a token once q is there. With P and Q the sides' masses in the tail, r = P / Q, and w
the weights of the samples:
    ghost            (1 - r) q in the tail, q - p in the top-k
    drop             (1 - P) q - p over the top-k
    renormalize      q / (1 - Q) - p / (1 - P) in the top-k, 0 in the tail
    sampled          (1 - P + sum w) q - p over the top-k - w over the samples
    control-variate  ghost; less v over the samples, plus q / Q sum v in the tail: v = w (1 - s min(r q / p, CLIP)),
                     with bounded w and a share s = exp(-SHARPNESS distance)
The rules are written out here again, because the cache does not know the objective; a test compares the two.

`token` compares the gradients of all tokens as one long vector, `mean` their mean over tokens, which is the gradient of
an output bias: noise of an estimate falls with the number of tokens only there.

Shapes: N tokens, V vocabulary, H top-k entries, D drawn columns, K = H + D.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.cache.codec import broken
from kdtrain.cache.reader import CachedBatch
from kdtrain.errors import RunError
from kdtrain.objective.targets import CLIP, SHARPNESS, DenseTargets, SparseTargets

Gradient = tuple[Tensor, Tensor]
"""scale [N] and extra [N, K]."""
_TINY = 1e-38


def sparse_gradients(
    targets: SparseTargets, q_NV: Tensor, beta: float, distance_N: Tensor | None
) -> dict[str, Gradient]:
    """By the tail rule's name, for every rule that the numbers kept allow.

    q_NV: the student at beta. distance_N: see `distance`; needed where there are samples.
    """
    q_NK = q_NV.gather(1, safe_ids(targets, q_NV))
    top_k, width = targets.top_k, q_NK.shape[1]
    top_NH = targets.top_logprobs(beta).exp()
    mass_N = (targets.log_tail(beta) - targets.log_partition(beta)).exp()
    ratio_N = mass_N / outside(q_NV, targets).clamp(min=_TINY)
    ghost = (1 - ratio_N, _padded(ratio_N[:, None] * q_NK[:, :top_k] - top_NH, width))
    found: dict[str, Gradient] = {}
    if top_k:
        found |= {"ghost": ghost, "drop": (top_NH.sum(-1), _padded(-top_NH, width))}
    if top_k > 1:
        within_NH = q_NK[:, :top_k] / q_NK[:, :top_k].sum(-1, keepdim=True).clamp(min=_TINY)
        inner_NH = top_NH / top_NH.sum(-1, keepdim=True)
        found["renormalize"] = (torch.zeros_like(mass_N), _padded(within_NH - inner_NH, width))
    if targets.num_samples:
        weight_ND = targets.drawn_weights(beta)
        found["sampled"] = (top_NH.sum(-1) + weight_ND.sum(-1), torch.cat([-top_NH, -weight_ND], -1))
        assert distance_N is not None
        share_N1 = (-SHARPNESS * distance_N).exp()[:, None]
        found["control-variate"] = _corrected(targets, q_NV, q_NK, beta, share_N1)
    return found


def distance(targets: SparseTargets, log_q_NV: Tensor, labels_N: Tensor, beta: float) -> Tensor:
    """[N] of a student (log q at T = 1) from the cached teacher, from nothing that was drawn.

    KL over top-k and bucket, or where there is no top-k |log p - log q| of the label times 2 beta - 1, within 0 and 1.
    """
    if targets.top_k == 0:
        gap_N = log_q_NV.gather(1, labels_N[:, None])[:, 0] - targets.label_logprob
        return gap_N.abs() * min(max(2 * beta - 1, 0.0), 1.0)
    log_p_NH, log_mass_N = targets.top_logprobs(1.0), targets.log_tail(1.0) - targets.log_partition(1.0)
    inside_N = (log_p_NH.exp() * (log_p_NH - log_q_NV.gather(1, targets.ids[:, : targets.top_k]))).sum(-1)
    rest_N = outside(log_q_NV.exp(), targets).clamp(min=_TINY).log()
    return (inside_N + log_mass_N.exp() * (log_mass_N - rest_N)).clamp(min=0.0)


def _corrected(targets: SparseTargets, q_NV: Tensor, q_NK: Tensor, beta: float, share_N1: Tensor) -> Gradient:
    top_k = targets.top_k
    mass_N = (targets.log_tail(beta) - targets.log_partition(beta)).exp()
    drawn_ND = targets.counts[:, top_k:] > 0
    student_N = outside(q_NV, targets).clamp(min=_TINY)
    logs_ND = (beta * targets.logprobs[:, top_k:] - targets.log_partition(beta)[:, None]).masked_fill(~drawn_ND, 0.0)
    over_ND = (mass_N / student_N)[:, None] * q_NK[:, top_k:] * (-logs_ND).exp()
    pull_ND = targets.bounded_weights(beta) * (1 - share_N1 * over_ND.clamp(max=CLIP))
    scale_N = 1 + (pull_ND.sum(-1) - mass_N) / student_N
    top_NH = (1 - scale_N)[:, None] * q_NK[:, :top_k] - targets.top_logprobs(beta).exp()
    return scale_N, torch.cat([top_NH, -pull_ND], -1)


def outside(values_NV: Tensor, targets: SparseTargets) -> Tensor:
    """Sum outside the top-k, [N], without the cancellation of 1 - sum."""
    return values_NV.scatter(1, targets.ids[:, : targets.top_k], 0).sum(-1)


def safe_ids(targets: SparseTargets, values_NV: Tensor) -> Tensor:
    """Ids that can be gathered with; an absent entry weighs nothing wherever it lands."""
    return targets.ids.clamp(max=values_NV.shape[1] - 1)


def _padded(top_NH: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(top_NH, (0, width - top_NH.shape[1]))


class Angles:
    """Running inner products of the full gradient with those of several rules."""

    def __init__(self) -> None:
        self.full = 0.0
        self.mean_full: Tensor | float = 0.0
        self.inner: dict[str, float] = {}
        self.square: dict[str, float] = {}
        self.mean: dict[str, Tensor] = {}

    def add_full(self, full_NV: Tensor) -> None:
        """The full gradient of some tokens; what rules make of them follows."""
        self.full += full_NV.square().sum(dtype=torch.float64).item()
        self.mean_full = self.mean_full + full_NV.sum(0, dtype=torch.float64)

    def add(self, name: str, full_NV: Tensor, gradient_NV: Tensor) -> None:
        """A gradient spelled out."""
        inner = (full_NV * gradient_NV).sum(dtype=torch.float64).item()
        self._add(name, inner, gradient_NV.square().sum(dtype=torch.float64).item(), gradient_NV.sum(0).double())

    def add_sparse(self, gradients: dict[str, Gradient], targets: SparseTargets, full_NV: Tensor, q_NV: Tensor) -> None:
        """Gradients of the form scale q + extra."""
        ids_NK = safe_ids(targets, q_NV)
        full_NK, q_NK = full_NV.gather(1, ids_NK).double(), q_NV.gather(1, ids_NK).double()
        along_N = (full_NV * q_NV).sum(-1, dtype=torch.float64)
        length_N = q_NV.square().sum(-1, dtype=torch.float64)
        scales = torch.stack([scale_N for scale_N, _ in gradients.values()])
        means = (scales @ q_NV).double()
        for mean_V, (name, (scale_N, extra_NK)) in zip(means, gradients.items(), strict=True):
            scale_N, extra_NK = scale_N.double(), extra_NK.double()
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
        """By rule: angle in degrees and norm ratio, of tokens and of their mean."""
        found = {}
        full_V = torch.as_tensor(self.mean_full)
        for name, mean_V in self.mean.items():
            token = compare(self.inner[name], self.full, self.square[name])
            mean = compare((full_V @ mean_V).item(), full_V.square().sum().item(), mean_V.square().sum().item())
            found[name] = {"token_angle": token[0], "token_norm": token[1], "mean_angle": mean[0], "mean_norm": mean[1]}
        return found


def compare(inner: float, full: float, cached: float) -> tuple[float, float]:
    """Angle in degrees and |cached| / |full| from inner products; 90 degrees where one is nothing."""
    if full <= 0 or cached <= 0:
        return 90.0, 0.0
    cosine = max(-1.0, min(1.0, inner / math.sqrt(full * cached)))
    return math.degrees(math.acos(cosine)), math.sqrt(cached / full)


Targets = SparseTargets | DenseTargets
Teacher = Callable[[Tensor, Tensor | None], Tensor]

TEMPERATURES = (1.0, 2.0, 4.0)
GRID = (2 / 3, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4)
TOLERANCE = 2e-2
MAX_TOKENS, MAX_LOGITS, MAX_SEQUENCES = 8192, 2**25, 16
STUDENT = "0.7 * teacher log p + normal noise of 0.5 nats (seed 0)"
RULE = (
    f"widest interval around T = 1 in [2/3, 4] where the worst error of log Z stays below {TOLERANCE} nats, "
    "rounding of the teacher's forward in its dtype included"
)


def sample_size(sequences: int, seq_len: int, vocab_size: int) -> tuple[int, int]:
    """(sequences, positions of each) of the held sample, where a shard has `sequences` of them."""
    tokens = max(1, min(MAX_TOKENS, MAX_LOGITS // vocab_size))
    taken = max(1, min(sequences, MAX_SEQUENCES, tokens))
    return taken, min(seq_len, max(1, tokens // taken))


def measure(batch: CachedBatch, teacher: Teacher, *, document_mask: bool, positions: int) -> tuple[dict, dict]:
    """(fidelity, temperature_range) of the stored sequences in `batch`, at `positions` positions of each.

    teacher: tokens [1,T] int64, segments [1,T] or None -> logits [1,T,V].
    """
    energies, kept = [], []
    length = batch.loss_mask.shape[1]
    chosen = torch.linspace(0, length - 1, positions).round().long()
    for b in range(len(batch.tokens)):
        segments = batch.segments[b : b + 1] if document_mask else None
        with torch.no_grad():
            logits_NV = rearrange(teacher(batch.tokens[b : b + 1, :-1], segments), "1 t v -> t v")
        if broken(logits_NV[None]).any():
            continue
        energies.append(logits_NV[chosen.to(logits_NV.device)].float().log_softmax(-1).clamp(min=-1e4).cpu())
        kept.append(b * length + chosen)
    if not kept:
        raise RunError("the teacher gave logits that are not numbers for every sequence of the held sample")
    targets = batch.targets[torch.cat(kept)]  # type: ignore[index]
    assert isinstance(targets, SparseTargets | DenseTargets)
    labels_N = batch.tokens[:, 1:].flatten()[torch.cat(kept)]
    energy_NV = torch.cat(energies)
    grid, span = _log_partition_errors(targets, energy_NV)
    at = {f"T={t:g}": _at_temperature(targets, energy_NV, labels_N, 1 / t) for t in TEMPERATURES}
    sample = {"sequences": len(kept), "tokens": len(energy_NV)}
    return {"sample": sample, "student": STUDENT, **at, "log_partition_error": grid}, span


def _log_partition_errors(targets: Targets, energy_NV: Tensor) -> tuple[list[dict[str, float]], dict[str, Any]]:
    rows = []
    for temperature in GRID:
        full_N = torch.logsumexp(energy_NV / temperature, -1)
        error_N = (targets.log_partition(1 / temperature) - full_N).abs()
        rows.append({"T": temperature, "worst": error_N.max().item(), "mean": error_N.mean().item()})
    return rows, temperature_range(rows)


def temperature_range(errors: list[dict[str, float]]) -> dict[str, Any]:
    """The interval of `RULE` from errors by ascending T: min, max, worst_error, rule; T = 1 belongs."""
    one = next(i for i, row in enumerate(errors) if row["T"] == 1)
    low = high = one
    while low > 0 and errors[low - 1]["worst"] < TOLERANCE:
        low -= 1
    while high + 1 < len(errors) and errors[high + 1]["worst"] < TOLERANCE:
        high += 1
    worst = max(row["worst"] for row in errors[low : high + 1])
    return {"min": float(errors[low]["T"]), "max": float(errors[high]["T"]), "worst_error": worst, "rule": RULE}


def _at_temperature(targets: Targets, energy_NV: Tensor, labels_N: Tensor, beta: float) -> dict[str, Any]:
    """Divergences and gradients at one beta, over blocks of rows."""
    noise = torch.Generator().manual_seed(0)
    rows = max(1, 2**20 // energy_NV.shape[1])
    bucket = spread = student = 0.0
    angles = Angles()
    for start in range(0, len(energy_NV), rows):
        energy = energy_NV[start : start + rows]
        part = targets[start : start + rows]
        student_NV = 0.7 * energy + 0.5 * torch.randn(energy.shape, generator=noise)
        log_q_NV = (beta * student_NV).log_softmax(-1)
        block = _Block(part, (beta * energy).log_softmax(-1), beta)
        bucket, spread = bucket + block.kl_bucket(), spread + block.kl_spread()
        student += block.kl(log_q_NV)
        distance_N = None
        if isinstance(part, SparseTargets) and part.num_samples:
            distance_N = distance(part, student_NV.log_softmax(-1), labels_N[start : start + rows], beta)
        block.compare(angles, log_q_NV.exp(), distance_N)
    number = len(energy_NV)
    return {
        "student_kl": student / number,
        "kl_bucket": bucket / number,
        "kl_spread": spread / number,
        "gradient": angles.result(),
    }


class _Block:
    """What a cache holds of some rows at one beta, beside the full log p [N, V]."""

    def __init__(self, targets: Targets, log_p_NV: Tensor, beta: float) -> None:
        self.targets, self.log_p_NV, self.p_NV, self.beta = targets, log_p_NV, log_p_NV.exp(), beta
        if isinstance(targets, SparseTargets):
            self.ids_NH = targets.ids[:, : targets.top_k]
            log_tail_N1 = (targets.log_tail(beta) - targets.log_partition(beta))[:, None]
            self.cached_NE = torch.cat([targets.top_logprobs(beta), log_tail_N1], -1)
            tail_N1 = outside(self.p_NV, targets)[:, None]
            self.outcomes_NE = torch.cat([self.p_NV.gather(1, self.ids_NH), tail_N1], -1)

    def _dense(self) -> Tensor:
        assert isinstance(self.targets, DenseTargets)
        return self.beta * self.targets.logprobs.float() - self.targets.log_partition(self.beta)[:, None]

    def kl(self, log_NV: Tensor) -> float:
        """Sum over rows of KL(full || other)."""
        return (self.p_NV * (self.log_p_NV - log_NV)).sum(dtype=torch.float64).item()

    def kl_bucket(self) -> float:
        """Sum over rows of KL(full || cache) over top-k entries and one bucket."""
        if isinstance(self.targets, DenseTargets):
            return self.kl(self._dense())
        # The masses of both sides are 1 to rounding; with their difference no term is below 0.
        p_NE, log_c_NE = self.outcomes_NE.double(), self.cached_NE.double().clamp(min=-87.0)
        return (torch.special.xlogy(p_NE, p_NE) - p_NE * log_c_NE - p_NE + log_c_NE.exp()).sum().item()

    def kl_spread(self) -> float:
        """The same over the vocabulary, the bucket spread evenly over what is not in the head."""
        if isinstance(self.targets, DenseTargets):
            return self.kl_bucket()
        rest = max(1, self.p_NV.shape[1] - self.targets.top_k)
        even_NE = self.cached_NE.clone()
        even_NE[:, -1] -= math.log(rest)
        own = (self.p_NV * self.log_p_NV).sum(dtype=torch.float64)
        return (own - (self.outcomes_NE * even_NE.clamp(min=-87.0)).sum(dtype=torch.float64)).item()

    def compare(self, angles: Angles, q_NV: Tensor, distance_N: Tensor | None) -> None:
        """Add the gradients of these rows, for the student q."""
        full_NV = q_NV - self.p_NV
        angles.add_full(full_NV)
        if isinstance(self.targets, DenseTargets):
            angles.add("dense", full_NV, q_NV - self._dense().exp())
        else:
            found = sparse_gradients(self.targets, q_NV, self.beta, distance_N)
            angles.add_sparse(found, self.targets, full_NV, q_NV)
