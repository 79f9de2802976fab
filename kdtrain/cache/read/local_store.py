"""The local folder: what is here of caches that lie elsewhere, below a limit.

    HOME/caches/DIGEST/manifest.json, tokenizer/, ...   a cache by the digest of its manifest: kept once, wherever from
    HOME/caches/DIGEST/shards/train-00000.h5            whole and checked, under this name
    HOME/caches/DIGEST/shards/train-00000.h5.part       a download that broke off; what it is of stands in .part.json
    HOME/names/SHA256.json                              which digest an address had when it was last read

HOME is KDTRAIN_HOME, or ~/.cache/kdtrain. Room is made under one lock: the shard that was read longest ago goes first.
Only what a sealed manifest beside it names, at the size that it states, is ever removed, or one of these that was
damaged here and set aside, and no shard that a process has locked because it reads it. Processes of one machine share
the folder.

What it gives up: on a file system without locks (flock) two processes may write to one download, which the digest
finds, and a shard that is being read may be removed, which its reader survives.
"""

import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta

from kdtrain.cache.address import Address
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Digest, Manifest, read_manifest
from kdtrain.errors import RunError, UsageError
from kdtrain.files import Lock, make_folder, publish_json, read_sealed, remove_file, temporary_of, typed

PART = ".part"
GB = 10**9


_ASIDE = re.compile(r"\.damaged-\d+$")
_LEFT = 3600.0
"""Seconds after which a temporary file that nobody writes is what a killed process left."""


class Name(TypedDict):
    """What an address meant when it was last read."""

    address: Annotated[str, Meta(max_length=4000)]
    pinned: Annotated[str, Meta(max_length=4000)]
    """The address of this very version: with the commit on a hub, else the same."""
    cache: Digest


class Full(Exception):
    """There is no room below the limit that may be made."""


def home() -> Path:
    """The local folder, which need not exist."""
    return Path(os.environ.get("KDTRAIN_HOME") or Path.home() / ".cache" / "kdtrain")


def cache_folder(digest: str) -> Path:
    """Where the cache of this manifest is kept."""
    return home() / "caches" / digest


def remember(address: Address, pinned: Address, digest: str) -> None:
    """Keep which cache an address leads to, for a time without a connection; not in a folder that is read-only."""
    with suppress(RunError, UsageError):
        path = _name_path(address)
        make_folder(path.parent)
        publish_json(path, {"address": str(address), "pinned": str(pinned), "cache": digest}, "cache.name")


def recall(address: Address) -> Name | None:
    """What `remember` kept."""
    try:
        found = typed(read_sealed(_name_path(address)), Name)
    except (OSError, ValueError):
        return None
    return found if found["address"] == str(address) else None


def _name_path(address: Address) -> Path:
    return home() / "names" / f"{hashlib.sha256(str(address).encode()).hexdigest()}.json"


_manifests: dict[Path, Manifest] = {}


