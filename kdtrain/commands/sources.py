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
    """Return the source of a split.

    Args:
        reader: the split; of bare tokens with a `teacher`.
        device: where the batches go.
        vocab_size: logits of the student.
        mode: number format of the teacher's forward.
        teacher: the online teacher.
        compiled: its compiled layers.
        layers: its layers whose outputs the hidden-state loss compares.
    """
    cached = CachedSource(reader, device, vocab_size)
    if teacher is None:
        return cached
    forward = teacher_hidden_states(teacher, device, mode, layers, compiled)
    return OnlineSource(cached, forward, wide_head(teacher), reader.manifest.settings.document_mask)
