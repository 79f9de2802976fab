"""The two ways a command ends badly, and the exit code of each.

A `UsageError` is raised before anything was done, for what cannot be: an unknown option, a vocabulary that does not
fit, a cache that is not finished. A `RunError` is raised for what went wrong while running. Both carry one line
that says what is wrong, where, and what to do; the command prints that line and no traceback. `writing` and
`making` make one of what the operating system says to a write, whoever passes it on; `refuse_no_path` refuses what
it would not even look up.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class _Message(Exception):
    """A message that names options: as flags where a command asks for it, as arguments in a library."""

    flags = False
    """Whether messages name flags; the command turns it on for its process."""

    def __str__(self) -> str:
        text = super().__str__()
        if _Message.flags:
            return text
        text = re.sub(r"(?<![\w-])--no-([a-z][a-z0-9-]*)", lambda found: f"{found[1].replace('-', '_')}=False", text)
        return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), text)


def name_flags(yes: bool = True) -> None:
    """Let the messages of this process name flags (`--top-k`), as a command's do, or arguments (`top_k`)."""
    _Message.flags = yes


class UsageError(_Message, ValueError):
    """The command was asked for something that cannot be; it ends with exit code 2."""


class RunError(_Message, RuntimeError):
    """The command failed while it was running; it ends with exit code 1.

    reason: the `stop_reason` of the run that it ended, a word of result.json.
    """

    def __init__(self, message: str, *, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or take a file system that holds larger ones",
}

_FULL = {errno.ENOSPC, errno.EDQUOT}

_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
"""What the system says of a path at which there cannot be a folder, however empty the disk."""
_DEEPEST = 255
"""How many folders a path may have: pathlib makes them, and shutil removes them, by recursion."""
_NUMBER = re.compile(r"(?:errno = |\(os error )(\d+)")
"""The number in a message of HDF5, and in one of a library written in Rust (tokenizers, safetensors)."""


def system_error(error: BaseException) -> OSError | None:
    """What the operating system said, also inside another library's message; None if it said nothing."""
    if found := _NUMBER.search(str(error)):
        return OSError(int(found[1]), os.strerror(int(found[1])))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error).splitlines()[0])
    return None


def reason(error: BaseException) -> str:
    """The `reason` of a RunError, and of what the system said: `disk` where there is no room, else `error`."""
    if isinstance(error, RunError):
        return error.reason
    return "disk" if isinstance(error, OSError) and error.errno in _FULL else "error"


def advice(error: OSError) -> str:
    """What to do where a disk takes no more, as the end of a line; nothing for other errors."""
    known = _ADVICE.get(error.errno or 0)
    return f"; {known} and run it again" if known else ""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says to a write into a RunError that names `path`."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:  # tokenizers raises a bare Exception for a full disk
        if (said := system_error(error)) is None:
            raise
        mend = _ADVICE.get(said.errno or 0, "make the folder writable")
        raise RunError(
            f"cannot write {path}: {said.strerror}; what was finished before is kept: {mend} and run it again",
            reason=reason(said),
        ) from error


@contextmanager
def making(path: Path) -> Iterator[None]:
    """`writing`, for a folder that was asked for: a path at which none can be is a UsageError."""
    with writing(path):
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                raise
            raise UsageError(f"{path} cannot be made: {error.strerror}; name another folder") from error


@contextmanager
def panics_refused(what: str) -> Iterator[None]:
    """Make a UsageError that begins with `what` of a panic in a library written in Rust, such as tokenizers."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which is not an Exception, and cannot be imported
            raise
        raise UsageError(f"{what} ({' '.join(str(error).split())[:200]}); use another tokenizer") from None


def printable(text: str) -> str:
    """`text` with what steers a terminal, line breaks among it, spelled out: a stranger's file may name anything."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def refuse_no_path(text: str, name: str) -> None:
    """Raise a UsageError that begins with `name` for what no file system takes, or pathlib: a NUL, far too many bytes
    or folders."""
    if "\0" in text:
        raise UsageError(f"{name} {text[:80]!r} holds a NUL; take it out")
    if len(os.fsencode(text)) > 4095 or any(len(os.fsencode(part)) > 255 for part in text.split("/")):
        raise UsageError(f"{name} '{text[:60]}...' is longer than a path can be: 255 bytes a name, 4,095 in all")
    if text.count("/") > _DEEPEST:
        raise UsageError(f"{name} '{text[:60]}...' is nested too deep: at most {_DEEPEST} folders")
