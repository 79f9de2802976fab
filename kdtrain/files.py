"""Files that must last, and files that a stranger may have written: published, sealed, read, moved aside, locked.

Writing: a file is written under a hidden random name in its own folder, flushed to the disk, renamed, and the folder
is flushed after it: whoever sees the name sees the whole content, also after a power cut. A JSON record carries a
SHA-256 over the rest of itself (`digest`), its seal, so that an edited or damaged one is noticed.

Removing: this module alone removes, replaces and renames, and only what kdtrain wrote: a name that `published` owns,
a temporary name that it made (`sweep`), a folder whose seal vouches for every file in it (`remove_folder`). What may be
damaged, or is of unknown origin, is moved aside (`set_aside`), not removed. Nothing is done behind a link.

Reading: a seal proves that a file was not changed since, not who made it. Records are therefore bounded in size and
depth, checked against types, and nothing but a regular file is ever opened, so that no read blocks.

What it gives up: two flushes a file, a few milliseconds.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kdtrain import faults
from kdtrain.errors import RunError, UsageError, making, writing

T = TypeVar("T")
log = logging.getLogger("kdtrain")

PUBLISH_POINTS = ("before-fsync", "before-rename", "before-folder-fsync", "after-publish")
"""The fault points of one `published` file, in order; the full name is LABEL.POINT."""

SMALL = 2**20
"""Bytes of a settings file, a record of one shard at most."""
MEDIUM = 2**25
"""Bytes of a manifest or of a checkpoint's state at most; a manifest has 250 a shard."""
LARGE = 2**28
"""Bytes of a tokenizer.json at most; the largest known has 3e7."""
_ENTRIES = 2**20
"""How many entries a record may have: as Python objects they take fifty times the space that they take as text."""
_DEPTH = 64
"""How deep a record may be nested."""
ASIDE = ("damaged", "left", "old", "replaced")
"""Words that `set_aside` puts into a name."""
_ASIDE = re.compile(rf".+\.(?:{'|'.join(ASIDE)})-\d+")
_TOML = 2**18
"""Bytes of a TOML file at most."""
_DOTTED_KEY = re.compile(r"""(?:^|[\s{,\[])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){16}""")
"""The beginning of a dotted key of more than 16 parts."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
_POLL = 0.2
"""Seconds between two looks at a lock that is waited for."""


# Reading ------------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> BufferedReader:
    """`path` for reading bytes. ValueError: it is not a regular file, such as a pipe, whose reader would wait."""
    # Without O_NONBLOCK, opening a pipe waits for a writer before its kind can be asked for.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is not a regular file")
    return open(handle, "rb")


def read_bytes(path: Path, limit: int = SMALL) -> bytes:
    """The content of a file. OSError: it cannot be read. ValueError: it is not a regular file, or too large."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def read_text(path: Path, limit: int = SMALL) -> str:
    """The text of a UTF-8 file. OSError, ValueError: as `read_bytes`, or it is not UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, kind: type[T], limit: int = SMALL) -> T:
    """The JSON record in `path` as a `kind` (see `typed`). OSError, ValueError: as `read_text`, or it is not one."""
    return typed(parse_json(read_text(path, limit)), kind)


def parse_json(text: str, entries: int = _ENTRIES) -> Any:
    """The value that `text` spells. ValueError: not JSON, nested too deep, or of more than `entries`."""
    if sum(map(text.count, "[{,")) > entries:
        raise ValueError(f"it has more than {entries:,} entries")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _refuse_depth(value)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML table in `path`. OSError, ValueError: as `read_text`, or it is not TOML."""
    text = read_text(path, _TOML)
    # The parser takes time that grows with the square of the parts of a dotted key.
    if _DOTTED_KEY.search(text):
        raise ValueError("a key of it has too many dots")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _refuse_depth(table)
    return table


def typed(value: Any, kind: type[T]) -> T:
    """`value`, of JSON or TOML, as a `kind`: a dataclass or any annotation. ValueError: the key that does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`", "").replace("$.", "")) from None


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEPTH):
        tables = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [inner for each in tables for inner in each]
        if not level:
            return
    raise ValueError("it is nested too deep")


# Digests and seals --------------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """One spelling for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical spelling of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with `digest`, the SHA-256 over everything else in it."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return {**content, "digest": json_digest(content)}


