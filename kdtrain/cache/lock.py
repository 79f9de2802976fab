"""Who works in a folder now: a lock on a file in it, which the system lets go of when its holder ends, however it ends.

What a killed holder leaves is a file that nobody holds, and bars nobody. Builders of caches and training runs lock in
this way. What it gives up: on a file system without locks nobody is kept out.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kdtrain.errors import UsageError, writing


class HeldError(UsageError):
    """Another process holds the lock; `holder` is what it calls itself."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class Lock:
    """Keeps others out, from now until `release` or the end of the process.

    path: the file that is locked, in a folder that exists. message: what to say where another process holds it.
    name: what this process calls itself, for those that it keeps out.

    HeldError: another process holds it. RunError: the folder cannot be written.
    """

    def __init__(self, path: Path, message: str, name: str = "") -> None:
        self._path = path
        with writing(path):
            while not self._take(message):
                continue
            with suppress(OSError):  # a full disk
                os.ftruncate(self._file.fileno(), 0)
                os.write(self._file.fileno(), name.encode())

    def _take(self, message: str) -> bool:
        """False: the last holder has just removed the file that was locked; there is to be a new one."""
        self._file = open(self._path, "a+")  # noqa: SIM115  (held open: the lock lives as long as it)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with self._file:
                self._file.seek(0)
                raise HeldError(message, self._file.read()) from None
        except OSError:
            return True
        return self._stands()

    def _stands(self) -> bool:
        """Whether the file that is locked still has its name."""
        return self._path.exists() and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())

    def release(self) -> None:
        """Let others in, and remove the file."""
        if self._file.closed:
            return
        with suppress(OSError):  # a folder that has become read-only keeps the file, which then bars nobody
            if self._stands():
                self._path.unlink()
        self._file.close()
