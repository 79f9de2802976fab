"""What withheld text shows of a student and its teacher: both losses, their divergence, and the best mixture of both.

Shape suffixes: N tokens, R rows of one kind of targets, G groups of tokens.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdtrain.config.sections import FIXED_ALPHA
from kdtrain.objective.batch import Batch
from kdtrain.objective.metrics import by_kind, chunks, losses

MOST = FIXED_ALPHA
_LEAST_EVIDENCE = 16.0
"""Sum of squared log p(y) - log q(y) below which teacher and student hardly differ: share and posterior would
then have a standard error of more than a half."""
_HALVINGS = 24


class Measured(NamedTuple):
    """The measurement of one member on withheld text: sums over `tokens`, nats, and the posterior."""

    tokens: float
    student: float
    """Of -log q(y)."""
    teacher: float
    """Of -log p(y)."""
    divergence: float
    """Of KL(p || q) at T = 1; NaN where it is not known, as across tokenizers: then the posterior alone counts."""
    divergence_squares: float
    """Of the squares of the divergence of each token."""
    evidence: float
    """Of the squares of log p(y) - log q(y)."""
    posterior: float

    @property
    def gap(self) -> float:
        """Return S - T, nats per token."""
        return (self.student - self.teacher) / max(self.tokens, 1.0)

    @property
    def share(self) -> float:
        """Return what the labels confirm of the teacher, 0 to 1; the posterior where the divergence is not known."""
        if math.isnan(self.divergence):
            return self.posterior
        return min(max((self.student - self.teacher) / max(self.divergence, 1e-9), 0.0), 1.0)

    @property
    def differs(self) -> bool:
        """Return whether teacher and student differ by more than the noise of the measurement, in finite numbers."""
        within_noise = self.divergence <= 2 * math.sqrt(self.divergence_squares)  # False for NaN
        return _LEAST_EVIDENCE <= self.evidence < math.inf and not within_noise

    def figures(self, by_heart: float) -> dict[str, float]:
        """Return these by the names of metrics.jsonl, nats per token. by_heart: G of `objective.alpha`."""
        sums = {"loss": self.student, "teacher_loss": self.teacher}
        if not math.isnan(self.divergence):
            sums["kl"] = self.divergence
        means = {name: each / max(self.tokens, 1.0) for name, each in sums.items()}
        return {**means, "tokens": self.tokens, "share": self.share, "posterior": self.posterior, "gap": by_heart}


@torch.no_grad()
def measured(
    student: Any, batches: Iterable[Batch | None], sum_over_ranks: Callable[[Tensor], Tensor]
) -> Measured | None:
    """Measure a member on its batches over all ranks; None, on every rank, where a batch is None.

    Every rank must call it, and gets the same numbers. student: a `training.student.Student` in evaluation mode.
    """
    found = [torch.zeros(0, 4, dtype=torch.float64)]
    for batch in batches:
        if batch is None:
            return None
        hidden_ND = student.hidden_eager(batch)
        head = student.model.head.gathered(student.vocab_size)
        for part, rows in by_kind(batch.rows()):
            if rows.targets is not None:
                pieces = chunks(hidden_ND[part], head, rows, student.vocab_size)
                losses_R3 = torch.cat([losses(z_RV, own, head) for _, z_RV, own in pieces])
                found.append(grouped(losses_R3, rows.mask, rows.targets.common(), batch.loss_mask.shape[1]))
    return summed(torch.cat(found), sum_over_ranks)


def summed(losses_G4: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Measured:
    """Sum the groups of tokens that `grouped` returns over all ranks, and find the posterior.

    d/da mean log(a p + (1 - a) q) = mean (p - q) / (a p + (1 - a) q) falls in a, so that its sign shows the side.
    """
    odds_G = losses_G4[:, 1] - losses_G4[:, 2]  # log p(y) - log q(y)
    squares = [each_G.square().sum() for each_G in (losses_G4[:, 3], odds_G)]
    sums = sum_over_ranks(torch.stack([*losses_G4.sum(0), *squares]))
    ratio_G, low, high = odds_G.clamp(-40, 40).expm1(), 0.0, MOST  # p / q - 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum_over_ranks((ratio_G / (1 + middle * ratio_G)).sum()) > 0:
            low = middle
        else:
            high = middle
    return Measured._make([*sums.tolist(), (low + high) / 2])


def grouped(losses_N3: Tensor, mask_N: Tensor, starts_N: Tensor | None, length: int) -> Tensor:
    """Sum the `losses` of some rows of `length` positions by groups: [G, 4] fp64 on the CPU.

    The columns are the number of tokens, -log q(y), -log p(y) and KL(p || q), nats, NaN where it is not known.

    starts_N: of a teacher of another tokenizer, where both have a boundary; a group goes from one to the next of its
    row, and counts where none of its tokens is masked. None: each token is a group.
    """
    losses_N3, mask_N = losses_N3.double().cpu(), mask_N.cpu()
    ones_N1 = torch.ones(len(mask_N), 1, dtype=torch.float64)
    if starts_N is None:
        return torch.cat([ones_N1, losses_N3], 1)[mask_N]
    starts_N = starts_N.cpu()
    begins_N = torch.arange(len(mask_N)) % length == 0
    first_G = (starts_N | begins_N).nonzero().squeeze(1)
    end_G = torch.cat([first_G[1:], torch.tensor([len(mask_N)])])
    columns_N4 = torch.cat([ones_N1, losses_N3[:, :2], (~mask_N).double()[:, None]], 1)
    before_N4 = torch.cat([torch.zeros(1, 4, dtype=torch.float64), columns_N4.cumsum(0)])
    sums_G4 = before_N4[end_G] - before_N4[first_G]
    whole_G = (sums_G4[:, 3] == 0) & (end_G % length != 0) & starts_N[first_G]
    sums_G4[:, 3] = math.nan
    return sums_G4[whole_G]