def read_sealed(path: Path, limit: int = SMALL) -> dict[str, Any]:
    """The record in `path`. OSError: it cannot be read. ValueError: it is not JSON, or its seal does not match."""
    text = read_text(path, limit)
    record = parse_json(text)
    # The text is compared too: two spellings of a number can be one value, and a flipped bit is to be seen.
    if not isinstance(record, dict) or sealed(record) != record or _spelled(record) != text:
        raise ValueError("its content does not match its own digest")
    return record


def _spelled(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def file_digest(path: Path) -> str:
    """SHA-256 (hex) over the bytes of a file. ValueError: it is not a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Publishing ---------------------------------------------------------------------------------------------------------


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk; nothing is done for a pipe or a device, whose opening may wait."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if stat.S_IFMT(os.fstat(handle).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            os.fsync(handle)
    finally:
        os.close(handle)


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path`, unused so far, that `sweep` knows."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(6)}.tmp")


@contextmanager
def published(path: Path, label: str) -> Iterator[Path]:
    """Yield the name to write to; afterwards `path` is complete on the disk. On any error nothing is left behind.

    path: in a folder that kdtrain wrote; what stands there is replaced. label: of its fault points.

    RunError: the disk is full, the folder is read-only, ...; the file that stood at `path` before is untouched.
    """
    temporary = temporary_name(path)
    try:
        with writing(path):
            yield temporary
            faults.point(f"{label}.before-fsync")
            fsync(temporary)
            faults.point(f"{label}.before-rename")
            os.replace(temporary, path)
            faults.point(f"{label}.before-folder-fsync")
            fsync(path.parent)
            faults.point(f"{label}.after-publish")
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def publish_text(path: Path, text: str, label: str) -> None:
    """Replace the file `path` by `text`, whole. RunError: as `published`."""
    with published(path, label) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish_json(path: Path, record: dict[str, Any], label: str) -> dict[str, Any]:
    """Seal `record`, write it to `path`, and return the sealed record."""
    record = sealed(record)
    publish_text(path, _spelled(record), label)
    return record


def point_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, at once. OSError: something that is not a link stands there."""
    if path.exists() and not path.is_symlink():
        raise OSError(errno.EEXIST, "something that is not a link stands there", str(path))
    hidden = temporary_name(path)
    hidden.symlink_to(target)
    os.replace(hidden, path)
    fsync(path.parent)


def remove_link(path: Path) -> None:
    """Remove a symbolic link, if there is one."""
    if path.is_symlink():
        path.unlink()


@contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """A new folder with a temporary name beside `path`, to be filled and given its name by `swap_in`.

    Whatever bears the temporary name in the end is removed. OSError: it cannot be made.
    """
    hidden = temporary_name(path)
    hidden.mkdir(parents=True)
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def swap_in(hidden: Path, path: Path, label: str, word: str = "old") -> Path | None:
    """Give a folder that is complete its name; a folder that has it is moved aside, and its new path returned.

    label: of the fault points `before-rename` and `between-renames`. word: see `set_aside`.

    OSError: a file or a link is in the way, or the disk does not take it.
    """
    for each in [*hidden.rglob("*"), hidden]:
        if not each.is_symlink():
            fsync(each)
    faults.point(f"{label}.before-rename")
    aside = None
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OSError(errno.ENOTDIR, "something that is not a folder stands there", str(path))
    if path.exists() and any(path.iterdir()):
        aside = set_aside(path.parent, path.name, word)
        faults.point(f"{label}.between-renames")
    os.rename(hidden, path)
    fsync(path.parent)
    return aside


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it; the ones that were not there before, innermost first.

    UsageError: no folder can be there. RunError: it cannot be written.
    """
    with making(path):
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    return made


def remove_empty(made: list[Path]) -> None:
    """Remove what `make_folder` made and is still empty."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


# Moving aside and removing ------------------------------------------------------------------------------------------


def refuse_links(folder: Path, allowed: Collection[str] = ()) -> None:
    """Refuse to write into a folder with a symbolic link in it: what lies behind one belongs to somebody else.

    allowed: paths of links, relative to the folder. The folder itself may be a link, and so may what bears a temporary
    name: a command killed in `point_link` leaves one, and `sweep` removes it. UsageError: names the link.
    """
    for inside, folders, names in os.walk(folder):
        for name in sorted(folders + names):
            path = Path(inside, name)
            allows = _TEMPORARY.fullmatch(name) or path.relative_to(folder).as_posix() in allowed
            if path.is_symlink() and not allows:
                raise UsageError(f"{path} is a link, and nothing is written through links; put a real one there")


def set_aside(folder: Path, name: str, word: str) -> Path:
    """Rename `folder`/`name`, a relative path, to the first free NAME.WORD-1, -2, ...; the new path.

    word: one of `ASIDE`.

    A link is renamed itself. UsageError: a folder on the way to it is a link. OSError: it cannot be renamed.
    """
    assert word in ASIDE, word
    path = folder
    for part in Path(name).parts[:-1]:
        path /= part
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and nothing is changed behind links; put a real folder there")
    path, number = folder / name, 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{word}-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def aside_in(folder: Path) -> list[Path]:
    """What `set_aside` has renamed in `folder` itself, by name, oldest first: the one that was written to longest ago.

    Numbers do not tell: one that has become free is given again.
    """
    found = [path for path in folder.iterdir() if _ASIDE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name))


