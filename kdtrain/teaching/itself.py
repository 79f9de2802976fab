"""The student without its adapters as its own teacher, at no cost in memory.

It is what the student was when the run began; where `--load` began with trained adapters, the base below these.
The divergence then holds a student near its base while it learns from the text, as KL to a reference policy does, or
is all that it learns, at another temperature (self-distillation, Born-Again Networks, arXiv 1805.04770).

Shape suffixes: B sequences, T positions, D width.
"""

import dataclasses

from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.models.adapters import adapted, adapters_off
from kdtrain.models.head import SplitModel
from kdtrain.parallel.memory_plan import ModelFootprint
from kdtrain.teaching.local import LocalTeacher
from kdtrain.teaching.teacher import register_teacher


@register_teacher("self")
class SelfTeacher(LocalTeacher):
    """The student without its adapters."""

    @property
    def digest(self) -> str:
        """Of the frozen weights."""
        return self._digest

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Its forward alone: the weights are the student's."""
        found = super().footprint(seq_len)
        return found and dataclasses.replace(found, parameters=0, in_layers=0, weight_bytes=4)

    def load(self, sharded: bool = False) -> None:
        """Nothing: `meet` brings the weights."""

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Nothing: the student is checked."""

    def meet(self, student: SplitModel) -> None:
        """Use the student's backbone and, before it is sharded, its output head."""
        if not adapted(student):
            raise UsageError("--teacher self is the student without its adapters, and it has none; add --lora-rank")
        self._digest = student.base
        self._use(student)

    def prepare(self, *, sharded: bool = False, shard_size: int | None = None, compile: bool = False) -> None:
        """Nothing: the student is sharded and compiled; without its adapters it runs as it is."""

    def hidden_states(
        self, tokens_BT: Tensor, segments_BT: Tensor | None, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """As a local teacher's; the student's mode does not change."""
        training = [each for each in self.model.modules() if each.training]
        self.model.eval()
        try:
            with adapters_off(self.model):
                return super().hidden_states(tokens_BT, segments_BT, layers)
        finally:
            for each in training:
                each.training = True
