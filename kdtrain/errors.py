"""The two errors that end a command, the exit code of each, and the log.

A `UsageError` is raised before the command has done anything, for a request that cannot work: an unknown option, a
vocabulary that does not fit, an unfinished cache. A `RunError` is raised for a failure while running. Both carry one
line that says what is wrong, where, and what to do; the command prints that line and no traceback. `writing` and
`making` turn an error of the operating system into one of the two, also if another library passes it on.
"""

import errno
import logging
import operator
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import Any

log = logging.getLogger("kdtrain")
_early: list[tuple[str, str]] = []
CALLBACKS: set[CodeType] = set()
"""Functions that a library in C calls, and that crash the process where they raise: a signal waits for their end."""


class _Message(Exception):
    """A message about options, which it calls flags in a command and arguments in the library."""

    flags = False
    """Whether messages name flags; the command sets it for its process."""

    def __str__(self) -> str:
        text = super().__str__()
        if _Message.flags:
            return text
        text = re.sub(r"(?<![\w-])--no-([a-z][a-z0-9-]*)", lambda found: f"{found[1].replace('-', '_')}=False", text)
        return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), text)


def warn_early(kind: str, text: str) -> None:
    """Log a warning of a run whose files are not open yet; `Writers` later writes it as an event."""
    log.warning(text)
    _early.append((kind, text))


def early_warnings() -> list[tuple[str, str]]:
    """Return kind and text of each `warn_early` since the last call."""
    found = _early.copy()
    _early.clear()
    return found


def name_flags(yes: bool = True) -> None:
    """Make the messages of this process name flags (`--top-k`), as in a command, or arguments (`top_k`)."""
    _Message.flags = yes


class UsageError(_Message, ValueError):
    """The request cannot work; the command ends with exit code 2."""


class RunError(_Message, RuntimeError):
    """The command failed while running; it ends with exit code 1.

    reason: the `stop_reason` in the result.json of the run.
    """

    def __init__(self, message: str, *, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or take a file system that holds larger ones",
}

_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
"""Errors of a path at which no folder can exist, however empty the disk."""
_DEEPEST = 255
"""Most folders in a path: pathlib makes them, and shutil removes them, by recursion."""
_NUMBER = re.compile(r"(?:errno = |\(os error )(\d+)")
"""The error number in a message of HDF5, or of a library written in Rust (tokenizers, safetensors)."""


def system_error(error: BaseException) -> OSError | None:
    """Return the operating system's error in `error`, also out of another library's message; None if there is none."""
    if found := _NUMBER.search(str(error)):
        return OSError(int(found[1]), os.strerror(int(found[1])))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error).splitlines()[0])
    return None


def first_sentence(error: Exception) -> str:
    """Return an exception's message up to the end of its first sentence, on one line."""
    line = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[\w)'\"])[.;] (?=[A-Z])", line, maxsplit=1)[0][:240].rstrip(". ")


def reason(error: BaseException) -> str:
    """Return the `reason` of a RunError; for another error `disk` if the disk is full, else `error`."""
    if isinstance(error, RunError):
        return error.reason
    return "disk" if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT} else "error"


def advice(error: OSError) -> str:
    """Return the advice for a full disk, as the end of a line; empty for other errors."""
    return f"; {known} and run it again" if (known := _ADVICE.get(error.errno or 0)) else ""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's error on a write into a RunError that names `path`."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:  # tokenizers raises a bare Exception for a full disk
        if (found := system_error(error)) is None:
            raise
        mend = _ADVICE.get(found.errno or 0, "make the folder writable")
        raise RunError(
            f"cannot write {path}: {found.strerror}; finished files are intact: {mend} and run it again",
            reason=reason(found),
        ) from error


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Turn errors as `writing` does, for a folder that the user names: an impossible folder is a UsageError."""
    with writing(path):
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                raise
            raise UsageError(f"{path} cannot be made: {error.strerror}; name another folder") from error


@contextmanager
def panics_refused(what: str) -> Iterator[None]:
    """Turn an error of tokenizers, or a panic in its Rust code, into a UsageError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        # a panic is pyo3's, which is not an Exception and cannot be imported; an error is a bare Exception
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UsageError(f"{what} ({' '.join(str(error).split())[:200]}); use another tokenizer") from None


def printable(text: str) -> str:
    """Return `text` with control characters and line breaks escaped: names in a downloaded file may hold any."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shown_address(text: str, most: int = 120) -> str:
    """Return an address for a message without what follows ? or # or stands before @: it may be a password."""
    return re.sub(r"//[^/?#]*@", "//...@", re.sub(r"([?#]).+", r"\1...", printable(text)))[:most]


def as_number(value: Any, option: str) -> float:
    """Return `value` as a float. UsageError: it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{option} {value!r} is not a number") from None


def as_whole(value: Any, name: str, least: int = 0) -> int:
    """Return `value` as an integer from `least` to 2**63 - 1. UsageError: it is not one."""
    with suppress(TypeError):  # arrays and tensors have __index__ and may be no index
        if not isinstance(value, bool) and least <= (found := operator.index(value)) < 2**63:
            return found
    raise UsageError(f"{name} {value!r} is not a whole number of at least {least}")


def as_path(value: Any, name: str) -> Path:
    """Return `value` as a path. UsageError: it is not one."""
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"{name} {value!r} is not a path")
    return Path(value)


def refuse_no_path(text: str, name: str) -> None:
    """Raise a UsageError that begins with `name` if no file can have the path `text`, such as one with a NUL."""
    if "\0" in text:
        raise UsageError(f"{name} {text[:80]!r} holds a NUL; take it out")
    if len(os.fsencode(text)) > 4095 or any(len(os.fsencode(part)) > 255 for part in text.split("/")):
        raise UsageError(f"{name} '{text[:60]}...' is longer than a path can be: 255 bytes a name, 4,095 in all")
    if text.count("/") > _DEEPEST:
        raise UsageError(f"{name} '{text[:60]}...' is nested too deep: at most {_DEEPEST} folders")
