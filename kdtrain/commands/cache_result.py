"""What a command that has made a cache prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdtrain.cache.format.manifest import Manifest
from kdtrain.commands.cache_pages import made_page
from kdtrain.tables import show, show_page


def show_cache(folder: Path, manifest: Manifest, as_json: bool, said: Sequence[str] = (), **facts: Any) -> None:
    """Print what a cache is: a short page, or one JSON object of everything.

    said: lines for the page. facts: of this command alone, for the object.
    """
    if not as_json:
        show_page(made_page(folder, manifest, said))
        return
    sequences = {name: split["sequences"] for name, split in manifest.splits.items()}
    result = {
        "cache": str(folder),
        "digest": manifest.digest,
        "format_version": manifest.settings.format_version,
        "teacher": (manifest.settings.teacher or {}).get("spec"),
        "num_samples": manifest.codec.num_samples,
        "sampling": manifest.settings.sampling,
        "sequences": sequences,
        "tokens": {name: count * manifest.settings.seq_len for name, count in sequences.items()},
        "bytes_per_token": manifest.bytes_per_token["total"],
        "temperature_range": manifest.temperature_range,
    }
    show("", {**result, **facts}, True)


def made_of(manifest: Manifest) -> list[str]:
    """The digests of the caches that this one was made of."""
    return [parent["digest"] for parent in manifest.parents or []]
