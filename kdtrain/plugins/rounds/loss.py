"""The reverse KL from the token that the student drew, and a teacher's top-k beside it.

With y drawn from an earlier state q' of the student, q its state now, p the teacher, b a number that does not depend on
y, and d(v) = log q(v) - log p(v), the term of a row is

    sg[w (d(y) - b)] log q(y),    w = min(q(y) / q'(y), 2),

whose mean gradient over y is that of KL(q || p) at fixed prefixes, where no w is truncated: E[grad log q] = 0, so that
b changes the variance alone: it is one number a round, in which a token has the share of one among thousands. The sum
over later tokens is dropped, as in all practical recipes. With S the top-k it is

    sum_{v in S} sg[q(v) (d(v) - b)] log q(v)  +  1[y not in S] sg[w (d(y) - b)] log q(y),

exact inside and sampled outside. The value is the estimate of KL(q || p), not the number that is differentiated.

What it gives up: truncation biases the gradient where the student has moved far since it wrote (docs/on-policy.md).

Shape suffixes: R rows, H top-k entries.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kdtrain.config.choices import DIVERGENCES
from kdtrain.objective.targets import SparseTargets, Supervision

LARGEST = 2.0
"""The weight at which it is truncated."""


def inside(targets: SparseTargets, labels_N: Tensor) -> Tensor:
    """Return which labels [N] are among the top-k of their position."""
    return (targets.ids[:, : targets.top_k] == labels_N[:, None]).any(1)


def _of_label(statistics: Any, rows: Supervision) -> Tensor:
    targets = rows.targets
    assert isinstance(targets, SparseTargets) and targets.policy is not None
    log_q_R = statistics.label - statistics.lse
    with torch.no_grad():
        weight_R = (log_q_R - targets.policy).exp().clamp(max=LARGEST)
        baseline_R = torch.zeros_like(log_q_R) if targets.baseline is None else targets.baseline
        ratio_R = log_q_R - targets.label_logprob
    if targets.top_k:
        log_q_RH = statistics.kept[:, : targets.top_k] - statistics.lse[:, None]
        with torch.no_grad():
            weight_R = weight_R.masked_fill(inside(targets, rows.labels), 0.0)
            ratio_RH = log_q_RH - targets.logprobs[:, : targets.top_k]
            share_RH = log_q_RH.exp()
            value_R = (share_RH * ratio_RH).sum(1) + weight_R * ratio_R
            factor_RH = share_RH * (ratio_RH - baseline_R[:, None])
        moving_R = (factor_RH * log_q_RH).sum(1)
    else:
        value_R = weight_R * ratio_R
        moving_R = torch.zeros_like(log_q_R)
    moving_R = moving_R + weight_R * (ratio_R - baseline_R) * log_q_R
    return value_R + (moving_R - moving_R.detach())


SAMPLED_REVERSE_KL = replace(
    DIVERGENCES.get("reverse-kl"), accepts=frozenset({"sparse", "sampled", "drawn"}), of_label=_of_label
)
"""Over events, of which it is not computed, it is the reverse KL."""
