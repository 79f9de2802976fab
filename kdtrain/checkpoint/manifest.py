"""What a checkpoint folder must hold: a sealed manifest with the size and SHA-256 of every file, and how to check it.

`manifest.json` is `{"version", "step", "rollbacks", "files": {name: [size, sha256]}, "digest"}`, where `digest` is the
SHA-256 of the rest, so that a flipped bit is noticed there as well. The other files are `state.json` (every number
that is no tensor) and the safetensors files of `shards.py`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from kdtrain.checkpoint import shards, tiers

MANIFEST, STATE = "manifest.json", "state.json"
VERSION = 2


def seal(step: int, rollbacks: int, files: Mapping[str, tuple[int, str]]) -> str:
    """The text of a manifest."""
    content = {"version": VERSION, "step": step, "rollbacks": rollbacks, "files": {k: [*v] for k, v in files.items()}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1) + "\n"


def problem(path: Path, digests: bool = True) -> str | None:
    """What is wrong with the checkpoint folder `path`: a file is missing, unknown, unreadable, of another size or
    digest, or the manifest is not what was written; None if nothing.

    `digests=False` looks at names and sizes only, which costs nothing.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        if manifest["version"] != VERSION:
            return f"its format is version {manifest['version']!r}, and this kdtrain reads version {VERSION}"
        files: dict[str, tuple[int, str]] = manifest["files"]
        if text != seal(manifest["step"], manifest["rollbacks"], files):
            return f"{MANIFEST} does not match its own digest"
        for name in [*sorted(files.keys() - {STATE}), STATE]:
            size, digest = files[name]
            if (wrong := _file_problem(path / name, size, digest, digests)) is not None:
                return f"{name} {wrong}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        return f"{MANIFEST} cannot be read ({reason})"
    unknown = sorted(each.name for each in path.glob(f"*{shards.SUFFIX}") if each.name not in files)
    return f"{unknown[0]} does not belong to it" if unknown else None


def entry_of(path: Path, name: str, valid: bool = True) -> tiers.Entry:
    """Where in the run the checkpoint `path` was taken: by its manifest, or by its name where that cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return tiers.Entry(name, int(manifest["step"]), int(manifest["rollbacks"]), valid)
    except (OSError, ValueError, KeyError, TypeError):
        return tiers.Entry(name, tiers.step_in(name), 0, valid)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is, or was, a checkpoint: by its name, or by what is in it, unless that cannot be seen."""
    if not path.is_dir():
        return False
    try:
        inside = os.listdir(path)
    except PermissionError:
        return True
    shard = any(name.startswith("shard-") and name.endswith(shards.SUFFIX) for name in inside)
    return tiers.tier(path.name) != "special" or STATE in inside or shard


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_problem(path: Path, size: int, digest: str, digests: bool) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes instead of {size}"
        with open(path, "rb") as file:
            if digests and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return "does not match its SHA-256"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
