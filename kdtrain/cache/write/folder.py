"""Opening a folder for a build: what may be built there, the locks, and the files before the first shard.

A folder that holds other files, or a cache of other settings, is refused with what differs. So is one in which another
command is building: each rank of a builder locks the file `.building-RANK`. Rank 0 takes its lock first, checks that no
other is held (by a rank that an earlier command left behind, for example), and then lets the other ranks take theirs.

What it gives up: on a file system without locks two builders are not kept apart; their files are equal, but one of the
builds may stop with an error.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Manifest, check_sizes, differences, read_manifest
from kdtrain.errors import RunError, UsageError, making, writing
from kdtrain.files import (
    LARGE,
    Lock,
    file_digest,
    files_below,
    hidden_folder,
    publish_json,
    read_bytes,
    refuse_links,
    swap_in,
    sweep,
)
from kdtrain.models.hub import TOKENIZER_FILES, refuse_odd_files, save_tokenizer
from kdtrain.ranks import on_main, rank

_FILES = (cache_format.SETTINGS, cache_format.INDEX, cache_format.MANIFEST)


def open_folder(
    folder: Path, settings: CacheSettings, tokenizer: Any, all_ranks: bool
) -> tuple[Manifest | None, Lock | None]:
    """Check and lock a folder, and write its settings, rank 0 before the others.

    Returns the manifest of a finished cache, else this rank's lock. all_ranks: True when all ranks call this, False for
    this process alone.

    UsageError: see `claim_folder` and `lock`, or its path cannot be a folder. RunError: it cannot be written.
    """
    own: list[Lock] = []
    number = rank() if all_ranks else 0

    def needs_build() -> bool:
        if claim_folder(folder, settings) is not None:
            return False
        with making(folder):
            (folder / cache_format.SHARDS).mkdir(parents=True, exist_ok=True)
        own.append(_first_lock(folder))
        if claim_folder(folder, settings) is not None:  # another builder finished it meanwhile
            own.pop().release()
            return False
        with writing(folder):
            sweep(folder)
            sweep(folder / cache_format.SHARDS)
        # Corrected settings replace those of a build that failed before its first shard.
        if not CacheSettings.begun(folder) or CacheSettings.stored(folder) != settings.to_json():
            publish_json(folder / cache_format.SETTINGS, settings.to_json(), "cache.settings")
        if tokenizer is not None:
            with writing(folder / cache_format.TOKENIZER):
                copy_tokenizer(tokenizer, folder / cache_format.TOKENIZER)
        return True

    try:
        if not (on_main(needs_build) if all_ranks else needs_build()):
            if (folder / f"{cache_format.LOCK}{number}").exists():  # its builder was killed after the manifest
                with suppress(UsageError, RunError):  # a read-only folder keeps it
                    lock(folder, number).release()
            return read_manifest(folder), None
        return None, own[0] if own else lock(folder, number)
    except BaseException:
        for each in own:
            each.release()
        raise


def _first_lock(folder: Path) -> Lock:
    """Take the lock of rank 0. UsageError: a rank of another command holds one."""
    own = lock(folder, 0)
    try:
        for path in folder.glob(f"{cache_format.LOCK}*"):
            if path.name != f"{cache_format.LOCK}0" and cache_format.LOCK_NAME.fullmatch(path.name):
                lock(folder, int(path.name.removeprefix(cache_format.LOCK))).release()
    except UsageError:
        own.release()
        raise
    return own


def claim_folder(folder: Path, settings: CacheSettings) -> Manifest | None:
    """Return the manifest if `folder` is this cache and finished; None if there is something to build.

    UsageError: the folder is a file, holds other files, a cache of other settings (named), a finished cache with a
    shard that is missing or of another size (named), or a folder in the place of a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --out must be a folder")
    for name in _FILES:
        if (folder / name).is_dir():
            raise UsageError(f"{folder / name} is a folder, and the cache needs that name for a file; move it away")
    if not folder.exists() or cache_format.holds_nothing(folder):
        return None
    if (folder / cache_format.MANIFEST).exists():
        manifest = read_manifest(folder)
        _refuse_others(folder, manifest.settings.to_json(), settings, "holds a finished cache")
        check_sizes(folder, manifest)
        return manifest
    if not CacheSettings.begun(folder):
        raise UsageError(f"{folder} holds files that are not a cache; choose another --out")
    refuse_links(folder)
    stored = CacheSettings.stored(folder)
    shards = folder / cache_format.SHARDS
    # Half-written files of a killed builder do not count.
    if shards.is_dir() and any(not path.name.endswith(".tmp") for path in shards.iterdir()):
        _refuse_others(folder, stored, settings, "holds an unfinished cache")
    return None


def lock(folder: Path, rank: int) -> Lock:
    """Take the lock of one rank of a builder on a folder that exists. UsageError: another process builds there."""
    message = f"another process is building {folder} now; wait for it, or choose another --out"
    return Lock(folder / f"{cache_format.LOCK}{rank}", message)


def _refuse_others(folder: Path, there: dict[str, Any], settings: CacheSettings, what: str) -> None:
    if changed := list(differences(there, settings.to_json())):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(
            f"{folder} {what} with other settings ({'; '.join(changed[:3])}{more}); "
            "choose another --out or remove that folder"
        )


def copy_tokenizer(tokenizer: Any, target: Path) -> None:
    """Put the tokenizer's files into the folder `target`; other files there are moved aside."""
    with hidden_folder(target) as hidden:
        if hasattr(tokenizer, "save_pretrained"):
            save_tokenizer(tokenizer, hidden)
        else:
            refuse_odd_files(str(tokenizer))
            for name in TOKENIZER_FILES:
                if (path := Path(tokenizer) / name).is_file():
                    (hidden / name).write_bytes(read_bytes(path, LARGE))
            for path in Path(tokenizer).glob("additional_chat_templates/*.jinja"):
                (hidden / path.parent.name).mkdir(exist_ok=True)
                (hidden / path.parent.name / path.name).write_bytes(read_bytes(path, LARGE))
        if target.is_dir() and file_digests(target) == file_digests(hidden):
            return
        swap_in(hidden, target, "cache.tokenizer")


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below `folder`, by its path there."""
    return {name: file_digest(path) for name, path in files_below(folder).items()}
