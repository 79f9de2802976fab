"""Caches made of the shards of others, without decoding them: appended as files, or cut by sequences.

A whole shard is the same file again, a hard link where the disk allows one. Of a shard that is cut, the stored bytes of
each sequence are copied, with the lists of the whole shard: few sequences of a shard take more bytes a token. The
format version is `PIECES`: the manifest states how many sequences each shard has. A resume keeps the shards that are
there, as a capture does.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from kdtrain import faults
from kdtrain.cache.build.folder import open_folder
from kdtrain.cache.build.generated_text import read_written
from kdtrain.cache.build.publish import publish_manifest, read_sidecars, set_aside_others
from kdtrain.cache.build.shard_writer import ShardPlace, ShardRows, finished_record, publish_file
from kdtrain.cache.format import hdf5
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Manifest, Parent, first_rows
from kdtrain.cache.read.reader import Cache, CacheReader
from kdtrain.errors import RunError, UsageError, writing
from kdtrain.files import LARGE, canonical_json, file_digest, read_bytes

_ANCESTRY = 2**18
"""Characters of a parent's own parents that a manifest takes over: one of 32 MiB could not be read."""


@dataclass(frozen=True)
class Piece:
    """A shard of another cache, or some of its sequences."""

    reader: CacheReader
    shard: int
    rows: np.ndarray | None = None
    """Which, within the shard, ascending; None: all."""

    def __len__(self) -> int:
        shards = self.reader.manifest.splits[self.reader.split]["shards"]
        return shards[self.shard]["sequences"] if self.rows is None else len(self.rows)


class TokenizerFiles:
    """The tokenizer in the folder of a cache, as a builder of another takes it."""

    def __init__(self, cache: Cache) -> None:
        self._folder, self._digests = cache.folder / cache_format.TOKENIZER, cache.manifest.tokenizer_files
        self._remote = cache.remote

    def save_pretrained(self, folder: Path) -> None:
        """Copy the files. UsageError: one is missing or damaged. RunError: one cannot be fetched."""
        if self._remote is not None:
            self._remote.bring_tokenizer()
        for name, digest in self._digests.items():
            try:
                content = read_bytes(self._folder / name, LARGE)
            except (OSError, ValueError) as error:
                raise UsageError(f"{self._folder / name} cannot be read ({error})") from None
            if hashlib.sha256(content).hexdigest() != digest:
                raise UsageError(f"{self._folder / name}: its content changed (SHA-256 differs)")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def parent_record(cache: Cache, weight: float = 1.0) -> Parent:
    """The record of `cache` in the manifest of one that is made of it."""
    manifest = cache.manifest
    found: Parent = {
        "digest": manifest.digest,
        "teacher": manifest.settings.teacher,
        "num_samples": manifest.codec.num_samples,
        "weight": weight,
        "sequences": {split: each["sequences"] for split, each in manifest.splits.items()},
    }
    if manifest.parents and len(canonical_json(manifest.parents)) < _ANCESTRY:
        found["parents"] = manifest.parents
    if manifest.origin:
        found["origin"] = manifest.origin
    return found


def write_pieces(
    folder: Path,
    settings: CacheSettings,
    splits: Mapping[str, Sequence[Piece]],
    *,
    tokenizer: Cache,
    parents: list[Parent],
    measured: tuple[Any, Any],
    stated: Mapping[str, Any],
    progress: Callable[[int, int | None], None] | None = None,
) -> Manifest:
    """Build the cache in `folder` from pieces, or what is missing of it; a finished one stays untouched.

    tokenizer: the cache whose tokenizer it gets. measured: fidelity and range of T. stated: `capture` and
    `generated` of the manifest; by default what the teacher wrote is counted.

    UsageError: the folder holds something else. RunError: a shard is damaged, the disk is full or cannot be written.
    """
    manifest, lock = open_folder(folder, settings, TokenizerFiles(tokenizer), False)
    if manifest is not None or lock is None:
        assert manifest is not None
        return manifest
    try:
        places: dict[str, list[ShardPlace]] = {}
        tokens, done, total = {}, 0, sum(len(piece) for pieces in splits.values() for piece in pieces)
        for split, pieces in splits.items():
            sha, places[split], first = hashlib.sha256(), [], 0
            for number, piece in enumerate(pieces):
                part = _rows(piece, cache_format.shard_name(split, number), first)
                if finished_record(folder, settings, part) is None:
                    _publish(folder, settings, piece, part)
                sha.update(np.ascontiguousarray(part.tokens, "<u4").tobytes())
                places[split].append(ShardPlace(part.name, len(part), part.digest))
                first, done = first + len(part), done + len(part)
                if progress:
                    progress(done, total)
            tokens[split] = sha.hexdigest()
        with writing(folder):
            faults.point("cache.before-finish")
        sidecars = read_sidecars(folder, settings, places)
        set_aside_others(folder, {place.name for each in places.values() for place in each})
        if "generated" in settings.data and "generated" not in stated:
            stated = {**stated, "generated": read_written(folder, settings, sidecars)[1]}
        return publish_manifest(folder, settings, sidecars, tokens, *measured, {"parents": parents, **stated})
    finally:
        lock.release()


def _rows(piece: Piece, name: str, first: int) -> ShardRows:
    """The text of a piece. `first`: what the attributes of a cut shard say; a whole one keeps its own."""
    split = piece.reader.manifest.splits[piece.reader.split]
    start, stop = first_rows(split)[piece.shard : piece.shard + 2]
    if piece.rows is None:
        first = split["shards"][piece.shard].get("first_sequence", start)
    text = piece.reader.text(np.arange(start, stop) if piece.rows is None else start + piece.rows)
    return ShardRows(name=name, split=piece.reader.split, first=first, kept={}, **text)


def _publish(folder: Path, settings: CacheSettings, piece: Piece, part: ShardRows) -> None:
    source = piece.reader.shard_file(piece.shard)
    stated = piece.reader.manifest.splits[piece.reader.split]["shards"][piece.shard]
    there = os.path.lexists(cache_format.shard_path(folder, part.name))
    # The numbers of the rows here: those of the sidecar it came with are of another cache.
    broken = [
        f"{part.split} {part.first + row}" for row in np.flatnonzero((part.loss_mask == cache_format.BROKEN).all(1))
    ]

    def write(path: Path) -> tuple[dict[str, int], list[str]]:
        if piece.rows is None:
            _same_file(source, path, link=not there)
            if file_digest(path) != stated["sha256"]:
                raise RunError(f"{source}: its content changed while it was read; run the same command again")
            with h5py.File(path) as file:
                stored = hdf5.stored_bytes(file)
        else:
            with h5py.File(source) as file, hdf5.creating(path) as (target, check):
                hdf5.create_shard(target, settings.codec, settings.seq_len, part.split, part.first, len(part))
                hdf5.copy_rows(file, target, settings.codec, settings.seq_len, piece.rows)
                target.flush()
                check()
                stored = hdf5.stored_bytes(target)
        faults.point("cache.shard.before-close")
        return stored, broken

    publish_file(folder, settings, part, write)


def _same_file(source: Path, path: Path, *, link: bool) -> None:
    """Make `path` the file `source`: a hard link, or a copy where there can be none.

    link: False where the shard's final name is taken: renaming one link over another to the same file does nothing.
    """
    if link and not source.is_symlink():
        try:
            os.link(source, path)
            return
        except OSError:
            pass
    with open(source, "rb") as file, open(path, "xb") as copy:
        shutil.copyfileobj(file, copy, 2**22)
