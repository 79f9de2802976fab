"""The records of a cache: what it was built from, and what each of its files must be.

`settings.json`, written first, states what was asked for; shards carry its digest, so that a resume never
mixes two caches. `manifest.json`, written last and sealed by its own digest, repeats the settings and adds
digests of every shard, the index and the tokenizer files, the measured fidelity, and bytes a token. Every
reader starts at it. Both may be downloaded, with a valid seal of a stranger: reading types them, and checks numbers
that decide on memory or paths against each other.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta

from kdtrain.cache import format as cache_format
from kdtrain.cache.codec import CodecSpec
from kdtrain.errors import UsageError
from kdtrain.files import (
    MEDIUM,
    canonical_json,
    file_digest,
    json_digest,
    read_sealed,
    sealed,
    typed,
)

Count = Annotated[int, Meta(ge=0, le=2**62)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What decides the content of a cache, apart from the text itself."""

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
    """source, packing and everything else that decides the text (plain JSON values)."""
    document_mask: bool = False
    """Packed documents do not see each other; the student follows it."""
    seed: int = 0
    """Seed of the samples."""
    sampling: str | None = None
    """How samples are drawn: systematic; None without samples, and in caches whose samples are independent."""
    sequences_per_shard: Annotated[int, Meta(ge=1, lt=2**31)] = 512
    """S: shard s holds the sequences [s*S, (s+1)*S)."""
    sequences: dict[str, int | None] = field(default_factory=dict)
    """Limit by split; None or no entry: all of them."""

    @property
    def vocab_size(self) -> int:
        """Rows of the teacher's output head."""
        return self.codec.vocab_size

    def to_json(self) -> dict[str, Any]:
        """A plain record, as in settings.json and in the manifest."""
        record = {**asdict(self), "codec": self.codec.to_json(), "vocab_size": self.vocab_size}
        if self.sampling is None:
            del record["sampling"]
        # With the format version, so that a resume never adds shards of one format to those of another.
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
    """Sequences for which the teacher's logits were non-finite."""
    tokens_sha256: Digest
    """Of all tokens, as little-endian uint32."""
    shards: Annotated[list[ShardRecord], Meta(min_length=1)]


class Sidecar(TypedDict):
    """The sealed record beside a shard."""

    name: str
    split: str
    first_sequence: Count
    sequences: Count
    sha256: Digest
    bytes: Count
    stored: dict[str, Count]
    """Bytes by data set."""
    broken: list[str]
    """Sequences with non-finite logits, as SPLIT and number."""
    rows_sha256: Digest
    settings_sha256: Digest


class TemperatureRange(TypedDict):
    """The temperatures at which a cache is right."""

    min: Annotated[float, Meta(gt=0)]
    max: float
    worst_error: float
    """Of log Z, nats."""
    rule: str


