"""Is a cache as hard to lose as it says? Random kills and random bit flips, counted.

`make torture`, or `python -m tests.torture.cache [--kills 100] [--flips 200] [--quick]`.

Kills: `kdtrain cache-teacher` over a tiny random teacher is started in a fork of this process, killed with SIGKILL
after a random time, started again, ..., until it ends by itself; each kill counts once, and each finished cache is
compared, data set by data set, with an undisturbed one. Flips: one bit at a random offset over all files of a
finished cache is turned; `verify` has to name that file, and reading every sequence has to end in an error or in
exactly the right numbers; then the bit is turned back. The result is benchmarks/results/torture-cache.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from benchmarks.harness import RESULTS, write
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import RunError, UsageError
from kdtrain.objective.batch import Batch
from kdtrain.testing import tiny_model
from tests.torture import forks


def main() -> int:
    """Run both tortures; 0 when nothing was lost, missed or let through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="5 kills, 20 flips, and no result file")
    options = parser.parse_args()
    kills, flips = (5, 20) if options.quick else (options.kills, options.flips)
    choose = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        forks.materials(tiny_model("llama", 300, seed=1))
        started = time.monotonic()
        _build(Path("sound"))
        sound, seconds = _content(Path("sound")), time.monotonic() - started
        result = {"seed": options.seed, **_kill(choose, kills, seconds, sound), **_flip(choose, flips)}
    print(json.dumps(result, indent=1))
    if not options.quick:
        write(RESULTS / "torture-cache.json", result)
    bad = ("caches_that_differ", "flips_missed_by_verify", "flips_that_reached_the_trainer")
    return int(any(result[name] for name in bad))


def _build(out: Path, kill_after: float | None = None) -> bool:
    """Run one command in a fork; return whether it ended by itself, well."""
    codec = ("--top-k", "4", "--num-samples", "6", "--sequences-per-shard", "8", "--batch-size", "4")
    size = ("--num-sequences", "96", "--validation-sequences", "8")
    argv = ["cache-teacher", "--teacher", "teacher", "--out", str(out), *forks.TEXT, *size, *codec]
    status = forks.command(argv, kill_after=kill_after)
    assert status in (0, -signal.SIGKILL), f"the command ended with {status}: {forks.said()}"
    return status == 0


def _content(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}

    def take(name: str, each: Any) -> None:
        if isinstance(each, h5py.Dataset):
            found[f"{path.name}/{name}"] = each[()]

    for path in sorted((folder / "shards").glob("*.h5")):
        with h5py.File(path) as file:
            file.visititems(take)
    found["facts"] = np.array(json.dumps([read_manifest(folder).splits, read_manifest(folder).fidelity]))
    return found


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _kill(choose: random.Random, wanted: int, seconds: float, sound: dict[str, np.ndarray]) -> dict[str, Any]:
    kills = caches = differing = 0
    while kills < wanted:
        folder = Path("killed")
        shutil.rmtree(folder, ignore_errors=True)
        while kills < wanted and not _build(folder, choose.uniform(0, seconds)):
            kills += 1
        assert _build(folder), "a build that nobody killed did not end well"
        caches += 1
        differing += verify_cache(folder) != [] or not _same(_content(folder), sound)
        print(f"{kills} kills, {caches} caches, {differing} of them differ", file=sys.stderr)
    return {"kills": kills, "caches_finished": caches, "caches_that_differ": differing}


def _read_all(folder: Path) -> list[Batch]:
    readers = [CacheReader(folder, split) for split in ("train", "validation")]
    return [reader.read(range(len(reader))) for reader in readers]


def _equal(one: Batch, other: Batch) -> bool:
    mine, theirs = vars(one) | vars(one.targets), vars(other) | vars(other.targets)
    return all(torch.equal(mine[name], theirs[name]) for name in mine if torch.is_tensor(mine[name]))


def _flip(choose: random.Random, wanted: int) -> dict[str, Any]:
    folder = Path("sound")
    sound = _read_all(folder)
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"
    )  # no digest covers the card
    sizes = [path.stat().st_size for path in files]
    missed, passed, where = 0, 0, dict.fromkeys(("shard", "sidecar", "tokenizer", "other"), 0)
    for _ in range(wanted):
        path = choose.choices(files, sizes)[0]
        place, bit = choose.randrange(path.stat().st_size), 1 << choose.randrange(8)
        _turn(path, place, bit)
        where[_kind(path)] += 1
        missed += not any(str(path) in line for line in verify_cache(folder))
        try:
            passed += not all(_equal(one, other) for one, other in zip(_read_all(folder), sound, strict=True))
        except (RunError, UsageError):
            continue  # an error is what a damaged cache is to give
        finally:
            _turn(path, place, bit)
    assert verify_cache(folder) == []
    found = {"flips_missed_by_verify": missed, "flips_that_reached_the_trainer": passed}
    return {"flips": wanted, "flips_by_file": where, **found}


def _kind(path: Path) -> str:
    if path.parent.name == "shards":
        return "shard" if path.suffix == ".h5" else "sidecar"
    return "tokenizer" if path.parent.name == "tokenizer" else "other"


def _turn(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ bit]))


if __name__ == "__main__":
    sys.exit(main())
