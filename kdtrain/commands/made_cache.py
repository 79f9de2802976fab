"""What a command that makes a cache of others prints."""

from pathlib import Path

from kdtrain.cache.manifest import Manifest
from kdtrain.monitor.tables import show


def show_cache(folder: Path, manifest: Manifest, as_json: bool) -> None:
    """Print what a merged or cut cache is."""
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
        "parents": [parent["digest"] for parent in manifest.parents or []],
    }
    show(f"cache {folder}", result, as_json)
