"""The records of a cache: what it was built from, and what each of its files must be.

`settings.json`, written first, states what was requested; shards carry its digest, so that a resume never
mixes two caches. `manifest.json`, written last and sealed by its own digest, repeats the settings and adds
digests of every shard, the index and the tokenizer files, the measured fidelity, and bytes per token. Every
reader starts at it. Both may be downloaded, with a valid seal of a stranger: reading types them, and checks numbers
that decide on memory or paths against each other.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict, cast

from msgspec import Meta

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.spec import MIXTURE, SAMPLING, CodecSpec
from kdtrain.config.choices import Weights
from kdtrain.errors import UsageError, printable
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
_GRID = re.compile(rf"{SAMPLING}(?:\+([0-9]{{1,6}})/([0-9]{{1,6}}))?")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The settings that decide the content of a cache, apart from the text itself."""

    codec: CodecSpec
    """How a distribution is kept; its vocab_size is the teacher's (output head, padding included)."""
    seq_len: Annotated[int, Meta(ge=1, lt=2**31)]
    """Positions a sequence, T; a row holds T + 1 tokens."""
    tokenizer_size: Count
    """Number of entries of the tokenizer; at most codec.vocab_size."""
    tokenizer_digest: str | None = None
    """See `tokenizer_digest`."""
    teacher: dict[str, Any] | None = None
    """spec (name), weights_digest, dtype, attention, of a model's file its SHA-256 (`file_digest`) and which numbers it
    holds (`quantised`); None: the codec is `tokens`."""
    data: dict[str, Any] = field(default_factory=dict)
    """source, packing and everything else that decides the text (plain JSON values)."""
    document_mask: bool = False
    """Packed documents do not see each other; the student follows it."""
    seed: int = 0
    """Seed of the samples."""
    sampling: str | None = None
    """How samples are drawn: grid, grid+OFFSET, mixture (several draws), systematic (before grids); None without
    samples, and in caches whose samples are independent."""
    sequences_per_shard: Annotated[int, Meta(ge=1, lt=2**31)] = 512
    """S: shard s holds the sequences [s*S, (s+1)*S), in a cache of `FORMAT_VERSION`."""
    sequences: dict[str, int | None] = field(default_factory=dict)
    """Limit by split; None or no entry: all of them."""
    format_version: Annotated[int, Meta(ge=cache_format.FORMAT_VERSION, le=cache_format.WRITTEN)] = (
        cache_format.FORMAT_VERSION
    )
    """`FORMAT_VERSION`, `PIECES`, or `WRITTEN`."""

    @property
    def vocab_size(self) -> int:
        """Rows of the teacher's output head."""
        return self.codec.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Return a plain record, as in settings.json and in the manifest."""
        record = {**asdict(self), "codec": self.codec.to_json(), "vocab_size": self.vocab_size}
        if self.sampling is None:
            del record["sampling"]
        return json.loads(canonical_json(record))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CacheSettings":
        """Make settings from such a record; other keys are ignored. ValueError: a key that does not fit."""
        return typed(record, cls)

    @staticmethod
    def stored(folder: Path) -> dict[str, Any]:
        """Read the record in a cache's settings.json. UsageError: it cannot be read, or is damaged."""
        path = folder / cache_format.SETTINGS
        try:
            return {key: value for key, value in read_sealed(path).items() if key != "digest"}
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}; make it readable") from error
        except ValueError as error:
            hint = f"run kdtrain verify {folder} --repair first"
            raise UsageError(f"{path} was altered or damaged ({error}); {hint}") from error

    def written(self, **others: Any) -> "CacheSettings":
        """Return the settings for text that a student wrote, whose log p of each label is kept. others: to change."""
        codec = replace(self.codec, written=True)
        return replace(self, codec=codec, format_version=cache_format.WRITTEN, **others)

    def in_pieces(self, mixed: bool = False, **others: Any) -> "CacheSettings":
        """Return the settings for shards of any sizes, made for other caches. others: to change.

        mixed: whether their samples were drawn in several ways.
        """
        sampling = MIXTURE if mixed else self.sampling
        return replace(self, sampling=sampling, sequences={}, format_version=cache_format.PIECES, **others)

    @property
    def is_in_pieces(self) -> bool:
        """Whether the cache was appended or cut."""
        return self.format_version == cache_format.PIECES

    @property
    def is_mixed(self) -> bool:
        """Whether its samples were drawn in several ways, of caches that were appended."""
        return self.sampling == MIXTURE

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end the texts that the teacher wrote; none in a cache of other text. ValueError: no ids."""
        generated = self.data.get("generated")
        if generated is None:
            return ()
        found = typed(generated, _Generated)["end_tokens"]
        if any(each >= self.vocab_size for each in found):
            raise ValueError(f"data.generated.end_tokens: beyond the vocabulary of {self.vocab_size}")
        return tuple(found)

    @property
    def grid_offset(self) -> Fraction | None:
        """By how much the grid of its samples lies beside the first one; None: they are on no grid."""
        found = _GRID.fullmatch(self.sampling or "")
        if found is None or (found[2] and not 0 < int(found[1]) < int(found[2])):
            return None
        return Fraction(int(found[1]), int(found[2])) if found[2] else Fraction(0)

    def on_grid(self, offset: Fraction) -> "CacheSettings":
        """Return the settings for samples on a grid that lies `offset` beside the first one."""
        name = f"{SAMPLING}+{offset.numerator}/{offset.denominator}" if offset else SAMPLING
        return replace(self, sampling=name)

    def fits(self, folder: Path) -> bool:
        """Return whether a folder is free for a cache of these settings, or holds one that was begun by them."""
        if not folder.exists() or cache_format.holds_nothing(folder):
            return True
        return self.begun(folder) and self.stored(folder) == self.to_json()

    @staticmethod
    def begun(folder: Path) -> bool:
        """Return whether a cache was begun in a folder."""
        return (folder / cache_format.SETTINGS).exists()

    def digest(self) -> str:
        """Return the SHA-256 over `to_json`; each shard carries it."""
        return json_digest(self.to_json())


class ShardRecord(TypedDict):
    """A shard in the manifest."""

    name: Annotated[str, Meta(pattern=f"^{cache_format.SHARD_NAME.pattern}$")]
    sequences: Count
    sha256: Digest
    bytes: Count
    first_sequence: NotRequired[Count]
    """What its attributes hold, in a cache of `PIECES`; in others it is the number of its first row."""


class SplitRecord(TypedDict):
    """A split in the manifest."""

    sequences: Count
    broken: Count
    """Sequences for which the teacher's logits were non-finite."""
    tokens_sha256: Digest
    """Of all tokens, as little-endian uint32."""
    shards: Annotated[list[ShardRecord], Meta(min_length=1)]


