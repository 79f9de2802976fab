"""The hidden-state loss of a run: which layers, how wide they are, and what is refused.

Widths and the number of layers are read off a probe batch of each model, because configurations name them in many
ways, and some models change the width between layers.
"""

from dataclasses import dataclass

from kdtrain.config import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, layer_widths
from kdtrain.objective.hidden import HiddenLoss, layer_pairs


@dataclass(frozen=True)
class HiddenPlan:
    """The loss with its projections, and the layers it compares."""

    loss: HiddenLoss
    student_layers: tuple[int, ...]
    teacher_layers: tuple[int, ...]

    def describe(self) -> str:
        """What is compared with what, on one line."""
        pairs = zip(self.student_layers, self.teacher_layers, self.loss.projections, strict=True)
        shown = ", ".join(f"{own} to {other} ({w.shape[1]} -> {w.shape[0]})" for own, other, w in pairs)
        return f"hidden-state loss {self.loss.kind} of the student's layers to the teacher's: {shown}"


def plan_hidden_loss(
    objective: ObjectiveConfig, student: SplitModel, teacher: SplitModel | None, seed: int
) -> HiddenPlan | None:
    """The hidden-state loss that `objective` asks for, on the student's device; None where it asks for none.

    Raises:
        UsageError: there is no teacher to ask, a model does not show its layers, or a layer is not there.
    """
    if objective.hidden_loss == "none":
        return None
    own = layer_widths(student)
    if teacher is None:
        raise UsageError(
            f"--hidden-loss {objective.hidden_loss} needs the teacher's hidden states at the student's {len(own) - 1} "
            f"layers of width {own[-1]}, and a cache holds distributions alone; give --teacher and --data for --cache"
        )
    theirs = layer_widths(teacher)
    pairs = layer_pairs(objective.hidden_layers, len(own) - 1, len(theirs) - 1)
    loss = HiddenLoss(objective.hidden_loss, [(own[s], theirs[t]) for s, t in pairs], seed)
    return HiddenPlan(loss.to(student.model.device), *(tuple(layers) for layers in zip(*pairs, strict=True)))
