"""The gradient in a student's logits that a cache gives under each tail rule, against that of the full distribution.

With p the teacher and q the student at beta, the gradient of forward KL is beta (q - p). That of every tail rule over
sparse targets is, less the factor beta,
    scale q + extra,   extra being 0 outside the kept ids,
so that a rule costs a few numbers a token once q is there. With P and Q the sides' masses in the tail, r = P / Q, and w
the weights of the draws:
    ghost            (1 - r) q in the tail, q - p in the head
    drop             (1 - P) q - p over the head
    renormalize      q / (1 - Q) - p / (1 - P) in the head, 0 in the tail
    sampled          (1 - P + sum w) q - p over the head - w over the draws
    control-variate  ghost; less v over the draws, plus q / Q sum v in the tail: v = w (1 - s min(r q / p, CLIP)), with
                     bounded w and a share s = exp(-SHARPNESS distance)
The rules are written out here again, because the cache does not know the objective; a test compares the two.

`token` compares the gradients of all tokens as one long vector, `mean` their mean over tokens, which is the gradient of
an output bias: noise of an estimate falls with the number of tokens only there.

Shapes: N tokens, V vocabulary, H head, D drawn columns, K = H + D.
"""

import math

import torch
from torch import Tensor

from kdtrain.objective.targets import CLIP, SHARPNESS, SparseTargets

Gradient = tuple[Tensor, Tensor]
"""scale [N] and extra [N, K]."""
_TINY = 1e-38


def sparse_gradients(
    targets: SparseTargets, q_NV: Tensor, beta: float, distance_N: Tensor | None
) -> dict[str, Gradient]:
    """By the tail rule's name, for every rule that the numbers kept allow.

    q_NV: the student at beta. distance_N: see `distance`; needed where there are draws.
    """
    q_NK = q_NV.gather(1, safe_ids(targets, q_NV))
    head, width = targets.head, q_NK.shape[1]
    head_NH = targets.head_logprobs(beta).exp()
    mass_N = (targets.log_tail(beta) - targets.log_partition(beta)).exp()
    ratio_N = mass_N / outside(q_NV, targets).clamp(min=_TINY)
    ghost = (1 - ratio_N, _padded(ratio_N[:, None] * q_NK[:, :head] - head_NH, width))
    found: dict[str, Gradient] = {}
    if head:
        found |= {"ghost": ghost, "drop": (head_NH.sum(-1), _padded(-head_NH, width))}
    if head > 1:
        within_NH = q_NK[:, :head] / q_NK[:, :head].sum(-1, keepdim=True).clamp(min=_TINY)
        inner_NH = head_NH / head_NH.sum(-1, keepdim=True)
        found["renormalize"] = (torch.zeros_like(mass_N), _padded(within_NH - inner_NH, width))
    if targets.draws:
        weight_ND = targets.drawn_weights(beta)
        found["sampled"] = (head_NH.sum(-1) + weight_ND.sum(-1), torch.cat([-head_NH, -weight_ND], -1))
        assert distance_N is not None
        share_N1 = (-SHARPNESS * distance_N).exp()[:, None]
        found["control-variate"] = _corrected(targets, q_NV, q_NK, beta, share_N1)
    return found


def distance(targets: SparseTargets, log_q_NV: Tensor, labels_N: Tensor, beta: float) -> Tensor:
    """[N] of a student (log q at T = 1) from the cached teacher, from nothing that was drawn.

    KL over head and bucket, or where there is no head |log p - log q| of the label times 2 beta - 1, within 0 and 1.
    """
    if targets.head == 0:
        gap_N = log_q_NV.gather(1, labels_N[:, None])[:, 0] - targets.label_logprob
        return gap_N.abs() * min(max(2 * beta - 1, 0.0), 1.0)
    log_p_NH, log_mass_N = targets.head_logprobs(1.0), targets.log_tail(1.0) - targets.log_partition(1.0)
    inside_N = (log_p_NH.exp() * (log_p_NH - log_q_NV.gather(1, targets.ids[:, : targets.head]))).sum(-1)
    rest_N = outside(log_q_NV.exp(), targets).clamp(min=_TINY).log()
    return (inside_N + log_mass_N.exp() * (log_mass_N - rest_N)).clamp(min=0.0)


def _corrected(targets: SparseTargets, q_NV: Tensor, q_NK: Tensor, beta: float, share_N1: Tensor) -> Gradient:
    head = targets.head
    mass_N = (targets.log_tail(beta) - targets.log_partition(beta)).exp()
    drawn_ND = targets.counts[:, head:] > 0
    student_N = outside(q_NV, targets).clamp(min=_TINY)
    logs_ND = (beta * targets.logprobs[:, head:] - targets.log_partition(beta)[:, None]).masked_fill(~drawn_ND, 0.0)
    over_ND = (mass_N / student_N)[:, None] * q_NK[:, head:] * (-logs_ND).exp()
    pull_ND = targets.bounded_weights(beta) * (1 - share_N1 * over_ND.clamp(max=CLIP))
    scale_N = 1 + (pull_ND.sum(-1) - mass_N) / student_N
    head_NH = (1 - scale_N)[:, None] * q_NK[:, :head] - targets.head_logprobs(beta).exp()
    return scale_N, torch.cat([head_NH, -pull_ND], -1)


def outside(values_NV: Tensor, targets: SparseTargets) -> Tensor:
    """Sum outside the head, [N], without the cancellation of 1 - head."""
    return values_NV.scatter(1, targets.ids[:, : targets.head], 0).sum(-1)


def safe_ids(targets: SparseTargets, values_NV: Tensor) -> Tensor:
    """Ids that can be gathered with; an absent entry weighs nothing wherever it lands."""
    return targets.ids.clamp(max=values_NV.shape[1] - 1)


def _padded(head_NH: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(head_NH, (0, width - head_NH.shape[1]))


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
