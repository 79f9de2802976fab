"""Where a cache comes from, and whether it still is what was written.

`settings.json`, written first, states what was asked for; shards carry its digest, so that a resume never
mixes two caches. `manifest.json`, written last and sealed by its own digest, repeats the settings and adds
digests of every shard, the index and the tokenizer files, the measured fidelity, and bytes a token. Every
reader starts at it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from kdtrain.cache import layout
from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.files import canonical_json, file_digest, json_digest, read_sealed, sealed
from kdtrain.cache.shard_reader import content_problem
from kdtrain.errors import UsageError, writing


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What makes two caches the same before a single token is read."""

    codec: CodecSpec
    """How a distribution is kept; its vocab_size is the teacher's (output head, padding included)."""
    seq_len: int
    """Positions a sequence, T; a row holds T + 1 tokens."""
    tokenizer_size: int
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
    """Of the draws."""
    sequences_per_shard: int = 512
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
        return json.loads(canonical_json({"format_version": layout.FORMAT_VERSION, **record}))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> CacheSettings:
        """The inverse of `to_json`; keys of others are ignored."""
        known = {f.name: record[f.name] for f in fields(cls)}
        return cls(**{**known, "codec": CodecSpec.from_json(record["codec"])})

    def digest(self) -> str:
        """SHA-256 over `to_json`; each shard carries it."""
        return json_digest(self.to_json())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished cache, as its manifest states it."""

    settings: CacheSettings
    splits: dict[str, dict[str, Any]]
    """By split: sequences, tokens_sha256 (little-endian uint32), shards (name, sequences, sha256, bytes)."""
    fidelity: dict[str, Any] | None
    """See `fidelity.measure`; None for the codec `tokens`."""
    temperature_range: dict[str, Any] | None
    """min, max, worst_error (nats), rule: where log Z of the cache is right."""
    bytes_per_token: dict[str, float]
    """On disk by data set, `overhead` (HDF5's own) and `total`."""
    index_sha256: str
    tokenizer_files: dict[str, str]
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
    def from_json(cls, record: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`."""
        own = {f.name: record[f.name] for f in fields(cls) if f.name != "settings"}
        for split, summary in own["splits"].items():
            most, left = record["sequences_per_shard"], summary["sequences"]
            for number, shard in enumerate(summary["shards"]):
                expected = layout.shard_name(split, number), min(most, left - number * most)
                if (shard["name"], shard["sequences"]) != expected or split not in layout.SPLITS or expected[1] < 1:
                    raise ValueError(f"the shards of {str(split)[:80]} are not those of {left} sequences")
            if left != sum(shard["sequences"] for shard in summary["shards"]):
                raise ValueError(f"the shards of {str(split)[:80]} are not those of {left} sequences")
        return cls(settings=CacheSettings.from_json(record), **own)


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a finished cache. UsageError: none there, unfinished, altered, unknown version."""
    folder = Path(folder)
    path = folder / layout.MANIFEST
    if not path.is_file():
        if (folder / layout.SETTINGS).exists() or (folder / layout.SHARDS).exists():
            raise UsageError(f"the cache {folder} is unfinished; run the same cache-teacher command again to finish it")
        raise UsageError(f"{folder} holds no cache (no {layout.MANIFEST}); make one with kdtrain cache-teacher")
    try:
        record = read_sealed(path)
        version = record.get("format_version")
        if version == layout.FORMAT_VERSION:
            return Manifest.from_json(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} was altered or damaged ({error}): kdtrain verify {folder} --repair, then cache-teacher"
        ) from error
    known = layout.FORMAT_VERSION
    raise UsageError(f"{path} has format version {version}; this kdtrain reads {known}: use another version of it")


class Problem(NamedTuple):
    """Something that is not as it was written; `shard` is the name of the shard to drop, if it is one."""

    text: str
    shard: str | None = None


def read_sidecar(folder: Path, name: str) -> dict[str, Any]:
    """The sealed record of a shard. ValueError or OSError: there is none that can be trusted."""
    record = read_sealed(layout.sidecar_path(folder, name))
    if record.get("name") != name:
        raise ValueError(f"it belongs to shard {record.get('name')}")
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
        raise UsageError(f"{found[0]}{more}: run kdtrain verify {folder} --repair, then the same {command} again")


def shard_problem(folder: Path, record: dict[str, Any], *, digest: bool = True) -> str | None:
    """What is wrong with the shard that `record` (name, bytes, sha256) describes; None: nothing.

    digest: whether the SHA-256 is compared, for which all of it is read.
    """
    path = layout.shard_path(folder, record["name"])
    if not path.is_file():
        return f"{path}: is missing"
    if path.stat().st_size != record["bytes"]:
        return f"{path}: has {path.stat().st_size} bytes instead of {record['bytes']}"
    if digest and file_digest(path) != record["sha256"]:
        return f"{path}: its content changed (SHA-256 differs)"
    return None


def _sidecar_problems(folder: Path, name: str, stated: dict[str, Any] | None) -> Iterator[Problem]:
    path = layout.sidecar_path(folder, name)
    try:
        record = read_sidecar(folder, name)
    except (OSError, ValueError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else str(error)
        yield Problem(f"{path}: {reason}", name)
        record = stated or {}
    if stated and any(record.get(key) != value for key, value in stated.items()):
        yield Problem(f"{path}: does not describe the shard that the manifest names", name)
    if (stated or record) and (problem := shard_problem(folder, stated or record)):
        yield Problem(problem, name)


def _file_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    expected = {layout.INDEX: manifest.index_sha256}
    expected |= {f"{layout.TOKENIZER}/{name}": digest for name, digest in manifest.tokenizer_files.items()}
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            yield Problem(f"{path}: is missing")
        elif file_digest(path) != digest:
            yield Problem(f"{path}: its content changed (SHA-256 differs)")


def _settings_problems(folder: Path, digest: str | None) -> Iterator[Problem]:
    path = folder / layout.SETTINGS
    try:
        changed = digest not in (None, CacheSettings.from_json(read_sealed(path)).digest())
        if changed:
            yield Problem(f"{path}: does not state what the manifest states")
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Problem(f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else error}")


def _problems(folder: Path) -> Iterator[Problem]:
    try:
        manifest = read_manifest(folder)
    except UsageError as error:
        if not (folder / layout.SHARDS).is_dir():
            raise
        yield Problem(str(error))
        yield from _settings_problems(folder, None)
        names = {path.stem for path in (folder / layout.SHARDS).iterdir() if path.suffix in (".h5", ".json")}
        for name in sorted(names):
            yield from _sidecar_problems(folder, name, None)
        return
    yield from _settings_problems(folder, manifest.settings.digest())
    yield from _file_problems(folder, manifest)
    settings = manifest.settings
    for split, summary in manifest.splits.items():
        for number, stated in enumerate(summary["shards"]):
            found = list(_sidecar_problems(folder, stated["name"], stated))
            yield from found
            if found:
                continue
            path, first = layout.shard_path(folder, stated["name"]), number * settings.sequences_per_shard
            wrong = content_problem(path, settings.codec, settings.seq_len, split, first, stated["sequences"])
            if wrong is not None:
                yield Problem(f"{path}: {wrong}", stated["name"])


def verify_cache(folder: Path | str) -> list[str]:
    """Every file of a cache against its digest, and every shard against the format: one line a problem, empty if all
    is well; nothing is changed.

    An unfinished cache is a problem too. UsageError: there is no cache at `folder`.
    """
    return [problem.text for problem in _problems(Path(folder))]


def repair(folder: Path | str) -> list[str]:
    """Drop what `verify_cache` finds bad, so that the same cache-teacher command builds it again; the files that
    were there and are gone, manifest and index among them.

    A sound cache is left as it is. RunError: the folder cannot be written.
    """
    folder = Path(folder)
    problems = list(_problems(folder))
    dropped = [folder / layout.MANIFEST, folder / layout.INDEX] if problems else []
    for problem in problems:
        if problem.shard:
            dropped += [layout.shard_path(folder, problem.shard), layout.sidecar_path(folder, problem.shard)]
        elif problem.text.startswith(f"{folder / layout.SETTINGS}:"):
            dropped.append(folder / layout.SETTINGS)
        elif problem.text.startswith(f"{folder / layout.TOKENIZER}/"):
            dropped += [path for path in (folder / layout.TOKENIZER).rglob("*") if path.is_file()]
    gone = [path for path in dict.fromkeys(dropped) if path.exists()]
    for path in gone:
        with writing(path):
            path.unlink()
    return [str(path) for path in gone]


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
        text = path.read_text(encoding="utf-8")
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
