"""How far a cache is from the teacher it came from, measured on the stored numbers at build time.

The held sample is a set of positions of the first validation sequences, at most 8,192 tokens and 2^25
logits, read back from the finished shard and compared with a fresh forward of the teacher.

Reported at T = 1, 2, 4: KL(full || cache) with the tail as one outcome (`kl_bucket`: the error of the
numbers kept) and with the tail's mass spread evenly (`kl_spread`: what is unknown about the rest); angle
and norm ratio between the KL gradient in the student's logits from the cache and from the full
distribution, by tail rule (`gradients`): `ghost`, `drop` and `renormalize` as far as the head allows,
`sampled` and `control-variate` with draws, else `dense`. A training run reads a cache with draws by one of
those two; the others stand beside them to be compared with. `student_kl` is the KL from the full
distribution to the student: gradients agree the better the larger it is.

The student: the teacher's log-probabilities times 0.7 plus normal noise of 0.5 nats (seed 0).

`temperature_range` is the widest interval of a grid over [2/3, 4] around T = 1 in which the worst error of
log Z over the sample stays below 2e-2 nats. It is an error against a fresh forward, one sequence at a time: what a
teacher in bf16 gives differs from what it gave in the batches that were stored, and that counts as the cache's error.

Shapes: N tokens of the sample, V vocabulary, H head, K kept entries.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.cache.codec import broken
from kdtrain.cache.gradients import Angles, distance, outside, sparse_gradients
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
        if isinstance(part, SparseTargets) and part.draws:
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
    """What a cache says about some rows at one beta, beside the full log p [N, V]."""

    def __init__(self, targets: Targets, log_p_NV: Tensor, beta: float) -> None:
        self.targets, self.log_p_NV, self.p_NV, self.beta = targets, log_p_NV, log_p_NV.exp(), beta
        if isinstance(targets, SparseTargets):
            self.ids_NH = targets.ids[:, : targets.head]
            log_tail_N1 = (targets.log_tail(beta) - targets.log_partition(beta))[:, None]
            self.cached_NE = torch.cat([targets.head_logprobs(beta), log_tail_N1], -1)
            tail_N1 = outside(self.p_NV, targets)[:, None]
            self.outcomes_NE = torch.cat([self.p_NV.gather(1, self.ids_NH), tail_N1], -1)

    def _dense(self) -> Tensor:
        assert isinstance(self.targets, DenseTargets)
        return self.beta * self.targets.logprobs.float() - self.targets.log_partition(self.beta)[:, None]

    def kl(self, log_NV: Tensor) -> float:
        """Sum over rows of KL(full || other)."""
        return (self.p_NV * (self.log_p_NV - log_NV)).sum(dtype=torch.float64).item()

    def kl_bucket(self) -> float:
        """Sum over rows of KL(full || cache) over head entries and one bucket."""
        if isinstance(self.targets, DenseTargets):
            return self.kl(self._dense())
        # The masses of both sides are 1 to rounding; with their difference no term is below 0.
        p_NE, log_c_NE = self.outcomes_NE.double(), self.cached_NE.double().clamp(min=-87.0)
        return (torch.special.xlogy(p_NE, p_NE) - p_NE * log_c_NE - p_NE + log_c_NE.exp()).sum().item()

    def kl_spread(self) -> float:
        """The same over the vocabulary, the bucket spread evenly over what is not in the head."""
        if isinstance(self.targets, DenseTargets):
            return self.kl_bucket()
        rest = max(1, self.p_NV.shape[1] - self.targets.head)
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
