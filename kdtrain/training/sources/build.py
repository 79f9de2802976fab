"""Opens a source by its name, and completes it for a student: for training, validation, `evaluate` and checks alike."""

import torch

from kdtrain.config.choices import SOURCES
from kdtrain.errors import UsageError
from kdtrain.teaching.online import OnlineTeacher
from kdtrain.training.sources.device import OnDevice
from kdtrain.training.sources.online import OnlineSource
from kdtrain.training.sources.source import Source, SourceRequest


def open_source(name: str, request: SourceRequest) -> Source:
    """Open the source called `name`.

    Raises:
        UsageError: there is no such source, it cannot be opened, or it is empty.
    """
    source: Source = SOURCES.get(name)(request)
    if not len(source):
        raise UsageError(f"--source {name} has no sequences in the split {request.split}")
    return source


def build_source(
    source: Source,
    device: torch.device,
    vocab_size: int,
    teacher: OnlineTeacher | None = None,
    layers: tuple[int, ...] = (),
) -> Source:
    """Return `source` as a student reads it.

    Args:
        source: an opened one.
        device: the student's.
        vocab_size: logits of the student that count; a token beyond them is an error, dense targets are narrowed.
        teacher: an online teacher, loaded and prepared, whose targets replace those of the source.
        layers: the teacher's layers that a hidden-state loss compares.
    """
    taught_by = getattr(source, "taught_by", None)
    if teacher is not None and taught_by is not None:
        return OnDevice(taught_by(teacher, device), device, vocab_size)
    moved = OnDevice(source, device, vocab_size)
    return moved if teacher is None else OnlineSource(moved, teacher, vocab_size, layers)
