"""Publish, seal, read, move aside, remove and lock files: durably, and safely where their author is unknown.

Writing: a file is written under a hidden random name in its own folder, flushed to the disk and renamed, and then the
folder is flushed: a file under its final name is complete, also after a power cut. A JSON record carries a SHA-256 of
its other entries (`digest`), its seal, which shows an edit or damage.

Removing: only this module removes, replaces and renames, and only what kdtrain wrote: a name that `published` owns, a
temporary name, which carries a check sum (`sweep`), a folder whose seal lists every file in it (`remove_folder`). What
may be damaged, or is of unknown origin, is moved aside (`set_aside`), not removed. Nothing is written through a link.

Reading: a seal proves that a file has not changed, not who wrote it. So records are bounded in size and depth and
checked against types, and only regular files are opened, so that no read blocks.

What it gives up: two flushes a file, a few milliseconds.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kdtrain import faults
from kdtrain.errors import RunError, UsageError, log, making, printable, writing

T = TypeVar("T")

SMALL = 2**20
"""Most bytes of a settings file or a record of one shard."""
MEDIUM = 2**25
"""Most bytes of a manifest or of a checkpoint's state; a manifest has 250 a shard."""
LARGE = 2**28
"""Most bytes of a tokenizer.json; the largest known has 3e7."""
_ENTRIES = 2**20
"""Most entries of a record: as Python objects they take fifty times the memory of their text."""
_DEPTH = 64
"""Deepest nesting of a record."""
ASIDE = ("damaged", "left", "old", "replaced")
"""Words that `set_aside` puts into a name."""
_ASIDE = re.compile(rf".+\.(?:{'|'.join(ASIDE)})-\d+")
_TOML = 2**18
"""Most bytes of a TOML file."""
_DOTTED_KEY = re.compile(r"""(?:^|[\s{,\[])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){16}""")
"""The beginning of a dotted key of more than 16 parts."""
_TEMPORARY = re.compile(r"\.((.+)\.[0-9a-f]{8})([0-9a-f]{8})\.tmp")
_SHORT = 50  # most characters of a file's name in names made from it, which must stay below 255 bytes
_POLL = 0.2  # seconds between two attempts to take a lock


# Reading ------------------------------------------------------------------------------------------------------------
def open_regular(path: Path) -> BufferedReader:
    """Open `path` for reading bytes. ValueError: it is not a regular file (reading a pipe would block)."""
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is not a regular file")
    return open(handle, "rb")


def read_bytes(path: Path, limit: int = SMALL) -> bytes:
    """Read the content of a file. OSError: it cannot be read. ValueError: it is not a regular file, or too large."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def read_text(path: Path, limit: int = SMALL) -> str:
    """Read the text of a UTF-8 file. OSError, ValueError: as `read_bytes`, or it is not UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, kind: type[T], limit: int = SMALL) -> T:
    """Read the JSON record in `path` as a `kind` (`typed`). OSError, ValueError: as `read_text`, or it does not fit."""
    return typed(parse_json(read_text(path, limit)), kind)


def refuse_leading_out(path: Path, folders: Iterable[Path]) -> None:
    """Refuse a file that a link puts elsewhere than into one of `folders`: its content is not the folder's own.

    UsageError: names it.
    """
    real = os.path.realpath(path)
    if not any(real.startswith(f"{os.path.realpath(folder)}/") for folder in folders):
        raise UsageError(f"{path} leads to {printable(real)} by a link, which is not read; put a copy there")


