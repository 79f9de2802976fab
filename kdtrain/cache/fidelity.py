"""How far a cache is from the teacher it came from, measured on the stored numbers at build time.

The held sample is a set of positions of the first validation sequences, at most 8,192 tokens and 2^25
logits, read back from the finished shard and compared with a fresh forward of the teacher.

Reported at T = 1, 2, 4: KL(full || cache) with the tail as one outcome (`kl_bucket`: the error of the
numbers kept) and with the tail's mass spread evenly (`kl_spread`: what is unknown about the rest); angle
and norm ratio between the KL gradient in the student's logits from the cache and from the full
distribution, per estimator: `ghost` (head + one bucket, shaped inside by the student), `sampled` (w_j =
(c_j/n) p_j^(beta-1) P_tail / Z(beta), arXiv 2503.16870, head exact), `dense`. `token` compares all
gradients of the sample as one long vector, `mean` their mean over tokens, which is the gradient of an
output bias: noise of a sampled estimate falls with the number of tokens only there.

The student: the teacher's log-probabilities times 0.7 plus normal noise of 0.5 nats (seed 0).

`temperature_range` is the widest interval of a grid over [2/3, 4] around T = 1 in which the worst error of
log Z over the sample stays below 2e-2 nats.

Shapes: N tokens of the sample, V vocabulary, H head, K kept entries.
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
from kdtrain.objective.targets import DenseTargets, SparseTargets

Targets = SparseTargets | DenseTargets
Teacher = Callable[[Tensor, Tensor | None], Tensor]

TEMPERATURES = (1.0, 2.0, 4.0)
GRID = (2 / 3, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4)
TOLERANCE = 2e-2
MAX_TOKENS, MAX_LOGITS, MAX_SEQUENCES = 8192, 2**25, 16
STUDENT = "0.7 * teacher log p + normal noise of 0.5 nats (seed 0)"
RULE = f"widest interval around T = 1 in [2/3, 4] where the worst error of log Z stays below {TOLERANCE} nats"


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
    assert batch.targets is not None
    targets = batch.targets[torch.cat(kept)]  # type: ignore[index]
    energy_NV = torch.cat(energies)
    grid, span = _log_partition_errors(targets, energy_NV)
    at = {f"T={t:g}": _at_temperature(targets, energy_NV, 1 / t) for t in TEMPERATURES}
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
    return {"min": errors[low]["T"], "max": errors[high]["T"], "worst_error": worst, "rule": RULE}


class _Angle:
    """Running inner products of two fields of gradients."""

    def __init__(self) -> None:
        self.inner = self.full = self.cached = 0.0
        self.mean_full: Tensor | float = 0.0
        self.mean_cached: Tensor | float = 0.0

    def add(self, full_NV: Tensor, cached_NV: Tensor) -> None:
        self.inner += (full_NV * cached_NV).sum(dtype=torch.float64).item()
        self.full += full_NV.square().sum(dtype=torch.float64).item()
        self.cached += cached_NV.square().sum(dtype=torch.float64).item()
        self.mean_full = self.mean_full + full_NV.sum(0, dtype=torch.float64)
        self.mean_cached = self.mean_cached + cached_NV.sum(0, dtype=torch.float64)

    def result(self) -> dict[str, float]:
        full_V, cached_V = torch.as_tensor(self.mean_full), torch.as_tensor(self.mean_cached)
        inner, full, cached = (
            (full_V @ cached_V).item(),
            full_V.square().sum().item(),
            cached_V.square().sum().item(),
        )
        token, mean = _compare(self.inner, self.full, self.cached), _compare(inner, full, cached)
        return {"token_angle": token[0], "token_norm": token[1], "mean_angle": mean[0], "mean_norm": mean[1]}


def _compare(inner: float, full: float, cached: float) -> tuple[float, float]:
    """Angle in degrees and |cached| / |full|; 90 degrees where one is nothing."""
    if full == 0 or cached == 0:
        return 90.0, 0.0
    cosine = max(-1.0, min(1.0, inner / math.sqrt(full * cached)))
    return math.degrees(math.acos(cosine)), math.sqrt(cached / full)


def _at_temperature(targets: Targets, energy_NV: Tensor, beta: float) -> dict[str, Any]:
    """Divergences and gradients at one beta, over blocks of rows."""
    noise = torch.Generator().manual_seed(0)
    rows = max(1, 2**22 // energy_NV.shape[1])
    bucket = spread = 0.0
    angles: dict[str, _Angle] = {}
    for start in range(0, len(energy_NV), rows):
        energy = energy_NV[start : start + rows]
        part = targets[start : start + rows]
        student_NV = 0.7 * energy + 0.5 * torch.randn(energy.shape, generator=noise)
        teacher_NV, q_NV = (beta * energy).softmax(-1), (beta * student_NV).softmax(-1)
        block = _Block(part, teacher_NV, q_NV, beta)
        bucket, spread = bucket + block.kl_bucket(), spread + block.kl_spread()
        for name, gradient_NV in block.gradients().items():
            angles.setdefault(name, _Angle()).add(beta * (q_NV - teacher_NV), gradient_NV)
    number = len(energy_NV)
    found = {name: angle.result() for name, angle in angles.items()}
    return {"kl_bucket": bucket / number, "kl_spread": spread / number, "gradient": found}


class _Block:
    """What a cache says about some rows at one beta, beside the full p and a student q, both [N, V]."""

    def __init__(self, targets: Targets, p_NV: Tensor, q_NV: Tensor, beta: float) -> None:
        self.targets, self.p_NV, self.q_NV, self.beta = targets, p_NV, q_NV, beta
        self.partition_N1 = targets.log_partition(beta)[:, None]
        if isinstance(targets, SparseTargets):
            self.ids_NH = targets.ids[:, : targets.head]
            self.head_NH = targets.head_logprobs(beta).exp()
            self.tail_N1 = (targets.log_tail(beta)[:, None] - self.partition_N1).exp()

    def _dense(self) -> Tensor:
        assert isinstance(self.targets, DenseTargets)
        return (self.beta * self.targets.logprobs.float() - self.partition_N1).exp()

    def _rest(self, values_NV: Tensor) -> Tensor:
        """Sum outside the head, [N, 1], without the cancellation of 1 - head."""
        return values_NV.scatter(1, self.ids_NH, 0).sum(-1, keepdim=True)

    def _kl(self, cached_NV: Tensor) -> float:
        return (torch.special.xlogy(self.p_NV, self.p_NV) - torch.special.xlogy(self.p_NV, cached_NV)).sum().item()

    def kl_bucket(self) -> float:
        """Sum over rows of KL(full || cache) over head entries and one bucket."""
        if isinstance(self.targets, DenseTargets):
            return self._kl(self._dense())
        outcomes_NH1 = torch.cat([self.p_NV.gather(1, self.ids_NH), self._rest(self.p_NV)], -1)
        cached_NH1 = torch.cat([self.head_NH, self.tail_N1], -1).clamp(min=1e-38)
        return (torch.special.xlogy(outcomes_NH1, outcomes_NH1 / cached_NH1)).sum().item()

    def kl_spread(self) -> float:
        """The same over the vocabulary, the bucket spread evenly over what is not in the head."""
        if isinstance(self.targets, DenseTargets):
            return self.kl_bucket()
        vocab_size, head = self.p_NV.shape[1], self.targets.head
        even_N1 = self.tail_N1 / max(1, vocab_size - head)
        return self._kl(even_N1.expand_as(self.p_NV).scatter(1, self.ids_NH, self.head_NH).clamp(min=1e-38))

    def gradients(self) -> dict[str, Tensor]:
        """By estimator: the KL gradient in the student's logits that follows from the cache, [N, V]."""
        if isinstance(self.targets, DenseTargets):
            return {"dense": self.beta * (self.q_NV - self._dense())}
        ratio_N1 = self.tail_N1 / self._rest(self.q_NV).clamp(min=1e-38)
        head_NH = self.q_NV.gather(1, self.ids_NH) - self.head_NH
        found = {"ghost": self.beta * (self.q_NV * (1 - ratio_N1)).scatter(1, self.ids_NH, head_NH)}
        if self.targets.draws:
            sampled_NV = self._sampled(self.targets)
            found["sampled"] = self.beta * (self.q_NV * sampled_NV.sum(-1, keepdim=True) - sampled_NV)
        return found

    def _sampled(self, targets: SparseTargets) -> Tensor:
        """The unbiased estimate of the teacher at beta: the head as it is, draws with their weights."""
        logs_NK = (self.beta - 1) * targets.logprobs + targets.log_tail(1.0)[:, None] - self.partition_N1
        drawn_NK = targets.counts > 0
        weight_NK = targets.counts / targets.draws * logs_NK.masked_fill(~drawn_NK, 0).exp()
        weight_NK[:, : targets.head] = self.head_NH
        ids_NK = targets.ids.clamp(max=self.p_NV.shape[1] - 1)  # an absent entry weighs nothing anywhere
        return torch.zeros_like(self.p_NV).scatter_add_(1, ids_NK, weight_NK)
