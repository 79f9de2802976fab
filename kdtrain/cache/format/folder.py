"""The folder of a cache, by the names of its files: whether a finished cache is there, seen without numpy."""

from pathlib import Path

MANIFEST = "manifest.json"
SETTINGS = "settings.json"
CELLS, VIEW = "cells.npy", "view.json"
"""In the place of shards and manifest: of a view in a student's tokens (`tokenizers.view_format`)."""
SHARDS = "shards"


def why_no_cache(folder: Path | str) -> str | None:
    """Why a folder holds no finished cache, and what to do; None where it has a manifest."""
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
