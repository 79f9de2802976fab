"""The tail rule `control-variate`: the ghost bucket, and draws that correct its shape inside.

The ghost bucket compares the mass of the tail and leaves its inside to the student: it takes the teacher to be
    p^_j = r q_j,   r = p_tail / q_tail,
there. What that misses of forward KL is a divergence inside the tail,
    KL(p || q) = KL over head and bucket + sum_{j in tail} p_j g(x_j),   x_j = r q_j / p_j,   g(x) = x - 1 - log x,
in which every term is at least 0, and 0 where x_j = 1. It is estimated from the draws, of chance pi_k each:
    sum_k (c_k / n) (p_k / pi_k) g(x_k).
Value, gradient and slope in T are those of this sum. In z_j of the tail the gradient is that of the bucket plus
(c_j / n) (r q_j - p_j) / pi_j, and something shaped like the student's tail that makes the sum of these 0; the head's
is exact. Its noise goes to 0 with the student's error (a control variate), while plain sampling keeps all of it.

Far from the teacher r q_k / pi_k has no bound, and neither has p_k / pi_k above T = 1, because draws are made at T = 1.
Hence two bounds:
    g goes on along its tangent in log x from x = `CLIP` = 2 on: the weight of a draw in the gradient is then never
    larger than in plain sampling;
    (p_k / p_tail) / pi_k, which is 1 at T = 1, counts as at most sqrt(n) (truncated importance sampling, Ionides 2008,
    J. Comput. Graph. Stat. 17(2)).
When it is unbiased: its mean is forward KL, in value and gradient, if r q_j <= 2 p_j and p_j <= sqrt(n) p_tail pi_j for
every j of the tail (the second always holds at T = 1). Otherwise its mean is a smaller divergence, in which the terms
that are cut pull less, in the right direction; it still is 0 if and only if the student is the teacher.

Why these: `benchmarks/tail_rules.py` on the shipped teacher, head 8 and 24 draws: squared error of a token's logit
gradient over that of the full one, in brackets of the mean gradient of 4,096 tokens, for students at three KLs.
                                0.02 nats         0.32 nats             5.78 nats (uniform)
    T = 1  ghost                0.018 (0.016)     0.0041 (0.0041)       0.0020 (0.0043)
           sampled              0.56 (0.12)       0.039 (0.0012)        0.0059 (0.00009)
           without bounds       0.051 (0.012)     0.038 (0.0012)        836 (12)
           clip at 8            0.051 (0.012)     0.031 (0.0010)        0.010 (0.0002)
           clip at 2            0.049 (0.011)     0.011 (0.0006)        0.0046 (0.0001)
    T = 2  ghost                0.053 (0.049)     0.0070 (0.027)        0.015 (0.089)
           sampled              202 (46)          3.0 (0.050)           1.6 (0.017)
           clip at 2            4.5 (1.0)         1.7 (0.029)           1.2 (0.019)
           ... weight sqrt(n)   1.2 (0.28)        0.13 (0.0047)         0.16 (0.0078)
           ... weight 2         0.61 (0.14)       0.047 (0.0043)        0.10 (0.0079)
A weight of at most 2 has less noise still; sqrt(n) lets the bias vanish as draws are added. The clip's price is bias in
the mean of many tokens for a student that overrates much, above all without a head (head 0, 50 draws, T = 1, 0.32 nats:
0.14 in brackets, plain sampling 0.005). Blends that stay unbiased, by a share of the control variate that falls with
the ghost bucket's KL, do not hold far away (21 for the uniform student): what the teacher all but excludes is drawn so
rarely that no share but 0 is small enough.

Shape suffixes: R rows, H head entries, D drawn entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdtrain.objective.statistics import Statistics
from kdtrain.objective.targets import CLIP, SparseTargets


def tail_correction(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Tensor:
    """What the draws add to KL over head and ghost bucket, [R] in nats, at least 0; differentiable in all arguments."""
    head = targets.head
    drawn_RD = targets.counts[:, head:] > 0
    log_tail_R1 = targets.log_tail(beta)[:, None]
    # log x = log r q - log p, in which both partition sums cancel.
    ratio_RD = log_tail_R1 - statistics.tail_beta[:, None]
    ratio_RD = ratio_RD + beta * (statistics.kept - targets.logprobs)[:, head:]
    missed_RD = clipped_gap(ratio_RD.masked_fill(~drawn_RD, 0.0))
    return (targets.bounded_weights(beta) * missed_RD).sum(-1)


def clipped_gap(log_ratio: Tensor) -> Tensor:
    """x - 1 - log x of log x, along its tangent in log x from `CLIP` on; without cancellation near x = 1."""
    inside = log_ratio.clamp(max=math.log(CLIP))
    return torch.expm1(inside) - inside + (CLIP - 1) * (log_ratio - inside)