class Parent(TypedDict):
    """A cache that this one was merged or cut from."""

    digest: Digest
    teacher: dict[str, Any] | None
    num_samples: Count
    weight: Annotated[float, Meta(gt=0, le=1)]
    """Its share in the distributions of the rows that it gave."""
    sequences: dict[str, Count]
    """How many it has, by split."""
    rows: NotRequired[str]
    """Which of them were taken, where not all were: START:STOP, or a fraction by the hash of the tokens."""
    splits: NotRequired[list[str]]
    """Of which splits: the others are whole."""
    origin: NotRequired[dict[str, Any]]
    """Where it comes from, if it was imported."""
    parents: NotRequired[list["Parent"]]
    """What it was made from itself."""


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
    """The cost of a teacher's weights held in fewer bits, on the first rows of the validation split."""

    weights: Weights
    whole_loss: float
    """Cross-entropy of the teacher with its whole weights, nats per token."""
    loss: float
    """With the packed ones."""
    cost: float
    """The difference, nats per token."""
    sequences: Count
    tokens: Count


def weights_line(cost: WeightsCost) -> str:
    """Describe in words how many nats the packed weights of a teacher cost."""
    return (
        f"{cost['weights']} weights cost the teacher {cost['cost']:+.4f} nats per token: validation loss "
        f"{cost['loss']:.4f}, with whole weights {cost['whole_loss']:.4f} ({cost['sequences']:,} sequences)"
    )


class _Generated(TypedDict):
    """The settings of a text that the teacher wrote."""

    end_tokens: Annotated[list[Count], Meta(max_length=1000)]


