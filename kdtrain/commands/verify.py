"""`kdtrain verify`: checks every digest of a cache, of a run's checkpoints, or of one checkpoint."""

from pathlib import Path

from kdtrain.cache.verify import repair, verify_cache
from kdtrain.checkpoint.sealed import checkpoint_at, read_checkpoint
from kdtrain.checkpoint.store import Store
from kdtrain.commands.build_cache import holds_tokens
from kdtrain.commands.kinds import damage_of, kind_of
from kdtrain.config import VerifyConfig
from kdtrain.errors import UsageError
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.tables import show


def main(config: VerifyConfig) -> int:
    """Print what is damaged; return 0 if nothing is, else 1.

    Raises:
        UsageError: the path is neither a cache nor a run nor a checkpoint, or cannot be repaired.
    """
    setup_logging()
    kind = kind_of(config.path)
    if config.repair and kind != "cache":
        raise UsageError(f"--repair is for caches; {config.path} is a {kind}")
    problems = _problems(config.path, kind)
    result: dict[str, object] = {
        "path": str(config.path),
        "kind": kind,
        "ok": not problems,
        "problems": problems,
    }
    if config.repair and problems:
        result["dropped"] = repair(config.path)
        log.info("run the same cache-teacher command again to build what is missing")
    show(f"verify {config.path}", result, config.json)
    return 1 if problems else 0


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
