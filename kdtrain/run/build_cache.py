"""Builds caches: of a teacher, and the caches of bare tokens that runs (`TextData`) and evaluations need."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.format.manifest import CacheSettings, Manifest, differences, read_manifest
from kdtrain.cache.format.names import MANIFEST, WRITTEN
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import LocalCache, open_cache
from kdtrain.cache.write.writer import Progress, not_empty, write_cache
from kdtrain.config.commands import CacheTeacherConfig
from kdtrain.config.sections import DEFAULT_PROMPT, DataConfig, TextConfig
from kdtrain.data.corpus import has_prompts, stated_text
from kdtrain.data.masks import Counts, Masks
from kdtrain.data.packed import WHOLE, PackedRow
from kdtrain.data.packing import packed_rows, prompt_rows
from kdtrain.errors import UsageError, log, printable
from kdtrain.files import read_sealed, set_aside
from kdtrain.models.loading import check_student
from kdtrain.models.tokenizer import (
    ChatTokenizer,
    filler_token,
    load_tokenizer,
    tokenizer_digest,
)
from kdtrain.monitor.progress import bar
from kdtrain.objective.batch import Batch
from kdtrain.parallel.agreement import agree
from kdtrain.ranks import is_main, on_main, raise_on_all_ranks
from kdtrain.teaching.teacher import Teacher, Writing
from kdtrain.tokenizers.view_format import PROMPTS, TEXT, own_data
from kdtrain.training.sources.plan import CachedData, DataPlan, Ordered, PlanRequest, Rows, register_plan
from kdtrain.training.sources.source import Source

_DAY = r"""strftime_now(\s+is\s+(not\s+)?defined|\(\s*(['"])(%[-_0^#]?[aAbBdejmyYGguUVwWxDFhC%]|[^%'"\\])*\3\s*\))"""
"""What a chat template asks of the date that is the same all day."""


def build_cache(
    config: CacheTeacherConfig,
    teacher: Teacher,
    refined: LocalCache | None = None,
    ordered: Ordered | None = None,
    text: dict[str, Any] | None = None,
) -> Manifest | None:
    """Build the missing shards of the cache on all ranks; return its manifest on rank 0, None on the others.

    teacher: loaded and prepared. refined: the cache of --refine. ordered: of a run that reads it meanwhile, whose text
    is packed beside it. text: see `corpus.stated_text`.

    Raises:
        UsageError: the folder holds another cache, the data do not fill one sequence, `refined` is another teacher's.
        RunError: the disk is full or cannot be written.
    """
    counts: Counts = {}
    settings, rows = begun(config, teacher, refined, counts)
    progress = None
    if ordered is not None:
        folder = config.out.with_name(TEXT)
        on_main(lambda: build_tokens(folder, config.data, teacher.tokenizer, teacher.vocab_size))
        there = (packed := LocalCache(folder)).manifest
        settings, rows, progress = ordered(replace(settings, data=there.settings.data), packed)
        counts = there.text_counts or {}
        text = there.text
    agree(settings.to_json)
    stated = {"text": text, "text_counts": counts, "weights_cost": teacher.cost}
    saved = ChatTokenizer.of(teacher.tokenizer, teacher.spec)
    options = {"tokenizer": saved, "batch_size": config.batch_size, "all_ranks": True}
    return _write(config.out, settings, rows, progress, teacher=teacher.answers(settings), stated=stated, **options)


def begun(
    config: CacheTeacherConfig, teacher: Teacher, refined: LocalCache | None, counts: Counts, here: bool = True
) -> tuple[CacheSettings, Rows]:
    """Return the settings of a cache that begins, and each split's rows. here: False for a teacher without weights."""
    earlier, finished = on_main(lambda: (begun_with(config.out), (config.out / MANIFEST).is_file()))
    if config.text.generate and here:
        with raise_on_all_ranks():
            how = Writing(
                temperature=config.text.gen_temperature,
                top_p=config.text.gen_top_p,
                end_tokens=teacher.ends,
                seed=config.seed,
                batch_size=config.batch_size,
            )
            teacher.write(how)
    if here:
        teacher.begin(earlier, finished)
    if refined is None:
        return _requested(config, teacher, counts, dict(teacher.identity) if here else {})
    refuse_other_teacher(refined, teacher, loaded=here)
    settings = refined.manifest.settings
    rows = {split: refined[split].rows() for split in refined}
    number = settings.codec.num_samples  # those drawn lie half way between two
    offset = ((settings.grid_offset or Fraction(0)) + Fraction(1, 2 * number)) % Fraction(1, number)
    return settings.on_grid(offset), rows


def decided(data: DataConfig, folder: Path | None, *checks: Callable[[int, bool], None]) -> DataConfig:
    """Return `data` with `--document-mask auto` decided: as the cache in `folder` was begun, else on for conversations.

    checks: refuse, as `check_fits`, a mask that a model cannot apply; then it is off.
    """
    if data.document_mask != "auto" or data.data is None:
        return data
    if folder is not None:
        with suppress(OSError, ValueError, TypeError):  # not begun, or refused by the builder
            return replace(data, document_mask=_stored(folder).document_mask)
    if mask := has_prompts(data):
        try:
            for check in checks:
                check(data.seq_len, True)
        except UsageError as error:
            log.info("--document-mask auto is off: %s", error)
            mask = False
    return replace(data, document_mask=mask)


def refuse_no_rows(
    folder: Path | None, data: DataConfig, tokenizer: PreTrainedTokenizerFast, limits: dict[str, int | None]
) -> None:
    """Raise a UsageError if a split gives no whole sequence, which is seen before any weights are loaded."""
    tokenizer.pinned = pin_text(folder, data, tokenizer)  # type: ignore[attr-defined]
    data = decided(data, folder)
    settings = _settings(data, tokenizer, CodecSpec(kind="tokens", vocab_size=len(tokenizer)), limits)
    for split, source in data.sources(limits).items():
        not_empty(split, packed_rows(data, source, tokenizer, None, Masks("", data.seq_len)), settings)


def known_text(folder: Path, data: DataConfig, packed: bool = False) -> dict[str, Any] | None:
    """Return `corpus.stated_text`. UsageError: `folder` is a finished cache of the same source with other files.

    packed: it is a run's own text, of which a change is a warning, and nothing else is logged.
    """
    now = stated_text(data)
    if not (folder / MANIFEST).is_file() or (there := read_manifest(folder)).settings.data.get("source") != data.data:
        return now
    unknown = "%s was finished before, and its manifest does not tell whether %s changed since"
    if there.text is None or now is None:
        if not packed:
            log.warning(unknown, folder, data.data)
    elif changed := list(differences(there.text, now)):
        what = f"{data.data} changed since ({printable('; '.join(changed[:2]))})"
        if "files" in now and not packed:
            raise UsageError(f"{folder} holds a finished cache, and {what}; choose another --out or remove that folder")
        log.warning("%s was finished before and is used as it is: %s", folder, what)
    elif not packed:
        log.info("%s was finished before, of the same text", folder)
    return now


def pin_text(folder: Path | None, data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Return how conversations become rows, as the cache in `folder` was begun, or as of now; empty for plain text.

    It is set as `pinned` of a tokenizer, and `data` of the settings holds it for a resume. `packing`: whole, which
    earlier releases did not have. `date`: when the cache was begun, for a chat template that shows it. Where the
    template shows no time of day, it is the day: the same command gives the same settings until midnight.
    """
    if not has_prompts(data):
        return {}
    template = str(tokenizer.chat_template)
    if folder is not None:
        with suppress(OSError, ValueError, TypeError):  # not begun, or refused by the builder
            there = _stored(folder).data
            datetime.fromisoformat(there.get("date", "2000-01-01"))
            return {name: there[name] for name in ("packing", "date") if name in there}
    pinned = {"packing": WHOLE}
    if "strftime_now" in template:
        now = datetime.now()
        timed = "strftime_now" in re.sub(_DAY, "", template)
        pinned["date"] = (now if timed else now.replace(hour=0, minute=0, second=0)).isoformat(timespec="seconds")
    return pinned


def begun_with(folder: Path) -> dict[str, Any] | None:
    """Return the `identity` of the teacher of the shards that `folder` holds; None where there are none."""
    try:
        if not any((folder / "shards").glob("*.h5")):
            return None
        return _stored(folder).teacher
    except (OSError, ValueError):  # the builder refuses it, with what is wrong
        return None


def refined_cache(where: str) -> LocalCache:
    """Open the cache of --refine. UsageError: its samples cannot be added to."""
    cache = open_cache(where)
    settings, codec = cache.manifest.settings, cache.manifest.codec
    if not codec.counts_only:
        raise UsageError(f"--refine {where}: only a cache of samples alone can be refined; capture this one anew")
    if settings.format_version == WRITTEN:
        raise UsageError(f"--refine {where}: a student wrote its text; capture its rows with more samples instead")
    if settings.is_in_pieces:
        raise UsageError(f"--refine {where}: it was appended or cut; refine the caches it was made of")
    if settings.grid_offset is None:
        kind = settings.sampling or "independent"
        raise UsageError(f"--refine {where}: its samples ({kind}) are of no grid to draw between; capture it anew")
    if 2 * codec.num_samples > 255:
        raise UsageError(
            f"--refine {where}: it has {codec.num_samples} samples per token, and twice as many cannot be added up: "
            "counts are kept in 8 bits"
        )
    return cache


def refuse_other_teacher(refined: LocalCache, teacher: Teacher, loaded: bool) -> None:
    """Raise a UsageError if the cache of --refine is of another teacher. loaded: False before any weights are."""
    settings = refined.manifest.settings
    there = settings.teacher or {}
    here = dict(teacher.identity) if loaded else {}
    if not loaded:
        theirs = {"tokenizer": settings.tokenizer_digest, "vocab_size": settings.vocab_size}
        here = {"tokenizer": tokenizer_digest(teacher.tokenizer), "vocab_size": teacher.vocab_size}
        there = {name: here[name] if each is None or here[name] is None else each for name, each in theirs.items()}
    names = [name for name in sorted(there.keys() | here.keys()) if name != "spec"]
    if changed := [name for name in names if there.get(name) != here.get(name)]:
        differ = "; ".join(
            f"{name}: {str(there.get(name))[:12]} there, {str(here.get(name))[:12]} here" for name in changed
        )
        spec = (settings.teacher or {}).get("spec")
        raise UsageError(f"--refine {refined.name} is of another teacher ({spec}, here {teacher.name}: {differ})")


def _requested(
    config: CacheTeacherConfig, teacher: Teacher, counts: Counts, identity: dict[str, Any]
) -> tuple[CacheSettings, Rows]:
    """Return the settings of the cache that the options request, and the rows of each split. counts: see `Masks`."""
    given = config.codec
    width = teacher.vocab_size
    limits = config.data.limits
    if not given.dense and given.top_k > width:
        raise UsageError(f"--top-k {given.top_k} is more than the vocabulary of {width}; choose less, or --dense")
    codec = CodecSpec.requested(given, width)
    settings = replace(
        _settings(config.data, teacher.tokenizer, codec, limits),
        teacher=identity,
        sequences_per_shard=config.sequences_per_shard,
    )
    settings = replace(settings, seed=config.seed, sampling=codec.sampling)
    if (how := teacher.writing) is None:
        return settings, teacher.texts[1] if teacher.texts else _text(config.data, teacher.tokenizer, limits, counts)
    prompts, rows = teacher.texts or _prompts(config.data, config.text, teacher.tokenizer, how.end_tokens)
    settings = replace(settings, data={**settings.data, "generated": {**prompts, **how.to_json()}})
    if how.policy is not None:
        settings = settings.written()
    return settings, rows


def _prompts(
    data: DataConfig, text: TextConfig, tokenizer: PreTrainedTokenizerFast, ends: tuple[int, ...]
) -> tuple[dict[str, int | None], Rows]:
    """Return what prompts are cut to, and the prompts of each split. ends: the tokens that end a text."""
    filler = filler_token(tokenizer, ends)
    prompts = {"prompt_tokens": _prompt_width(data, text), "max_new_tokens": text.max_new_tokens}
    rows = {
        name: prompt_rows(data, source, tokenizer, data.limits[name], filler=filler, **prompts)
        for name, source in data.sources(data.limits).items()
    }
    return prompts, rows


def validation_rows(
    config: CacheTeacherConfig, teacher: Teacher, refined: LocalCache | None, most: int
) -> Iterator[Batch]:
    """Yield the first rows of the validation split that `build_cache` keeps, in batches."""
    if refined is None:
        rows = _text(config.data, teacher.tokenizer, config.data.limits, {})["validation"]
    else:
        rows = refined["validation"].rows()
    first = islice(rows, most)
    while part := list(islice(first, config.batch_size)):
        tokens, mask, segments = (
            torch.from_numpy(np.stack([getattr(row, name) for row in part]).astype(kind))
            for name, kind in (("tokens", np.int64), ("loss_mask", bool), ("segments", np.int64))
        )
        yield Batch(tokens, mask, segments, None)


def _prompt_width(data: DataConfig, text: TextConfig) -> int | None:
    """Return the tokens of a prompt; None: the data have prompts of their own. UsageError: both."""
    width = text.prompt_tokens
    if not has_prompts(data):
        return width or min(DEFAULT_PROMPT, max(1, data.seq_len // 2))
    if width is not None:
        raise UsageError(
            f"--prompt-tokens has no effect: {data.data} has prompts of its own; leave it "
            "out, or read it with --format text"
        )
    return None


def build_tokens(
    folder: Path,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    splits: dict[str, int | None] | None = None,
) -> Manifest:
    """Pack text into a cache of bare tokens, in this process alone; an interrupted one is resumed.

    vocab_size: the width of the logits of the model that reads these tokens. splits: how many sequences of each split;
    None: train and validation as in `data`.
    """
    limits = splits or data.limits
    tokenizer.pinned = pin_text(folder, data, tokenizer)  # type: ignore[attr-defined]
    settings = _settings(data, tokenizer, CodecSpec(kind="tokens", vocab_size=vocab_size), limits)
    counts: Counts = {}
    rows = _text(data, tokenizer, limits, counts)
    stated = {"text": known_text(folder, data, packed=True), "text_counts": counts}
    manifest = _write(folder, settings, rows, teacher=None, tokenizer=tokenizer, batch_size=64, stated=stated)
    assert manifest is not None
    return manifest


@register_plan("text")
class TextData(DataPlan):
    """Text, packed with the tokenizer of an online teacher, or without one of the student.

    What an earlier attempt with other options packed is set aside, unless a run has read it.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.config, self.student, self.teacher = request.config, request.student, request.teacher

    def masked(self) -> bool:
        """Return whether documents are masked, as `DataPlan.masked`, where both models can; `prepare` asks them."""
        data = self.config.data
        return super().masked() if data.data is None else bool(decided(data, self.config.out / TEXT).document_mask)

    def refuse_no_rows(self) -> None:
        data = self.config.data
        folder = self.config.out / TEXT
        if self.teacher is not None and not (folder / MANIFEST).exists():
            refuse_no_rows(folder, data, self.teacher.tokenizer, data.limits)

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        folder = self.config.out / TEXT

        def pack() -> DataConfig:
            tokenizer = load_tokenizer(self.student) if self.teacher is None else self.teacher.tokenizer
            width = len(tokenizer) if self.teacher is None else self.teacher.vocab_size
            if not resumed and own_data(folder) == "view":  # of an earlier attempt across tokenizers
                set_aside(self.config.out, folder.name, "left")
            checks = [] if self.teacher is None else [self.teacher.check]
            data = decided(self.config.data, folder if resumed else None, *checks, partial(check_student, self.student))
            self._build(folder, resumed, lambda: build_tokens(folder, data, tokenizer, width))
            return data

        self.options = {"data": on_main(pack)}
        with raise_on_all_ranks():
            return CachedData(self.config, [folder]).prepare(resumed)

    def prompts(
        self, width: int | None, resumed: bool, rows: Callable[[], Mapping[str, list[PackedRow]]] | None = None
    ) -> LocalCache:
        teacher = self.teacher
        data = self.config.data
        folder = self.config.out / PROMPTS
        assert teacher is not None, "a teacher scores what is written behind them"
        tokenizer: Any = teacher.tokenizer
        found = None
        if rows is not None:
            tokenizer.pinned = on_main(lambda: pin_text(folder, data, tokenizer))
            with raise_on_all_ranks():
                found = rows()

        def build() -> None:
            tokenizer.pinned = pin_text(folder, data, tokenizer)
            tokenizer.pinned.pop("packing", None)  # a prompt has a row of its own
            text = TextConfig(generate=True, prompt_tokens=width)
            prompts, read = _prompts(data, text, tokenizer, teacher.ends)
            codec = CodecSpec(kind="tokens", vocab_size=teacher.vocab_size)
            settings = _settings(data, tokenizer, codec, data.limits)
            settings = replace(settings, data={**settings.data, "prompts": prompts})
            stated = {"text": known_text(folder, data, packed=True)}
            own = {split: iter(each) for split, each in (found or read).items()}
            saved = ChatTokenizer.of(tokenizer, teacher.spec)
            _write(folder, settings, own, teacher=None, tokenizer=saved, batch_size=64, stated=stated)

        on_main(lambda: self._build(folder, resumed, build))
        return LocalCache(folder)

    def _build(self, folder: Path, resumed: bool, build: Callable[[], Any]) -> None:
        """Call `build`, again where an earlier attempt with other options filled the folder, which is set aside."""
        try:
            build()
        except UsageError:
            if resumed or own_data(folder) not in ("tokens", "nothing"):
                raise
            set_aside(self.config.out, folder.name, "left")
            build()


def _stored(folder: Path) -> CacheSettings:
    """Read the settings with which a cache was begun. OSError, ValueError: there are none."""
    return CacheSettings.from_json(read_sealed(folder / "settings.json"))


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
        **({} if data.format == "auto" else {"format": data.format}),
        **({"parse_special_tokens": True} if data.parse_special_tokens else {}),
        **getattr(tokenizer, "pinned", {}),
    }
    return CacheSettings(
        codec=codec,
        seq_len=data.seq_len,
        tokenizer_size=len(tokenizer),
        tokenizer_digest=tokenizer_digest(tokenizer),
        data=text,
        document_mask=bool(data.document_mask),
        sequences=limits,
    )


def _text(data: DataConfig, tokenizer: PreTrainedTokenizerFast, limits: dict[str, int | None], counts: Counts) -> Rows:
    """Return the rows of each split. counts: see `Masks`."""
    sources = data.sources(limits)
    masks = {name: Masks(split, data.seq_len, name == next(iter(limits)), counts) for name, split in sources.items()}
    return {name: packed_rows(data, sources[name], tokenizer, limits[name], masks[name]) for name in limits}


def _write(
    folder: Path,
    settings: CacheSettings,
    rows: Rows,
    progress: Progress | None = None,
    **options: Any,
) -> Manifest | None:
    if progress is not None:
        return write_cache(folder, settings, rows, progress=progress, **options)
    with bar("cache" if settings.codec.taught else "tokens", None) as shown:
        progress = (lambda done, total: shown.update(done, total=total)) if is_main() else None
        return write_cache(folder, settings, rows, progress=progress, **options)
