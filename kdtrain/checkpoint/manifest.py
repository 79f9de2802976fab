"""What a checkpoint folder must hold: a sealed manifest with the size and SHA-256 of every file, and how to check it.

`manifest.json` is `{"version", "step", "rollbacks", "files": {name: [size, sha256]}, "digest"}`, where `digest` is the
SHA-256 of the rest, so that a flipped bit is noticed there as well. The other files are `state.json` (every number
that is no tensor) and the safetensors files of `shards.py`.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from kdtrain.checkpoint import shards, tiers
from kdtrain.files import file_digest, parse_json, read_json, read_text, typed

MANIFEST, STATE = "manifest.json", "state.json"
VERSION = 2


_NAME = re.compile(r"state\.json|shard-[0-9]{5}-[0-9]{5}\.safetensors")
"""What a file of a checkpoint is called: names of a manifest become paths."""


class _Record(TypedDict):
    version: int
    step: Annotated[int, Meta(ge=0, le=2**62)]
    rollbacks: Annotated[int, Meta(ge=0, le=2**62)]
    files: dict[str, tuple[Annotated[int, Meta(ge=0)], str]]
    digest: str


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
        files = _files(path)
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{MANIFEST}: {error}"
    for name in [*sorted(files.keys() - {STATE}), STATE]:
        if (wrong := _file_problem(path / name, *files[name], digests)) is not None:
            return f"{name} {wrong}"
    unknown = sorted(each.name for each in path.glob(f"*{shards.SUFFIX}") if each.name not in files)
    return f"{unknown[0]} does not belong to it" if unknown else None


def sealed_files(path: Path) -> set[str]:
    """The names that the sealed manifest of a checkpoint vouches for, its own among them; none where it does not."""
    try:
        return {MANIFEST, *_files(path)}
    except (OSError, ValueError):
        return set()


def vouched_files(path: Path) -> set[str]:
    """The names of all files in a checkpoint, each as the sealed manifest says it was written; none where one is not.

    Files may be missing. This proves that kdtrain wrote what is there, as names alone do not.
    """
    try:
        files, there = _files(path), {each.name for each in path.iterdir()}
    except (OSError, ValueError):
        return set()
    others = there - {MANIFEST}
    proven = all(name in files and _file_problem(path / name, *files[name], digests=True) is None for name in others)
    return there if proven else set()


def _files(path: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 by name. OSError: the manifest cannot be read. ValueError: it is not one of this version."""
    text = read_text(path / MANIFEST)
    record = parse_json(text)
    if isinstance(record, dict) and record.get("version", VERSION) != VERSION:
        raise ValueError(f"its format is version {record['version']!r}, and this kdtrain reads version {VERSION}")
    record = typed(record, _Record)
    if text != seal(record["step"], record["rollbacks"], record["files"]):
        raise ValueError("it does not match its own digest")
    if STATE not in record["files"] or not all(map(_NAME.fullmatch, record["files"])):
        raise ValueError("it names files that a checkpoint does not have")
    return record["files"]


def entry_of(path: Path, name: str, valid: bool = True) -> tiers.Entry:
    """Where in the run the checkpoint `path` was taken: by its manifest, or by its name where that cannot be read."""
    try:
        manifest = read_json(path / MANIFEST, _Record)
        return tiers.Entry(name, manifest["step"], manifest["rollbacks"], valid)
    except (OSError, ValueError):
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
