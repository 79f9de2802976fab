"""A cache that lies elsewhere: its manifest first, a shard when it is first read, and the next ones ahead.

`open_cache` fetches the manifest, which is small and sealed; the one that was read first counts for the whole run. A
cache on the hub lies in HF_HOME, where the hub's client keeps it (`net.hub`), pinned to the commit of its revision. One
of a web server lies in `KDTRAIN_HOME/caches/DIGEST`, by the digest of its manifest, so that the same cache from two
places is kept once; a file gets its name there after its check, and `KDTRAIN_HOME/names` holds the digest that an
address had last. Without a connection, what is here is used.

What it gives up: nothing is removed for room (`hf cache`, or the folder by hand); on a file system without locks two
processes may write to one download, which the digest finds.
"""

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Digest, Manifest, ShardRecord, check_sizes, read_manifest
from kdtrain.errors import RunError, UsageError, log, printable, writing
from kdtrain.files import (
    LARGE,
    MEDIUM,
    Lock,
    file_digest,
    hidden_lock,
    make_folder,
    publish_json,
    published,
    read_sealed,
    refuse_links,
    remove_file,
    rename_over,
    set_aside,
    typed,
)
from kdtrain.net.address import Address, Unreachable, offline, parse_address
from kdtrain.sandbox import home

_THREADS = 2
"""That fetch ahead."""


class Remote:
    """A cache elsewhere, and the folder that holds the files fetched from it: a `ShardSource`.

    address: of the hub, pinned to a commit, or of a web server. manifest: the one that was read first.
    """

    def __init__(self, address: Address, folder: Path, manifest: Manifest, *, connected: bool) -> None:
        self.address, self.folder, self.manifest, self.connected = address, folder, manifest, connected
        self._wanted: list[ShardRecord] = []
        self._fetching: set[str] = set()
        self._threads: list[threading.Thread] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wanted": [], "_fetching": set(), "_threads": []}

    def ensure(self, record: ShardRecord, altered: bool = False) -> Path:
        """Fetch a whole shard, unless it is here. altered: the file here has another digest than the record.

        RunError: it cannot be fetched (named, with the address).
        """
        path = cache_format.shard_path(self.folder, record["name"])
        if not altered and path.is_file() and path.stat().st_size == record["bytes"]:
            return path
        try:
            name = path.relative_to(self.folder).as_posix()
            return self.bring(name, record["sha256"], record["bytes"], exact=True)
        except UsageError as error:  # it was there when the run began
            raise RunError(str(error)) from error

    def bring(
        self, name: str, expected: str | Callable[[Path], bool], most: int = LARGE, *, exact: bool = False
    ) -> Path:
        """Fetch a file, unless it is here: one of the tokenizer, the index, a record, or a shard; return its path.

        expected: its SHA-256, or whether a file is what the manifest states. most: bytes that it may have. exact: it
        has exactly these.

        UsageError, RunError: it cannot be fetched.
        """
        path = self.folder / name
        what = f"{self.address}: {printable(name)}"

        def sound(path: Path) -> bool:
            return file_digest(path) == expected if isinstance(expected, str) else expected(path)

        if path.is_file() and sound(path):
            return path
        if not self.connected:
            raise Unreachable(
                f"{what} is not here, and there is no connection{' (HF_HUB_OFFLINE)' if offline() else ''}; "
                "connect, and run the same command again"
            )
        log.debug("fetching %s of %s", name, self.address)
        wrong = (
            f"{what} is not what the manifest states: it was altered, or the cache was replaced there; name a "
            "revision, or ask its author"
        )
        if self.address.repository is not None:
            from kdtrain.net.hub import fetch_file

            for again in (False, True):
                if sound(path := fetch_file(self.address, name, most=most, exact=exact, again=again)):
                    return path
            raise RunError(wrong)
        from kdtrain.net.request import download  # with requests, which a local cache does without

        make_folder(path.parent)
        part = path.with_name(f"{path.name}.part")
        lock = Lock(hidden_lock(path), f"{path} is being downloaded", path.name, wait=3600.0)
        try:
            if path.is_file():
                if sound(path):  # another process was first
                    return path
                with writing(path):
                    moved = set_aside(self.folder, name, "damaged")
                log.warning("%s is not as it was fetched; it is now %s, and is fetched again", path, moved.name)
            for _ in range(2):
                download(self.address.url(name), part, what=what, most=most, exact=exact)
                if sound(part):
                    with published(path, "cache.fetch") as temporary:
                        rename_over(part, temporary)
                    return path
                with writing(part):
                    remove_file(part)
            raise RunError(wrong)
        finally:
            lock.release()

    def bring_tokenizer(self) -> None:
        """Fetch the files of the tokenizer."""
        for name, digest in self.manifest.tokenizer_files.items():
            self.bring(f"{cache_format.TOKENIZER}/{name}", digest)

    def missing(self, split: str) -> list[str]:
        """Return the names of the shards of a split that are not here."""
        shards = self.manifest.splits[split]["shards"]
        return [each["name"] for each in shards if not cache_format.shard_path(self.folder, each["name"]).exists()]

    def ahead(self, records: Iterable[ShardRecord]) -> None:
        """Fetch shards in the background, in this order, in place of the ones wanted before."""
        self._wanted = [each for each in records if each["name"] not in self._fetching] if self.connected else []
        self._threads = [each for each in self._threads if each.is_alive()]
        for _ in range(min(len(self._wanted), _THREADS - len(self._threads))):
            # a daemon: the end of the process does not wait for what nobody reads
            thread = threading.Thread(target=self._fetch_wanted, daemon=True, name="cache-fetch")
            self._threads.append(thread)
            thread.start()

    def _fetch_wanted(self) -> None:
        with suppress(IndexError):
            while True:
                record = self._wanted.pop(0)
                self._fetching.add(record["name"])
                try:
                    self.ensure(record)
                except (UsageError, RunError, OSError) as error:  # the reader will raise it
                    log.debug("not fetched ahead: %s", error)
                finally:
                    self._fetching.discard(record["name"])


