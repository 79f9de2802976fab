"""Which layers of student and teacher the hidden-state loss compares, and its projections between them."""

from dataclasses import dataclass

from kdtrain.config import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, layer_widths
from kdtrain.objective.hidden import HiddenLoss, layer_pairs
from kdtrain.teaching.online import OnlineTeacher


@dataclass(frozen=True)
class HiddenPlan:
    """The hidden-state loss with its projections, and the layers it compares."""

    loss: HiddenLoss
    student_layers: tuple[int, ...]
    teacher_layers: tuple[int, ...]

    def describe(self) -> str:
        """Return the compared layers, on one line."""
        pairs = zip(self.student_layers, self.teacher_layers, self.loss.projections, strict=True)
        shown = ", ".join(f"{own} to {other} ({w.shape[1]} -> {w.shape[0]})" for own, other, w in pairs)
        return f"hidden-state loss {self.loss.kind} of the student's layers to the teacher's: {shown}"


def plan_hidden_loss(
    objective: ObjectiveConfig, student: SplitModel, teacher: OnlineTeacher | None, seed: int
) -> HiddenPlan | None:
    """Return the hidden-state loss of `objective`, on the student's device; None where it has none.

    Raises:
        UsageError: there is no online teacher, a model does not return its layers, or a layer does not exist.
    """
    if objective.hidden_loss == "none":
        return None
    own = layer_widths(student)
    if teacher is None:
        raise UsageError(
            f"--hidden-loss {objective.hidden_loss} needs the teacher's hidden states at the student's {len(own) - 1} "
            f"layers of width {own[-1]}, and a cache holds distributions alone; give --teacher and --data for --cache"
        )
    theirs = teacher.layer_widths()
    pairs = layer_pairs(objective.hidden_layers, len(own) - 1, len(theirs) - 1)
    loss = HiddenLoss(objective.hidden_loss, [(own[s], theirs[t]) for s, t in pairs], seed)
    return HiddenPlan(loss.to(student.model.device), *(tuple(layers) for layers in zip(*pairs, strict=True)))