_DEEPEST = 8
"""Most parts of the name of a tokenizer file; those of transformers have two."""
_LEFT_OUT = frozenset(
    {"capture", "generated", "origin", "parents", "test_vector", "text", "text_counts", "weights_cost"}
)
"""Keys of the manifest that are left out where they say nothing, so that older manifests keep their digest."""


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
    parents: list[Parent] | None = None
    """The caches that it was made from, sorted by digest; None: it was captured from a teacher."""
    test_vector: dict[str, Any] | None = None
    """See `publish.make_vector`; None in caches without one."""
    origin: dict[str, Any] | None = None
    """Where a cache that `kdtrain import` made comes from, and what its source does not say; else left out."""
    text: dict[str, Any] | None = None
    """See `corpus.stated_text`; None where it is unknown, as in earlier caches."""
    weights_cost: WeightsCost | None = None
    """None where the teacher's weights were whole."""
    capture: dict[str, Any] | None = None
    """Of a teacher that an inference server ran, `kept_mass` of a sample; else left out."""
    generated: dict[str, dict[str, Count]] | None = None
    """Of a text that the teacher wrote (`generated` of the data), by split: labels that it wrote (`tokens`), and how
    many sequences ended why (`stop`, `length`); else left out."""
    text_counts: dict[str, dict[str, Count]] | None = None
    """By split of the data, in words with a number, what the text lost in being read; else left out."""
    digest: str = ""
    """Over everything else: the digest of the cache."""

    @classmethod
    def planned(cls, settings: CacheSettings, sizes: Mapping[str, int]) -> "Manifest":
        """Predict a manifest by the sequences of each split, as far as it is known before the first shard.

        Its digest is that of the settings.
        """
        splits = dict[str, SplitRecord]()
        for split, number in sizes.items():
            shards = list[ShardRecord]()
            for first in range(0, number, settings.sequences_per_shard):
                name = cache_format.shard_name(split, len(shards))
                count = min(settings.sequences_per_shard, number - first)
                shards.append({"name": name, "sequences": count, "sha256": "", "bytes": 0})
            splits[split] = {"sequences": number, "broken": 0, "tokens_sha256": "", "shards": shards}
        return cls(
            settings=settings,
            splits=splits,
            fidelity=None,
            temperature_range=cast(TemperatureRange | None, settings.codec.stated_range),
            bytes_per_token={},
            index_sha256="",
            tokenizer_files={},
            versions={},
            digest=settings.digest(),
        )

    @property
    def codec(self) -> CodecSpec:
        """The codec in which each distribution is stored."""
        return self.settings.codec

    @property
    def vocab_size(self) -> int:
        """Rows of the teacher's output head."""
        return self.settings.vocab_size

    def is_known_as(self, digest: object) -> bool:
        """Return True if `digest` names this cache: the manifest's, or the settings' if the run captured it."""
        return digest in (self.digest, self.settings.digest())

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end the texts that the teacher wrote; none in a cache of other text."""
        return self.settings.end_tokens

    @property
    def knows_labels(self) -> bool:
        """Whether the cache holds the teacher's log p of 99.9 % of the labels; an import may hold tail shares."""
        origins = [self.origin, *(each.get("origin") for each in self.parents or ())]
        shares = [each.get("labels_kept") for each in origins if each]
        return all(isinstance(each, int | float) and each >= 0.999 for each in shares)

    @property
    def files(self) -> list[str]:
        """The paths of the cache's files in its folder; that of the manifest is the last one."""
        names = [cache_format.SETTINGS, cache_format.INDEX]
        names += [f"{cache_format.TOKENIZER}/{name}" for name in self.tokenizer_files]
        for split in self.splits.values():
            for shard in split["shards"]:
                names += [f"{cache_format.SHARDS}/{shard['name']}.{suffix}" for suffix in ("h5", "json")]
        return [*names, cache_format.MANIFEST]

    @property
    def maker(self) -> str:
        """The command that builds the missing parts of the cache, in words."""
        if self.origin is not None:
            return "the same import command"
        if self.parents is not None:
            return f"the same {'subset' if any('rows' in each for each in self.parents) else 'merge'} command"
        captured = "distill" if "order" in self.settings.data else "cache-teacher"
        return f"the same {captured} command" if self.codec.taught else "the same command"

    def to_json(self) -> dict[str, Any]:
        """Return the sealed record, as in manifest.json."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        own = {name: value for name, value in own.items() if value is not None or name not in _LEFT_OUT}
        return sealed({**self.settings.to_json(), **own})

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Manifest":
        """Make a manifest from its record. ValueError: a key does not fit, or numbers contradict each other."""
        manifest = typed({**record, "settings": record}, cls)
        if not manifest.splits:
            raise ValueError("splits: there is none")
        for split, stated in manifest.splits.items():
            _refuse_contradictions(split, stated, manifest.settings)
        _ = manifest.end_tokens
        if (manifest.settings.format_version == cache_format.WRITTEN) != manifest.codec.written:
            raise ValueError("format_version: it is not that of the codec")
        if manifest.settings.tokenizer_size > manifest.vocab_size:
            raise ValueError(f"tokenizer_size: {manifest.settings.tokenizer_size} is more than the vocabulary")
        for name in manifest.tokenizer_files:
            path = PurePosixPath(name)
            # printable characters that a disk can hold
            fits = name.isprintable() and all(len(part.encode()) <= 255 for part in path.parts)
            if not (fits and 0 < len(path.parts) <= _DEEPEST) or ".." in path.parts or path.is_absolute():
                raise ValueError(f"tokenizer_files: '{printable(name)[:80]}' is not a name inside the folder")
        if "total" not in manifest.bytes_per_token:
            raise ValueError("bytes_per_token: total is missing")
        span = manifest.temperature_range
        if span is not None and not (math.isfinite(span["max"]) and span["min"] <= 1 <= span["max"]):
            raise ValueError(f"temperature_range: {span['min']} to {span['max']} is not a range around 1")
        return manifest


def _refuse_contradictions(split: str, stated: SplitRecord, settings: CacheSettings) -> None:
    per_shard = settings.sequences_per_shard
    pieces = settings.is_in_pieces
    counts = [shard["sequences"] for shard in stated["shards"]]
    full = all(count == per_shard for count in counts[:-1]) and 1 <= counts[-1] <= per_shard
    whole = all(counts) if pieces else full
    if split not in cache_format.SPLITS or not whole or sum(counts) != stated["sequences"]:
        raise ValueError(f"splits.{split}: its shards do not make up {stated['sequences']} sequences")
    for number, shard in enumerate(stated["shards"]):
        if shard["name"] != cache_format.shard_name(split, number):
            raise ValueError(f"splits.{split}: '{shard['name']}' is not the name of shard {number}")
        if ("first_sequence" in shard) != pieces:
            raise ValueError(f"splits.{split}: shard {number} has {'no ' if pieces else ''}first_sequence")


def differences(there: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Yield one phrase for each leaf that differs between two JSON records."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        for key in sorted(there.keys() | wanted.keys()):
            yield from differences(there.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    elif there != wanted:
        yield f"{name}: {there} there, {wanted} here"


def first_rows(stated: SplitRecord) -> list[int]:
    """Return the number of the first row of each shard of a split, and at the end the number of all rows."""
    return [0, *accumulate(shard["sequences"] for shard in stated["shards"])]


def read_manifest(folder: Path | str) -> Manifest:
    """Read the manifest of a finished cache. UsageError: it is missing, altered or of an unknown version."""
    path = Path(folder, cache_format.MANIFEST)
    if (missing := cache_format.why_no_cache(folder)) is not None:
        raise UsageError(f"{folder}: {missing}")
    try:
        record = read_sealed(path, MEDIUM)
        version = record.get("format_version")
        if version in (cache_format.FORMAT_VERSION, cache_format.PIECES, cache_format.WRITTEN):
            return Manifest.from_json(record)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    except ValueError as error:
        raise UsageError(
            f"{path} was altered or damaged ({error}): kdtrain verify {folder} --repair, then cache-teacher"
        ) from error
    known = f"{cache_format.FORMAT_VERSION} to {cache_format.WRITTEN}"
    raise UsageError(f"{path} has format version {version}; this kdtrain reads {known}: build the cache again")


class Problem(NamedTuple):
    """A file of a cache that is not as it was written."""

    text: str
    aside: str | None = None
    """The damaged file or folder to move aside, relative to the cache; empty: it is missing; None: it cannot be read
    now."""


def read_sidecar(folder: Path, name: str) -> Sidecar:
    """Read the sealed record of a shard. OSError: it cannot be read. ValueError: it is damaged or of another shard."""
    record = typed(read_sealed(cache_format.sidecar_path(folder, name)), Sidecar)
    if record["name"] != name:
        raise ValueError(f"it belongs to shard {record['name']}")
    return record


def check_sizes(folder: Path | str, manifest: Manifest) -> None:
    """Raise UsageError if a shard (named) is missing, or its size differs from the manifest's.

    Nothing is read: it costs one `stat` a shard.
    """
    folder = Path(folder)
    records = [record for split in manifest.splits.values() for record in split["shards"]]
    found = [problem for record in records if (problem := shard_problem(folder, record, digest=False))]
    if found:
        more = f" (and {len(found) - 1} more shards)" if len(found) > 1 else ""
        raise UsageError(f"{found[0].text}{more}: run kdtrain verify {folder} --repair, then {manifest.maker} again")


def shard_problem(folder: Path, record: ShardRecord | Sidecar, *, digest: bool = True) -> Problem | None:
    """Return the problem of the shard that `record` describes, or None.

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
    """Return the problem of a file that raised `error`. A missing or unreadable file is not damaged: it stays."""
    if isinstance(error, FileNotFoundError):
        return Problem(f"{path}: is missing", "")
    if isinstance(error, OSError):
        return Problem(f"{path}: cannot be read ({error.strerror}); make it readable")
    return Problem(f"{path}: {error}", aside)


def refuse_tokenizer(digest: str | None, cached: str | None) -> None:
    """Raise UsageError, which names both, if the digests of two tokenizers differ; None is not checked."""
    if None not in (digest, cached) and digest != cached:
        raise UsageError(
            f"the student has another tokenizer ({str(digest)[:12]}) than the teacher's text ({str(cached)[:12]}): "
            "give the student the teacher's tokenizer, or train across tokenizers with --cross-tokenizer"
        )
