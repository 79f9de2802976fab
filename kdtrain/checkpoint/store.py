"""Checkpoints on disk: publish, verify, choose, prune.

A checkpoint is a folder of safetensors files (`shards.py`), `state.json` and a sealed `manifest.json` (`manifest.py`).
It is written under a hidden name, flushed to the disk, and renamed into place, so that a published one is complete;
what does not match its manifest is named and passed over, and never deleted. `latest` and `best` are symbolic links,
replaced atomically. Nothing is ever unpickled.

A second name for the same state (`epoch-0001` beside `step-00000250`) costs no space, because its files are hard
links; what damages one then damages both. One process writes a folder at a time.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kdtrain import faults
from kdtrain.checkpoint import shards, tiers
from kdtrain.checkpoint.manifest import MANIFEST, STATE, entry_of, is_checkpoint, problem, seal, sync
from kdtrain.errors import RunError, UsageError
from kdtrain.parallel.world import is_main, of_all, on_main

_REPLACED = ".replaced"


@dataclass(frozen=True)
class Checkpoint:
    """What a loaded checkpoint holds: named tensors on the CPU, and plain numbers."""

    name: str
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class Store:
    """The checkpoints of one run.

    Args:
        folder: `runs/NAME/checkpoints`; made when the first checkpoint is saved.
        keep_rolling, keep_epochs, keep_special: how many of the newest valid ones of each tier `prune` keeps.
        words: the group of ranks that `save` together; None for a process alone. All else is for rank 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_rolling: int = 10,
        keep_epochs: int = 5,
        keep_special: int = 3,
        words: Any = None,
    ) -> None:
        self.folder = folder
        self.words = words
        self.keep = tiers.Keep(keep_rolling, keep_epochs, keep_special)
        self._whole: dict[str, object] = {}

    def save(
        self, name: str, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], rollbacks: int = 0
    ) -> Path:
        """Publish a checkpoint and point `latest` at it; one of the same name is replaced. Every rank calls this.

        Args:
            name: decides the tier (`tiers.rolling_name`, `tiers.epoch_name`, or any other).
            step, rollbacks: where in the run it was taken; they decide which checkpoint is newest.
            tensors, state: named tensors, and what JSON can hold.

        Raises:
            RunError: the disk is full or cannot be written; names the entry. What was published before is intact.
        """
        final, hidden = self._places(name)

        def finish() -> None:
            files[STATE] = _write(hidden / STATE, json.dumps(state, indent=1))
            faults.point("checkpoint.before-manifest")
            _write(hidden / MANIFEST, seal(step, rollbacks, files))
            self._rename(name)
            self._whole[name] = _fingerprint(final)
            self.link("latest", name)

        with self._cleaning(name):
            on_main(lambda: self._prepare(name), self.words)
            files = shards.write(hidden, tensors, self.words)
            on_main(finish, self.words)
        return final

    def copy(self, name: str, to: str) -> Path:
        """Publish the checkpoint `name` under a second name, by hard links where the disk has them.

        Raises:
            RunError: as `save`.
        """
        assert name != to
        source = self.path(name)
        final, hidden = self._places(to)
        with self._cleaning(to):
            self._prepare(to)
            for file in sorted(source.iterdir()):
                _link_or_copy(file, hidden / file.name)
            self._rename(to)
        return final

    def link(self, name: str, target: str) -> None:
        """Point the link `name` (latest, best) at the checkpoint `target`, atomically."""
        faults.point("checkpoint.before-link")
        hidden = self.folder / f".{name}.tmp"
        hidden.unlink(missing_ok=True)
        hidden.symlink_to(target)
        os.replace(hidden, self.folder / name)
        sync(self.folder)

    def unlink(self, name: str) -> None:
        """Remove the link `name`, if it is there."""
        (self.folder / name).unlink(missing_ok=True)

    def linked(self, name: str) -> str | None:
        """The checkpoint that the link `name` points at, whether it is there or not."""
        link = self.folder / name
        return os.readlink(link) if link.is_symlink() else None

    def path(self, name: str) -> Path:
        """The folder of a checkpoint; where a kill came between the two renames of a save, the older one's."""
        final, replaced = self.folder / name, self.folder / f"{name}{_REPLACED}"
        return replaced if replaced.exists() and not final.exists() else final

    def names(self) -> list[str]:
        """Published checkpoints, oldest first, whether they verify or not."""
        return [entry.name for entry in self.entries()]

    def entries(self, whole: Callable[[str], bool] | None = None) -> list[tiers.Entry]:
        """Published checkpoints, oldest first, and where in the run they were taken; valid by sizes, or by `whole`."""
        found = {}
        for path in self.folder.glob("*"):
            name = path.name.removesuffix(_REPLACED)
            if tiers.is_name(name) and not path.is_symlink() and is_checkpoint(path):
                at = self.path(name)
                found[name] = entry_of(at, name, whole(name) if whole else problem(at, digests=False) is None)
        return tiers.ordered(found.values())

    def problem(self, name: str) -> str | None:
        """What is wrong with a checkpoint, in words, or None."""
        return problem(self.path(name))

    def newest_valid(self, before: int | None = None, planned: bool = False) -> tuple[str | None, list[str]]:
        """The newest checkpoint that verifies, and a line for each damaged one that was passed over.

        Args:
            before: only checkpoints of earlier steps than this are looked at.
            planned: only those that a run which nobody interrupts has as well.
        """
        damaged: list[str] = []
        for entry in reversed(self.entries()):
            if (before is not None and entry.step >= before) or (planned and not tiers.is_planned(entry.name)):
                continue
            if (wrong := self.problem(entry.name)) is None:
                return entry.name, damaged
            damaged.append(f"checkpoint {entry.name} is damaged and passed over: {wrong}")
        return None, damaged

    def choose(self, wanted: str) -> Path:
        """The folder of the checkpoint called `wanted`: latest, best, a name in this run, or a path.

        Raises:
            UsageError: there is none of that name.
            RunError: it is there, and damaged.
        """
        if wanted == "latest":
            name, damaged = self.newest_valid()
            if name is None:
                kind = RunError if damaged else UsageError
                raise kind("; ".join(damaged) or f"{self.folder} holds no checkpoint")
            return self.path(name)
        named = self.linked("best") if wanted == "best" else wanted
        for path in (self.path(named), Path(wanted)) if named else ():
            if is_checkpoint(path.resolve()):
                if (wrong := problem(path)) is not None:
                    raise RunError(
                        f"checkpoint {path} is damaged: {wrong}; choose another with --resume or --checkpoint"
                    )
                return path.resolve()
        known = ", ".join([*self.names(), *(link for link in tiers.LINKS if (self.folder / link).exists())])
        raise UsageError(f"no checkpoint '{wanted}' in {self.folder}; there are: {known or 'none'}")

    def prune(self, protected: Collection[str] = ()) -> list[str]:
        """Remove what retention no longer needs; the names removed.

        The latest, the best and the `protected` stay, and so do damaged ones, which count for nothing.
        """
        kept = {*protected, *filter(None, map(self.linked, tiers.LINKS))}
        if not tiers.removable(self.entries(), self.keep, kept):
            return []
        # sizes cannot tell a flipped bit: before anything is removed, what is to remain in its place is read once
        removed = tiers.removable(self.entries(self._is_whole), self.keep, kept)
        for name in removed:
            self.remove(name)
        return removed

    def remove(self, name: str) -> None:
        """Remove a checkpoint that is there."""
        hidden = self.folder / f".{name}.removed"
        os.rename(self.folder / name, hidden)  # a kill while its files go must not leave half a checkpoint
        faults.point("checkpoint.pruning")
        shutil.rmtree(hidden)
        self._whole.pop(name, None)

    def set_aside_after(self, step: int, rollbacks: int | None = None) -> list[str]:
        """Rename the checkpoints later than `step`, which a run that goes on from there has left; their old names.

        With `rollbacks` those of the same step after more rollbacks are later as well.

        `best` follows its checkpoint, and `latest` falls back to the newest one that stays.
        """
        later = [
            each.name
            for each in self.entries()
            if each.step > step or (rollbacks is not None and each.step == step and each.rollbacks > rollbacks)
        ]
        self._set_aside(later, "left")
        return later

    def set_aside_damaged(self) -> list[str]:
        """Rename the checkpoints that do not verify, so that they are found no more; their old names."""
        damaged = [name for name in self.names() if self.problem(name) is not None]
        self._set_aside(damaged, "damaged")
        return damaged

    def _places(self, name: str) -> tuple[Path, Path]:
        """Where a checkpoint is published, and where it is written before."""
        return self.folder / name, self.folder / f".{name}.tmp"

    def _prepare(self, name: str) -> None:
        """Make the hidden folder of a checkpoint to be written."""
        assert tiers.is_name(name), name
        self._settle()
        self._places(name)[1].mkdir(parents=True)

    def _rename(self, name: str) -> None:
        """Give a hidden folder that is complete its name."""
        final, hidden = self._places(name)
        sync(hidden)
        faults.point("checkpoint.before-rename")
        if final.exists() and problem(final) is not None:
            self._set_aside([name], "damaged")
        elif final.exists():
            os.rename(final, self.folder / f"{name}{_REPLACED}")
            faults.point("checkpoint.between-renames")
        os.rename(hidden, final)
        sync(self.folder)
        faults.point("checkpoint.after-rename")
        self._settle()

    @contextlib.contextmanager
    def _cleaning(self, name: str) -> Iterator[None]:
        """Leave nothing half written when the disk fails inside, and say so by a `RunError`."""
        final, hidden = self._places(name)
        try:
            yield
        except (OSError, shards.EntryError) as error:
            if is_main():
                shutil.rmtree(hidden, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self._settle()
            raise of_all(
                RunError(f"checkpoint {final} could not be written: {_cause(error)}; earlier ones are intact")
            ) from None

    def _settle(self) -> None:
        """Finish what a kill has cut short: a name between two renames, half a folder, a folder half removed."""
        for replaced in self.folder.glob(f"*{_REPLACED}"):
            final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if not final.exists():
                os.rename(replaced, final)
            else:
                os.rename(replaced, replaced.with_name(f".{final.name}.removed"))
        for left in [*self.folder.glob(".*.tmp"), *self.folder.glob(".*.removed")]:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)

    def _is_whole(self, name: str) -> bool:
        """`problem`, remembered for as long as the files are the same."""
        try:
            fingerprint = _fingerprint(self.path(name))
        except OSError:
            return False
        if self._whole.get(name) != fingerprint:
            if self.problem(name) is not None:
                return False
            self._whole[name] = fingerprint
        return True

    def _set_aside(self, names: list[str], word: str) -> None:
        moved = {}
        for name in names:
            number = 1
            while (aside := self.folder / f"{name}.{word}-{number}").exists():
                number += 1
            os.rename(self.path(name), aside)
            moved[name] = aside.name
        remaining = self.names()
        for link, target in (
            ("latest", remaining[-1] if remaining else None),
            ("best", moved.get(self.linked("best") or "") if word == "left" else None),
        ):
            if self.linked(link) in moved:
                self.link(link, target) if target else (self.folder / link).unlink()


