"""Checkpoints on disk: publish, verify, choose, prune.

A checkpoint is a folder `step-00000250/` with `tensors.safetensors`, `state.json` (every number that is no tensor)
and `manifest.json` (size and SHA-256 of both). It is written under a hidden name, synced, and renamed into place, so
that a published one is complete; what does not match its manifest is named and passed over. `latest` and `best` are
symbolic links, replaced atomically. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kdtrain import faults
from kdtrain.errors import RunError, UsageError

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
NAME = re.compile(r"step-(\d{8})$")


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
        keep_rolling: how many of the newest are kept by `prune`; the best is kept besides.
    """

    def __init__(self, folder: Path, keep_rolling: int = 10) -> None:
        self.folder = folder
        self.keep_rolling = keep_rolling

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
        """Publish the checkpoint of `step` and point `latest` at it.

        Raises:
            RunError: the disk is full or cannot be written; what was published before is intact.
        """
        final = self.folder / f"step-{step:08d}"
        hidden = self.folder / f".{final.name}.tmp"
        try:
            _remove(hidden)
            hidden.mkdir(parents=True)
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, hidden / TENSORS)
            (hidden / STATE).write_text(json.dumps(state, indent=1))
            files = {name: _digest(hidden / name) for name in (TENSORS, STATE)}
            (hidden / MANIFEST).write_text(json.dumps({"version": 1, "files": files}, indent=1))
            for name in (TENSORS, STATE, MANIFEST):
                sync(hidden / name)
            sync(hidden)
            faults.point("checkpoint.before-rename")
            replaced = self.folder / f".{final.name}.replaced"
            if final.exists():
                os.rename(final, replaced)
            os.rename(hidden, final)
            sync(self.folder)
            _remove(replaced)
            faults.point("checkpoint.after-rename")
            self.link("latest", final.name)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
            shutil.rmtree(hidden, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"checkpoint {final} could not be written: {reason}; earlier ones are intact") from None
        return final

    def link(self, name: str, target: str) -> None:
        """Point the link `name` (latest, best) at the checkpoint `target`, atomically."""
        hidden = self.folder / f".{name}.tmp"
        hidden.unlink(missing_ok=True)
        hidden.symlink_to(target)
        os.replace(hidden, self.folder / name)

    def names(self) -> list[str]:
        """Published checkpoints, oldest first, whether they verify or not."""
        return sorted(path.name for path in self.folder.glob("step-*") if NAME.match(path.name))

    def problem(self, name: str) -> str | None:
        """What is wrong with a checkpoint, in words, or None."""
        return problem(self.folder / name)

    def newest_valid(self) -> tuple[str | None, list[str]]:
        """The newest checkpoint that verifies, and a line for each damaged one that was passed over."""
        damaged: list[str] = []
        for name in reversed(self.names()):
            if (wrong := self.problem(name)) is None:
                return name, damaged
            damaged.append(f"checkpoint {name} is damaged and passed over: {wrong}")
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
            return self.folder / name
        for path in (self.folder / wanted, Path(wanted)):
            if wanted and path.is_dir() and ((path / MANIFEST).is_file() or NAME.match(path.name)):
                if (wrong := problem(path)) is not None:
                    raise RunError(
                        f"checkpoint {path} is damaged: {wrong}; choose another with --resume or --checkpoint"
                    )
                return path.resolve()
        known = ", ".join([*self.names(), *(link for link in ("latest", "best") if (self.folder / link).exists())])
        raise UsageError(f"no checkpoint '{wanted}' in {self.folder}; there are: {known or 'none'}")

    def prune(self) -> None:
        """Remove all but the newest `keep_rolling` valid checkpoints, the best and the latest; damaged ones stay."""
        linked = {os.path.basename(os.path.realpath(self.folder / link)) for link in ("best", "latest")}
        valid = [name for name in self.names() if problem(self.folder / name, digests=False) is None]
        for name in valid[: -self.keep_rolling]:
            if name not in linked:
                shutil.rmtree(self.folder / name)

    def set_aside_after(self, step: int) -> list[str]:
        """Rename the checkpoints later than `step`, which a run that goes on from there has left; their old names."""
        later = [name for name in self.names() if name > f"step-{step:08d}"]
        for name in later:
            number = 1
            while (aside := self.folder / f"{name}.left-{number}").exists():
                number += 1
            os.rename(self.folder / name, aside)
        return later


def load(path: Path) -> Checkpoint:
    """Read a checkpoint that `problem` has found to be whole."""
    return Checkpoint(path.name, load_file(path / TENSORS), json.loads((path / STATE).read_text()))


def problem(path: Path, digests: bool = True) -> str | None:
    """What is wrong with the checkpoint folder `path`: a missing file, another size, another digest; None if nothing.

    `digests=False` looks at names and sizes only, which costs nothing.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name in (TENSORS, STATE):
            size, digest = manifest["files"][name]
            if not (path / name).is_file():
                return f"{name} is missing"
            if (path / name).stat().st_size != size:
                return f"{name} has {(path / name).stat().st_size} bytes instead of {size}"
            if digests and _digest(path / name)[1] != digest:
                return f"{name} does not match its SHA-256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