class WeightsCost(TypedDict):
    """What it costs that the teacher's weights were held in fewer bits, on the first rows of the validation split."""

    weights: str
    """bf16, int8 or nf4."""
    whole_loss: float
    """Cross-entropy of the teacher with its whole weights, nats a token."""
    loss: float
    """With the packed ones."""
    cost: float
    """The difference, nats a token."""
    sequences: Count
    tokens: Count


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
    weights_cost: WeightsCost | None = None
    """None, and not in the record, where the teacher's weights were whole."""
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
        """The sealed record, as in manifest.json."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        if self.weights_cost is None:
            del own["weights_cost"]
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
    """A read looks for sequence i in shard i // per_shard, so every shard but the last must be full."""
    counts = [shard["sequences"] for shard in stated["shards"]]
    full = all(count == per_shard for count in counts[:-1]) and 1 <= counts[-1] <= per_shard
    if split not in cache_format.SPLITS or not full or sum(counts) != stated["sequences"]:
        raise ValueError(f"splits.{split}: its shards do not make up {stated['sequences']} sequences")
    for number, shard in enumerate(stated["shards"]):
        if shard["name"] != cache_format.shard_name(split, number):
            raise ValueError(f"splits.{split}: '{shard['name']}' is not the name of shard {number}")


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a finished cache. UsageError: it is missing, unfinished, altered or of an unknown version."""
    folder = Path(folder)
    path = folder / cache_format.MANIFEST
    if not path.exists():
        if any((folder / cache_format.SHARDS).glob("*.h5*")):  # a temporary one too
            raise UsageError(f"the cache {folder} is unfinished; run the same cache-teacher command again to finish it")
        if (folder / cache_format.SETTINGS).exists():
            raise UsageError(
                f"the cache {folder} holds no shard: the command that began it was refused or stopped before its first "
                "one; run cache-teacher again"
            )
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
    """A file of a cache that is not as it was written."""

    text: str
    aside: str | None = None
    """The damaged file or folder to move aside, relative to the cache; empty: it is missing; None: it cannot be read
    now."""


def read_sidecar(folder: Path, name: str) -> Sidecar:
    """The sealed record of a shard. OSError: it cannot be read. ValueError: it is damaged or of another shard."""
    record = typed(read_sealed(cache_format.sidecar_path(folder, name)), Sidecar)
    if record["name"] != name:
        raise ValueError(f"it belongs to shard {record['name']}")
    return record


def check_sizes(folder: Path | str, manifest: Manifest) -> None:
    """UsageError: a shard (named) is missing, or its size differs from the manifest's.

    Nothing is read: it costs one `stat` a shard.
    """
    folder = Path(folder)
    records = [record for split in manifest.splits.values() for record in split["shards"]]
    found = [problem for record in records if (problem := shard_problem(folder, record, digest=False))]
    if found:
        more = f" (and {len(found) - 1} more shards)" if len(found) > 1 else ""
        command = "command" if manifest.codec.kind == "tokens" else "cache-teacher command"
        raise UsageError(f"{found[0].text}{more}: run kdtrain verify {folder} --repair, then the same {command} again")


def shard_problem(folder: Path, record: ShardRecord | Sidecar, *, digest: bool = True) -> Problem | None:
    """What is wrong with the shard that `record` describes, or None.

    digest: compare the SHA-256 too, which reads the whole file.
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
        return file_problem(path, error, aside)
    return None


def file_problem(path: Path, error: OSError | ValueError, aside: str) -> Problem:
    """The problem of a file that raised `error`. One that is missing or unreadable now is not damaged: it stays."""
    if isinstance(error, FileNotFoundError):
        return Problem(f"{path}: is missing", "")
    if isinstance(error, OSError):
        return Problem(f"{path}: cannot be read ({error.strerror}); make it readable")
    return Problem(f"{path}: {error}", aside)


def refuse_vocabulary(vocab_size: int, cached: int, used: int) -> None:
    """UsageError: a student's `vocab_size` logits cannot hold the ids of a cache (both sizes named).

    More rows than the teacher's are fine, the trainer ignores them. Fewer are fine while only padding is missing: the
    tokenizer fits, and the difference is at most 1,024 or 1 % of the teacher's rows.

    cached: rows of the teacher's output head. used: entries of its tokenizer.
    """
    if vocab_size >= cached or (vocab_size >= used and cached - vocab_size <= max(1024, cached // 100)):
        return
    raise UsageError(
        f"the student has a vocabulary of {vocab_size}, the cache one of {cached} (tokenizer {used}): "
        f"set the student's vocab_size to {cached}"
    )


def refuse_tokenizer(digest: str | None, cached: str | None) -> None:
    """UsageError: the digest of the student's tokenizer is not the cache's (both named); None is not checked."""
    if None not in (digest, cached) and digest != cached:
        raise UsageError(
            f"the student has another tokenizer ({str(digest)[:12]}) than the teacher's text ({str(cached)[:12]}): "
            "give the student the teacher's tokenizer"
        )
