"""`kdtrain verify`: checks every digest of a cache, of a run's checkpoints, or of one checkpoint."""

from pathlib import Path

from kdtrain.cache import format as cache_format
from kdtrain.cache.address import parse_address
from kdtrain.cache.remote import open_remote
from kdtrain.cache.verify import repair, verify_cache
from kdtrain.checkpoint.store import Store, checkpoint_at, is_checkpoint, problem, read_checkpoint
from kdtrain.commands.build_cache import holds_tokens
from kdtrain.commands.run_folder import is_run
from kdtrain.config import VerifyConfig
from kdtrain.config.values import refuse
from kdtrain.errors import RunError, UsageError
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.tables import show


def main(config: VerifyConfig) -> int:
    """Print what is damaged; return 0 if nothing is, else 1.

    Raises:
        UsageError: the path is neither a cache nor a run nor a checkpoint, or cannot be repaired.
    """
    setup_logging()
    if (address := parse_address(config.path)) is not None:
        refuse(config.repair, f"--repair is for caches in folders; ask the author of {address}")
        remote = open_remote(address, config.local_limit)
        kind, path, problems = "cache", str(address), verify_cache(config.path, remote)
    else:
        kind, path = kind_of(config.path), str(config.path)
        refuse(config.repair and kind != "cache", f"--repair is for caches; {config.path} is a {kind}")
        problems = _problems(config.path, kind)
    result: dict[str, object] = {
        "path": path,
        "kind": kind,
        "ok": not problems,
        "problems": problems,
    }
    if config.repair and problems:
        result["dropped"] = repair(config.path)
        log.info("run the same cache-teacher command again to build what is missing")
    show(f"verify {path}", result, config.json)
    return 1 if problems else 0


def kind_of(path: Path) -> str:
    """Return `cache`, `run` or `checkpoint`."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if is_run(path):
        return "run"
    if is_checkpoint(path.resolve()):
        return "checkpoint"
    if any((path / name).exists() for name in (cache_format.MANIFEST, cache_format.SETTINGS, cache_format.SHARDS)):
        return "cache"
    raise UsageError(f"{path} is neither a cache nor a run nor a checkpoint")


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None. RunError: it was removed meanwhile."""
    if (damage := problem(checkpoint)) is not None and not checkpoint.exists():
        raise RunError(f"checkpoint {checkpoint}: {damage}")
    return damage


def _problems(path: Path, kind: str) -> list[str]:
    if kind == "cache":
        return [str(each) for each in verify_cache(path)]
    if kind == "checkpoint":
        damage = read_checkpoint(lambda: checkpoint_at(path), damage_of)
        return [damage] if damage else []
    store = Store(path / "checkpoints")
    tokens = verify_cache(path / "data") if holds_tokens(path / "data") else []
    names = [entry.name for entry in store.entries(apart=True)]
    damaged = [(name, damage) for name in names if (damage := store.problem(name))]
    # a run that is training may have removed one meanwhile
    return tokens + [f"{name}: {damage}" for name, damage in damaged if store.path(name).exists()]
