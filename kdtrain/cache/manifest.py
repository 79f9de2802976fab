"""Where a cache comes from, and whether it still is what was written.

`settings.json`, written first, states what was asked for; shards carry its digest, so that a resume never
mixes two caches. `manifest.json`, written last and sealed by its own digest, repeats the settings and adds
digests of every shard, the index and the tokenizer files, the measured fidelity, and bytes a token. Every
reader starts at it. Both may have come from elsewhere, sealed by whoever made them: what is read is typed, and numbers
that lead to memory or to paths are checked against each other.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta

from kdtrain.cache import format as cache_format
from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.shard_reader import check_content
from kdtrain.errors import UsageError, writing
from kdtrain.files import (
    LARGE,
    MEDIUM,
    canonical_json,
    file_digest,
    json_digest,
    publish_json,
    read_sealed,
    read_text,
    refuse_links,
    sealed,
    set_aside,
    typed,
)

Count = Annotated[int, Meta(ge=0, le=2**62)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What makes two caches the same before a single token is read."""

    codec: CodecSpec
    """How a distribution is kept; its vocab_size is the teacher's (output head, padding included)."""
    seq_len: Annotated[int, Meta(ge=1, lt=2**31)]
    """Positions a sequence, T; a row holds T + 1 tokens."""
    tokenizer_size: Count
    """Number of entries of the tokenizer; at most codec.vocab_size."""
    tokenizer_digest: str | None = None
    """See `tokenizer_digest`."""
    teacher: dict[str, Any] | None = None
    """spec (name), weights_digest, dtype, attention; None: the codec is `tokens`."""
    data: dict[str, Any] = field(default_factory=dict)
    """source, packing and whatever else decides the text (plain JSON values)."""
    document_mask: bool = False
    """Packed documents do not see each other; the student follows it."""
    seed: int = 0
    """Of the samples."""
    sequences_per_shard: Annotated[int, Meta(ge=1, lt=2**31)] = 512
    """S: shard s holds the sequences [s*S, (s+1)*S)."""
    sequences: dict[str, int | None] = field(default_factory=dict)
    """Limit by split; None or no entry: all there are."""

    @property
    def vocab_size(self) -> int:
        """Rows of the teacher's output head."""
        return self.codec.vocab_size

    def to_json(self) -> dict[str, Any]:
        """A plain record, as it stands in settings.json and in the manifest."""
        record = {**asdict(self), "codec": self.codec.to_json(), "vocab_size": self.vocab_size}
        # The format stands here too: a resume never adds shards of one format to those of another.
        return json.loads(canonical_json({"format_version": cache_format.FORMAT_VERSION, **record}))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CacheSettings":
        """The inverse of `to_json`; other keys are ignored. ValueError: a key that does not fit."""
        return typed(record, cls)

    def digest(self) -> str:
        """SHA-256 over `to_json`; each shard carries it."""
        return json_digest(self.to_json())


class ShardRecord(TypedDict):
    """A shard in the manifest."""

    name: Annotated[str, Meta(pattern=f"^{cache_format.SHARD_NAME.pattern}$")]
    sequences: Count
    sha256: Digest
    bytes: Count


class SplitRecord(TypedDict):
    """A split in the manifest."""

    sequences: Count
    broken: Count
    """Sequences that the teacher had no numbers for."""
    tokens_sha256: Digest
    """Of all tokens, as little-endian uint32."""
    shards: Annotated[list[ShardRecord], Meta(min_length=1)]


class Sidecar(TypedDict):
    """What stands beside a shard."""

    name: str
    split: str
    first_sequence: Count
    sequences: Count
    sha256: Digest
    bytes: Count
    stored: dict[str, Count]
    """Bytes by data set."""
    broken: list[str]
    """Sequences that the teacher had no numbers for, as SPLIT and number."""
    rows_sha256: Digest
    settings_sha256: Digest


