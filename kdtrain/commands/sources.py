"""Where the batches of a command come from: a split of a cache, and an online teacher if there is one."""

import torch

from kdtrain.cache.reader import CacheReader
from kdtrain.commands.common import teacher_hidden_states, wide_head
from kdtrain.models.head import SplitModel
from kdtrain.precision.compiled import CompiledLayers
from kdtrain.training.data import CachedSource, OnlineSource, Source


def build_source(
    reader: CacheReader,
    device: torch.device,
    vocab_size: int,
    mode: str,
    teacher: SplitModel | None = None,
    compiled: CompiledLayers | None = None,
    layers: tuple[int, ...] = (),
) -> Source:
    """Return the source of a split: its batches go to `device`, for a student of `vocab_size` logits.

    With a `teacher` the split has bare tokens. mode: number format of its forward. compiled: its compiled layers.
    layers: those whose outputs the hidden-state loss compares.
    """
    cached = CachedSource(reader, device, vocab_size)
    if teacher is None:
        return cached
    forward = teacher_hidden_states(teacher, device, mode, layers, compiled)
    return OnlineSource(cached, forward, wide_head(teacher), reader.manifest.settings.document_mask)
