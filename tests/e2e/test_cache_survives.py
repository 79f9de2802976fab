"""`kdtrain cache-teacher`, killed in every state of its files, loses nothing; at any moment: tests/torture/cache.py.

One cache is built by a chain of commands, each killed at the next point: that is harder than one kill, because
each command also goes on from what the last one left. In the end the cache equals one that nobody disturbed.
"""

import signal
import subprocess
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
    """List the points of one chain: of the files published once, those before the rename and one after it.

    Of two points between which no file changes, one; each by itself is in tests/cache/test_crash.py.
    """
    order = ["settings", "tokenizer", "shard", "sidecar", "before-finish", "index", "card", "manifest"]
    points = [name for part in order for name in FAULT_POINTS if name.startswith(f"cache.{part}")]
    assert sorted(points) == sorted(FAULT_POINTS)
    if after_publish:
        return [name for name in points if name.startswith(ONCE) and name.endswith(".after-publish")]
    once, again = (".before-fsync", ".after-publish"), (".before-fsync", ".before-folder-fsync")
    return [name for name in points if not name.endswith(once if name.startswith(ONCE) else again)]


@pytest.mark.parametrize("after_publish", [False, True])
def test_a_cache_killed_in_every_state_of_its_files_is_the_undisturbed_one(bench, undisturbed, after_publish) -> None:
    out = f"killed-{after_publish}"
    for point in _chain(after_publish):
        assert bench.run(*_command(bench, out), fault=f"{point}:kill").code == -signal.SIGKILL, point
    bench.run(*_command(bench, out)).ok()
    assert_same(bench.root / out, undisturbed)


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