def parse_json(text: str, entries: int = _ENTRIES) -> Any:
    """Parse the JSON `text`. ValueError: not JSON, nested too deep, or more than `entries` entries."""
    if sum(map(text.count, "[{,")) > entries:
        raise ValueError(f"it has more than {entries:,} entries")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    refuse_depth(value)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read the TOML table in `path`. OSError, ValueError: as `read_text`, or it is not TOML."""
    text = read_text(path, _TOML)
    # The parser's time grows with the square of the parts of a dotted key.
    if _DOTTED_KEY.search(text):
        raise ValueError("one of its keys has too many dots")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    refuse_depth(table)
    return table


def typed(value: Any, kind: type[T]) -> T:
    """Convert `value`, from JSON or TOML, to `kind`: a dataclass or any annotation. ValueError: a key does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`", "").replace("$.", "")) from None


def refuse_depth(value: Any) -> None:
    """Raise ValueError if `value`, from JSON or TOML, is nested too deep."""
    level = [value]
    for _ in range(_DEPTH):
        tables = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [inner for each in tables for inner in each]
        if not level:
            return
    raise ValueError("it is nested too deep")


# Digests and seals --------------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """Return the one spelling of equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(value: Any) -> str:
    """Return the SHA-256 (hex) over the canonical spelling of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return `record` with `digest`, the SHA-256 of its other entries."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return {**content, "digest": json_digest(content)}


def read_sealed(path: Path, limit: int = SMALL) -> dict[str, Any]:
    """Read the record in `path`. OSError: it cannot be read. ValueError: it is not JSON, or its seal does not match."""
    text = read_text(path, limit)
    record = parse_json(text)
    # The text is compared too: after a flipped bit, another spelling of a number can have the same value.
    if not isinstance(record, dict) or sealed(record) != record or _spelled(record) != text:
        raise ValueError("its content does not match its own digest")
    return record


def _spelled(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) over the bytes of a file. ValueError: it is not a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Publishing ---------------------------------------------------------------------------------------------------------


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk; a pipe or a device is left alone."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if stat.S_IFMT(os.fstat(handle).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            os.fsync(handle)
    finally:
        os.close(handle)


def temporary_name(path: Path) -> Path:
    """Return a new hidden name beside `path`; half of its digits are a check sum, by which `temporary_of` knows it."""
    stem = f"{_short(path.name)}.{secrets.token_hex(4)}"
    return path.with_name(f".{stem}{_check_sum(stem)}.tmp")


def temporary_of(name: str) -> str | None:
    """Return the name, shortened if long, for which `temporary_name` made `name`; None: a stranger made it."""
    found = _TEMPORARY.fullmatch(name)
    return found[2] if found and found[3] == _check_sum(found[1]) else None


def hidden_lock(path: Path) -> Path:
    """Return the name beside `path` of the lock file for a file or folder that is replaced as a whole."""
    return path.with_name(f".{_short(path.name)}.lock")


def _short(name: str) -> str:
    """Return a name of at most `_SHORT` characters, different for different names."""
    return name if len(name) <= _SHORT else f"{name[: _SHORT - 10]}~{_check_sum(name)}"


def _check_sum(text: str) -> str:
    return hashlib.sha256(f"kdtrain {text}".encode(errors="surrogateescape")).hexdigest()[:8]


@contextmanager
def published(path: Path, label: str) -> Iterator[Path]:
    """Yield the name to write to; then publish it as `path`, complete on the disk. An error leaves no file.

    path: in a folder that kdtrain wrote; an earlier file is replaced. label: names the fault points, LABEL.POINT.

    RunError: the disk is full, the folder is read-only, ...; an earlier file at `path` is untouched.
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
    """Publish `text` as the file `path`. RunError: as `published`."""
    with published(path, label) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish_json(path: Path, record: dict[str, Any], label: str) -> dict[str, Any]:
    """Seal `record`, write it to `path`, and return the sealed record."""
    record = sealed(record)
    publish_text(path, _spelled(record), label)
    return record


def point_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, atomically. OSError: there is something that is not a link."""
    if path.exists() and not path.is_symlink():
        raise OSError(errno.EEXIST, "it is not a link", str(path))
    hidden = temporary_name(path)
    hidden.symlink_to(target)
    os.replace(hidden, path)
    fsync(path.parent)


def remove_link(path: Path) -> None:
    """Remove a symbolic link, if there is one."""
    if path.is_symlink():
        path.unlink()


def remove_file(path: Path) -> None:
    """Remove a file that kdtrain wrote, if it is there; of a link the link itself, never its target."""
    path.unlink(missing_ok=True)


def rename_over(source: Path, target: Path) -> None:
    """Replace a file that kdtrain wrote by another one of its own."""
    os.replace(source, target)


@contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder with a temporary name beside `path`, for the block to fill and `swap_in` to rename.

    The folder is removed in the end if it still has the temporary name. OSError: it cannot be made.
    """
    hidden = temporary_name(path)
    hidden.mkdir(parents=True)
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def swap_in(hidden: Path, path: Path, label: str, word: str = "old") -> Path | None:
    """Rename the complete folder `hidden` to `path`; move an earlier folder aside and return its new path.

    label: names the fault points `before-rename` and `between-renames`. word: see `set_aside`.

    UsageError: `path` is a mount point. OSError: `path` is a file or a link, or the disk refuses.
    """
    refuse_mount(path)
    for each in [*hidden.rglob("*"), hidden]:
        if not each.is_symlink():
            fsync(each)
    faults.point(f"{label}.before-rename")
    aside = None
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OSError(errno.ENOTDIR, "it is not a folder", str(path))
    if path.exists() and any(path.iterdir()):
        aside = set_aside(path.parent, path.name, word)
        faults.point(f"{label}.between-renames")
    os.rename(hidden, path)
    fsync(path.parent)
    return aside


def make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents; return the new ones, innermost first.

    UsageError: no folder can exist there. RunError: it cannot be written.
    """
    with making(path):
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    return made


def make_writable(out: Path) -> list[Path]:
    """Call `make_folder` for an `--out`, which must be writable. RunError: it is not."""
    made = make_folder(out)
    if not os.access(out, os.W_OK):
        raise RunError(f"--out {out} cannot be written: permission denied; make the folder writable")
    return made


def refuse_no_folder(out: Path) -> None:
    """Refuse a path where `make_writable` cannot make a folder, and leave nothing behind."""
    with making(out):
        exists = out.exists()
    if not exists:
        remove_empty(make_writable(out))


def remove_empty(made: list[Path]) -> None:
    """Remove the folders that `make_folder` made, if they are still empty."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


# Moving aside and removing ------------------------------------------------------------------------------------------


def refuse_links(folder: Path, allowed: Collection[str] = ()) -> None:
    """Refuse to write into a folder that holds a symbolic link, whose target is not ours.

    allowed: paths of links, relative to the folder; one that ends with a slash is a folder whose links are not ours:
    nothing is written below it. The folder itself may be a link, and so may a temporary name: a command killed in
    `point_link` leaves one, and `sweep` removes it. UsageError: names the link.
    """
    for inside, folders, names in os.walk(folder):
        for name in sorted(folders + names):
            path = Path(inside, name)
            below = path.relative_to(folder).as_posix()
            if path.is_symlink() and not (temporary_of(name) or below in allowed):
                raise UsageError(f"{path} is a link, and nothing is written through links; put a real one there")
            if name in folders and f"{below}/" in allowed:
                folders.remove(name)


def refuse_mount(path: Path) -> None:
    """Refuse to rename or replace a mount point, which the system does not allow. UsageError: names it."""
    if is_mount(path):
        raise UsageError(f"{path} is a mount point, which cannot be moved or replaced; name a folder inside it")


def is_mount(path: Path) -> bool:
    """Return True if a folder is a mount point, also of the same disk, which `os.path.ismount` does not see."""

    def mount(folder: Path) -> list[str]:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lines = Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
        finally:
            os.close(handle)
        return [line for line in lines if line.startswith("mnt_id:")]

    try:
        return os.path.ismount(path) or mount(path) != mount(path / "..")
    except OSError:  # there is no folder
        return False


def refuse_displacing(folder: Path, needed: Mapping[str, Path | str | None]) -> None:
    """Refuse to move or replace a folder if it is a link or a mount point, or if the command needs its contents.

    needed: paths by the words that name them; what does not exist does not count. The current directory is needed, too:
    a relative path would lead into the folder that was moved.

    UsageError: names the link, the mount point or the path.
    """
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link; name the folder itself")
    refuse_mount(folder)
    real = os.path.realpath(folder)
    for words, path in {"the current directory": ".", **needed}.items():
        if path is None or not os.path.exists(path):
            continue
        whole = Path(path).absolute()
        # each step: a link in the folder may lead out of it again
        if any(f"{os.path.realpath(step)}/".startswith(f"{real}/") for step in (whole, *whole.parents)):
            where = f"{words} {path}" if path != "." else words
            raise UsageError(
                f"{folder} would be moved away or replaced, and {where} is in it; name another folder, or "
                + ("run the command from elsewhere" if path == "." else "copy that elsewhere first")
            )


def same_path(one: str | Path, other: str | Path) -> bool:
    """Return True if two paths, relative or through links, lead to the same place."""
    return os.path.realpath(one) == os.path.realpath(other)


def set_aside(folder: Path, name: str, word: str) -> Path:
    """Rename `folder`/`name`, a relative path, to the first free NAME.WORD-1, -2, ...; return the new path.

    word: one of `ASIDE`.

    Of a link, the link is renamed. UsageError: a folder in `name` is a link, or `name` is a mount point. OSError: it
    cannot be renamed.
    """
    assert word in ASIDE, word
    path = folder
    for part in Path(name).parts[:-1]:
        path /= part
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and nothing is changed through links; put a real folder there")
    path = folder / name
    number = 1
    if not path.is_symlink():
        refuse_mount(path)
    while os.path.lexists(aside := path.with_name(f"{path.name}.{word}-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def aside_in(folder: Path) -> list[Path]:
    """Return the paths that `set_aside` has renamed in `folder` itself, by the time of the last write, oldest first.

    Not by number: a free number is used again.
    """
    found = [path for path in folder.iterdir() if _ASIDE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name))


def files_below(folder: Path) -> dict[str, Path]:
    """Return every file in a folder and the folders inside, by its path there, in order."""
    return {each.relative_to(folder).as_posix(): each for each in sorted(folder.rglob("*")) if each.is_file()}


def remove_folder(path: Path, files: Collection[str], label: str) -> bool:
    """Remove a folder that holds only `files`, which its seal lists; return whether it was removed.

    label: the fault point before its files are removed.

    A link, and a folder that holds anything else, stays. OSError: it cannot be changed, and stays unless a part of it
    was removed.
    """
    if path.is_symlink() or not files:
        return False
    folders = {os.path.dirname(name) for name in files}
    for each in path.rglob("*"):
        own = each.relative_to(path).as_posix()
        if each.is_symlink() or not (each.is_file() if own in files else own in folders and each.is_dir()):
            return False
    there = set(os.listdir(path))
    hidden = temporary_name(path)
    os.rename(path, hidden)  # a kill during the removal must not leave half a folder
    try:
        faults.point(label)
        shutil.rmtree(hidden)
    except OSError:
        with suppress(OSError):
            if set(os.listdir(hidden)) == there:  # a read-only folder: nothing was removed
                os.rename(hidden, path)
        raise
    return True


def sweep(folder: Path, of: str | None = None) -> None:
    """Remove the temporary files that killed commands left in a folder; a file that cannot be removed stays.

    of: only those for the file or folder of this name, in a folder that is not of kdtrain alone. The caller holds the
    lock of all that write them.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        name = temporary_of(path.name)
        if name is None or (of is not None and name != _short(of)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


# Locks --------------------------------------------------------------------------------------------------------------


def is_locked(path: Path) -> bool | None:
    """Return True if a process of this machine holds the `Lock` of `path`; None where the system does not say."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment, which a `Lock` waits for
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


class Lock:
    """Excludes other processes from a folder until `release` or the end of the process, also by a kill.

    A killed holder leaves the file, unlocked. On a file system without locks, no process is excluded.

    path: the file to lock, in an existing folder. message: the error if another process holds it.
    name, wait: waits up to so many seconds for a holder of the same name.

    UsageError: another process holds it. RunError: the folder cannot be written.
    """

    def __init__(self, path: Path, message: str, name: str = "", wait: float = 0.0) -> None:
        from filelock import FileLock  # imported here: no mistake waits for it

        self._path = path
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        until = time.monotonic() + wait
        waiting = False
        if any(is_it(path) for is_it in (Path.is_dir, Path.is_fifo, Path.is_socket, Path.is_char_device)):
            raise RunError(f"{path} is not a regular file; remove it")  # one look each: its holder may remove it
        with writing(path):
            while not self._take():
                if not name or self._holder() != name or time.monotonic() > until:
                    raise UsageError(message)
                if not waiting:
                    log.info("waiting for another process to release %s", path)
                waiting = True
            self._own = path.stat()
            with suppress(OSError):  # a full disk
                path.write_text(name)

    def _take(self) -> bool:
        """Try to take the lock; return True if this process holds it now, or the file system has no locks."""
        try:
            self._lock.acquire(timeout=_POLL, poll_interval=_POLL / 10)
        except TimeoutError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        return True

    def _holder(self) -> str:
        try:
            return read_text(self._path)
        except (OSError, ValueError):
            return ""

    def release(self) -> None:
        """Unlock and remove the file."""
        if self._lock.is_locked:
            with suppress(OSError):  # a read-only folder keeps the file, unlocked
                if os.path.samestat(self._own, self._path.stat()):
                    self._path.unlink()
            self._lock.release()
