"""Builds caches: of a teacher, and the caches of bare tokens that runs and evaluations need."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from kdtrain.cache.codec import SAMPLING, CodecSpec, keep
from kdtrain.cache.folder import holds_nothing
from kdtrain.cache.manifest import CacheSettings, Manifest, tokenizer_digest
from kdtrain.cache.writer import write_cache
from kdtrain.commands.agreement import agree
from kdtrain.commands.common import Teacher, rows
from kdtrain.config import CacheTeacherConfig, DataConfig
from kdtrain.data.logprobs import logprob_rows
from kdtrain.data.packing import PackedRow
from kdtrain.errors import UsageError
from kdtrain.files import file_digest, read_sealed
from kdtrain.models.head import SplitModel
from kdtrain.models.loading import ChatTokenizer, generation_of
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.progress import bar
from kdtrain.ranks import is_main, raise_on_all_ranks


def build_cache(
    config: CacheTeacherConfig,
    spec: ModelSpec,
    teacher: SplitModel,
    forward: Teacher,
    mode: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    digest: str,
    sharded: bool = False,
    compiled: bool = False,
) -> Manifest | None:
    """Build the missing shards of the cache on all ranks; return its manifest on rank 0, None on the others.

    Args:
        forward: the teacher's logits of tokens.
        digest: of the teacher's weights.
        sharded: whether the teacher is sharded over the ranks.
        compiled: whether its layers are compiled, which changes rounding: a resumed build must do the same.

    Raises:
        UsageError: the folder holds another cache, or the data do not fill one sequence.
        RunError: the disk is full or cannot be written.
    """
    codec = config.codec
    width = teacher.vocab_size
    if not codec.dense and codec.top_k > width:
        raise UsageError(f"--top-k {codec.top_k} is more than the vocabulary of {width}; choose less, or --dense")
    kept: dict[str, Any] = (
        {"kind": "dense"} if codec.dense else {"kind": "sparse", "top_k": codec.top_k, "num_samples": codec.samples}
    )
    metadata = {
        "spec": spec.name,
        "weights_digest": digest,
        "dtype": spec.dtype,
        "precision": mode,
        "attention": spec.attention,
        **({"compiled": True} if compiled else {}),
    }
    settings = replace(
        _settings(config.data, tokenizer, CodecSpec(**kept, vocab_size=width), config.splits()),
        teacher=metadata,
        seed=config.seed,
        sampling=SAMPLING if kept.get("num_samples") else None,
        sequences_per_shard=config.sequences_per_shard,
    )
    agree(settings.to_json)
    options = {"batch_size": config.batch_size, "sharded": sharded, "all_ranks": True}
    saved = ChatTokenizer(tokenizer, generation_of(spec))
    return _write(config.out, settings, config.data, tokenizer, forward, saved=saved, **options)


def build_from_logprobs(
    config: CacheTeacherConfig, spec: ModelSpec, tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> Manifest | None:
    """Build a cache, valid at T = 1 only, from the log-probabilities in `config.from_logprobs`, as `build_cache` does.

    Raises:
        UsageError: the file cannot be read or does not fit the vocabulary, or the folder holds another cache.
        RunError: the disk is full or cannot be written.
    """
    path, data = config.from_logprobs, config.data
    assert path is not None
    codec = CodecSpec(kind="sparse", top_k=config.codec.top_k, vocab_size=vocab_size)

    def packed_rows(split: str) -> Iterator[PackedRow]:
        for row in logprob_rows(path, split, data.seq_len, codec.top_k):
            if (token := int(row.tokens.max())) >= vocab_size:
                raise UsageError(
                    f"--from-logprobs {path} has the token {token}, the teacher's vocabulary only {vocab_size}; "
                    "name the teacher that made the file"
                )
            targets = keep(row.top_ids, row.top_logprobs, row.label_logprob, codec)
            yield PackedRow(row.tokens, row.loss_mask, row.segments, targets)

    with raise_on_all_ranks():
        if not path.is_file():
            raise UsageError(f"--from-logprobs {path} does not exist")
        digest = file_digest(path)
    settings = replace(
        _settings(data, tokenizer, codec, config.splits()),
        teacher={"spec": spec.name, "logprobs": path.name},
        data={"logprobs": path.name, "sha256": digest},
        sequences_per_shard=config.sequences_per_shard,
    )
    agree(settings.to_json)
    return write_cache(
        config.out,
        settings,
        {split: packed_rows(split) for split in config.splits()},
        teacher=None,
        tokenizer=ChatTokenizer(tokenizer, generation_of(spec)),
        batch_size=config.batch_size,
        all_ranks=True,
    )


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
    manifest = _write(folder, settings, data, tokenizer, None, batch_size=64)
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


def _write(
    folder: Path,
    settings: CacheSettings,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    teacher: Teacher | None,
    saved: ChatTokenizer | None = None,
    **options: Any,
) -> Manifest | None:
    # the cache calls the requested split train, and adds validation
    sources = {
        "train": data.split,
        "validation": "validation" if "train" in settings.sequences else data.split,
    }
    parts = {name: rows(data, sources[name], tokenizer, limit) for name, limit in settings.sequences.items()}
    with bar("cache" if teacher else "tokens", None) as shown:
        progress = (lambda done, total: shown.update(done, total=total)) if is_main() else None
        return write_cache(
            folder,
            settings,
            parts,
            teacher=teacher,
            tokenizer=saved or tokenizer,
            progress=progress,
            **options,
        )