class TemperatureRange(TypedDict):
    """The temperatures at which a cache is right."""

    min: Annotated[float, Meta(gt=0)]
    max: float
    worst_error: float
    """Of log Z, nats."""
    rule: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished cache, as its manifest states it."""

    settings: CacheSettings
    splits: dict[str, SplitRecord]
    fidelity: dict[str, Any] | None
    """See `fidelity.measure`; None for the codec `tokens`."""
    temperature_range: TemperatureRange | None
    """None for the codec `tokens`."""
    bytes_per_token: dict[str, float]
    """On disk by data set, `overhead` (HDF5's own) and `total`."""
    index_sha256: Digest
    tokenizer_files: dict[str, Digest]
    """SHA-256 by file name."""
    versions: dict[str, str]
    """kdtrain and the libraries it was built with."""
    digest: str = ""
    """Over everything else: the digest of the cache."""

    @property
    def codec(self) -> CodecSpec:
        """How a distribution is kept."""
        return self.settings.codec

    @property
    def vocab_size(self) -> int:
        """Rows of the teacher's output head."""
        return self.settings.vocab_size

    def to_json(self) -> dict[str, Any]:
        """The sealed record, as it stands in manifest.json."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return sealed({**self.settings.to_json(), **own})

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Manifest":
        """The inverse of `to_json`. ValueError: a key that does not fit, or numbers that contradict each other."""
        manifest = typed({**record, "settings": record}, cls)
        for split, stated in manifest.splits.items():
            _refuse_contradictions(split, stated, manifest.settings.sequences_per_shard)
        if manifest.settings.tokenizer_size > manifest.vocab_size:
            raise ValueError(f"tokenizer_size: {manifest.settings.tokenizer_size} is more than the vocabulary")
        for name in manifest.tokenizer_files:
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                raise ValueError(f"tokenizer_files: '{name}' is not a name inside the folder")
        if "total" not in manifest.bytes_per_token:
            raise ValueError("bytes_per_token: total is missing")
        span = manifest.temperature_range
        if span is not None and not (math.isfinite(span["max"]) and span["min"] <= 1 <= span["max"]):
            raise ValueError(f"temperature_range: {span['min']} to {span['max']} is not a range around 1")
        return manifest


def _refuse_contradictions(split: str, stated: SplitRecord, per_shard: int) -> None:
    """A read looks for sequence i in shard i // per_shard, so that every shard but the last must be full."""
    counts = [shard["sequences"] for shard in stated["shards"]]
    full = all(count == per_shard for count in counts[:-1]) and 1 <= counts[-1] <= per_shard
    if split not in cache_format.SPLITS or not full or sum(counts) != stated["sequences"]:
        raise ValueError(f"splits.{split}: its shards do not make up {stated['sequences']} sequences")
    for number, shard in enumerate(stated["shards"]):
        if shard["name"] != cache_format.shard_name(split, number):
            raise ValueError(f"splits.{split}: '{shard['name']}' is not the name of shard {number}")


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a finished cache. UsageError: none there, unfinished, altered, unknown version."""
    folder = Path(folder)
    path = folder / cache_format.MANIFEST
    if not path.exists():
        if (folder / cache_format.SETTINGS).exists() or (folder / cache_format.SHARDS).exists():
            raise UsageError(f"the cache {folder} is unfinished; run the same cache-teacher command again to finish it")
        raise UsageError(f"{folder} holds no cache (no {cache_format.MANIFEST}); make one with kdtrain cache-teacher")
    try:
        record = read_sealed(path, MEDIUM)
        version = record.get("format_version")
        if version == cache_format.FORMAT_VERSION:
            return Manifest.from_json(record)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    except ValueError as error:
        raise UsageError(
            f"{path} was altered or damaged ({error}): kdtrain verify {folder} --repair, then cache-teacher"
        ) from error
    known = cache_format.FORMAT_VERSION
    raise UsageError(f"{path} has format version {version}; this kdtrain reads {known}: build the cache again")


class Problem(NamedTuple):
    """Something that is not as it was written."""

    text: str
    aside: str | None = None
    """The damaged file or folder, relative to the cache; empty: it is missing; None: it cannot be read now."""


def read_sidecar(folder: Path, name: str) -> Sidecar:
    """The sealed record of a shard. OSError: it cannot be read. ValueError: it is not to be trusted."""
    record = typed(read_sealed(cache_format.sidecar_path(folder, name)), Sidecar)
    if record["name"] != name:
        raise ValueError(f"it belongs to shard {record['name']}")
    return record


def check_sizes(folder: Path | str, manifest: Manifest) -> None:
    """Refuse a cache with a shard that is missing or of another size than its manifest says (UsageError naming it).

    Nothing is read: it costs a question to the file system a shard.
    """
    folder = Path(folder)
    records = [record for split in manifest.splits.values() for record in split["shards"]]
    found = [problem for record in records if (problem := shard_problem(folder, record, digest=False))]
    if found:
        more = f" (and {len(found) - 1} more shards)" if len(found) > 1 else ""
        command = "command" if manifest.codec.kind == "tokens" else "cache-teacher command"
        raise UsageError(f"{found[0].text}{more}: run kdtrain verify {folder} --repair, then the same {command} again")


def shard_problem(folder: Path, record: ShardRecord | Sidecar, *, digest: bool = True) -> Problem | None:
    """What is wrong with the shard that `record` describes; None: nothing.

    digest: whether the SHA-256 is compared, for which all of it is read.
    """
    path = cache_format.shard_path(folder, record["name"])
    aside = f"{cache_format.SHARDS}/{path.name}"
    try:
        found = path.stat().st_size
        if found != record["bytes"]:
            return Problem(f"{path}: has {found} bytes instead of {record['bytes']}", aside)
        if digest and file_digest(path) != record["sha256"]:
            return Problem(f"{path}: its content changed (SHA-256 differs)", aside)
    except (OSError, ValueError) as error:
        return _unreadable(path, error, aside)
    return None


def _unreadable(path: Path, error: OSError | ValueError, aside: str) -> Problem:
    """A file that is missing or that the system does not give us now is not damaged: nothing is moved for it."""
    if isinstance(error, FileNotFoundError):
        return Problem(f"{path}: is missing", "")
    if isinstance(error, OSError):
        return Problem(f"{path}: cannot be read ({error.strerror}); make it readable")
    return Problem(f"{path}: {error}", aside)


def _sidecar_problems(folder: Path, name: str, stated: ShardRecord | None) -> Iterator[Problem]:
    path = cache_format.sidecar_path(folder, name)
    aside = f"{cache_format.SHARDS}/{path.name}"
    record: ShardRecord | Sidecar | None = stated
    try:
        sidecar = read_sidecar(folder, name)
        record = stated or sidecar
        if stated and any(sidecar[key] != value for key, value in stated.items()):  # type: ignore[literal-required]
            yield Problem(f"{path}: does not describe the shard that the manifest names", aside)
    except (OSError, ValueError) as error:
        yield _unreadable(path, error, aside)
    if record and (problem := shard_problem(folder, record)):
        yield problem


def _file_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    expected = {cache_format.INDEX: manifest.index_sha256}
    expected |= {f"{cache_format.TOKENIZER}/{name}": digest for name, digest in manifest.tokenizer_files.items()}
    for name, digest in expected.items():
        path, aside = folder / name, name.split("/", 1)[0]
        try:
            if aside == cache_format.TOKENIZER and path.stat().st_size > LARGE:
                yield Problem(f"{path}: has more than {LARGE:,} bytes", aside)
            elif file_digest(path) != digest:
                yield Problem(f"{path}: its content changed (SHA-256 differs)", aside)
        except (OSError, ValueError) as error:
            problem = _unreadable(path, error, aside)
            # A tokenizer folder that lacks a file is damaged as a whole; the index is made again in any case.
            missing = (
                isinstance(error, FileNotFoundError) and aside == cache_format.TOKENIZER and (folder / aside).exists()
            )
            yield problem._replace(aside=aside) if missing else problem


def _settings_problem(folder: Path, digest: str | None) -> Problem | None:
    path = folder / cache_format.SETTINGS
    try:
        found = CacheSettings.from_json(read_sealed(path)).digest()
    except (OSError, ValueError) as error:
        return _unreadable(path, error, cache_format.SETTINGS)
    if digest in (None, found):
        return None
    return Problem(f"{path}: does not state what the manifest states", cache_format.SETTINGS)


def _problems(folder: Path) -> Iterator[Problem]:
    try:
        manifest = read_manifest(folder)
    except UsageError as error:
        finished, damaged = os.path.lexists(folder / cache_format.MANIFEST), isinstance(error.__cause__, ValueError)
        if not (folder / cache_format.SHARDS).is_dir() or (finished and not error.__cause__):
            raise  # not a cache, or one of another version
        yield Problem(str(error), cache_format.MANIFEST if damaged else None)
        if problem := _settings_problem(folder, None):
            yield problem
        names = {
            path.stem for path in (folder / cache_format.SHARDS).iterdir() if cache_format.is_shard_file(path.name)
        }
        for name in sorted(names):
            yield from _sidecar_problems(folder, name, None)
        return
    if problem := _settings_problem(folder, manifest.settings.digest()):
        yield problem
    yield from _file_problems(folder, manifest)
    settings = manifest.settings
    for split, summary in manifest.splits.items():
        for number, stated in enumerate(summary["shards"]):
            found = list(_sidecar_problems(folder, stated["name"], stated))
            yield from found
            if found:
                continue
            path, first = cache_format.shard_path(folder, stated["name"]), number * settings.sequences_per_shard
            try:  # it is as it was written, but a stranger may have written it
                check_content(path, settings.codec, settings.seq_len, split, first, stated["sequences"])
            except (OSError, ValueError) as error:
                yield _unreadable(path, error, f"{cache_format.SHARDS}/{path.name}")


def verify_cache(folder: Path | str) -> list[str]:
    """Every file of a cache against its digest, and every shard against the format: one line a problem, empty if all
    is well; nothing is changed.

    An unfinished cache is a problem too. UsageError: there is no cache at `folder`.
    """
    return [problem.text for problem in _problems(Path(folder))]


def repair(folder: Path | str) -> list[str]:
    """Move aside what `verify_cache` finds damaged, so that the same cache-teacher command builds it again; the new
    paths of what was moved. Nothing is deleted.

    A sound cache is left as it is, and so is what cannot be read. UsageError: nothing in the folder proves that kdtrain
    wrote it, or there is a link in it. RunError: the folder cannot be written.
    """
    folder = Path(folder)
    refuse_links(folder)
    problems = list(_problems(folder))
    if all(problem.aside is None for problem in problems):
        return []
    settings = _sealed_settings(folder)
    names = [problem.aside for problem in problems if problem.aside]
    # Both are made again at the end of a build; a manifest that stays would call the cache finished.
    names += [name for name in (cache_format.MANIFEST, cache_format.INDEX) if os.path.lexists(folder / name)]
    with writing(folder):
        if cache_format.SETTINGS in names:
            names.remove(cache_format.SETTINGS)
            moved = [set_aside(folder, cache_format.SETTINGS, "damaged")]
        else:
            moved = []
        if not (folder / cache_format.SETTINGS).exists():
            publish_json(folder / cache_format.SETTINGS, settings.to_json(), "cache.settings")
        moved += [set_aside(folder, name, "damaged") for name in dict.fromkeys(names)]
    return [str(path) for path in moved]


def _sealed_settings(folder: Path) -> CacheSettings:
    """The settings of a cache by whichever of its two seals holds. UsageError: neither does."""
    for name in (cache_format.MANIFEST, cache_format.SETTINGS):
        try:
            return CacheSettings.from_json(read_sealed(folder / name, MEDIUM))
        except (OSError, ValueError):
            continue
    raise UsageError(
        f"neither {cache_format.MANIFEST} nor {cache_format.SETTINGS} of {folder} proves that kdtrain wrote it, and "
        "nothing was changed; move the folder away and build the cache again"
    )


def check_student(manifest: Manifest, vocab_size: int) -> None:
    """Refuse a student whose vocabulary cannot hold the cache's ids (UsageError naming both numbers).

    More rows than the teacher's are fine, the trainer ignores them; fewer are fine while only padding is
    missing: the tokenizer fits, and the difference is at most 1,024 or 1 % of the teacher's rows.
    """
    cached, used = manifest.vocab_size, manifest.settings.tokenizer_size
    if vocab_size >= cached or (vocab_size >= used and cached - vocab_size <= max(1024, cached // 100)):
        return
    raise UsageError(
        f"the student has a vocabulary of {vocab_size}, the cache one of {cached} (tokenizer {used}): "
        f"set the student's vocab_size to {cached}"
    )


def check_tokenizer(manifest: Manifest, digest: str | None) -> None:
    """Refuse a tokenizer other than the cache's (UsageError naming both digests); None: nothing to check."""
    stated = manifest.settings.tokenizer_digest
    if None not in (digest, stated) and digest != stated:
        raise UsageError(
            f"the student has another tokenizer ({str(digest)[:12]}) than the teacher's text ({str(stated)[:12]}): "
            "give the student the tokenizer of the teacher"
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over what decides the ids: a folder with tokenizer.json, or a fast tokenizer that was loaded.

    Counted are the model (vocabulary, merges), normaliser, pre-tokeniser and the added tokens with their
    ids; padding and truncation, which loading and use change, are not. UsageError: the folder has no
    tokenizer.json.
    """
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing; the folder must hold a fast tokenizer")
        try:
            text = read_text(path, LARGE)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
    else:
        text = tokenizer.backend_tokenizer.to_str()
    content = json.loads(text)
    model = content["model"]
    # Older files spell a merge "a b", newer ones ["a", "b"].
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges", [])]
    decides = {key: content.get(key) for key in ("normalizer", "pre_tokenizer")}
    added = sorted([token["id"], token["content"]] for token in content.get("added_tokens", []))
    decides |= {"model": {**model, "merges": merges}, "added_tokens": added}
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()
