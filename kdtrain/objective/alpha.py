"""Alpha, the teacher's weight in the loss: fixed, scheduled, or by withheld text (`--alpha auto`).

Labels that are read for the first time show how far the teacher is right; labels that were read before show little, and
teach little. So auto takes text that nothing trains on, with its labels y, the teacher p and the student q. S and T are
the cross-entropies of q and p, D is KL(p || q) at T = 1, nats per token:

    share      clip((S - T) / D, 0, 1): what the labels confirm of the teacher. Of text drawn from the teacher S - T is
               D in the mean, however near the two are; where the teacher knows no more than the student it is 0.
    posterior  the a at which mean log(a p(y) + (1 - a) q(y)) is largest: the teacher's weight in the best mixture of
               both. A student that knows the training labels by heart gets worse here, and the weight rises.

    1 - alpha = (1 - h) (1 - (1 - m) share - m posterior), alpha at most `MOST`
    m = max(G / (G + S'), 1 - 1 / passes),  G = max(0, (S - T) - (S' - T'))
    h = max(0, T - T') / T

S' and T' are the losses of the training batches, averages of the last steps. m is the part of the training labels that
the student knows by heart: of their nats it knows G beyond what it knows of any text, with the teacher as the ruler of
how hard each text is. h is the part that the teacher knows: such labels are in its distributions already. Labels that
are fresh have m = 0, and a sound teacher has h = 0. No constant is fitted to a text.

Between two measurements S - T moves by what S' - T' has moved, times 1 - m, and D by as much: a student learns most of
what it will before the first of them. In a user's own loop, whose ranks do not sum S' and T', it stays as measured.

Alpha moves by at most `MOVES` a step, so that neither the optimizer's moments nor a guard sees a jump. It depends on
what was measured before the step alone. docs/objective.md has what was measured, and what others do.

Shape suffix: M members of a mixture (1 without one).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kdtrain.config.sections import ObjectiveConfig
from kdtrain.errors import UsageError, as_number, log
from kdtrain.objective.measured import MOST, Measured
from kdtrain.objective.temperature import scheduled

MOVES = 0.02
LEAST_TOKENS = 2048
"""Withheld tokens that a measurement needs; of a member with fewer alpha is `MOST`."""
_AVERAGED = 20
"""Steps in the averages of the training batches; further ones move them by one part of as many."""
_TINY = 1e-9


class Alpha(nn.Module):
    """A weight from `start`, 0 to 1, to `end` over `total_steps`, a pure function of the step; or the same throughout.

    Args:
        shape: of the way, as `--alpha-schedule` takes it.
    """

    def __init__(self, start: float, end: float = 0.0, total_steps: int = 0, shape: str = "constant") -> None:
        super().__init__()
        if not 0 <= as_number(start, "--alpha") <= 1:
            raise UsageError(f"--alpha {start} is not between 0 and 1")
        self.start = float(start)
        self.end = end
        self.total_steps = total_steps
        self.shape = shape
        self.fixed = self.start if shape == "constant" else None
        """The weight of every step; None where it moves."""
        self.step = 0
        """The optimizer step, from 0, of the next calls."""
        self.passes: Sequence[float] = ()
        """How often training went over the text of each member so far."""

    @property
    def measured(self) -> bool:
        """Return whether withheld text was measured."""
        return False

    def set_step(self, step: int, passes: Sequence[float] = ()) -> None:
        """Set `step` and `passes`."""
        self.step, self.passes = step, passes

    def value(self) -> float | Tensor:
        """Return the weight of the next loss; where it is measured, an fp64 tensor [M]."""
        return scheduled(self.shape, self.start, self.end, self.step, self.total_steps)

    def largest(self) -> float:
        """Return the weight of the next loss, in a mixture the largest."""
        return float(torch.as_tensor(self.value()).max())

    def update(self, sums_M6: Tensor) -> None:
        """Take `LossOutput.members` of a step over all ranks; here they change nothing."""


class MeasuredAlpha(Alpha):
    """The weight of each member by withheld text, see the top of the file; `MOST` until something is measured.

    The state is fp64 whatever the module is cast to: a step's move would be rounded away.

    Args:
        taught: whether each member has a teacher; where it has none, the weight is 0.
    """

    present: Tensor
    """[M] the weight now; -1 before the first measurement."""
    known: Tensor
    """[M, 4] of the last measurement S - T, D less S - T (-1: not known), posterior (-1: none was made yet) and T."""
    trained: Tensor
    """[M, 3] averages of S' and T', and the number of steps in them, at most `_AVERAGED`."""
    then: Tensor
    """[M, 2] the averages at the last measurement, or when they had as many steps for the first time."""
    taught: Tensor

    def __init__(self, taught: Sequence[bool] = (True,)) -> None:
        super().__init__(MOST)
        size = len(taught)
        self.register_buffer("present", torch.full((size,), -1.0, dtype=torch.float64))
        self.register_buffer("known", torch.full((size, 4), -1.0, dtype=torch.float64))
        self.register_buffer("trained", torch.zeros(size, 3, dtype=torch.float64))
        self.register_buffer("then", torch.zeros(size, 2, dtype=torch.float64))
        self.register_buffer("taught", torch.tensor(taught), persistent=False)
        self.fixed = None
        self.passes = (1.0,) * size
        self.by_forward = True
        """Whether each forward in training moves it; a trainer that counts steps clears this, and calls `update`."""
        self.hinted = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MeasuredAlpha":
        """Move the state to where `fn` would move it, and leave it in fp64."""
        for name, each in self.named_buffers():
            setattr(self, name, each.to(fn(each).device))
        return self

    @property
    def measured(self) -> bool:
        return bool((self.known[:, 2] >= 0).any())

    @property
    def gaps(self) -> Tensor:
        """Return [M] G, nats per token; 0 before the first step."""
        gap_M = (self.known[:, 0] - (self.then[:, 0] - self.then[:, 1])).clamp(min=0)
        return torch.where(self.then[:, 0] > 0, gap_M, 0.0)

    def value(self) -> Tensor:
        return self.present.masked_fill(self.present < 0, MOST).masked_fill(~self.taught, 0.0)

    def target(self) -> Tensor:
        """Return [M] where the weight goes; where it is, if nothing is known."""
        gap_M, excess_M, posterior_M, teacher_M = self.known.unbind(1)
        # a loop that counts no steps has averages of its rank alone until they are measured
        student_M, theirs_M = (self.then if self.by_forward else self.trained[:, :2]).unbind(1)
        # filled on the device: a copy from the host would wait for the work in its queue
        again_M = torch.stack([gap_M.new_full((), 1 - 1 / max(each, 1.0)) for each in self.passes])
        heart_M = torch.maximum(self.gaps / (self.gaps + student_M).clamp(min=_TINY), again_M)
        moved_M = (student_M - theirs_M) - (self.then[:, 0] - self.then[:, 1])
        now_M = (gap_M + (1 - heart_M) * moved_M).clamp(min=0)
        share_M = torch.where(excess_M < 0, posterior_M, now_M / (now_M + excess_M).clamp(min=_TINY))
        mixed_M = (1 - heart_M) * share_M + heart_M * posterior_M
        held_M = torch.where(theirs_M > 0, (1 - theirs_M / teacher_M.clamp(min=_TINY)).clamp(min=0), 0.0)
        target_M = (1 - (1 - held_M) * (1 - mixed_M)).clamp(0, MOST)
        return torch.where(posterior_M < 0, self.present, target_M)

    @torch.no_grad()
    def observe(self, measured: Sequence[Measured]) -> None:
        """Take what withheld text shows of each member now; the first time the weight begins there.

        A member of which too little is withheld keeps `MOST`, and one whose student is too near its teacher keeps
        what it had.
        """
        begun_M4 = torch.where(self.known[:, 2:3] < 0, self.known.new_tensor([0.0, -1.0, MOST, 0.0]), self.known)
        rows = begun_M4.tolist()
        shown = [each.differs and not too_few(each.tokens) for each in measured]
        for row, each, differs in zip(rows, measured, shown, strict=True):
            if differs:
                excess = -1.0 if math.isnan(each.divergence) else max(each.divergence / each.tokens - each.gap, 0.0)
                row[:] = each.gap, excess, each.posterior, each.teacher / each.tokens
        self.known.copy_(torch.tensor(rows, dtype=torch.float64))
        shown_M1 = torch.tensor(shown, device=self.then.device)[:, None]
        self.then.copy_(torch.where(shown_M1, self.trained[:, :2], self.then))
        self.present.copy_(torch.where(self.present < 0, self.target(), self.present))

    @torch.no_grad()
    def update(self, sums_M6: Tensor) -> None:
        """Take `LossOutput.members` of a step over all ranks, and move. A member without tokens, or with NaN, stays."""
        student_M, _, teacher_M, tokens_M, own_M, theirs_M = sums_M6.double().unbind(1)
        teacher_M = teacher_M * torch.where(theirs_M > 0, own_M / theirs_M.clamp(min=1), 1.0)  # the same bytes
        now_M2 = torch.stack([student_M, teacher_M], 1) / tokens_M.clamp(min=1)[:, None]
        counts_M1 = ((tokens_M > 0) & self.taught & now_M2.isfinite().all(1))[:, None]
        before_M2 = self.trained[:, :2]
        steps_M1 = self.trained[:, 2:] + 1
        moved_M2 = before_M2 + (now_M2 - before_M2) / steps_M1.clamp(max=_AVERAGED)
        if not self.by_forward:
            self.then.copy_(torch.where(counts_M1 & (steps_M1 <= _AVERAGED), moved_M2, self.then))
        averages_M3 = torch.cat([moved_M2, steps_M1.clamp(max=_AVERAGED)], 1)
        self.trained.copy_(torch.where(counts_M1, averages_M3, self.trained))
        self.present.add_((self.target() - self.present).clamp(-MOVES, MOVES))

    def follow(self, sums_M6: Tensor) -> None:
        """Call `update` for a forward in training; log once that nothing was measured yet."""
        if not (self.hinted or self.measured):
            log.warning("alpha is %.2g: it follows withheld text, by Student.measure or AlphaCallback", MOST)
        self.hinted = True
        self.update(sums_M6)

    @torch.no_grad()
    def begin_at_zero(self) -> None:
        """Begin with the labels alone, until the next measurement shows otherwise."""
        self.present.zero_()
        self.known.copy_(self.known.new_tensor([0.0, -1.0, 0.0, 0.0]))


def too_few(tokens: float, of: str = "") -> str | None:
    """Return the line on a member, `of` if it is one of several, of which too few tokens are withheld; None: enough."""
    needed = f"{tokens:,.0f} withheld tokens with a label, and {LEAST_TOKENS:,} are needed"
    return f"alpha stays {MOST:.2g}{of and f' for {of}'}: {needed}" if tokens < LEAST_TOKENS else None


def build_alpha(options: ObjectiveConfig, total_steps: int, taught: Sequence[bool]) -> Alpha:
    """Make the weight that a run with these options trains with. taught: see `MeasuredAlpha`; none True: no teacher."""
    if not any(taught):
        return Alpha(0.0)
    if options.alpha == "auto":
        return MeasuredAlpha(taught)
    last = max(total_steps - 1, 1)  # the last step has the end value
    return Alpha(options.alpha, options.alpha_end, last, options.alpha_schedule)


def of_before(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the state with that of an alpha that followed its training batches as today's, which measures anew."""
    if (means_M3 := tensors.get("alpha.means")) is None:
        return tensors
    student_M, teacher_M, divergence_M = means_M3.double().unbind(1)
    present_M = ((student_M - teacher_M) / divergence_M.clamp(min=0)).clamp(0, MOST).nan_to_num(MOST)
    means_M2 = means_M3.double()[:, :2]
    begun_M1 = means_M2[:, :1].isfinite()
    averages_M2 = torch.where(begun_M1, means_M2, 0.0)
    own = {"alpha.present": present_M, "alpha.then": averages_M2}
    own["alpha.trained"] = torch.cat([averages_M2, begun_M1.double() * _AVERAGED], 1)
    own["alpha.known"] = torch.full((len(present_M), 4), -1.0, dtype=torch.float64)
    return {name: each for name, each in tensors.items() if name != "alpha.means"} | own
