"""The folder that a command writes: claimed, published into, and given back empty where nothing came of it.

`OutFolder` is what a command of a plugin needs of files that it writes; `kdtrain.files` has the rules that it follows.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from kdtrain import files
from kdtrain.errors import making, writing


class OutFolder:
    """A folder that a command writes; what others have put into it stays as it is.

    path: need not exist: what is published makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse(self, needed: Mapping[str, Path | str | None] | None = None) -> None:
        """Refuse a path where no folder can be made; or with `needed`, a folder that must not be replaced.

        needed: paths that the command reads, by the words that name them. UsageError, RunError: names the reason.
        """
        if needed is None:
            files.refuse_no_folder(self.path)
        else:
            files.refuse_displacing(self.path, needed)

    def others(self, name: str) -> list[str]:
        """Return the names of what is there besides the file `name` and what is hidden for it; of a file its own.

        UsageError, RunError: no folder can be there, or be read.
        """
        with making(self.path):
            if self.path.exists() and not self.path.is_dir():
                return [self.path.name]
            found = sorted(each.name for each in self.path.iterdir()) if self.path.exists() else []
        return [each for each in found if each != name and not each.startswith(f".{name}.")]

    @contextmanager
    def claimed(self, name: str, message: str) -> Iterator[None]:
        """Keep other processes from writing the file `name` during the block, and remove what killed ones left of it.

        The folder is made, and removed in the end if it is empty.

        message: of the UsageError if another process has it. RunError: the folder cannot be written.
        """
        made = files.make_folder(self.path)
        lock = None
        try:
            lock = files.Lock(files.hidden_lock(self.path / name), message)
            files.sweep(self.path, of=name)
            yield
        finally:
            if lock is not None:
                lock.release()
            files.remove_empty(made)

    @property
    def is_claimed(self) -> bool:
        """Whether a process of this machine holds a lock in the folder."""
        return any(map(files.is_locked, self.path.glob(".*lock*")))

    @property
    def mib(self) -> float:
        """The MiB of what is in the folder."""
        return mib([self.path])

    def publish(self, name: str, content: str | dict[str, Any], label: str) -> None:
        """Publish a text, or a record with its seal, as the file `name`. RunError: the disk refuses.

        label: names the fault points.
        """
        files.make_folder(self.path)
        if isinstance(content, str):
            files.publish_text(self.path / name, content, label)
        else:
            files.publish_json(self.path / name, content, label)

    def published(self, name: str, label: str) -> AbstractContextManager[Path]:
        """Yield the path to write to in the block, and publish it as the file `name`; as `files.published`."""
        return files.published(self.path / name, label)

    def hidden(self, name: str) -> AbstractContextManager[Path]:
        """Yield a folder beside the name, which is gone after the block."""
        return files.hidden_folder(self.path / name)

    def sweep(self) -> None:
        """Remove the temporary files that killed commands left; the caller is alone in the folder."""
        files.sweep(self.path)

    def set_aside(self, name: str, word: str) -> Path:
        """Rename a file or folder that is not ours, or damaged; return its new path (`files.set_aside`)."""
        return files.set_aside(self.path, name, word)

    def remove(self, name: str) -> None:
        """Remove a file that the command wrote, if it is there. RunError: the disk refuses."""
        with writing(self.path):
            files.remove_file(self.path / name)

    def take(self, path: Path) -> None:
        """Move a file or folder that kdtrain wrote elsewhere into this one, under its name. RunError: as `remove`."""
        files.make_folder(self.path)
        with writing(self.path):
            files.rename_over(path, self.path / path.name)


def mib(paths: list[Path]) -> float:
    """Return the MiB of files and folders; a file with several names counts once, and links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        for each in [path, *(Path(inside, name) for inside, _, names in os.walk(path) for name in names)]:
            try:
                status = each.lstat()
            except FileNotFoundError:  # removed by a run that is training
                continue
            if not stat.S_ISDIR(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_size
    return round(sum(sizes.values()) / 2**20, 1)
