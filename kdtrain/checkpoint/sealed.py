"""The files of one checkpoint and the sealed manifest that vouches for them (`store` has the format).

Reads and compares; nothing here needs torch but to see whether tensors can be loaded.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

from msgspec import Meta

from kdtrain.checkpoint import tiers
from kdtrain.errors import RunError, UsageError
from kdtrain.files import MEDIUM, file_digest, parse_json, read_json, read_text, typed

T = TypeVar("T")

MANIFEST, STATE = "manifest.json", "state.json"
VERSION = 2


class _Record(TypedDict):
    version: int
    step: Annotated[int, Meta(ge=0, le=2**62)]
    rollbacks: Annotated[int, Meta(ge=0, le=2**62)]
    files: dict[str, tuple[Annotated[int, Meta(ge=0)], str]]
    digest: str


def seal(step: int, rollbacks: int, files: Mapping[str, tuple[int, str]]) -> str:
    """Return the text of a manifest."""
    content = {"version": VERSION, "step": step, "rollbacks": rollbacks, "files": {k: [*v] for k, v in files.items()}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1) + "\n"


def problem(path: Path, digests: bool = True, loads: bool = False) -> str | None:
    """Describe the problem of the checkpoint folder `path`: a missing, unknown, unreadable or changed file, or a
    changed manifest; None if it is whole.

    `digests=False` compares only names and sizes, which takes no time. With `loads`, content that `load` would refuse
    is wrong as well, even if it is as it was sealed.
    """
    try:
        files = _files(path)
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{MANIFEST}: {error}"
    for name in [*sorted(files.keys() - {STATE}), STATE]:
        if (wrong := _file_problem(path / name, *files[name], digests)) is not None:
            return f"{name} {wrong}"
    unknown = sorted(each.name for each in path.glob(f"*{tiers.SUFFIX}") if each.name not in files)
    if unknown:
        return f"{unknown[0]} does not belong to it"
    return unreadable(path) if loads else None


def unreadable(path: Path) -> str | None:
    """Say why `load` would refuse the files of a checkpoint, sealed or not; None: it reads them."""
    from kdtrain.checkpoint import shards

    try:
        read_state(path)
        shards.tensor_names(path)
    except OSError as error:
        return f"{STATE} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{STATE}: {error}"
    except RunError as error:
        return str(error)
    return None


def sealed_files(path: Path) -> set[str]:
    """Return the manifest of a checkpoint and the files that it names; empty if its seal does not match."""
    try:
        return {MANIFEST, *_files(path)}
    except (OSError, ValueError):
        return set()


def vouched_files(path: Path) -> set[str]:
    """Return all files in a checkpoint if each matches the sealed manifest, else none; files may be missing.

    This proves that kdtrain wrote them, which names alone do not.
    """
    try:
        files = _files(path)
        there = {each.name for each in path.iterdir()}
    except (OSError, ValueError):
        return set()
    others = there - {MANIFEST}
    proven = all(name in files and _file_problem(path / name, *files[name], digests=True) is None for name in others)
    return there if proven else set()


def _files(path: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 by name. OSError: the manifest cannot be read. ValueError: not one of this version."""
    text = read_text(path / MANIFEST)
    record = parse_json(text)
    if isinstance(record, dict) and record.get("version", VERSION) != VERSION:
        raise ValueError(f"its format is version {record['version']!r}, and this kdtrain reads version {VERSION}")
    record = typed(record, _Record)
    if text != seal(record["step"], record["rollbacks"], record["files"]):
        raise ValueError("it does not match its own digest")
    allowed = re.compile(r"state\.json|shard-[0-9]{5}-[0-9]{5}\.safetensors")  # since they become paths
    if STATE not in record["files"] or not all(map(allowed.fullmatch, record["files"])):
        raise ValueError("it names files that a checkpoint does not have")
    return record["files"]


def entry_of(path: Path, name: str, valid: bool = True) -> tiers.CheckpointEntry:
    """Return the place of the checkpoint `path` in the run: from its manifest, or its name if that is unreadable."""
    try:
        manifest = read_json(path / MANIFEST, _Record)
        return tiers.CheckpointEntry(name, manifest["step"], manifest["rollbacks"], valid)
    except (OSError, ValueError):
        return tiers.CheckpointEntry(name, tiers.step_in(name), 0, valid)


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder is, or was, a checkpoint, by its name or its files; or if it cannot be listed."""
    if not path.is_dir():
        return False
    try:
        inside = os.listdir(path)
    except PermissionError:
        return True
    except FileNotFoundError:  # a run that is training has just removed it
        return False
    shard = any(name.startswith("shard-") and name.endswith(tiers.SUFFIX) for name in inside)
    return tiers.tier(path.name) != "special" or STATE in inside or shard


def _file_problem(path: Path, size: int, digest: str, digests: bool) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes instead of {size}"
        if digests and file_digest(path) != digest:
            return "does not match its SHA-256"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Read the numbers, options and digests of a checkpoint that `problem` has verified, without its tensors."""
    return read_json(path / STATE, dict[str, Any], MEDIUM)


def read_checkpoint(find: Callable[[], Path], read: Callable[[Path], T]) -> T:
    """Call `read` on the checkpoint that `find` names; again if a run that is training has removed it meanwhile.

    Raises:
        UsageError, RunError: as `find`, and as `read` for a checkpoint that is still there.
    """
    while True:
        path = find()
        try:
            return read(path)
        except (RunError, OSError):
            if path.exists():
                raise


def checkpoint_at(path: Path) -> Path:
    """Return the folder of the checkpoint `path`, which may be a link. UsageError: a training run has removed it."""
    if not path.exists():
        raise UsageError(f"{path} was removed while it was read, by the run that is training; name a newer checkpoint")
    return path.resolve()
