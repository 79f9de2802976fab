"""`kdtrain cache-teacher`, killed at every labelled point and at random moments, loses nothing.

One cache is built by a chain of commands, each killed at the next point: that is harder than one kill, because
each command also goes on from what the last one left. In the end the cache equals one that nobody disturbed.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.tools.verify import verify_cache
from tests.cache.fork_kit import FAULT_POINTS

ONCE = ("cache.settings", "cache.manifest")
"""Files that one build publishes once: a kill after the rename ends the chain's chance to meet a later point."""


def _command(bench, out: str) -> list[object]:
    options = ("--teacher", "teacher", "--out", out, *bench.small, "--sequences-per-shard", 2, "--batch-size", 1)
    return ["cache-teacher", *options, "--top-k", 4, "--num-samples", 6]


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
    """Assert that both caches hold the same, data set by data set, and that the first is whole."""
    assert verify_cache(folder) == []
    one, other = _content(folder), _content(expected)
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []
    ours, theirs = read_manifest(folder), read_manifest(expected)
    assert (ours.splits, ours.fidelity) == (theirs.splits, theirs.fidelity)
    assert [path.name for path in folder.rglob("*") if path.suffix == ".tmp" or "building" in path.name] == []


def _chain(after_publish: bool) -> list[str]:
    """List the points of one chain: of the files published once, those before the rename and one after it."""
    last = "after-publish" if after_publish else "before-folder-fsync"
    order = ["settings", "tokenizer", "shard", "sidecar", "before-finish", "index", "card", "manifest"]
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


def test_a_cache_killed_five_times_at_random_moments_is_the_undisturbed_one(bench, undisturbed) -> None:
    """Each kill is at a random moment after the first sign of work; a command that ended before its kill is checked,
    and a new cache started."""
    choose, kills, caches = random.Random(0), 0, 0
    while kills < 5:
        folder = bench.root / f"random-{caches}"
        if _killed(bench, folder, choose.uniform(0, 0.4)):
            kills += 1
        else:
            assert_same(folder, undisturbed)
            caches += 1
    bench.run(*_command(bench, folder.name)).ok()
    assert_same(folder, undisturbed)


def _killed(bench, folder: Path, seconds: float) -> bool:
    """Run the command and kill it so long after its lock; return whether it was still running."""
    for lock in folder.glob(".building-*"):
        lock.unlink()  # of the command killed before
    (process,) = bench.begin(*_command(bench, folder.name))
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while not list(folder.glob(".building-*")):
            os.kill(process, 0)
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    return bench.end()[0].code == -signal.SIGKILL


@pytest.fixture
def small_disk(bench) -> Iterator[Path]:
    """Mount a file system of 128 KiB."""
    folder = bench.root / "small-disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], capture_output=True).returncode:
        pytest.skip("only root may mount; test_crash.py fills a disk by a limit and by faults")
    yield folder
    subprocess.run(["umount", folder], check=True)


def _remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def test_a_full_disk_and_a_read_only_one_are_one_line_and_keep_published_shards(bench, undisturbed, small_disk) -> None:
    folder = small_disk / "cache"
    full = bench.run(*_command(bench, str(folder)))
    assert full.code == 1
    assert "No space left on device" in full.refusal()
    assert f"cannot write {folder}/" in full.refusal()
    kept = {path: path.read_bytes() for path in (folder / "shards").iterdir()}
    assert len([path for path in kept if path.suffix == ".h5"]) >= 1
    assert [path for path in kept if path.suffix == ".tmp"] == []

    _remount(small_disk, "ro,size=64m")
    barred = bench.run(*_command(bench, str(folder)))
    assert barred.code == 1
    assert "Read-only file system" in barred.refusal()
    assert f"cannot write {folder}/" in barred.refusal()

    _remount(small_disk, "rw,size=64m")
    assert {path: path.read_bytes() for path in kept} == kept
    times = {path: path.stat().st_mtime_ns for path in kept if path.with_suffix(".json") in kept}
    bench.run(*_command(bench, str(folder))).ok()
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert_same(folder, undisturbed)
