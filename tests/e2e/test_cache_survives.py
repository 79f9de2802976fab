"""`kdtrain cache-teacher`, killed at every labelled point and at random moments, loses nothing.

One cache is built by a chain of commands, each killed at the next point: that is harder than one kill, because
each command also goes on from what the last one left. In the end the cache equals one that nobody disturbed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from kdtrain.cache.provenance import read_manifest, verify_cache
from kdtrain.cache.writer import FAULT_POINTS

ONCE = ("cache.settings", "cache.manifest")
"""Files that one build publishes once: a kill after the rename ends the chain's chance to meet a later point."""


def _command(bench, out: str) -> list[object]:
    options = ("--teacher", "teacher", "--out", out, *bench.small, "--sequences-per-shard", 2, "--batch-size", 1)
    return ["cache-teacher", *options, "--head", 4, "--draws", 6]


@pytest.fixture(scope="module")
def undisturbed(bench) -> Path:
    bench.run(*_command(bench, "undisturbed")).ok()
    return bench.root / "undisturbed"


def _content(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in sorted((folder / "shards").glob("*.h5")):
        with h5py.File(path) as file:
            file.visititems(
                lambda name, each, shard=path.name: (
                    found.update({f"{shard}/{name}": each[()]}) if isinstance(each, h5py.Dataset) else None
                )
            )
    return found


def assert_same(folder: Path, expected: Path) -> None:
    """Both caches hold the same, data set by data set, and the first is whole."""
    assert verify_cache(folder) == []
    one, other = _content(folder), _content(expected)
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []
    ours, theirs = read_manifest(folder), read_manifest(expected)
    assert (ours.splits, ours.fidelity) == (theirs.splits, theirs.fidelity)
    assert [path.name for path in folder.rglob("*") if path.suffix == ".tmp" or "building" in path.name] == []


def _chain(after_publish: bool) -> list[str]:
    """The points of one chain: of the files published once, those before the rename and one after it."""
    last = "after-publish" if after_publish else "before-folder-fsync"
    order = ["settings", "tokenizer", "shard", "sidecar", "before-finish", "index", "manifest"]
    points = [name for part in order for name in FAULT_POINTS if name.startswith(f"cache.{part}")]
    assert sorted(points) == sorted(FAULT_POINTS)
    once = [name for name in points if name.startswith(ONCE)]
    if after_publish:
        return [name for name in once if name.endswith(last)]
    return [name for name in points if name not in once or not name.endswith("after-publish")]


@pytest.mark.parametrize("after_publish", [False, True])
def test_a_cache_killed_at_every_labelled_point_is_the_undisturbed_one(bench, undisturbed, after_publish) -> None:
    out = f"killed-{after_publish}"
    for point in _chain(after_publish):
        assert bench.run(*_command(bench, out), fault=f"{point}:kill").code == -signal.SIGKILL, point
    bench.run(*_command(bench, out)).ok()
    assert_same(bench.root / out, undisturbed)


def test_a_cache_killed_at_random_moments_is_the_undisturbed_one(bench, undisturbed) -> None:
    """Five kills, each at a random moment after the first sign of work; every command goes on with the rest."""
    choose = random.Random(0)
    folder = bench.root / "random"
    command = [sys.executable, "-m", "kdtrain", *(str(word) for word in _command(bench, "random"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    killed = 0
    for _ in range(5):
        process = subprocess.Popen(
            command, cwd=bench.root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not list(folder.glob(".building-*")):
            time.sleep(0.005)
        time.sleep(choose.uniform(0, 0.4))
        process.kill()
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 1
    bench.run(*_command(bench, "random")).ok()
    assert_same(folder, undisturbed)