def kept_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder of `caches`; None if it is none of ours, or damaged."""
    if folder not in _manifests:
        try:
            manifest = read_manifest(folder)
        except (UsageError, RunError, OSError, ValueError):
            return None
        if manifest.digest != folder.name:
            return None
        _manifests[folder] = manifest  # a digest has one content
    return _manifests[folder]


class _File(NamedTuple):
    """A file of a kept cache."""

    path: Path
    size: int
    """What it takes, or will take when its download ends."""
    used: float
    """When it was last read, in seconds since 1970."""
    removable: bool
    """A shard, the part of one, or a damaged one, as the sealed manifest beside it states."""


def _files() -> Iterator[_File]:
    for inside, _, names in os.walk(home()):
        for name in names:
            path = Path(inside, name)
            with suppress(FileNotFoundError):
                yield _file(path, path.lstat())


def _file(path: Path, found: os.stat_result) -> _File:
    folder, size, stem = path.parents[1], found.st_size, _ASIDE.sub("", path.name.removesuffix(PART))
    if temporary_of(path.name) is not None:
        return _File(path, size, found.st_mtime, found.st_mtime < time.time() - _LEFT)
    if path.parent.name == cache_format.SHARDS and stem.endswith(".h5") and stat.S_ISREG(found.st_mode):
        manifest = kept_manifest(folder) if folder.parent == home() / "caches" else None
        stated = {} if manifest is None else sizes(manifest)
        if (whole := stated.get(stem.removesuffix(".h5"))) is not None and (stem != path.name or size == whole):
            if _ASIDE.search(path.name):
                return _File(path, size, 0.0, True)
            return _File(path, whole, max(found.st_atime, found.st_mtime if stem != path.name else 0), True)
    return _File(path, size, found.st_atime, False)


def sizes(manifest: Manifest) -> dict[str, int]:
    """Bytes of each shard by name."""
    return {shard["name"]: shard["bytes"] for split in manifest.splits.values() for shard in split["shards"]}


@contextmanager
def alone() -> Iterator[None]:
    """One process, and one thread of it, at a time."""
    make_folder(home())
    handle = os.open(home() / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def reserve(path: Path, size: int, limit: int, before: float | None = None) -> None:
    """Make room for the new file `path` of `size` bytes, and make it, empty, so that others count it.

    before: remove only what was last read before this time, in seconds since 1970.

    Full: what would have to go is in use, or not kdtrain's.
    """
    with alone():
        files = [each for each in _files() if each.path != path]
        needed = sum(each.size for each in files) + size - limit
        candidates = sorted((each for each in files if each.removable), key=lambda each: each.used)
        for each in candidates if needed > 0 else ():
            if needed <= 0 or (before is not None and each.used >= before):
                break
            if _remove(each.path):
                needed -= each.size
        if needed > 0:
            raise Full
        path.touch()


def _remove(path: Path) -> bool:
    """Remove a shard or a part, unless a process has it locked; whether it is gone."""
    if path.name.endswith(PART):
        try:
            own = download_lock(path.with_name(path.name.removesuffix(PART)))
        except UsageError:
            return False
        with suppress(OSError):
            remove_file(path)
            remove_file(note_path(path))
        own.release()
        return not path.exists()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return not path.exists()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_file(path)
    except OSError:  # in use
        return False
    finally:
        os.close(handle)
    return True


def note_path(part: Path) -> Path:
    """The record beside a part."""
    return part.with_name(f"{part.name}.json")


def download_lock(path: Path) -> Lock:
    """The lock of the one that downloads `path`. UsageError: another has it."""
    return Lock(path.with_name(f".{path.name}.lock"), f"{path} is being downloaded")


def hold(path: Path) -> int | None:
    """Lock a shard against removal, until the handle that is returned is closed; None if it is gone.

    It also counts as read now.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    if there is None or not os.path.samestat(os.fstat(handle), there):  # removed before it was locked
        os.close(handle)
        return None
    with suppress(OSError):  # not ours to touch; its time of writing stays, by which a reader knows it
        os.utime(path, ns=(time.time_ns(), there.st_mtime_ns))
    return handle


def listing() -> tuple[list[dict[str, Any]], int]:
    """What is here, a row for each cache, the one that was read last first; and the bytes that all of it takes."""
    addresses: dict[str, list[str]] = {}
    for path in sorted((home() / "names").glob("*.json")):
        with suppress(OSError, ValueError):
            name = typed(read_sealed(path), Name)
            addresses.setdefault(name["cache"], []).append(name["address"])
    rows, total = [], 0
    by_cache: dict[Path, list[_File]] = {}
    for each in _files():
        total += each.path.lstat().st_size if each.path.exists() else 0
        if len(each.path.relative_to(home()).parts) > 2:
            by_cache.setdefault(home().joinpath(*each.path.relative_to(home()).parts[:2]), []).append(each)
    for folder, files in by_cache.items():
        if (manifest := kept_manifest(folder)) is None:
            continue
        shards = [each for each in files if each.removable and each.path.name.endswith(".h5")]
        rows.append(
            {
                "digest": manifest.digest,
                "from": sorted(addresses.get(manifest.digest, [])),
                "teacher": (manifest.settings.teacher or {}).get("spec"),
                "shards here": len(shards),
                "shards": len(sizes(manifest)),
                "bytes": sum(each.size for each in files if each.removable is False or each in shards),
                "last read": max((each.used for each in shards), default=None),
                "folder": str(folder),
            }
        )
    return sorted(rows, key=lambda row: -(row["last read"] or 0)), total
