"""Seals as a stranger would make them anew: every digest of a cache or a checkpoint fits what is in the folder.

Written from the format (cache/README.md) and not with kdtrain's own functions, which may one day refuse to seal what
is not sound.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Edit = Callable[[dict[str, Any]], None]


def digest(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def spelled(record: dict[str, Any]) -> str:
    """Write a sealed record of a cache as text: manifest, settings or sidecar."""
    content = {key: value for key, value in record.items() if key != "digest"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    sealed = {**content, "digest": hashlib.sha256(canonical.encode()).hexdigest()}
    return json.dumps(sealed, indent=1) + "\n"


@contextlib.contextmanager
def record(path: Path) -> Iterator[dict[str, Any]]:
    """Open a JSON object for a change, and seal it again."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(spelled(content))


def cache(
    folder: Path, manifest: Edit | None = None, settings: Edit | None = None, sidecar: Edit | None = None
) -> None:
    """Seal a cache whose files were changed, after further changes to its records."""
    with record(folder / "settings.json") as asked:
        if settings:
            settings(asked)
    stated = json.loads((folder / "settings.json").read_text())
    shards = {}
    for path in sorted((folder / "shards").glob("*.json")):
        with record(path) as own:
            shard = path.with_suffix(".h5")
            if shard.is_file():
                own |= {"sha256": digest(shard), "bytes": shard.stat().st_size}
            own["settings_sha256"] = stated["digest"]
            if sidecar:
                sidecar(own)
        shards[path.stem] = {name: own[name] for name in ("sha256", "bytes") if name in own}
    with record(folder / "manifest.json") as whole:
        whole |= {name: value for name, value in stated.items() if name != "digest"}
        for split in whole["splits"].values():
            for shard in split["shards"]:
                shard |= shards.get(shard["name"], {})
        whole["index_sha256"] = digest(folder / "index.h5")
        files = {path.name: digest(path) for path in sorted(folder.glob("tokenizer/*")) if path.is_file()}
        whole["tokenizer_files"] = files
        if manifest:
            manifest(whole)


def checkpoint(folder: Path, manifest: Edit | None = None) -> None:
    """Seal a checkpoint whose files were changed, after further changes to its manifest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    for name in content["files"]:
        if (folder / name).is_file():
            content["files"][name] = [(folder / name).stat().st_size, digest(folder / name)]
    if manifest:
        manifest(content)
    sealed = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "digest": sealed}, indent=1) + "\n")
