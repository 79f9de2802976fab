"""May this folder be built in, and what stands in it before the first shard.

A folder that holds something else, or a cache of other settings, is refused with what differs.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdtrain import faults
from kdtrain.cache import layout
from kdtrain.cache.files import fsync, publish_json, read_sealed, writing
from kdtrain.cache.provenance import CacheSettings, Manifest, read_manifest
from kdtrain.errors import UsageError

_TOKENIZER_FILES = (
    "token*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
)


def claim(folder: Path, settings: CacheSettings) -> Manifest | None:
    """The manifest if `folder` is this cache and finished; None if there is something to build.

    UsageError: the folder is a file, holds other files, or a cache of other settings (named).
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --out must be a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if (folder / layout.MANIFEST).exists():
        manifest = read_manifest(folder)
        _refuse_others(folder, manifest.settings.to_json(), settings, "holds a finished cache")
        return manifest
    if (folder / layout.SETTINGS).exists():
        _refuse_others(folder, _stored_settings(folder), settings, "holds an unfinished cache")
    elif not (folder / layout.SHARDS).is_dir():
        raise UsageError(f"{folder} holds files that are no cache; choose another --out")
    return None


def begin(folder: Path, settings: CacheSettings, tokenizer: Any) -> None:
    """Make the folder, settings.json and the tokenizer files. RunError: it cannot be written."""
    make_folder(folder)
    if not (folder / layout.SETTINGS).exists():
        publish_json(folder / layout.SETTINGS, settings.to_json(), "cache.settings")
    if tokenizer is not None:
        with writing(folder / layout.TOKENIZER):
            _copy_tokenizer(tokenizer, folder / layout.TOKENIZER)


def make_folder(folder: Path) -> None:
    """Make the folder of the shards, and those above it. RunError: it cannot be written."""
    with writing(folder):
        (folder / layout.SHARDS).mkdir(parents=True, exist_ok=True)


def _stored_settings(folder: Path) -> dict[str, Any]:
    path = folder / layout.SETTINGS
    try:
        return {key: value for key, value in read_sealed(path).items() if key != "digest"}
    except ValueError as error:
        raise UsageError(
            f"{path} was altered or damaged ({error}); run kdtrain verify {folder} --repair first"
        ) from error


def _refuse_others(folder: Path, there: dict[str, Any], settings: CacheSettings, what: str) -> None:
    if changed := list(_differences(there, settings.to_json())):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(
            f"{folder} {what} with other settings ({'; '.join(changed[:3])}{more}); "
            "choose another --out or remove that folder"
        )


def _differences(there: Any, asked: Any, name: str = "") -> Iterator[str]:
    """One phrase a leaf that differs between two JSON records."""
    if isinstance(there, dict) and isinstance(asked, dict):
        for key in sorted(there.keys() | asked.keys()):
            yield from _differences(there.get(key), asked.get(key), f"{name}.{key}" if name else key)
    elif there != asked:
        yield f"{name}: {there} there, {asked} asked"


def _copy_tokenizer(tokenizer: Any, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(temporary)
    else:
        for path in sorted({p for pattern in _TOKENIZER_FILES for p in Path(tokenizer).glob(pattern)}):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, temporary / path.name)
    for path in temporary.rglob("*"):
        fsync(path)
    faults.point("cache.tokenizer.before-rename")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    fsync(target.parent)
