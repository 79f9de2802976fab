"""`--alpha auto`: the teacher's weight, by what the labels confirm of it.

    alpha = clip((student - teacher) / divergence, 0, MOST)

student and teacher are the cross-entropies of both with the labels, divergence is KL(teacher || student) at T = 1, all
nats a token and averages that move by 1 / `STEPS` of the way to each step's. Were the text drawn from the teacher,
student - teacher would be the divergence on average, however near the two are; it is 0 where the teacher knows the text
no better than the student, which then learns from the text alone. docs/objective.md has what was measured.

Alpha depends on the steps before alone, so that nothing waits, and no label decides the weight of its own token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kdtrain.config.sections import FIXED_ALPHA

MOST = FIXED_ALPHA
STEPS = 20


class GapAlpha(nn.Module):
    """Alpha of each member of a mixture, or of one data set, and the averages that it follows.

    taught: whether a member has a teacher; where it has none, alpha is 0.
    """

    means: Tensor
    """[M, 3] fp64: student's and teacher's cross-entropy, divergence, nats a token; inf before the first step."""
    taught: Tensor

    def __init__(self, taught: Sequence[bool] = (True,)) -> None:
        super().__init__()
        self.register_buffer("means", torch.full((len(taught), 3), torch.inf, dtype=torch.float64))
        self.register_buffer("taught", torch.tensor(taught), persistent=False)

    def weights(self) -> Tensor:
        """[M] alpha of the next step; `MOST` before the first."""
        student_M, teacher_M, divergence_M = self.means.unbind(1)
        share_M = (student_M - teacher_M) / divergence_M.clamp(min=0)  # an estimate may be below 0
        return share_M.clamp(0, MOST).nan_to_num(MOST).masked_fill(~self.taught, 0.0)

    @torch.no_grad()
    def update(self, sums_M7: Tensor) -> None:
        """Take `LossOutput.members` of a step over all ranks. A member without tokens, or with NaN, stays as it is."""
        student_M, _, divergence_M, teacher_M, tokens_M, own_M, theirs_M = sums_M7.double().unbind(1)
        teacher_M = teacher_M * torch.where(theirs_M > 0, own_M / theirs_M.clamp(min=1), 1.0)  # the same bytes
        now_M3 = torch.stack([student_M, teacher_M, divergence_M], 1) / tokens_M.clamp(min=1)[:, None]
        known_M3 = torch.where(self.means.isinf(), now_M3, self.means)
        moved_M3, counts_M = known_M3 + (now_M3 - known_M3) / STEPS, (tokens_M > 0) & self.taught
        self.means.copy_(torch.where((counts_M & now_M3.isfinite().all(1))[:, None], moved_M3, self.means))
