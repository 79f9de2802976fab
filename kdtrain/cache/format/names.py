"""The files of a cache by name, and whether a finished cache is in a folder, seen without numpy.

cache/README.md is the specification of the format, versions 3 to 5; `spec` has the data sets of a shard.
"""

import re
from pathlib import Path

from kdtrain.files import temporary_of

MANIFEST = "manifest.json"
SETTINGS = "settings.json"
CELLS, VIEW = "cells.npy", "view.json"
"""In the place of shards and manifest: of a view in a student's tokens (`tokenizers.view_format`)."""
SHARDS = "shards"
FORMAT_VERSION = 3
"""Of every shard, and of a cache whose shards, all but the last, hold `sequences_per_shard` sequences each."""
PIECES = 4
"""The format version of a cache of shards of any sizes, made for other caches: appended by merge, or cut by subset."""
WRITTEN = 5
"""The format version of a cache of text that a student wrote, and of its shards: they hold its log p of each label."""
SPLITS = ("train", "validation", "test")
INDEX = "index.h5"
TOKENIZER = "tokenizer"
DICTIONARY = "dictionary"
BROKEN = 2
"""`loss_mask` of a sequence for which the teacher's logits were non-finite."""
SHARD_NAME = re.compile(r"[a-z]+-[0-9]{5,}")
"""Names of shards. Names in a manifest become paths, and a file with another name is not kdtrain's."""

LOCK = ".building-"
"""The file that rank R of a builder locks is .building-R."""
LOCK_NAME = re.compile(rf"{re.escape(LOCK)}[0-9]+")


def is_shard_file(name: str) -> bool:
    """Return True if a file of this name in `shards/` is a shard or a sidecar."""
    stem, _, suffix = name.partition(".")
    return SHARD_NAME.fullmatch(stem) is not None and suffix in ("h5", "json")


def shard_name(split: str, number: int) -> str:
    """Return the name of a shard without its suffix, as in the manifest."""
    return f"{split}-{number:05d}"


def shard_path(folder: Path, name: str) -> Path:
    """Return the path of the HDF5 file of the shard `name`."""
    return folder / SHARDS / f"{name}.h5"


def sidecar_path(folder: Path, name: str) -> Path:
    """Return the path of the JSON record of the shard `name`."""
    return folder / SHARDS / f"{name}.json"


def why_no_cache(folder: Path | str) -> str | None:
    """Say why a folder holds no finished cache, and what to do; None if it has a manifest."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return None
    if not folder.exists():
        return "no cache is there; make one with kdtrain cache-teacher"
    if folder.is_file():
        return "it is a file, and a cache is a folder; make one with kdtrain cache-teacher"
    if (folder / CELLS).exists():
        view = "it is not a cache but a view of one, in a student's tokens"
        return f"{view}; run kdtrain verify on the run that it belongs to"
    if any((folder / SHARDS).glob("*.h5*")):  # a temporary one too
        return "the cache is unfinished; run the same cache-teacher command again to finish it"
    if (folder / SETTINGS).exists():
        began = "the command that began it was refused or stopped before its first one"
        return f"the cache holds no shard: {began}; run cache-teacher again"
    return f"it holds no cache (no {MANIFEST}); make one with kdtrain cache-teacher"


def holds_nothing(folder: Path) -> bool:
    """Return True if a folder has no files except the ones that a builder makes before it publishes settings.json."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return all(
        path.parent == folder and (LOCK_NAME.fullmatch(path.name) or temporary_of(path.name) == SETTINGS)
        for path in files
    )
