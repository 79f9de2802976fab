"""What `--cross-tokenizer` does before a student reads: the view of the text in the student's tokens."""

from typing import Any

from kdtrain.cache.format.codec import CodecSpec
from kdtrain.cache.read.reader import Cache
from kdtrain.cache.read.remote import open_cache
from kdtrain.config import DistillConfig, EvaluateConfig
from kdtrain.config.across import partners
from kdtrain.config.values import refuse
from kdtrain.errors import UsageError
from kdtrain.files import set_aside
from kdtrain.models.loading import vocabulary
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import digest_of, load_tokenizer, tokenizer_digest
from kdtrain.monitor.progress import bar, log
from kdtrain.teaching.online import OnlineTeacher
from kdtrain.tokenizers.view import View
from kdtrain.tokenizers.view_builder import OtherViewError, build_view
from kdtrain.training.sources.aligned import AlignedSource, aligned_facts
from kdtrain.training.sources.source import Facts, Source

_TOKENS = CodecSpec(kind="tokens", vocab_size=2)
"""Of an online teacher's own tokens."""


def across(config: DistillConfig, student: ModelSpec, teacher: OnlineTeacher | None) -> Facts | None:
    """What is known of the data of a run across tokenizers; None without that option, or with one tokenizer.

    UsageError: the cache has no teacher's numbers, or `differ`.
    """
    if not config.cross_tokenizer:
        return None
    data = config.data
    if teacher is not None:
        name, codec = str(data.data), _TOKENS
        theirs: str | None = tokenizer_digest(teacher.tokenizer)
        seq_len, document_mask = data.seq_len, data.document_mask
    else:
        cache = _cache(config)
        name, stated = cache.name, cache.manifest.settings
        codec, theirs = stated.codec, stated.tokenizer_digest
        seq_len, document_mask = stated.seq_len, stated.document_mask
        if not codec.taught:
            raise UsageError(f"{name} holds no teacher's numbers; --cross-tokenizer needs them")
    if not differ(config, digest_of(student), theirs):
        return None
    known = student.init == "pretrained" or "vocab_size" in (student.config or ())
    size = entries(student.name, load_tokenizer(student), vocabulary(student) if known else None)
    return aligned_facts(name, seq_len=seq_len, document_mask=document_mask, size=size, codec=codec)


def entries(name: str, tokenizer: Any, rows: int | None) -> int:
    """Those of a student's tokenizer. UsageError: its model has fewer `rows`; None: it takes as many as are needed."""
    size = 1 + int(max(tokenizer.get_vocab().values()))  # ids may have gaps
    if rows is not None and size > rows:
        raise UsageError(f"{name} has a tokenizer of {size} entries, and its model {rows}; name the model's own")
    return size


def differ(config: DistillConfig | EvaluateConfig, own: str | None, theirs: str | None) -> bool:
    """Whether the digests of the tokenizers of student and teacher differ; a student without one has the teacher's.

    UsageError: they do not, and special tokens are matched.
    """
    if own not in (None, theirs):
        return True
    why = "teacher and student have the same tokenizer" if own else "the student has no tokenizer but the teacher's"
    refuse(bool(config.special_tokens), f"--special-tokens has no effect: {why}; leave it out")
    log.info("--cross-tokenizer: %s", why)
    return False


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
    """The splits of the view that `align` made. UsageError: cells disagree with the text too often."""
    view = View(config.out / ("data" if config.cache else "view"), _cache(config))
    return {split: AlignedSource(view, split) for split in ("train", "validation")}


def _cache(config: DistillConfig) -> Cache:
    """The cache, or with an online teacher its own tokens of the text."""
    if config.cache:
        return open_cache(config.cache[0])
    return Cache(config.out / "data")
