"""Verifying and repairing a cache: every file against its digest, every shard against the format.

`verify_cache` changes nothing; `repair` moves what is damaged aside, so that the same command builds it again.

What it gives up: a cache that a stranger made and sealed can be sound by every digest and still teach anything.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.hdf5 import check_structure
from kdtrain.cache.format.manifest import (
    CacheSettings,
    Manifest,
    Problem,
    ShardRecord,
    Sidecar,
    file_problem,
    first_rows,
    read_manifest,
    read_sidecar,
    shard_problem,
)
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import AHEAD
from kdtrain.cache.read.remote import Remote, open_remote
from kdtrain.cache.read.shard import Shard, batch_of
from kdtrain.cache.write.publish import agrees, make_vector
from kdtrain.errors import RunError, UsageError, first_sentence, system_error, writing
from kdtrain.files import LARGE, MEDIUM, SMALL, file_digest, publish_json, read_sealed, refuse_links, set_aside, typed
from kdtrain.net.address import parse_address

_ENTRIES_AT_ONCE = 2**20  # entries that `check_content` unpacks at once


def check_content(path: Path, spec: CodecSpec, seq_len: int, split: str, first: int, number: int) -> None:
    """Read all of a shard, and compare its structure with the one that `hdf5_writing.create_shard` makes.

    ValueError: the structure differs, or a number is impossible. OSError: the file cannot be read.
    """
    entries = seq_len * max(1, spec.columns if spec.coded else spec.vocab_size)
    step = max(1, _ENTRIES_AT_ONCE // entries)
    check_structure(path, spec, seq_len, split, first, number)
    try:
        with closing(Shard(path, spec)) as shard:
            for start in range(0, number, step):
                batch_of([shard.read(np.arange(start, min(start + step, number)))], spec)
    except MemoryError:
        raise
    except Exception as error:
        system = system_error(error)
        raise system if system and system.errno else ValueError(first_sentence(error)) from error


def _same(sidecar: Sidecar, stated: ShardRecord) -> bool:
    return all(sidecar[key] == value for key, value in stated.items())  # type: ignore[literal-required]


def _sidecar_problems(folder: Path, name: str, stated: ShardRecord | None) -> Iterator[Problem]:
    path = cache_format.sidecar_path(folder, name)
    aside = f"{cache_format.SHARDS}/{path.name}"
    record: ShardRecord | Sidecar | None = stated
    try:
        sidecar = read_sidecar(folder, name)
        record = stated or sidecar
        if stated and not _same(sidecar, stated):
            yield Problem(f"{path}: does not describe the shard that the manifest names", aside)
    except (OSError, ValueError) as error:
        yield file_problem(path, error, aside)
    if record and (problem := shard_problem(folder, record)):
        yield problem


def _file_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    expected = {cache_format.INDEX: manifest.index_sha256}
    expected |= {f"{cache_format.TOKENIZER}/{name}": digest for name, digest in manifest.tokenizer_files.items()}
    for name, digest in expected.items():
        path = folder / name
        aside = name.split("/", 1)[0]
        try:
            if aside == cache_format.TOKENIZER and path.stat().st_size > LARGE:
                yield Problem(f"{path}: has more than {LARGE:,} bytes", aside)
            elif file_digest(path) != digest:
                yield Problem(f"{path}: its content changed (SHA-256 differs)", aside)
        except (OSError, ValueError) as error:
            problem = file_problem(path, error, aside)
            # A tokenizer folder that lacks a file is damaged as a whole; the index is written again in any case.
            lacks = problem.aside == "" and aside == cache_format.TOKENIZER and (folder / aside).exists()
            yield problem._replace(aside=aside) if lacks else problem


def _settings_problem(folder: Path, digest: str | None) -> Problem | None:
    path = folder / cache_format.SETTINGS
    try:
        found = CacheSettings.from_json(read_sealed(path)).digest()
    except (OSError, ValueError) as error:
        return file_problem(path, error, cache_format.SETTINGS)
    if digest in (None, found):
        return None
    return Problem(f"{path}: does not state what the manifest states", cache_format.SETTINGS)


def _problems(folder: Path, remote: Remote | None = None) -> Iterator[Problem]:
    if remote is not None:
        yield from _remote_problems(remote)
        return
    try:
        manifest = read_manifest(folder)
    except UsageError as error:
        finished = os.path.lexists(folder / cache_format.MANIFEST)
        damaged = isinstance(error.__cause__, ValueError)
        if not (folder / cache_format.SHARDS).is_dir() or (finished and not error.__cause__):
            raise  # it is not a cache, or has another format version
        yield Problem(str(error), cache_format.MANIFEST if damaged else None)
        if problem := _settings_problem(folder, None):
            yield problem
        paths = (folder / cache_format.SHARDS).iterdir()
        for name in sorted({path.stem for path in paths if cache_format.is_shard_file(path.name)}):
            yield from _sidecar_problems(folder, name, None)
        return
    if problem := _settings_problem(folder, manifest.settings.digest()):
        yield problem
    yield from _file_problems(folder, manifest)
    for split, summary in manifest.splits.items():
        for row, stated in zip(first_rows(summary), summary["shards"], strict=False):
            found = list(_sidecar_problems(folder, stated["name"], stated))
            yield from found or _content_problems(folder, manifest, split, row, stated)


def _content_problems(folder: Path, manifest: Manifest, split: str, row: int, stated: ShardRecord) -> Iterator[Problem]:
    """Yield the problems of a shard from `row` on whose digest is right, but which a stranger may have made."""
    settings = manifest.settings
    path = cache_format.shard_path(folder, stated["name"])
    first = stated.get("first_sequence", row)
    try:
        check_content(path, settings.codec, settings.seq_len, split, first, stated["sequences"])
    except (OSError, ValueError) as error:
        yield file_problem(path, error, f"{cache_format.SHARDS}/{path.name}")
        return
    vector = manifest.test_vector
    if vector is None or row or split != next(iter(manifest.splits)):
        return
    if not agrees(vector, make_vector(folder, settings.codec, split, stated["name"], stated["sequences"])):
        text = f"{folder / cache_format.MANIFEST}: its test_vector is not what shard {stated['name']} holds"
        yield Problem(text, cache_format.MANIFEST)


def _remote_problems(remote: Remote) -> Iterator[Problem]:
    """Yield the problems of a cache elsewhere: each file is fetched as a reader would, a shard at a time."""
    folder, manifest = remote.folder, remote.manifest

    def brought(action: Callable[..., Any], *arguments: Any) -> Iterator[Problem]:
        try:
            action(*arguments)
        except (UsageError, RunError) as error:
            yield Problem(str(error.args[0]))

    def holds(states: Callable[[dict[str, Any]], bool]) -> Callable[[Path], bool]:
        def sound(path: Path) -> bool:
            try:
                return states(read_sealed(path))
            except (OSError, ValueError):
                return False

        return sound

    digest = manifest.settings.digest()
    settings = holds(lambda record: CacheSettings.from_json(record).digest() == digest)
    yield from brought(remote.bring, cache_format.SETTINGS, settings, SMALL)
    yield from brought(remote.bring, cache_format.INDEX, manifest.index_sha256)
    yield from brought(remote.bring_tokenizer)
    for split, summary in manifest.splits.items():
        rows = first_rows(summary)
        for number, stated in enumerate(summary["shards"]):
            sidecar = cache_format.sidecar_path(folder, stated["name"]).relative_to(folder).as_posix()
            same = holds(lambda record, stated=stated: _same(typed(record, Sidecar), stated))  # type: ignore[misc]
            remote.ahead(summary["shards"][number : number + AHEAD])
            found = [*brought(remote.ensure, stated), *brought(remote.bring, sidecar, same, SMALL)]
            found = found or list(_sidecar_problems(folder, stated["name"], stated))
            yield from found or _content_problems(folder, manifest, split, rows[number], stated)


def verify_cache(where: Path | str, remote: Remote | None = None) -> list[str]:
    """Compare every file of a cache with its digest, and every shard with the format; return a line for each problem.

    where: a folder, or an address (`Cache`). remote: of a cache elsewhere, if it is open already.

    An unfinished cache is reported as a problem. UsageError: there is no cache. RunError: it cannot be reached.
    """
    if remote is None and (address := parse_address(where)) is not None:
        remote = open_remote(address)
    return [problem.text for problem in _problems(Path(where), remote)]


def repair(folder: Path | str) -> list[str]:
    """Move aside the files that `verify_cache` finds damaged, so that the cache's command builds them again.

    Returns the new paths of what it moved. It deletes nothing, and leaves a sound cache and unreadable files as they
    are. UsageError: nothing in the folder proves that kdtrain wrote it, or it contains a link. RunError: the folder
    cannot be written.
    """
    folder = Path(folder)
    refuse_links(folder)
    problems = list(_problems(folder))
    if all(problem.aside is None for problem in problems):
        return []
    settings = _sealed_settings(folder)
    names = [problem.aside for problem in problems if problem.aside]
    # The end of a build writes both again; with a manifest the cache would count as finished.
    names += [name for name in (cache_format.MANIFEST, cache_format.INDEX) if os.path.lexists(folder / name)]
    with writing(folder):
        # Settings first: the manifest, which proves as much, goes only when they are whole.
        moved = [set_aside(folder, name, "damaged") for name in names if name == cache_format.SETTINGS]
        if not (folder / cache_format.SETTINGS).exists():
            publish_json(folder / cache_format.SETTINGS, settings.to_json(), "cache.settings")
        moved += [set_aside(folder, name, "damaged") for name in dict.fromkeys(names) if name != cache_format.SETTINGS]
    return [str(path) for path in moved]


def _sealed_settings(folder: Path) -> CacheSettings:
    """Read the settings of a cache from the manifest or settings.json, whichever is intact. UsageError: neither is."""
    for name in (cache_format.MANIFEST, cache_format.SETTINGS):
        try:
            return CacheSettings.from_json(read_sealed(folder / name, MEDIUM))
        except (OSError, ValueError):
            continue
    raise UsageError(
        f"neither {cache_format.MANIFEST} nor {cache_format.SETTINGS} of {folder} proves that kdtrain wrote it, and "
        "nothing was changed; move the folder away and build the cache again"
    )
