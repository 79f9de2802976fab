"""The student and its loss as one module: what a wrapper (DDP, FSDP2, accelerate, Trainer) is put around.

Backbone, output head and loss are called inside one `forward`, so that a wrapper sees every parameter that takes part.
The backbone is compiled; the objective's engine compiles its own elementwise work.

Shape suffixes: B sequences, T positions, N tokens (B*T), D model width, K kept entries, G knots of beta.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdtrain.cache.reader import CachedBatch
from kdtrain.config import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, layer_widths, split
from kdtrain.objective.hidden import HiddenLoss, layer_pairs
from kdtrain.objective.loss import DistillationLoss, LossOutput, joined
from kdtrain.objective.targets import per_token
from kdtrain.objective.temperature import Temperature
from kdtrain.precision.linear import Switch
from kdtrain.precision.modes import autocast, head_dtype
from kdtrain.training.data import TaughtBatch


class Student(nn.Module):
    """A causal language model and its distillation loss.

    The model's parameters are used as they are; nothing of the model changes but what `document_mask` asks for.

    Args:
        model: of `transformers`, or one that is split into backbone and output head already.
        loss: what it is trained on.
        vocab_size: the vocabulary of the data; rows of the head from there on are padding. None: all rows count.
        mode: number format of the backbone's forward (`fp32`, `bf16`, `fp16`), but for what is quantised; `fp32` leaves
            it to an autocast around the call.
        document_mask: keep packed documents from seeing each other.
        compile: compile backbone and objective.
        compile_mode: what `torch.compile` calls the mode.
        by_layer: the backbone's layers are compiled already, each by itself, and the backbone is not to be.
        hidden_loss: compares hidden states of `layers` with the teacher's, times `hidden_weight`; None not to.
        switch: of the model's linear layers, and `quantized` the mode it can switch to; None where there is none.
    Raises:
        UsageError: the model's output head cannot be read.

    >>> from kdtrain.testing import tiny_model
    >>> student = Student(tiny_model("llama", 300), DistillationLoss(alpha=0.0))
    >>> output = student(tokens=torch.randint(0, 300, (2, 9)), loss_mask=torch.ones(2, 8, dtype=torch.bool))
    >>> output.tokens
    tensor(16)
    """

    accepts_loss_kwargs = True
    """What `transformers.Trainer` asks before it gives `num_items_in_batch`."""

    def __init__(
        self,
        model: PreTrainedModel | SplitModel,
        loss: DistillationLoss,
        *,
        vocab_size: int | None = None,
        mode: str = "fp32",
        document_mask: bool = False,
        compile: bool = False,
        compile_mode: str | None = None,
        by_layer: bool = False,
        hidden_loss: HiddenLoss | None = None,
        hidden_weight: float = 1.0,
        layers: tuple[int, ...] = (),
        switch: Switch | None = None,
        quantized: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model if isinstance(model, SplitModel) else split(model, keep_attention=not document_mask)
        self.loss = loss
        self.vocab_size = vocab_size or self.model.vocab_size
        self.mode = mode
        self.document_mask = document_mask
        self.compile_objective = compile
        self.by_layer = by_layer
        self.hidden_loss = hidden_loss
        self.hidden_weight = hidden_weight
        self.layers = layers
        self.switch = switch or Switch()
        self.quantized = quantized
        self._codec: tuple[tuple[float, ...], int] | None = None
        self.backbone = self._backbone
        if compile and not by_layer:
            self.backbone = torch.compile(self._backbone, dynamic=False, mode=compile_mode)
        self.register_state_dict_post_hook(_without_tied)
        self.register_load_state_dict_post_hook(_tied_are_not_missing)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device

    @property
    def temperature(self) -> Temperature:
        """That of the loss."""
        return self.loss.temperature

    @property
    def present_mode(self) -> str:
        """The mode of the next step: that of its forward's products."""
        return self.quantized if self.quantized and self.switch.position == "quantized" else self.mode

    def forward(
        self,
        batch: CachedBatch | None = None,
        num_items_in_batch: Tensor | float | None = None,
        *,
        tokens: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        logprobs: Tensor | None = None,
        counts: Tensor | None = None,
        tail: Tensor | None = None,
        label_logprob: Tensor | None = None,
        logit_mean: Tensor | None = None,
        logit_std: Tensor | None = None,
        knots: Tensor | None = None,
        num_samples: Tensor | None = None,
    ) -> LossOutput:
        """The loss to differentiate and the sums to report, of a batch or of the named tensors of one.

        Args:
            batch: B sequences of T + 1 tokens with their targets.
            num_items_in_batch: what sums over tokens are divided by: the unmasked tokens of the whole optimizer step,
                over micro-batches and ranks. None: those of this batch.
            tokens, loss_mask, ...: what `CachedBatch.fields` returns, all of it or without targets; knots and
                num_samples are read once, from the first batch, and are those of all.
        """
        if batch is None:
            named = {"tokens": tokens, "loss_mask": loss_mask, "segments": segments, "ids": ids, "logprobs": logprobs}
            named |= {"counts": counts, "tail": tail, "label_logprob": label_logprob}
            named |= {"logit_mean": logit_mean, "logit_std": logit_std}
            if knots is not None and num_samples is not None and self._codec is None:
                self._codec = tuple(knots[0].tolist()), int(num_samples[0])
            fields = {name: tensor for name, tensor in named.items() if tensor is not None}
            batch = CachedBatch.of(fields, *(self._codec or ()))
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        mask_N = rearrange(batch.loss_mask, "B T -> (B T)")
        normalizer = mask_N.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        hidden_ND, states = self._hidden(self.backbone, batch)
        output: LossOutput = self.loss(
            hidden_ND,
            self.model.head,
            labels_N,
            mask_N,
            batch.targets,
            vocab_size=self.vocab_size,
            normalizer=normalizer,
            compile=self.compile_objective,
        )
        if self.hidden_loss is not None:
            assert isinstance(batch, TaughtBatch)
            distance = self.hidden_loss(states, batch.states, mask_N)
            loss = output.loss + per_token(self.hidden_weight * distance, normalizer)
            output = output._replace(loss=loss, hidden=distance.detach().to(output.hidden.dtype))
        return output

    def total(self, sums: LossOutput, temperature: Tensor) -> Tensor:
        """The loss of the tokens that `sums` is of, as their sum, in fp64, at a temperature given as a number."""
        loss = joined(sums.ce.double(), sums.kd.double(), self.loss.alpha, self.loss.alpha * temperature.double() ** 2)
        return loss if self.hidden_loss is None else loss + self.hidden_weight * sums.hidden.double()

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

    def hidden_eager(self, batch: CachedBatch) -> Tensor:
        """The backbone's output for a micro-batch, [B*T, D], without a compiled graph.

        Validation is rare, and a graph of its own costs half a minute. It is never quantised: what is exported is not.
        """
        with self.switch.at("high"), self._layers_eager():
            return self._hidden(lambda *asked: (self.model(*asked), []), batch)[0]

    def _layers_eager(self) -> contextlib.AbstractContextManager[Any]:
        """Layers that are compiled each by itself run as they are inside."""
        return torch.compiler.set_stance("force_eager") if self.by_layer else contextlib.nullcontext()

    def _backbone(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The model's hidden states, and those of the layers that a hidden-state loss wants."""
        if self.layers:
            return self.model.with_layers(tokens_BT, segments_BT, self.layers)
        return self.model(tokens_BT, segments_BT), []

    def _hidden(
        self, backbone: Callable[..., tuple[Tensor, list[Tensor]]], batch: CachedBatch
    ) -> tuple[Tensor, list[Tensor]]:
        with autocast(self.mode, batch.tokens.device):
            hidden_BTD, states = backbone(batch.tokens[:, :-1], batch.segments if self.document_mask else None)
        if self.model.fused:
            # Many models end in a norm that gives fp32 under autocast; the head's products are the mode's all the same.
            hidden_BTD = hidden_BTD.to(head_dtype(self.mode) or hidden_BTD.dtype)
        return rearrange(hidden_BTD, "B T D -> (B T) D"), [rearrange(each, "B T D -> (B T) D") for each in states]


def _tied(student: nn.Module) -> set[str]:
    """The further names of parameters that have more than one."""
    every = {name for name, _ in student.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in student.named_parameters()}


def _without_tied(student: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """A tied weight is saved under one of its names, as safetensors wants it."""
    for name in _tied(student):
        state.pop(f"{prefix}{name}", None)


def _tied_are_not_missing(student: nn.Module, keys: Any) -> None:
    tied = _tied(student)
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in tied]


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
