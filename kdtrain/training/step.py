"""One micro-batch through student and objective, as one module.

Backbone and output head are called inside one `forward`, so that a wrapper around the module (DDP, FSDP) sees every
parameter that takes part. The backbone is compiled; the objective's engine compiles its own elementwise work.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import nn

from kdtrain.cache.reader import CachedBatch
from kdtrain.config import ObjectiveConfig, PrecisionConfig
from kdtrain.models.head import SplitModel
from kdtrain.objective.loss import LossOutput, distillation_loss
from kdtrain.precision.modes import autocast, head_dtype


class DistillStep(nn.Module):
    """The loss of one micro-batch.

    Args:
        student: split into backbone and output head.
        temperature: one of `kdtrain.objective.temperature`.
        vocab_size: the vocabulary of the data; a padded head's further rows are ignored.
        seq_len: T, tokens in a sequence.
        has_teacher: whether micro-batches carry targets; without them it is plain cross-entropy.
        mode: number format of the backbone's forward.
        device: where the micro-batch lies.
        document_mask: whether packed documents are kept from seeing each other.
        compile: whether backbone and objective are compiled.
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
        self.backbone = student.forward
        if compile:
            compile_mode = None if precision.compile_mode == "default" else precision.compile_mode
            self.backbone = torch.compile(student.forward, dynamic=False, mode=compile_mode)

    def hidden(self, batch: CachedBatch) -> torch.Tensor:
        """The backbone's output for a micro-batch, [B*T, D], by the compiled graph."""
        return self._hidden(self.backbone, batch)

    def hidden_eager(self, batch: CachedBatch) -> torch.Tensor:
        """The same without a compiled graph: validation is rare, and a graph of its own costs half a minute."""
        return self._hidden(self.student.forward, batch)

    def _hidden(self, backbone: Callable[..., torch.Tensor], batch: CachedBatch) -> torch.Tensor:
        with autocast(self.mode, self.device):
            hidden_BTD = backbone(batch.tokens[:, :-1], batch.segments if self.document_mask else None)
        if self.student.fused:
            # Many models end in a norm that gives fp32 under autocast; the head's products are the mode's all the same.
            hidden_BTD = hidden_BTD.to(head_dtype(self.mode) or hidden_BTD.dtype)
        return rearrange(hidden_BTD, "B T D -> (B T) D")

    def forward(self, batch: CachedBatch, normalizer: float) -> tuple[torch.Tensor, LossOutput]:
        """The loss to differentiate and the sums to report.

        Args:
            batch: B sequences of T + 1 tokens with their targets.
            normalizer: what sums over tokens are divided by.
        """
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        mask_N = rearrange(batch.loss_mask, "B T -> (B T)")
        output = distillation_loss(
            self.hidden(batch),
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
        return loss, output
