"""Builds caches: of a teacher, and the caches of bare tokens that runs and evaluations need."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.codec import SAMPLING, CodecSpec
from kdtrain.cache.folder import holds_nothing
from kdtrain.cache.manifest import CacheSettings, Manifest
from kdtrain.cache.writer import write_cache
from kdtrain.commands.agreement import agree
from kdtrain.config import CacheTeacherConfig, DataConfig
from kdtrain.data.packing import PackedRow, packed_rows
from kdtrain.errors import UsageError
from kdtrain.files import read_sealed
from kdtrain.models.loading import ChatTokenizer, generation_of, tokenizer_digest
from kdtrain.monitor.progress import bar
from kdtrain.objective.batch import Batch
from kdtrain.ranks import is_main
from kdtrain.teaching.teacher import Teacher


def build_cache(config: CacheTeacherConfig, teacher: Teacher) -> Manifest | None:
    """Build the missing shards of the cache on all ranks; return its manifest on rank 0, None on the others.

    teacher: loaded and prepared.

    Raises:
        UsageError: the folder holds another cache, or the data do not fill one sequence.
        RunError: the disk is full or cannot be written.
    """
    asked, width, limits = config.codec, teacher.vocab_size, config.splits()
    if not asked.dense and asked.top_k > width:
        raise UsageError(f"--top-k {asked.top_k} is more than the vocabulary of {width}; choose less, or --dense")
    codec = CodecSpec(kind="dense", vocab_size=width)
    if not asked.dense:
        codec = CodecSpec(kind="sparse", top_k=asked.top_k, num_samples=asked.samples, vocab_size=width)
    settings = replace(
        _settings(config.data, teacher.tokenizer, codec, limits),
        teacher=dict(teacher.identity),
        sequences_per_shard=config.sequences_per_shard,
    )
    if teacher.text is None:
        settings = replace(settings, seed=config.seed, sampling=SAMPLING if codec.num_samples else None)
        rows = _text(config.data, teacher.tokenizer, limits)
    else:
        settings = replace(settings, data=dict(teacher.text))
        rows = {split: teacher.rows(split, config.data.seq_len, codec) for split in limits}
    agree(settings.to_json)
    answers: dict[str, Any]
    if teacher.gives == "top-k":
        answers = {"teacher": None, "kept": lambda rows: teacher.kept(rows, codec, config.seed)}
    else:
        answers = {"teacher": teacher.logits, "sharded": teacher.sharded}
    saved, answers["weights_cost"] = ChatTokenizer(teacher.tokenizer, generation_of(teacher.spec)), teacher.cost
    return _write(config.out, settings, rows, tokenizer=saved, batch_size=config.batch_size, all_ranks=True, **answers)


def validation_rows(config: CacheTeacherConfig, teacher: Teacher, most: int) -> Iterator[Batch]:
    """The first rows of the validation split that `build_cache` packs, in batches."""
    rows = islice(_text(config.data, teacher.tokenizer, config.splits())["validation"], most)
    while part := list(islice(rows, config.batch_size)):
        tokens, mask, segments = (
            torch.from_numpy(np.stack([getattr(row, name) for row in part]).astype(kind))
            for name, kind in (("tokens", np.int64), ("loss_mask", bool), ("segments", np.int64))
        )
        yield Batch(tokens, mask, segments, None)


def build_tokens(
    folder: Path,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    splits: dict[str, int | None] | None = None,
) -> Manifest:
    """Pack text into a cache of bare tokens, in this process alone.

    Args:
        folder: the cache; an interrupted one is resumed.
        data: the text.
        tokenizer: turns the text into tokens.
        vocab_size: the width of the logits of the model that reads these tokens.
        splits: how many sequences of each split; None: train and validation as in `data`.
    """
    limits = splits or {"train": data.num_sequences, "validation": data.validation_sequences}
    settings = _settings(data, tokenizer, CodecSpec(kind="tokens", vocab_size=vocab_size), limits)
    rows = _text(data, tokenizer, limits)
    manifest = _write(folder, settings, rows, teacher=None, tokenizer=tokenizer, batch_size=64)
    assert manifest is not None
    return manifest


def holds_tokens(folder: Path) -> bool:
    """Whether `folder` is a cache of bare tokens, finished or not: kdtrain can rebuild it."""
    if not folder.is_dir():
        return False
    if holds_nothing(folder):
        return True
    try:
        return CacheSettings.from_json(read_sealed(folder / "settings.json")).codec.kind == "tokens"
    except (OSError, ValueError):
        return False


def _settings(
    data: DataConfig, tokenizer: PreTrainedTokenizerFast, codec: CodecSpec, limits: dict[str, int | None]
) -> CacheSettings:
    if codec.vocab_size < len(tokenizer):
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} entries and the model {codec.vocab_size} logits; "
            "give the model's own tokenizer"
        )
    text = {
        "source": data.data,
        "split": data.split,
        "text_column": data.text_column,
        "messages_column": data.messages_column,
    }
    return CacheSettings(
        codec=codec,
        seq_len=data.seq_len,
        tokenizer_size=len(tokenizer),
        tokenizer_digest=tokenizer_digest(tokenizer),
        data=text,
        document_mask=data.document_mask,
        sequences=limits,
    )


def _text(
    data: DataConfig, tokenizer: PreTrainedTokenizerFast, limits: dict[str, int | None]
) -> dict[str, Iterator[PackedRow]]:
    """The rows of each split: a cache calls the split that was asked for train, and adds validation."""
    sources = {"train": data.split, "validation": "validation" if "train" in limits else data.split}
    return {name: packed_rows(data, sources[name], tokenizer, limit) for name, limit in limits.items()}


def _write(
    folder: Path, settings: CacheSettings, rows: dict[str, Iterator[PackedRow]], **options: Any
) -> Manifest | None:
    with bar("tokens" if settings.codec.kind == "tokens" else "cache", None) as shown:
        progress = (lambda done, total: shown.update(done, total=total)) if is_main() else None
        return write_cache(folder, settings, rows, progress=progress, **options)
