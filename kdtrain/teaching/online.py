"""A teacher that knows whole distributions, and so may teach a run while it trains.

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, D width.
"""

import dataclasses
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.write.answers import LogitAnswers, ShardAnswers
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import DenseTargets
from kdtrain.parallel.footprint import ModelFootprint
from kdtrain.teaching import teacher


class OnlineTeacher(teacher.Teacher):
    """A teacher of one kind; a subclass has at least `vocab_size`, `digest` and `logits`."""

    sharded = False
    """True if a forward needs all ranks."""

    @staticmethod
    def open(spec: ModelSpec, device: torch.device, mode: str) -> "OnlineTeacher":
        """Open the teacher of a spec as `open_teacher` does. UsageError: it cannot teach a run."""
        found = teacher.open_teacher(spec, device, mode)
        if not isinstance(found, OnlineTeacher):
            raise UsageError(
                f"the teacher {found} gives a top-k only; make a cache with cache-teacher, and give --cache"
            )
        return found

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Return by default the memory of the logits alone, [B, T, V] in fp32, once while made and once as targets."""
        size = self.vocab_size
        sizes: dict[str, Any] = {"vocabulary": size, "width": size, "parameters": 0, "layers": 0, "in_layers": 0}
        return ModelFootprint(name=self.name, tied=False, kept=4.0 * size, **sizes)

    def meet(self, student: SplitModel) -> None:
        """Take from the student what the teacher shares with it; called once, when the student is loaded and whole."""

    def logits(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Return logits [B, T, V] of the next token, in fp32 on any device, without gradients.

        tokens_BT: int64, on any device. segments_BT: number of the document of each position; None: no document mask.
        """
        raise NotImplementedError

    def targets(
        self, batch: Batch, vocab_size: int, *, document_mask: bool = False, layers: tuple[int, ...] = ()
    ) -> Batch:
        """Return `batch` with targets over the first `vocab_size` entries, and the states of `layers`; no gradients.

        layers: see `layer_widths`.
        """
        assert not layers, "layer_widths refuses them"
        with torch.no_grad():
            logits_BTV = self.logits(batch.tokens[:, :-1], batch.segments if document_mask else None)
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        logits_NV = rearrange(logits_BTV.to(labels_N.device), "B T V -> (B T) V")
        return dataclasses.replace(batch, targets=DenseTargets.from_logits(logits_NV, labels_N, vocab_size))

    def layer_widths(self) -> list[int]:
        """Return D of the embedding and of each layer, for the hidden-state loss.

        UsageError: the teacher gives no hidden states.
        """
        raise UsageError(f"a teacher of kind {self.spec.kind} gives no hidden states; leave --hidden-loss out")

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """Return answers from a forward for each batch."""
        return LogitAnswers(self.logits, settings, self.sharded)


Teacher = OnlineTeacher
"""`kdtrain.Teacher`, which a package's own kind of teacher extends."""