def remove_folder(path: Path, files: Collection[str], label: str) -> bool:
    """Remove a folder that holds `files`, those that a seal in it vouches for, and nothing else.

    label: the fault point while its files go.

    False: it holds something else, or is a link, and stays as it is. OSError: it cannot be changed.
    """
    if path.is_symlink() or not files:
        return False
    with os.scandir(path) as inside:
        if any(each.name not in files or not each.is_file(follow_symlinks=False) for each in inside):
            return False
    hidden = temporary_name(path)
    os.rename(path, hidden)  # a kill while its files go must not leave half of it
    faults.point(label)
    shutil.rmtree(hidden)
    return True


def sweep(folder: Path) -> None:
    """Remove what killed commands left half written in a folder of kdtrain's own, by the names that it makes up."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if not _TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


# Locks --------------------------------------------------------------------------------------------------------------


class Lock:
    """Keeps other processes out of a folder, from now until `release` or the end of the process, however it ends.

    What a killed holder leaves is a file that nobody holds and that keeps nobody out. On a file system without locks
    nobody is kept out.

    path: the file that is locked, in a folder that exists. message: the error where another process holds it.
    name, wait: a holder of the same name is waited for, for so many seconds.

    UsageError: another process holds it. RunError: the folder cannot be written.
    """

    def __init__(self, path: Path, message: str, name: str = "", wait: float = 0.0) -> None:
        self._path = path
        until, waiting = time.monotonic() + wait, False
        with writing(path):
            while (holder := self._take()) is not None:
                if not name or holder != name or time.monotonic() > until:
                    raise UsageError(message)
                if not waiting:
                    log.info("waiting for an earlier attempt of this launch to release %s", path)
                waiting = True
                time.sleep(_POLL)
            with suppress(OSError):  # a full disk
                os.ftruncate(self._file.fileno(), 0)
                os.write(self._file.fileno(), name.encode())

    def _take(self) -> str | None:
        """None once it is held here, else the name of its holder."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            handle = os.open(self._path, flags, 0o666)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                raise RunError(f"{self._path} is not a regular file; remove it")
            self._file = open(handle, "r+", errors="replace")  # noqa: SIM115  (held open as long as the lock)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with self._file:
                    return self._file.read(SMALL)
            except OSError:
                return None
            if self._stands():
                return None
            self._file.close()  # the last holder has just removed it

    def _stands(self) -> bool:
        """Whether the file that is locked still has its name."""
        return self._path.exists() and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())

    def release(self) -> None:
        """Let others in, and remove the file."""
        if self._file.closed:
            return
        with suppress(OSError):  # a folder that has become read-only keeps the file, which then keeps nobody out
            if self._stands():
                self._path.unlink()
        self._file.close()