def load(path: Path, like: shards.Like | None = None) -> Checkpoint:
    """Read a checkpoint that `problem` has found to be whole; of a tensor that is cut up, the part of this rank.

    like: see `shards.read`.

    Raises:
        RunError: its files are not what a checkpoint is made of.
    """
    return Checkpoint(path.name, shards.read(path, like), read_state(path))


def read_state(path: Path) -> dict[str, Any]:
    """The numbers, options and digests of a checkpoint that `problem` has found to be whole, without its tensors."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def _write(path: Path, text: str) -> tuple[int, str]:
    """Write a text file, flushed to the disk; its size in bytes and its SHA-256."""
    content = text.encode()
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path.name) from None
    return len(content), hashlib.sha256(content).hexdigest()


def _link_or_copy(source: Path, to: Path) -> None:
    try:
        os.link(source, to)
    except OSError:
        shutil.copyfile(source, to)
        sync(to)


def _fingerprint(path: Path) -> object:
    """What changes when a file of the folder is replaced or written to."""
    facts = [(each.name, each.stat()) for each in sorted(path.iterdir())]
    return [(name, fact.st_ino, fact.st_size, fact.st_mtime_ns, fact.st_ctime_ns) for name, fact in facts]


def _cause(error: OSError | shards.EntryError) -> str:
    if isinstance(error, shards.EntryError):
        return f"{error.cause}, at {error.entry}"
    return f"{error.strerror or error}{f', at {error.filename}' if error.filename else ''}"
