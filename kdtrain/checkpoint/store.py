"""Checkpoints on disk: publish, verify, choose, prune.

A checkpoint is a folder of safetensors files (`shards.py`), `state.json` (every number that is not in a tensor) and a
sealed `manifest.json`: `{"version", "step", "rollbacks", "files": {name: [size, sha256]}, "digest"}`, where `digest` is
the SHA-256 of the other entries, so that a flipped bit shows there as well. Nothing is ever unpickled.

It is written under a hidden name, flushed to the disk, and renamed into place, so that a published one is complete. A
checkpoint, or one set aside, is never deleted if it does not match its manifest or holds a file that the manifest does
not name. Of those that a rollback set aside (`.left-1`) the newest few always stay; what a resume set aside (`.old-1`)
goes on a full disk only. `latest` and `best` are symbolic links, replaced atomically. A second
name for the same state (`epoch-0001` beside `step-00000250`) takes no space, because its files are hard links; damage
to one damages both. One process writes a folder at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtrain import faults
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.sealed import (
    MANIFEST,
    STATE,
    entry_of,
    is_checkpoint,
    problem,
    read_state,
    seal,
    sealed_files,
    unreadable,
    vouched_files,
)
from kdtrain.errors import RunError, UsageError, log, reason
from kdtrain.files import (
    aside_in,
    fsync,
    point_link,
    remove_folder,
    remove_link,
    set_aside,
    swap_in,
    sweep,
    temporary_name,
)
from kdtrain.process import is_main, reported

if TYPE_CHECKING:  # to list and check checkpoints takes no torch
    import torch

    from kdtrain.checkpoint import shards


KEEP_ASIDE = 2
"""How many of the newest checkpoints that rollbacks set aside are kept."""
_REPLACED = ".replaced-1"
"""Suffix of the older of two checkpoints of one name, between the two renames of a save."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors on the CPU, and plain numbers."""

    name: str
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class Store:
    """The checkpoints of one run. Every rank calls `save`; everything else is for rank 0.

    What cannot be removed stays, with one warning each: `warn` is called with its text.

    Args:
        folder: `runs/NAME/checkpoints`; created by the first save.
        keep: how many of the newest valid ones of each tier `prune` keeps.
    """

    def __init__(self, folder: Path, keep: tiers.Keep = tiers.Keep()) -> None:  # noqa: B008
        self.folder, self.keep = folder, keep
        self._whole: dict[str, object] = {}
        self._unproven: set[str] = set()
        self._stuck: set[str] = set()
        self.warn: Callable[[str], None] = log.warning
        self._changing = threading.RLock()  # the thread that saves sweeps, the one that trains makes links

    def save(
        self,
        name: str,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        rollbacks: int = 0,
        group: Any = None,
        *,
        alone: bool = False,
    ) -> Path:
        """Publish a checkpoint and point `latest` at it; replaces one of the same name. Every rank calls this.

        Args:
            name: decides the tier (`tiers.name_of`, or any other); `latest` does not follow
                one that is kept apart (`tiers.is_apart`).
            step, rollbacks: the place in the run, which decides which checkpoint is newest.
            tensors, state: named tensors, and JSON values.
            group: the group for objects; a thread needs its own (`ranks.control_group`).
            alone: only this process calls it, whatever group it is in.

        Raises:
            UsageError: the name is not one of a checkpoint, or the state could not be loaded again, because it is too
                large or nested too deep. Nothing is published.
            RunError: the disk is full or cannot be written; names the entry. Earlier checkpoints are intact.
        """
        from kdtrain.checkpoint import shards
        from kdtrain.ranks import on_main

        def finish() -> None:
            try:
                text = json.dumps(state, indent=1)
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"the state of checkpoint {name} cannot be written as JSON: {error}") from None
            files[STATE] = _write(hidden / STATE, text)
            faults.point("checkpoint.before-manifest")
            _write(hidden / MANIFEST, seal(step, rollbacks, files))
            if (wrong := unreadable(hidden)) is not None:
                raise UsageError(f"checkpoint {name} is not saved, because it could not be loaded again: {wrong}")
            self._publish(hidden, name)
            self._whole[name] = _fingerprint(self.folder / name)
            if not tiers.is_apart(name):
                self.link("latest", name)

        with self._cleaning(name):
            hidden = self._prepare(name) if alone else on_main(lambda: self._prepare(name), group)
            files = shards.write(hidden, tensors, group, alone=alone)
            finish() if alone else on_main(finish, group)
        return self.folder / name

    def copy(self, name: str, to: str) -> Path:
        """Publish the checkpoint `name` under a second name, by hard links if the disk supports them.

        Raises:
            RunError: as `save`.
        """
        assert name != to
        source = self.path(name)
        with self._cleaning(to):
            hidden = self._prepare(to)
            for file in sorted(sealed_files(source)):
                try:
                    os.link(source / file, hidden / file)
                except OSError:
                    shutil.copyfile(source / file, hidden / file)
            self._publish(hidden, to)
        return self.folder / to

    def link(self, name: str, target: str) -> None:
        """Point the link `name` (latest, best) at the checkpoint `target`, atomically."""
        faults.point("checkpoint.before-link")
        with self._changing:
            point_link(self.folder / name, target)

    def remove_link(self, name: str) -> None:
        """Remove the link `name`, if it exists."""
        remove_link(self.folder / name)

    def linked(self, name: str) -> str | None:
        """Return the target of the link `name`, which need not exist; None for a target outside of this folder."""
        link = self.folder / name
        target = os.readlink(link) if link.is_symlink() else None
        return None if target is None or os.sep in target or target.startswith(".") else target

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint; after a kill between the two renames of a save, the older one's."""
        final, replaced = self.folder / name, self.folder / f"{name}{_REPLACED}"
        return replaced if replaced.exists() and not final.exists() else final

    def names(self) -> list[str]:
        """Return the names of published checkpoints, oldest first, whether they verify or not."""
        return [entry.name for entry in self.entries()]

    def entries(
        self, whole: Callable[[str], bool] | None = None, *, apart: bool = False
    ) -> list[tiers.CheckpointEntry]:
        """Return published checkpoints, oldest first, with their place in the run; valid by sizes, or by `whole`.

        apart: include checkpoints that are kept for inspection only.
        """
        found = {}
        for path in self.folder.glob("*"):
            name = path.name.removesuffix(_REPLACED)
            wanted = tiers.is_name(name) and (apart or not tiers.is_apart(name))
            if wanted and not path.is_symlink() and is_checkpoint(path):
                at = self.path(name)
                entry = entry_of(at, name, whole(name) if whole else problem(at, digests=False) is None)
                if at.exists():  # else a run that is training has removed it meanwhile
                    found[name] = entry
        return tiers.ordered(found.values())

    def problem(self, name: str) -> str | None:
        """Describe the problem of a checkpoint, or return None."""
        return problem(self.path(name))

    def newest_valid(
        self, before: int | None = None, planned: bool = False, loads: bool = False
    ) -> tuple[str | None, list[str]]:
        """Return the newest checkpoint that verifies, and a line for each newer damaged one.

        Args:
            before: only checkpoints of steps before this.
            planned: only checkpoints that an uninterrupted run also has.
            loads: see `problem`.
        """
        damaged: list[str] = []
        for entry in reversed(self.entries()):
            if (before is not None and entry.step >= before) or (planned and not tiers.is_planned(entry.name)):
                continue
            if (wrong := problem(self.path(entry.name), loads=loads)) is None:
                return entry.name, damaged
            if not self.path(entry.name).exists():  # pruned by a run that is training
                continue
            damaged.append(f"checkpoint {entry.name} is damaged and skipped: {wrong}")
        return None, damaged

    def may_begin(self, wanted: str) -> bool:
        """Return True if a run may begin without a valid checkpoint: with `auto`, or with `latest` if there is none."""
        return wanted == "auto" or (wanted == "latest" and not self.names())

    def choose(self, wanted: str, loads: bool = False) -> Path:
        """Return the resolved folder of the checkpoint called `wanted`: latest, best, a name in this run, or a path.

        loads: see `problem`.

        Raises:
            UsageError: no checkpoint has that name.
            RunError: it is damaged.
        """
        if wanted == "latest":
            name, damaged = self.newest_valid(loads=loads)
            if name is None:
                kind = RunError if damaged else UsageError
                raise kind("; ".join(damaged) or f"{self.folder} holds no checkpoint")
            return self.path(name).resolve()
        named = self.linked("best") if wanted == "best" else wanted
        for path in (self.path(named), Path(wanted)) if named else ():
            if is_checkpoint(path.resolve()):
                if (wrong := problem(path, loads=loads)) is not None:
                    if not path.exists():  # pruned by a run that is training
                        break
                    raise RunError(
                        f"checkpoint {path} is damaged: {wrong}; choose another with --resume or --checkpoint"
                    )
                return path.resolve()
        if wanted == "best" and self.linked("best") != named:
            return self.choose(wanted)
        known = ", ".join([*self.names(), *(link for link in tiers.LINKS if (self.folder / link).exists())])
        raise UsageError(f"no checkpoint '{wanted}' in {self.folder}; there are: {known or 'none'}")

    def prune(self, protected: Collection[str] = ()) -> list[str]:
        """Remove the checkpoints that retention no longer needs; return their names.

        The latest, the best and the `protected` stay, and so do damaged ones, which do not count, and all that a resume
        set aside.
        """
        kept = self._kept(protected)
        found = [path for path in self.aside() if ".left-" in path.name]
        gone = [path.name for path in found[: max(len(found) - KEEP_ASIDE, 0)] if self._remove_aside(path.name)]
        if not tiers.removable(self.entries(), self.keep, kept):
            return gone
        # sizes do not show a flipped bit: read what stays once before removing anything
        old = tiers.removable(self.entries(self._is_whole), self.keep, kept)
        return gone + [name for name in old if self.remove(name)]

    def make_room(self, size: int, protected: Collection[str] = ()) -> list[str]:
        """Remove the oldest checkpoints until `size` bytes are free; return their names.

        Set-aside ones go first. The newest of each tier stays, and so does everything that `prune` never removes.
        """
        gone: list[str] = []
        old = tiers.removable(self.entries(self._is_whole), tiers.Keep(1, 1, 1), self._kept(protected))
        for remove, names in ((self._remove_aside, [path.name for path in self.aside()]), (self.remove, old)):
            for name in names:
                files = [each.lstat() for each in (self.folder / name).glob("*")]
                frees = sum(each.st_size for each in files if each.st_nlink == 1)  # other links keep the rest
                if size > 0 and remove(name):
                    gone.append(name)
                    size -= frees
        return gone

    def aside(self) -> list[Path]:
        """Return set-aside checkpoints, oldest first, except ones that a kill between a save's renames left."""
        return [path for path in aside_in(self.folder) if not path.name.endswith(_REPLACED)]

    def _kept(self, protected: Collection[str]) -> set[str]:
        return {*protected, *filter(None, map(self.linked, tiers.LINKS))}

    def _remove_aside(self, name: str) -> bool:
        """Remove a set-aside checkpoint; return False if a file in it has changed, or a link points at it."""
        if name in self._unproven | self._kept(()):
            return False
        gone = self._removed(self.folder / name, vouched_files(self.folder / name), "checkpoint.pruning")
        if not gone:
            self._unproven.add(name)  # not read again at each save
        return gone

    def remove(self, name: str) -> bool:
        """Remove an existing checkpoint; return False if it stays: it has a file that its manifest does not name, or
        cannot be changed."""
        path = self.folder / name
        self._whole.pop(name, None)
        return self._removed(path, sealed_files(path), "checkpoint.pruning")

    def _removed(self, path: Path, files: Collection[str], label: str) -> bool:
        """Call `remove_folder`; a refusal of the system is a warning, once for each folder, and does not end a run."""
        try:
            return remove_folder(path, files, label)
        except OSError as error:
            if path.name not in self._stuck:
                self._stuck.add(path.name)
                why = error.strerror or error
                self.warn(f"checkpoint {path} is no longer needed and cannot be removed: {why}; make it writable")
            return False

    def set_aside_after(self, step: int, rollbacks: int | None = None, word: str = "left") -> list[str]:
        """Set aside the checkpoints later than `step`, from which the run continues; return their old names.

        word: `left` by a rollback, `old` by a resume. With `rollbacks`, those of the same step after more rollbacks
        also count as later. `best` follows its checkpoint, and `latest` falls back to the newest one that stays.
        """
        later = [
            each.name
            for each in self.entries()
            if each.step > step or (rollbacks is not None and each.step == step and each.rollbacks > rollbacks)
        ]
        self._set_aside(later, word)
        return later

    def set_aside_damaged(self) -> list[str]:
        """Set aside the checkpoints that do not verify; return their old names."""
        damaged = [name for name in self.names() if self.problem(name) is not None]
        self._set_aside(damaged, "damaged")
        return damaged

    def _prepare(self, name: str) -> Path:
        """Make the hidden folder for a new checkpoint."""
        if not isinstance(name, str) or not tiers.is_name(name):
            raise UsageError(f"a checkpoint cannot be called {name!r}; use a name like step-00000010 or before-change")
        self._finish_interrupted()
        hidden = temporary_name(self.folder / name)
        hidden.mkdir(parents=True)
        return hidden

    def _publish(self, hidden: Path, name: str) -> None:
        """Rename a complete hidden folder to its name."""
        final = self.folder / name
        if final.exists() and problem(final) is not None:
            self._set_aside([name], "damaged")
        swap_in(hidden, final, "checkpoint", "replaced")
        faults.point("checkpoint.after-rename")
        self._finish_interrupted()

    @contextlib.contextmanager
    def _cleaning(self, name: str) -> Iterator[None]:
        """Remove half-written files if the block fails; an error of the disk becomes a `RunError`."""
        from kdtrain.checkpoint import shards

        try:
            yield
        except (OSError, UsageError, shards.EntryError) as error:
            if is_main():
                with contextlib.suppress(OSError):
                    self._finish_interrupted()
            if isinstance(error, UsageError):
                raise
            if isinstance(error, shards.EntryError):
                cause, where, why = error.cause, error.entry, error.reason
            else:
                cause = error.strerror or str(error)
                where = error.filename
                why = reason(error)
            text = f"checkpoint {self.folder / name} could not be written: {cause}{f', at {where}' if where else ''}"
            raise reported(RunError(f"{text}; earlier ones are intact", reason=why)) from None

    def _finish_interrupted(self) -> None:
        """Finish what a kill interrupted: a save between its two renames, a half-written or half-removed folder."""
        with self._changing:
            for replaced in self.folder.glob(f"*{_REPLACED}"):
                final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
                # without a matching seal it is not ours
                if not tiers.is_name(final.name) or replaced.is_symlink() or problem(replaced, digests=False):
                    continue
                if not final.exists():
                    swap_in(replaced, final, "checkpoint.settle")
                elif not self._removed(replaced, sealed_files(replaced), "checkpoint.settle.removing"):
                    set_aside(self.folder, replaced.name, "left")
            sweep(self.folder)

    def _is_whole(self, name: str) -> bool:
        """Return True if a checkpoint can be loaded; cached until a file changes."""
        try:
            fingerprint = _fingerprint(self.path(name))
        except OSError:
            return False
        if self._whole.get(name) != fingerprint:
            if problem(self.path(name), loads=True) is not None:
                return False
            self._whole[name] = fingerprint
        return True

    def _set_aside(self, names: list[str], word: str) -> None:
        moved = {name: set_aside(self.folder, self.path(name).name, word).name for name in names}
        remaining = self.names()
        for link, target in (
            ("latest", remaining[-1] if remaining else None),
            ("best", moved.get(self.linked("best") or "") if word != "damaged" else None),
        ):
            if self.linked(link) in moved:
                self.link(link, target) if target else self.remove_link(link)


def load(path: Path, like: shards.Like | None = None) -> Checkpoint:
    """Read a checkpoint that `problem` has verified; of a sharded tensor, the part of this rank.

    like: see `shards.read`.

    Raises:
        RunError: its files are not those of a checkpoint.
    """
    from kdtrain.checkpoint import shards

    return Checkpoint(path.name, shards.read(path, like), read_state(path))


def _write(path: Path, text: str) -> tuple[int, str]:
    """Write a text file, flushed to the disk; return its size in bytes and its SHA-256."""
    content = text.encode()
    try:
        path.write_bytes(content)
        fsync(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path.name) from None
    return len(content), hashlib.sha256(content).hexdigest()


def _fingerprint(path: Path) -> object:
    """Return a value that changes when a file of the folder is replaced or written to."""
    found = [(each.name, each.stat()) for each in sorted(path.iterdir())]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found]
