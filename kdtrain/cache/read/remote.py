"""A cache that lies elsewhere: its manifest first, a shard when it is first read, and the next ones ahead.

`open_remote` fetches the manifest, which is small and sealed, and pins a revision of the hub to its commit. Every other
file is checked against it before it gets its name in the local folder (`local`), through one way (`download`). The
manifest that was read first counts for the whole run. Without a connection, what is here is used, under the digest that
the address had last.

What it gives up: a random order reads from every shard, so a run needs them all within its first steps; below a limit
that is smaller than the cache it fetches them again in every epoch.
"""

import logging
import os
import queue
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from kdtrain.cache.address import Address, parse_address
from kdtrain.cache.download import CONTACTS, PATIENCE, Unreachable, fetch, offline, size_of
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, ShardRecord, read_manifest
from kdtrain.cache.read import local_store
from kdtrain.cache.read.reader import Cache
from kdtrain.config.values import LOCAL_LIMIT
from kdtrain.errors import RunError, UsageError, printable, writing
from kdtrain.files import (
    LARGE,
    MEDIUM,
    SMALL,
    file_digest,
    make_folder,
    published,
    refuse_links,
    remove_file,
    rename_over,
    set_aside,
    temporary_name,
)

log = logging.getLogger("kdtrain")

_THREADS = 2
_IDLE = 5.0
"""Seconds after which a thread that fetches ahead ends."""
_POLL = 0.05
_STALLED = 120.0
"""Seconds without a byte after which a download of another process is no longer waited for."""
_FULL = 60.0
"""Seconds for which room is waited for."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Reader(Protocol):
    """What keeps shards open, of which it can close some for the sake of room."""

    def oldest(self) -> float:
        """When the open shard that was read longest ago was read, by `time.monotonic`; inf: none is open."""

    def give_way(self) -> bool:
        """Close that shard; False: none is open, or another thread is reading."""


_readers: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()
"""All of this process, of any cache: they share one folder, and one may hold what another needs."""


class Remote:
    """A cache elsewhere, and the folder in which what has been fetched of it lies. Not for two threads at once.

    address: pinned. manifest: the one that was read first. limit: bytes of the local folder.
    """

    def __init__(self, address: Address, manifest: Manifest, limit: int, *, connected: bool) -> None:
        self.address, self.manifest, self.limit = address, manifest, limit
        self.connected = connected
        self.folder = local_store.cache_folder(manifest.digest)
        self._began = time.time()
        self._held: dict[str, int] = {}
        self._wanted: queue.SimpleQueue[ShardRecord] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": {}, "_wanted": None, "_asked": set(), "_threads": [], "_process": 0}

    def ensure(self, record: ShardRecord, reader: Reader | None = None) -> Path:
        """Have a shard here, whole, and keep it from removal until `release`.

        reader: the caller, which from now on closes shards for the sake of room, as all others of this process do.

        RunError: it cannot be had (named, with the address).
        """
        self._begin()
        if reader is not None:
            _readers[id(reader)] = reader
        name, path = record["name"], cache_format.shard_path(self.folder, record["name"])
        until = time.monotonic() + _FULL
        while name not in self._held:
            if (handle := local_store.hold(path)) is not None:
                self._held[name] = handle
                if os.fstat(handle).st_size == record["bytes"]:
                    break
                self.put_aside(record)
            try:
                self._fetch_shard(record)
            except local_store.Full:
                if _give_way():
                    continue
                if time.monotonic() > until:
                    raise RunError(
                        f"{self.address}: no room for {name} below --local-limit {self.limit / local_store.GB:g} GB "
                        f"in {local_store.home()}, where all else is in use or not kdtrain's; raise it, or make room"
                    ) from None
                time.sleep(_POLL)
            except UsageError as error:  # it was there when the run began
                raise RunError(str(error)) from error
        return path

    def release(self, name: str) -> None:
        """The shard may be removed from here."""
        if (handle := self._held.pop(name, None)) is not None:
            os.close(handle)

    def put_aside(self, record: ShardRecord) -> None:
        """Move the damaged shard that `ensure` gave aside, so that it fetches it again.

        Another process may have been first, and the file there now be the one that it fetched: that stays.
        """
        handle, path = self._held.get(record["name"]), cache_format.shard_path(self.folder, record["name"])
        with writing(path), suppress(FileNotFoundError), local_store.alone():
            if handle is not None and os.path.samestat(os.fstat(handle), os.lstat(path)):
                moved = set_aside(self.folder, f"{cache_format.SHARDS}/{path.name}", "damaged")
                log.warning("%s is not as it was fetched; it is now %s, and is fetched again", path, moved.name)
        self.release(record["name"])

    def ahead(self, records: Iterable[ShardRecord]) -> None:
        """Have shards fetched in the background, in this order, as far as there is room."""
        self._begin()
        if not self.connected:
            return
        for record in records:
            if record["name"] not in self._asked:
                self._asked.add(record["name"])
                self._wanted.put(record)
        self._threads = [each for each in self._threads if each.is_alive()]
        while len(self._threads) < _THREADS and not self._wanted.empty():
            # a daemon: the end of the process does not wait for what nobody asked for
            thread = threading.Thread(target=self._work, args=(self._wanted,), daemon=True, name="cache-fetch")
            self._threads.append(thread)
            thread.start()

    def bring(self, name: str, sha256: str, most: int = LARGE) -> Path:
        """Have a small file here: one of the tokenizer, the index. UsageError, RunError: it cannot be had."""
        return self._bring(name, lambda folder: file_digest(folder / name) == sha256, most, sha256)

    def bring_sealed(self, name: str, sound: Callable[[Path], bool]) -> Path:
        """Have a record here. sound: whether that in a folder is what the manifest states.

        UsageError, RunError: it cannot be had.
        """
        return self._bring(name, sound, SMALL, None)

    def _bring(self, name: str, sound: Callable[[Path], bool], most: int, sha256: str | None) -> Path:
        path, what = self.folder / name, f"{self.address}: {printable(name)}"
        if path.is_file() and sound(self.folder):
            return path
        self._refuse_offline(name)
        with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
            part = Path(folder) / name
            part.parent.mkdir(parents=True, exist_ok=True)
            fetch(
                *(self.address.url(name), part),
                what=what,
                most=most,
                sha256=sha256,
                headers=_headers(self.address),
            )
            if not sound(Path(folder)):
                raise RunError(f"{what} is not what the manifest states, and was not kept; ask its author")
            make_folder(path.parent)
            _publish(part, path, self.limit, self.address)
        return path

    def bring_tokenizer(self) -> None:
        """Have the files of the tokenizer here."""
        for name, digest in self.manifest.tokenizer_files.items():
            self.bring(f"{cache_format.TOKENIZER}/{name}", digest)

    def missing(self, split: str) -> list[str]:
        """The shards of a split that are not here, by name."""
        shards = self.manifest.splits[split]["shards"]
        return [each["name"] for each in shards if not cache_format.shard_path(self.folder, each["name"]).exists()]

    def _refuse_offline(self, name: str) -> None:
        if not self.connected:
            raise Unreachable(
                f"{self.address}: {printable(name)} is not here, and there is no connection"
                f"{' (HF_HUB_OFFLINE)' if offline() else ''}; connect, and run the same command again"
            )

    def _fetch_shard(self, record: ShardRecord, before: float | None = None) -> None:
        """Fetch a shard, or wait until another process or thread has. Full: there is no room.

        before: see `local.reserve`.
        """
        name, path = record["name"], cache_format.shard_path(self.folder, record["name"])
        self._refuse_offline(f"shard {name}")
        part = path.with_name(f"{path.name}{local_store.PART}")
        make_folder(path.parent)
        if (lock := _wait(path, part)) is None:
            return
        try:
            if path.exists():
                return
            if lock == "":  # its download has stalled
                part = temporary_name(path)
            local_store.reserve(part, record["bytes"], self.limit, before)
            log.debug("fetching %s of %s", name, self.address)
            fetch(
                *(self.address.url(f"{cache_format.SHARDS}/{path.name}"), part),
                what=f"{self.address}: shard {name}",
                most=record["bytes"],
                exact=True,
                sha256=record["sha256"],
                headers=_headers(self.address),
            )
            with published(path, "cache.fetch") as temporary:
                rename_over(part, temporary)
            with suppress(OSError):
                remove_file(local_store.note_path(part))
        finally:
            if not isinstance(lock, str):
                lock.release()

    def _begin(self) -> None:
        """In a new process: no thread, and no lock of its own."""
        if self._process == os.getpid():
            return
        for handle in self._held.values():
            os.close(handle)
        self._held, self._asked, self._wanted, self._threads = {}, set(), queue.SimpleQueue(), []
        self._process = os.getpid()

    def _work(self, wanted: "queue.SimpleQueue[ShardRecord]") -> None:
        while True:
            try:
                record = wanted.get(timeout=_IDLE)
            except queue.Empty:
                return
            path = cache_format.shard_path(self.folder, record["name"])
            try:
                if not path.exists():
                    self._fetch_shard(record, before=self._began)
            except (local_store.Full, UsageError, RunError, OSError) as error:  # who reads it will be told
                log.debug("not fetched ahead: %s", error)
            self._asked.discard(record["name"])


def _give_way() -> bool:
    """Close the shard that was read longest ago by any reader of this process that does not read now."""
    there = [reader for each in _readers.valuerefs() if (reader := each()) is not None]
    return any(reader.give_way() for reader in sorted(there, key=lambda reader: reader.oldest()))


def _wait(path: Path, part: Path) -> Any:
    """The lock of a download; None once another has brought the file; "" if another does not get on with it."""
    seen, since = -1, time.monotonic()
    while not path.exists():
        try:
            return local_store.download_lock(path)
        except UsageError:
            size = size_of(part)
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > _STALLED:
                return ""
            time.sleep(_POLL)
    return None


def open_remote(address: Address, limit: float = LOCAL_LIMIT) -> Remote:
    """Open the cache at an address.

    limit: GB of the local folder.

    UsageError: there is none, or it is not to be had. RunError: it cannot be reached, and nothing of it is here.
    """
    bytes_, known = int(min(limit, 1e9) * local_store.GB), local_store.recall(address)
    here = None if known is None else local_store.kept_manifest(local_store.cache_folder(known["cache"]))
    connected = not offline()
    if connected:
        try:
            pinned, manifest = _fetch_manifest(address, PATIENCE if here is None else 2, bytes_)
        except Unreachable as error:
            if here is None:
                raise
            connected = False
            log.warning("%s; using what is here", str(error.args[0]).partition(". What")[0])
    if not connected:
        if known is None or here is None:
            raise UsageError(f"{address}: nothing of it is here, and there is no connection (HF_HUB_OFFLINE); connect")
        pinned, manifest = Address(known["pinned"], address.repository, known["pinned"].rpartition("@")[2]), here
    elif known is not None and known["cache"] != manifest.digest:
        log.warning("%s: another cache lies there than before (%s instead of %s)", address, *_short(manifest, known))
    _refuse_small(address, manifest, bytes_)
    remote = Remote(pinned, manifest, bytes_, connected=connected)
    if remote.folder.exists():
        refuse_links(remote.folder)
    if not connected and (gone := [name for split in manifest.splits for name in remote.missing(split)]):
        names = f"{gone[0]}{', ...' if len(gone) > 1 else ''}"
        log.warning("%s: there is no connection, and %d of its shards are not here (%s)", address, len(gone), names)
    return remote


def open_cache(where: Path | str, limit: float = LOCAL_LIMIT) -> Cache:
    """The finished cache in a folder, or at an address. UsageError, RunError: as `Cache`, as `open_remote`."""
    if (address := parse_address(where)) is None:
        return Cache(where)
    remote = open_remote(address, limit)
    return Cache(remote.folder, remote.manifest, remote)


def read_small(address: Address, name: str, most: int) -> bytes:
    """The content of a small file, which is not kept. UsageError, Unreachable, RunError: as `fetch`."""
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
        part = Path(folder) / "part"
        what = f"{address}: {printable(name)}"
        fetch(address.url(name), part, what=what, most=most, headers=_headers(address))
        return part.read_bytes()


def _short(manifest: Manifest, known: local_store.Name) -> tuple[str, str]:
    return manifest.digest[:12], known["cache"][:12]


def _refuse_small(address: Address, manifest: Manifest, limit: int) -> None:
    largest = max(local_store.sizes(manifest).values(), default=0)
    if largest > limit:
        raise UsageError(
            f"{address}: --local-limit {limit / local_store.GB:g} is less than its largest shard, of "
            f"{largest / local_store.GB:.3g} GB; raise it"
        )
    if (total := sum(local_store.sizes(manifest).values())) > limit:
        log.warning(
            "%s has %.3g GB, and --local-limit is %g: shards will be fetched again in every epoch; raise it if you can",
            *(address, total / local_store.GB, limit / local_store.GB),
        )


def _publish(part: Path, path: Path, limit: int, address: Address) -> None:
    """Give a small file that was fetched its name in the local folder."""
    with published(path, "cache.fetch") as temporary:
        try:
            local_store.reserve(temporary, part.stat().st_size, limit)
        except local_store.Full:
            raise RunError(f"{address}: no room for {path.name} below --local-limit; raise it") from None
        shutil.copyfile(part, temporary)


def _fetch_manifest(address: Address, patience: int, limit: int) -> tuple[Address, Manifest]:
    """The pinned address, and the manifest that lies there, which is then in the local folder."""
    pinned = _pinned(address, patience) if address.repository else address
    known = local_store.recall(pinned) if pinned.repository else None  # a commit does not change
    if known is not None and (here := local_store.kept_manifest(local_store.cache_folder(known["cache"]))) is not None:
        local_store.remember(address, pinned, here.digest)
        return pinned, here
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
        part = Path(folder) / cache_format.MANIFEST
        with _named(address):
            fetch(
                *(pinned.url(cache_format.MANIFEST), part),
                what=f"{pinned}: {cache_format.MANIFEST}",
                most=MEDIUM,
                headers=_headers(pinned),
                patience=patience,
                contacts=CONTACTS,
            )
        try:
            manifest = read_manifest(folder)
        except UsageError as error:
            raise UsageError(f"{pinned}: {_wrong(error, part)}") from error
        target = local_store.cache_folder(manifest.digest) / cache_format.MANIFEST
        if local_store.kept_manifest(target.parent) is None:
            make_folder(target.parent)
            _publish(part, target, limit, pinned)
    for each in {address, pinned}:
        local_store.remember(each, pinned, manifest.digest)
    return pinned, manifest


@contextmanager
def _named(address: Address) -> Iterator[None]:
    """Say of a place without a manifest that it holds no cache."""
    try:
        yield
    except UsageError as error:
        text = str(error.args[0])
        if "is not there (4" not in text:
            raise
        raise UsageError(
            f"{address} holds no cache that kdtrain wrote (no {cache_format.MANIFEST}); check the address"
        ) from error


def _wrong(error: UsageError, part: Path) -> str:
    """What is wrong with a manifest, without advice for a folder of one's own."""
    if isinstance(error.__cause__, ValueError):
        return f"its manifest was altered or damaged ({printable(str(error.__cause__))[:300]}); ask its author"
    return str(error.args[0]).replace(str(part), f"its {cache_format.MANIFEST}").partition(": build")[0]


def _headers(address: Address) -> dict[str, str]:
    if address.repository is None:
        return {}
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="kdtrain")


def _pinned(address: Address, patience: int) -> Address:
    """A data set of the hub at the commit that its revision is now.

    UsageError: there is none, or it is not to be had. Unreachable: the hub does not answer.
    """
    if _COMMIT.fullmatch(address.revision):
        return address
    from kdtrain.cache.hub import commit_of

    return address.at(commit_of(address, patience))