def stated_by(where: Path | str) -> tuple[str, Manifest]:
    """Return a cache's name and its manifest, without torch. UsageError, RunError: as `open_cache`."""
    if (address := parse_address(where)) is not None:
        return str(address), open_remote(address).manifest
    manifest = read_manifest(where)
    check_sizes(where, manifest)
    return str(Path(where)), manifest


def open_remote(address: Address) -> Remote:
    """Open the cache at an address.

    UsageError: there is none, or it needs a permission. RunError: it cannot be reached, and nothing of it is here.
    """
    here = remote = _kept_remote(address)
    if not offline():
        try:
            remote = _fetched_remote(address, brief=here is not None)
        except Unreachable as error:
            if here is None:
                raise
            log.warning("%s; using what is here", str(error.args[0]).partition(". What")[0])
    if remote is None:
        raise UsageError(f"{address}: nothing of it is here, and there is no connection (HF_HUB_OFFLINE); connect")
    if here is not None and here.manifest.digest != remote.manifest.digest and address.repository is None:
        digests = remote.manifest.digest[:12], here.manifest.digest[:12]
        log.warning("%s: another cache lies there than before (%s instead of %s)", address, *digests)
    if not remote.connected and (gone := [name for split in remote.manifest.splits for name in remote.missing(split)]):
        names = f"{gone[0]}{', ...' if len(gone) > 1 else ''}"
        log.warning("%s: there is no connection, and %d of its shards are not here (%s)", address, len(gone), names)
    return remote


def _kept_remote(address: Address) -> Remote | None:
    """Return a cache as it was last read, from the files here; None if there are none."""
    if address.repository is not None:
        from kdtrain.net.hub import kept_file

        path = kept_file(address, cache_format.MANIFEST)
        return None if path is None else _pinned(address, path, connected=False)
    try:
        known = typed(read_sealed(_name_path(address)), _Name)
        return Remote(address, *_kept(known["cache"]), connected=False)
    except (OSError, ValueError, UsageError, RunError):
        return None


def _fetched_remote(address: Address, *, brief: bool) -> Remote:
    """Return a cache as it is now, on the hub at the commit of its revision. brief: a copy here can take its place."""
    from kdtrain.net import hub, request

    retry = request.BRIEF if brief else request.CONTACT
    name = cache_format.MANIFEST
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
        part = Path(folder) / name
        try:
            if address.repository is not None:
                path = hub.fetch_file(address, name, most=MEDIUM, retry=retry)
                return _pinned(address, path, connected=True)
            request.download(address.url(name), part, what=f"{address}: {name}", most=MEDIUM, retry=retry)
        except UsageError as error:
            if "is not there (4" not in str(error.args[0]):
                raise
            raise UsageError(f"{address} holds no cache that kdtrain wrote (no {name}); check the address") from error
        manifest = _manifest(part.parent, address)
        kept = cache_folder(manifest.digest)
        make_folder(kept)
        refuse_links(kept)
        try:
            _kept(manifest.digest)
        except (OSError, ValueError, UsageError):
            with published(kept / name, "cache.fetch") as temporary:
                shutil.copyfile(part, temporary)
    with suppress(RunError, UsageError):  # a folder that is read-only
        make_folder(_name_path(address).parent)
        publish_json(_name_path(address), {"address": str(address), "cache": manifest.digest}, "cache.name")
    return Remote(address, kept, manifest, connected=True)


def _pinned(address: Address, path: Path, connected: bool) -> Remote:
    """Return a data set of the hub at the commit of its manifest's path."""
    pinned = address.at(path.parent.name)
    return Remote(pinned, path.parent, _manifest(path.parent, pinned), connected=connected)


class _Name(TypedDict):
    """The cache that an address led to when it was last read."""

    address: Annotated[str, Meta(max_length=4000)]
    cache: Digest


def cache_folder(digest: str) -> Path:
    """Return the folder in which the cache with this manifest's digest is kept."""
    return home() / "caches" / digest


def _name_path(address: Address) -> Path:
    return home() / "names" / f"{hashlib.sha256(str(address).encode()).hexdigest()}.json"


def _kept(digest: str) -> tuple[Path, Manifest]:
    """Return the folder of a cache that was fetched before, and its manifest. UsageError, OSError: there is none."""
    manifest = read_manifest(folder := cache_folder(digest))
    if manifest.digest != digest:
        raise UsageError(f"{folder} holds another cache than its name states; move it away")
    return folder, manifest


def kept_manifest(where: Path | str, digest: str) -> Manifest:
    """Return the manifest of a cache that a run has read, without the network. UsageError, OSError: it is not here."""
    if (address := parse_address(where)) is None:
        return read_manifest(where)
    if address.repository is None:
        return _kept(digest)[1]
    if (remote := _kept_remote(address)) is None:
        raise UsageError(f"{address} is not here; inspect it once with a connection")
    return remote.manifest


def _manifest(folder: Path, address: Address) -> Manifest:
    try:
        return read_manifest(folder)
    except UsageError as error:
        if isinstance(error.__cause__, ValueError):
            cause = printable(str(error.__cause__))[:300]
            raise UsageError(f"{address}: its manifest was altered or damaged ({cause}); ask its author") from error
        text = str(error.args[0]).replace(str(folder / cache_format.MANIFEST), f"its {cache_format.MANIFEST}")
        raise UsageError(f"{address}: {text.partition(': build')[0]}") from error
