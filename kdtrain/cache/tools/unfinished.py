"""How far an unfinished cache is, by its settings, the records of its shards, and the lock of its builder."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Sidecar, read_sidecar, shard_problem
from kdtrain.cache.tools.facts import heading
from kdtrain.files import is_locked
from kdtrain.tables import duration, short, size


def progress(folder: Path) -> dict[str, Any] | None:
    """Measure the finished part of a cache; None if it is complete. Its rate counts the shards since the lock.

    UsageError, ValueError: its settings are damaged.
    """
    finished = (folder / cache_format.MANIFEST).exists()
    view = (folder / cache_format.CELLS).exists()
    if finished or view or not (folder / cache_format.SETTINGS).exists():
        return None
    settings = CacheSettings.from_json(CacheSettings.stored(folder))
    whole = list[tuple[float, Sidecar]]()
    for path in (records := [*(folder / cache_format.SHARDS).glob("*.json")]):
        with suppress(OSError, ValueError):
            record = read_sidecar(folder, path.stem)
            if shard_problem(folder, record, digest=False) is None:
                whole.append((path.stat().st_mtime, record))
    limits = [*settings.sequences.values()]
    done = sum(record["sequences"] for _, record in whole)
    known = [each for each in limits if each is not None]
    total = sum(known) if limits and len(known) == len(limits) else None
    shards = sum(-(-each // settings.sequences_per_shard) for each in known) if total else None
    locks = {path: is_locked(path) for path in folder.glob(f"{cache_format.LOCK}*")}
    making = next((each for each in (True, None) if each in locks.values()), False)
    tokens = done * settings.seq_len
    mib = sum(record["bytes"] for _, record in whole) / 2**20
    counts: dict[str, Any] = {"sequences": done, "sequences requested": total, "tokens": tokens, "MiB": mib}
    counts |= {"shards": len(whole), "shards requested": shards, "damaged shards": len(records) - len(whole)}
    line = [f"{len(whole):,} of {shards:,} shards ({done / total:.0%})" if total else f"{len(whole):,} shards"]
    line += [f"{short(tokens)} tokens", size(mib)]
    line += [f"{count:,} damaged, which are made again"] if (count := counts["damaged shards"]) else []
    line.append("being made" if making else "no process is seen to make it")
    with suppress(OSError, ValueError, OverflowError):  # nobody makes it, or its builder has just ended
        since = min(path.stat().st_mtime for path, held in locks.items() if held)
        last = max(written for written, _ in whole if written > since)
        rate = sum(record["sequences"] for written, record in whole if written > since) / (last - since)
        left = None if total is None else max((total - done) / rate - (time.time() - last), 0.0)
        counts |= {"tokens_per_second": rate * settings.seq_len, "seconds left": left}
        line += [f"{short(rate * settings.seq_len)} tok/s", f"{duration(left)} left"][: 1 if left is None else 2]
    return {"state": f"unfinished, {heading(settings)}", "making": making, "progress": ", ".join(line), **counts}
