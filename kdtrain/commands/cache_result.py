"""What a command that has made a cache prints."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kdtrain.cache.format.manifest import Manifest
from kdtrain.cache.tools.facts import MADE, cache_facts, heading
from kdtrain.tables import show


def show_cache(folder: Path, manifest: Manifest, as_json: bool, lines: Sequence[str] = (), **facts: Any) -> None:
    """Print the facts about a cache: a short page, or one JSON object of everything.

    lines: for the page, what only this command knows. facts: of this command alone, for the object.
    """
    known = cache_facts(manifest)
    if "of these" in known:  # the largest; kdtrain inspect has all
        known["of these"] = ", ".join(known["of these"].split(", ")[:5])
    shown = [f"{label}: {known[label]}" for label in (*manifest.splits, *MADE) if label in known]
    digest = f"digest {manifest.digest[:12]}; kdtrain inspect {shlex.quote(str(folder))} shows how true it is"
    page = [f"{folder}: {heading(manifest.settings)}", "", *shown, *lines, digest, *next_step(folder, manifest)]
    sequences = {name: split["sequences"] for name, split in manifest.splits.items()}
    record = {
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
    show(page, record | facts, as_json)


def next_step(path: Path | str, manifest: Manifest) -> Iterator[str]:
    """Yield the command that follows for a cache, if it has a teacher's distributions."""
    if manifest.codec.taught:
        yield f"Next: kdtrain distill --cache {shlex.quote(str(path))} --student SPEC --out runs/NAME"
