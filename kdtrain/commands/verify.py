"""`kdtrain verify`: checks every digest of a cache, of a run's checkpoints, or of one checkpoint.

Some rows of a sound cache are looked at, too (`cache.tools.self_check`); its teacher is not needed.
"""

import shlex
from pathlib import Path
from typing import Any

from kdtrain.cache.read.reader import open_cache
from kdtrain.cache.read.remote import open_remote
from kdtrain.cache.tools.self_check import Look
from kdtrain.cache.tools.verify import repair, verify_cache
from kdtrain.checkpoint.sealed import checkpoint_at, read_checkpoint
from kdtrain.checkpoint.store import Store
from kdtrain.config.commands import VerifyConfig
from kdtrain.config.values import refuse
from kdtrain.errors import log
from kdtrain.monitor.facts import damage_of, kind_of
from kdtrain.monitor.progress import setup_logging
from kdtrain.net.address import parse_address
from kdtrain.tables import counted, number
from kdtrain.tokenizers.view_format import OWN, own_data, verify_view


def main(config: VerifyConfig) -> int:
    """Print the files that are damaged and the numbers that cannot be right; return 0 without any, else 1.

    Raises:
        UsageError: the path is neither a cache nor a run nor a checkpoint, or cannot be repaired.
    """
    setup_logging()
    address = parse_address(config.path)
    kind, path = ("cache", str(address)) if address else (kind_of(config.path), str(config.path))
    refuse(config.repair and kind != "cache", f"--repair is for caches; {path} is a {kind}")
    if address is None:
        problems = _problems(config.path, kind)
    else:
        refuse(config.repair, f"--repair is for caches in folders; ask the author of {address}")
        problems = verify_cache(config.path, open_remote(address))
    result: dict[str, Any] = {
        "path": path,
        "kind": kind,
        "ok": not problems,
        "problems": problems,
    }
    page = [*problems]
    if config.repair and problems:
        result["dropped"] = repair(config.path)
        page += [f"moved aside: {each}" for each in result["dropped"]]
        log.info("run the command that made it again to build what is missing")
    elif kind == "cache" and problems and address is None:
        page += [
            "--repair sets what is damaged aside; the command that made the cache builds it again",
            f"Next: kdtrain verify {shlex.quote(path)} --repair",
        ]
    elif kind == "cache" and not problems:
        found, findings, page = _content(config)
        result |= {**found, "ok": not findings, "findings": findings}
    wrong = [*problems, *result.get("findings", ())]
    verdict = f"not ok, {counted(len(wrong), 'finding')}" if wrong else "ok, nothing is damaged"
    config.show([f"{path}: {kind} {verdict}", *page], result, wrapped=True)
    return 0 if result["ok"] else 1


def _content(config: VerifyConfig) -> tuple[dict[str, Any], list[str], list[str]]:
    """Check whether a sound cache can be right: return a record, the findings, and a page."""
    cache = open_cache(config.path)
    seen = Look.at(cache)
    if seen is None:
        return {}, [], ["it holds no targets of tokens that count to look at"]
    alignment = "" if seen.alignment.shift else f"; {seen.alignment}"
    page = [
        f"{seen.rows} rows: the teacher's loss is {number(seen.teacher_loss)}, its entropy {number(seen.entropy)}"
        f"{alignment}",
        *(f"finding: {each}" for each in seen.findings),
        *(f"note: {each}" for each in seen.notes),
        "kdtrain audit scores some rows again by the teacher",
    ]
    return {"look": seen.to_json()}, list(seen.findings), page


def _problems(path: Path, kind: str) -> list[str]:
    if kind == "cache":
        return [str(each) for each in verify_cache(path)]
    if kind == "checkpoint":
        damage = read_checkpoint(lambda: checkpoint_at(path), damage_of)
        return [damage] if damage else []
    store = Store(path / "checkpoints")
    caches: list[str] = []
    for folder in (path / name for name in OWN):
        made = own_data(folder)
        if made == "view":
            caches += verify_view(folder)
        elif made:
            caches += verify_cache(folder)
    names = [entry.name for entry in store.entries(apart=True)]
    damaged = [(name, damage) for name in names if (damage := store.problem(name))]
    # a run that is training may have removed one meanwhile
    return caches + [f"{name}: {damage}" for name, damage in damaged if store.path(name).exists()]
