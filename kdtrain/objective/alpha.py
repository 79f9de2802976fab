"""`--alpha auto`: the teacher's weight, by how far the student still is behind its teacher.

    alpha = clip(MIDDLE + SLOPE (student - teacher), LEAST, MOST)

student and teacher are the cross-entropies of both with the labels that the student trains on, nats a token, averaged
over the last steps: an average moves by 1 / `STEPS` of the way to each step's. While the student is far behind its
teacher alpha is `MOST`, the default of a fixed one; as the student overtakes it, alpha falls until the text counts for
almost all. docs/objective.md has what was measured, and where the constants come from.

Alpha of a step depends on the steps before it alone, so that nothing waits, and no token's label decides its weight:
the gradient is that of a fixed alpha. The averages are a part of the training state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kdtrain.config.sections import USUAL_ALPHA

MIDDLE, SLOPE = 0.35, 0.25
"""Alpha where both are equal, and by how much it rises a nat."""
LEAST, MOST = 0.1, USUAL_ALPHA
STEPS = 20


class GapAlpha(nn.Module):
    """Alpha of each member of a mixture, or of one data set, and the averages that it follows.

    taught: whether a member has a teacher; where it has none, alpha is 0.
    """

    means: Tensor
    """[M, 2] fp64: the student's and the teacher's cross-entropy, nats a token; inf before the first step."""
    taught: Tensor
    """[M] bool."""

    def __init__(self, taught: Sequence[bool] = (True,)) -> None:
        super().__init__()
        self.register_buffer("means", torch.full((len(taught), 2), torch.inf, dtype=torch.float64))
        self.register_buffer("taught", torch.tensor(taught), persistent=False)

    def weights(self) -> Tensor:
        """[M] alpha of the next step; `MOST` before the first."""
        student_M, teacher_M = self.means.unbind(1)
        alpha_M = (MIDDLE + SLOPE * (student_M - teacher_M)).clamp(LEAST, MOST).nan_to_num(MOST)
        return alpha_M.masked_fill(~self.taught, 0.0)

    @torch.no_grad()
    def update(self, sums_M6: Tensor) -> None:
        """Take the `LossOutput.members` of a step, over all ranks. A member without tokens stays as it is."""
        student_M, _, teacher_M, tokens_M, own_M, theirs_M = sums_M6.to(self.means.dtype).unbind(1)
        teacher_M = teacher_M * torch.where(theirs_M > 0, own_M / theirs_M.clamp(min=1), 1.0)  # the same bytes
        now_M2 = torch.stack([student_M, teacher_M], 1) / tokens_M.clamp(min=1)[:, None]
        known_M2 = torch.where(self.means.isinf(), now_M2, self.means)
        moved_M2 = known_M2 + (now_M2 - known_M2) / STEPS
        self.means.copy_(torch.where(((tokens_M > 0) & self.taught)[:, None], moved_M2, self.means))
