"""Whether labels lie outside of a top-k as often as its own mass predicts.

With the mass m inside of the entries a label lies outside with probability 1 - m, if it is what the teacher expects. A
top-k that was scaled to sum to 1 promises that no label ever does. Rows are the unit: positions of one are correlated.

What it gives up: a teacher is surer of text that it does not know than it should be, so that only a factor of `MOST`
between what is found and what is promised is called a fault; a top-k that was scaled and then cut may stay below it.

Shapes: N positions that count, H top-k entries, R rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets

MOST = 10.0
"""Times as many labels outside as the mass promises, from which on it is not the teacher's."""
_LEAST, _ERRORS, _ROWS = 0.005, 5.0, 5


@dataclass(frozen=True)
class Outside:
    """Two shares of the labels, 0 to 1: outside of the top-k, and as many as the kept mass leaves for it."""

    found: float
    """That lies outside of the top-k."""
    promised: float
    """That the mass leaves for it: the mean of 1 - m."""
    significant: bool
    """Whether more were found than promised, by 5 standard errors over rows."""

    @property
    def wrong(self) -> bool:
        """Whether the kept mass cannot be the teacher's."""
        return self.significant and more_than_promised(self.found, self.promised)

    def __str__(self) -> str:
        return (
            f"the entries sum to {1 - self.promised:.4f}, and yet {self.found:.1%} of the labels lie outside of them: "
            "they were renormalised, or are not about this text"
        )


def more_than_promised(found: float, promised: float) -> bool:
    """Return True if more labels lie outside than a teacher's own mass leaves room for."""
    return found >= _LEAST and found > MOST * promised


def outside(batches: Sequence[Batch]) -> Outside | None:
    """Compare the share of labels outside of the top-k with the kept mass, over all batches; None without a top-k."""
    found, promised = list[torch.Tensor](), list[torch.Tensor]()
    for batch in batches:
        targets, mask_BT = batch.targets, batch.loss_mask
        if not isinstance(targets, SparseTargets) or not targets.top_k:
            continue
        ids_NK, mass_NK = targets.listed()
        ids_NH, mass_NH = ids_NK[:, : targets.top_k], mass_NK[:, : targets.top_k]
        out_N = ~(ids_NH == batch.tokens[:, 1:].reshape(-1, 1)).any(-1)
        rest_N = (1 - mass_NH.double().sum(-1)).clamp(min=0)
        for each, sums in ((out_N, found), (rest_N, promised)):
            sums.append(each.view_as(mask_BT).double().where(mask_BT, 0).sum(-1))
    positions = sum(int(batch.loss_mask.sum()) for batch in batches)
    if not found or not positions:
        return None
    found_R, promised_R = torch.cat(found), torch.cat(promised)
    more_R = found_R - promised_R
    rows = len(more_R)
    least = _ERRORS * math.sqrt(rows) * float(more_R.std()) if rows >= _ROWS else math.inf
    return Outside(float(found_R.sum()) / positions, float(promised_R.sum()) / positions, float(more_R.sum()) > least)


def kept_mass(batch: Batch) -> dict[str, Any]:
    """Measure the mass of the distributions that a top-k holds, over the positions that count.

    kept_mass: the mean of the mass m inside; mass_loss: the mean of -log m in nats, which is KL(p' || p) of p' = the
    entries scaled to 1, and what no student can learn of the rest; positions: how many.
    """
    assert isinstance(batch.targets, SparseTargets)
    mass_N = batch.targets.listed()[1][:, : batch.targets.top_k].double().sum(-1)
    mass_N = mass_N[batch.loss_mask.flatten()].clamp(max=1)
    if not len(mass_N):
        return {"positions": 0, "kept_mass": None, "mass_loss": None}
    loss = float(-mass_N.clamp(min=1e-30).log().mean())
    return {"positions": len(mass_N), "kept_mass": round(float(mass_N.mean()), 6), "mass_loss": round(loss, 6)}
