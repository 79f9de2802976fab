"""One micro-batch through student and objective, as one module.

Backbone and output head are called inside one `forward`, so that a wrapper around the module (DDP, FSDP) sees every
parameter that takes part. The backbone is compiled; the objective's engine compiles its own elementwise work.

The hidden-state loss of a run: which layers, how wide they are, and what is refused.

Widths and the number of layers are read off a probe batch of each model, because configurations name them in many
ways, and some models change the width between layers.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import nn

from kdtrain.cache.reader import CachedBatch
from kdtrain.config import ObjectiveConfig, PrecisionConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, layer_widths
from kdtrain.objective.hidden import HiddenLoss, layer_pairs
from kdtrain.objective.loss import LossOutput, distillation_loss
from kdtrain.objective.targets import per_token
from kdtrain.precision.linear import Switch
from kdtrain.precision.modes import autocast, head_dtype
from kdtrain.training.data import TaughtBatch


class DistillStep(nn.Module):
    """The loss of one micro-batch.

    Args:
        student: split into backbone and output head.
        temperature: one of `kdtrain.objective.temperature`.
        vocab_size: the vocabulary of the data; a padded head's further rows are ignored.
        seq_len: T, tokens in a sequence.
        has_teacher: whether micro-batches carry targets; without them it is plain cross-entropy.
        mode: number format of the backbone's forward, but for what is quantised.
        device: where the micro-batch lies.
        document_mask: whether packed documents are kept from seeing each other.
        compile: whether backbone and objective are compiled.
        by_layer: whether the backbone's layers are compiled already, each by itself, and the backbone is not to be.
        hidden_loss: compares hidden states with the teacher's, None not to; `layers` of the student.
        switch: of the student's linear layers, and `quantized` the mode it can switch to; None where there is none.
    """

    def __init__(
        self,
        student: SplitModel,
        temperature: Any,
        objective: ObjectiveConfig,
        precision: PrecisionConfig,
        *,
        vocab_size: int,
        seq_len: int,
        has_teacher: bool,
        mode: str,
        device: torch.device,
        document_mask: bool,
        compile: bool,
        by_layer: bool = False,
        hidden_loss: HiddenLoss | None = None,
        layers: tuple[int, ...] = (),
        switch: Switch | None = None,
        quantized: str | None = None,
    ) -> None:
        super().__init__()
        self.student = student
        self.temperature = temperature
        self.objective = objective
        self.alpha = objective.alpha
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.has_teacher = has_teacher
        self.mode = mode
        self.device = device
        self.document_mask = document_mask
        self.compile_objective = compile
        self.by_layer = by_layer
        self.hidden_loss = hidden_loss
        self.layers = layers
        self.switch = switch or Switch()
        self.quantized = quantized
        self.backbone = self._backbone
        if compile and not by_layer:
            compile_mode = None if precision.compile_mode == "default" else precision.compile_mode
            self.backbone = torch.compile(self._backbone, dynamic=False, mode=compile_mode)

    @property
    def present_mode(self) -> str:
        """The mode of the next step: that of its forward's products."""
        return self.quantized if self.quantized and self.switch.position == "quantized" else self.mode

    def _backbone(
        self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The student's output, and those of the layers that a hidden-state loss wants."""
        if self.layers:
            return self.student.with_layers(tokens_BT, segments_BT, self.layers)
        return self.student(tokens_BT, segments_BT), []

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """No compiled graph inside: hooks are not called in one."""
        before = self.backbone, self.compile_objective
        self.backbone, self.compile_objective = self._backbone, False
        try:
            with self._layers_eager():
                yield
        finally:
            self.backbone, self.compile_objective = before

    def _layers_eager(self) -> contextlib.AbstractContextManager[Any]:
        """Layers that are compiled each by itself run as they are inside."""
        return torch.compiler.set_stance("force_eager") if self.by_layer else contextlib.nullcontext()

    def hidden_eager(self, batch: CachedBatch) -> torch.Tensor:
        """The backbone's output for a micro-batch, [B*T, D], without a compiled graph.

        Validation is rare, and a graph of its own costs half a minute. It is never quantised: what is exported is not.
        """
        with self.switch.at("high"), self._layers_eager():
            return self._hidden(lambda *asked: (self.student(*asked), []), batch)[0]

    def _hidden(
        self, backbone: Callable[..., tuple[torch.Tensor, list[torch.Tensor]]], batch: CachedBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with autocast(self.mode, self.device):
            hidden_BTD, states = backbone(batch.tokens[:, :-1], batch.segments if self.document_mask else None)
        if self.student.fused:
            # Many models end in a norm that gives fp32 under autocast; the head's products are the mode's all the same.
            hidden_BTD = hidden_BTD.to(head_dtype(self.mode) or hidden_BTD.dtype)
        return rearrange(hidden_BTD, "B T D -> (B T) D"), [rearrange(each, "B T D -> (B T) D") for each in states]

    def forward(self, batch: CachedBatch, normalizer: float) -> tuple[torch.Tensor, LossOutput]:
        """The loss to differentiate and the sums to report.

        Args:
            batch: B sequences of T + 1 tokens with their targets.
            normalizer: what sums over tokens are divided by.
        """
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        mask_N = rearrange(batch.loss_mask, "B T -> (B T)")
        hidden_ND, states = self._hidden(self.backbone, batch)
        output = distillation_loss(
            hidden_ND,
            self.student.head,
            labels_N,
            mask_N,
            batch.targets,
            temperature=self.temperature.value(),
            alpha=self.alpha,
            divergence=self.objective.divergence,
            tail=self.objective.tail,
            jsd_beta=self.objective.jsd_beta,
            skew_alpha=self.objective.skew_alpha,
            vocab_size=self.vocab_size,
            normalizer=normalizer,
            compile=self.compile_objective,
        )
        loss = output.loss
        if batch.targets is not None:
            extra = self.temperature.auxiliary_loss(batch.targets, mask_N, normalizer)
            loss = loss if extra is None else loss + extra
        if self.hidden_loss is not None:
            assert isinstance(batch, TaughtBatch)
            distance = self.hidden_loss(states, batch.states, mask_N)
            output = output._replace(hidden=distance.detach().to(output.hidden.dtype))
            loss = loss + per_token(self.objective.hidden_weight * distance, normalizer)
        return loss, output


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
