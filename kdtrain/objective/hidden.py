"""Hidden-state losses: layers of the student learn to match layers of the teacher.

A student's hidden states h_s go through a learned matrix W, student width x teacher width, and are compared with the
teacher's h_t at the same tokens:

    mse     mean over the teacher's width of (W h_s - h_t)^2     FitNets, arXiv 1412.6550, eq. 3;
                                                                 TinyBERT, arXiv 1909.10351, eq. 8
    cosine  1 - cos(W h_s, h_t)                                  DistilBERT, arXiv 1910.01108, section 2

W is fp32 and belongs to the training, not to the student. It starts as the identity if both widths are equal (the first
step is then DistilBERT's, which has no W), else with orthonormal rows or columns. A value is the mean over the
pairs of layers, summed over unmasked tokens. `even` is TinyBERT's uniform mapping of layers.

Given up: it needs an online teacher. Hidden states are hundreds of numbers per token and layer; no cache holds them.

Shape suffixes: N tokens, S width of a student's layer, D width of a teacher's.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdtrain.config.sections import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, layer_widths

KINDS = ("mse", "cosine")


class HiddenLoss(nn.Module):
    """The distance of pairs of layers, with a projection a pair.

    Args:
        kind: one of `KINDS`.
        widths: S and D of each pair.
        seed: of the projections that do not start as the identity; the global random state does not change.
        layers: the numbers of each pair, of the student's layer and the teacher's.
    """

    def __init__(
        self, kind: str, widths: Sequence[tuple[int, int]], seed: int = 0, layers: Sequence[tuple[int, int]] = ()
    ) -> None:
        super().__init__()
        assert kind in KINDS
        self.kind = kind
        self.student_layers, self.teacher_layers = (tuple(pair[side] for pair in layers) for side in (0, 1))
        generator = torch.Generator().manual_seed(seed)
        self.projections = nn.ParameterList()
        for narrow, wide in widths:
            start = torch.eye(wide)
            if wide != narrow:
                start = nn.init.orthogonal_(torch.empty(wide, narrow), generator=generator)
            self.projections.append(nn.Parameter(start))

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask_N: Tensor) -> Tensor:
        """Sum the pairs' mean distance over unmasked tokens; scalar fp32, differentiable in student and projections.

        Args:
            student: [N,S] a pair, any float dtype.
            teacher: [N,D] a pair, any float dtype, without gradients; masked rows may hold anything.
            mask_N: bool, True where the token counts. Without any the value is 0, still connected to the graph.
        """
        sums = []
        with torch.autocast(mask_N.device.type, enabled=False):
            for own_NS, other_ND, weight_DS in zip(student, teacher, self.projections, strict=True):
                # A GPU multiplies 16-bit states as such.
                kind = own_NS.dtype if own_NS.is_cuda and own_NS.element_size() == 2 else torch.float32
                own_ND = F.linear(own_NS.to(kind), weight_DS.to(kind)).float()
                other_ND = other_ND.detach().float().masked_fill(~mask_N[:, None], 0.0)
                if self.kind == "mse":
                    distance_N = (own_ND - other_ND).square().mean(-1)
                else:
                    distance_N = 1.0 - F.cosine_similarity(own_ND, other_ND, dim=-1)
                sums.append(distance_N.masked_fill(~mask_N, 0.0).sum())
            return torch.stack(sums).mean()

    def describe(self) -> str:
        """Return the compared layers, on one line."""
        pairs = zip(self.student_layers, self.teacher_layers, self.projections, strict=True)
        shown = ", ".join(f"{own} to {other} ({w.shape[1]} -> {w.shape[0]})" for own, other, w in pairs)
        return f"hidden-state loss {self.kind} of the student's layers to the teacher's: {shown}"


def layer_pairs(wanted: str, student_layers: int, teacher_layers: int) -> list[tuple[int, int]]:
    """Return the pairs of layers (student, teacher) to compare.

    Layer 0 is the embedding, layer L the last, as the output head sees it (after the final norm).

    Args:
        wanted: `even` (each student layer with the one at the same part of the teacher's depth), `last`, or pairs
            STUDENT:TEACHER separated by commas.
    Raises:
        UsageError: `wanted` has no such form, or names a layer that does not exist.
    """
    if wanted == "last":
        return [(student_layers, teacher_layers)]
    if wanted == "even":
        # Rounded half up, and never the embedding.
        places = [
            (own, (2 * own * teacher_layers + student_layers) // (2 * student_layers))
            for own in range(1, student_layers + 1)
        ]
        return [(own, max(other, 1)) for own, other in places]
    if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", wanted):
        raise UsageError(
            f"--hidden-layers '{wanted}' is not a mapping; use even, last, or STUDENT:TEACHER pairs as 2:3,4:6"
        )
    pairs = [(int(own), int(other)) for own, other in (pair.split(":") for pair in wanted.split(","))]
    for own, other in pairs:
        if own > student_layers or other > teacher_layers:
            raise UsageError(
                f"--hidden-layers {own}:{other} is beyond the layers: the student has 0 to {student_layers}, "
                f"the teacher 0 to {teacher_layers}"
            )
    return pairs


def plan_hidden_loss(
    objective: ObjectiveConfig, student: SplitModel, teacher: Any | None, seed: int
) -> HiddenLoss | None:
    """Return the hidden-state loss of `objective`, on the student's device; None where it has none.

    teacher: the online one, whose `layer_widths` are compared.

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
    loss = HiddenLoss(objective.hidden_loss, [(own[s], theirs[t]) for s, t in pairs], seed, pairs)
    return loss.to(student.model.device)
