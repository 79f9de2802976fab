"""What a run with `--cross-tokenizer` does before it trains: its view of the text in the student's tokens."""

from typing import Any

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.reader import Cache
from kdtrain.cache.view import OtherViewError, build_view
from kdtrain.cache.view_rows import View
from kdtrain.config import DistillConfig
from kdtrain.config.across import TERMS, partners
from kdtrain.errors import UsageError
from kdtrain.files import set_aside
from kdtrain.models.loading import digest_of, load_tokenizer, tokenizer_digest
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.progress import bar, log
from kdtrain.teaching.teacher import Teacher
from kdtrain.training.sources.aligned import AlignedSource, aligned_facts
from kdtrain.training.sources.source import Facts, Source

_TOKENS = CodecSpec(kind="tokens", vocab_size=2)
"""Of an online teacher's own tokens."""


def across(config: DistillConfig, student: ModelSpec, teacher: Teacher | None) -> Facts | None:
    """What is known of the data of a run across tokenizers; None without that option, or with one tokenizer.

    UsageError: the cache has no numbers for the terms.
    """
    if config.cross_tokenizer is None:
        return None
    terms, data = TERMS[config.cross_tokenizer], config.data
    if teacher is not None:
        name, codec = str(data.data), _TOKENS
        theirs: str | None = tokenizer_digest(teacher.tokenizer)
        seq_len, document_mask = data.seq_len, data.document_mask
    else:
        cache = _cache(config)
        name, stated = cache.name, cache.manifest.settings
        codec, theirs = stated.codec, stated.tokenizer_digest
        seq_len, document_mask = stated.seq_len, stated.document_mask
        if codec.kind == "tokens":
            raise UsageError(f"{name} holds no teacher's numbers; --cross-tokenizer needs them")
    if digest_of(student) != theirs:
        size = 1 + max(load_tokenizer(student).get_vocab().values())  # ids may have gaps
        return aligned_facts(name, seq_len=seq_len, document_mask=document_mask, size=size, codec=codec, terms=terms)
    log.info("--cross-tokenizer %s: teacher and student have the same tokenizer", config.cross_tokenizer)
    return None


def align(config: DistillConfig, student: ModelSpec, resumed: bool) -> None:
    """Make the view of the text in the student's tokens, in the folder of the run; with a teacher of its own packed.

    UsageError, RunError: as `build_view`.
    """
    folder, tokenizer = config.out / ("data" if config.cache else "view"), load_tokenizer(student)
    with bar("align", None) as shown:
        options: dict[str, Any] = {"events": partners(config.special_tokens), "progress": shown.update}
        try:
            view = build_view(folder, _cache(config), tokenizer, **options)
        except OtherViewError:
            if resumed:
                raise
            set_aside(config.out, folder.name, "left")  # of an earlier attempt with other options
            view = build_view(folder, _cache(config), tokenizer, **options)
    for line in view.lines():
        log.info("%s", line)


def open_view(config: DistillConfig) -> dict[str, Source]:
    """The splits of the view that `align` made. UsageError: it has no numbers for the terms, or cells disagree."""
    view = View(config.out / ("data" if config.cache else "view"), _cache(config))
    terms = TERMS[config.cross_tokenizer or "auto"]
    return {split: AlignedSource(view, split, terms) for split in ("train", "validation")}


def _cache(config: DistillConfig) -> Cache:
    """The cache, or with an online teacher its own tokens of the text."""
    if config.cache:
        return Cache(config.cache[0], local_limit=config.local_limit)
    return Cache(config.out / "data")
