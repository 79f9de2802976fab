"""What withheld text shows of a student and its teacher: both losses, their divergence, and the best mixture of both.

Shape suffixes: M members of a mixture (1 without one), N tokens, R rows of one kind of targets, G groups of tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.config.sections import FIXED_ALPHA
from kdtrain.objective.batch import Batch
from kdtrain.objective.logits import whole_head
from kdtrain.objective.metrics import token_losses

MOST = FIXED_ALPHA
_LEAST_EVIDENCE = 16.0
"""Sum of squared log p(y) - log q(y) below which teacher and student hardly differ: share and posterior would
then have a standard error of more than a half."""
_HALVINGS = 24


class Measured(NamedTuple):
    """What withheld text shows of one member: sums over `tokens`, nats, and the posterior."""

    tokens: float
    student: float
    """Of -log q(y)."""
    teacher: float
    """Of -log p(y)."""
    divergence: float | None
    """Of KL(p || q) at T = 1; None where it is not known, as across tokenizers: then the posterior alone counts."""
    divergence_squares: float
    """Of the squares of the divergence of each token."""
    evidence: float
    """Of the squares of log p(y) - log q(y)."""
    posterior: float

    @property
    def gap(self) -> float:
        """Return S - T, nats a token."""
        return (self.student - self.teacher) / max(self.tokens, 1.0)

    @property
    def share(self) -> float:
        """Return what the labels confirm of the teacher, 0 to 1; the posterior where the divergence is not known."""
        if self.divergence is None:
            return self.posterior
        return min(max((self.student - self.teacher) / max(self.divergence, 1e-9), 0.0), 1.0)

    @property
    def differs(self) -> bool:
        """Return whether teacher and student differ by more than the noise of the measurement."""
        if self.divergence is None:
            return self.evidence >= _LEAST_EVIDENCE
        return self.evidence >= _LEAST_EVIDENCE and self.divergence > 2 * math.sqrt(max(self.divergence_squares, 0.0))


def compared(student: Any, batches: Iterable[Batch | None]) -> Tensor | None:
    """Compare student and teacher on each group of tokens: [G, 4] fp64 on the CPU.

    The columns are the number of tokens, -log q(y), -log p(y) and KL(p || q), nats.

    A group is a token; with a teacher of another tokenizer what lies between two common boundaries, whose KL is NaN, as
    it is not known. None, where a batch is None. student: a `training.student.Student`, in evaluation mode or not.
    """
    found = [torch.zeros(0, 4, dtype=torch.float64)]
    for batch in batches:
        if batch is None:
            return None
        length = batch.loss_mask.shape[1]
        flat = [rearrange(each, "B T -> (B T)") for each in (batch.tokens[:, 1:], batch.loss_mask)]
        with torch.no_grad():
            hidden_ND, head = student.hidden_eager(batch), whole_head(student.model.head)
        parts = () if batch.targets is None else batch.targets.parts or ((len(hidden_ND), batch.targets),)
        sizes = [rows for rows, _ in parts]
        rows = zip(*(each.split(sizes) for each in (hidden_ND, *flat) if parts), (own for _, own in parts), strict=True)
        for hidden_RD, labels_R, mask_R, targets in rows:
            if targets is not None:
                own = (hidden_RD, head, labels_R, mask_R, targets)
                losses_R3 = token_losses(*own, vocab_size=student.vocab_size).double().cpu()
                found.append(_grouped(losses_R3, mask_R.cpu(), targets.common(), length))
    return torch.cat(found)


def measured(found: list[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> list[Measured]:
    """Sum each member's `compared` tokens over all ranks; every rank must call it, and gets the same numbers."""
    odds = [each_G4[:, 1] - each_G4[:, 2] for each_G4 in found]
    sums = [
        torch.cat([each_G4.sum(0), each_G4[:, 3].square().sum()[None], ratio_G.square().sum()[None]])
        for each_G4, ratio_G in zip(found, odds, strict=True)
    ]
    sums_M6, weights = sum_over_ranks(torch.stack(sums)).tolist(), posteriors(odds, sum_over_ranks)
    rows = []
    for (tokens, student, teacher, kl, squares, evidence), weight in zip(sums_M6, weights, strict=True):
        rows.append(Measured(tokens, student, teacher, None if math.isnan(kl) else kl, squares, evidence, weight))
    return rows


def posteriors(odds: Sequence[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> list[float]:
    """Find the posterior of each member from its log p(y) - log q(y), [N] nats in fp64, by halvings on the slope.

    d/da mean log(a p + (1 - a) q) = mean (p - q) / (a p + (1 - a) q) falls in a, so that its sign shows the side.
    Every rank must call it, and gets the same numbers.
    """
    ratios = [each.clamp(-40, 40).expm1() for each in odds]  # p / q - 1
    low, high = torch.zeros(len(odds), dtype=torch.float64), torch.full((len(odds),), MOST, dtype=torch.float64)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slopes = [(each / (1 + a * each)).sum() for each, a in zip(ratios, middle, strict=True)]
        rises = sum_over_ranks(torch.stack(slopes)) > 0
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    return ((low + high) / 2).tolist()


def figures(found: Measured, by_heart: float) -> dict[str, float]:
    """Return what was measured by the names of metrics.jsonl, nats a token. by_heart: G of `objective.alpha`."""
    sums = {"loss": found.student, "teacher_loss": found.teacher, "kl": found.divergence}
    means = {name: each / max(found.tokens, 1.0) for name, each in sums.items() if each is not None}
    return {**means, "tokens": found.tokens, "share": found.share, "posterior": found.posterior, "gap": by_heart}


def _grouped(losses_N3: Tensor, mask_N: Tensor, starts_N: Tensor | None, length: int) -> Tensor:
    """Sum the tokens of some rows of `length` positions by groups, as `compared` returns them.

    starts_N: where both tokenizers have a boundary; a group goes from one to the next of its row, and counts where none
    of its tokens is masked. None: each token is a group.
    """
    ones_N1 = torch.ones(len(mask_N), 1, dtype=torch.float64)
    if starts_N is None:
        return torch.cat([ones_N1, losses_N3], 1)[mask_N]
    starts_N, begins_N = starts_N.cpu(), torch.arange(len(mask_N)) % length == 0
    first_G = (starts_N | begins_N).nonzero().squeeze(1)
    end_G = torch.cat([first_G[1:], torch.tensor([len(mask_N)])])
    columns_N4 = torch.cat([ones_N1, losses_N3[:, :2], (~mask_N).double()[:, None]], 1)
    before_N4 = torch.cat([torch.zeros(1, 4, dtype=torch.float64), columns_N4.cumsum(0)])
    sums_G4 = before_N4[end_G] - before_N4[first_G]
    whole_G = (sums_G4[:, 3] == 0) & (end_G % length != 0) & starts_N[first_G]
    sums_G4[:, 3] = math.nan
    return sums_G4[whole_G]
