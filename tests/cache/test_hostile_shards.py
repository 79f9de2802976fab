"""A wrong shard that a stranger made and sealed is refused in one line, and a sound one never is."""

import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hostile_kit import COUNTS, DENSE, FAMILIES, TYPES, Change, payload, remade

from kdtrain.cache.format import hdf5
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.hdf5 import check_structure
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.read import reader, shard
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import check_content, verify_cache
from kdtrain.errors import RunError
from tests.hostile import seal

CASES = [
    pytest.param(change, codec, id=f"{family}: {name}")
    for codec, families in {"both": FAMILIES, "dense": {"dense": DENSE}, "num_samples": {"counts": COUNTS}}.items()
    for family, changes in families.items()
    for name, change in changes.items()
]
DATA_SETS = ("tokens", "loss_mask", "segments", "ids", "numbers")
LISTS = tuple(f"dictionary/{name}" for name in ("context_row", "candidates", "common", "tail_weights"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory, workshop, codecs) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sound")
    return {name: workshop.build(root / name, codecs[name]) for name in ("both", "num_samples", "dense", "tokens")}


@pytest.fixture
def hostile(tmp_path: Path, sound):
    """Copy a cache, change its first shard, and make the digests fit."""

    def make(change: Change, codec: str = "both") -> Path:
        shutil.copytree(sound[codec], tmp_path / "hostile")
        change(cache_format.shard_path(tmp_path / "hostile", "train-00000"))
        seal.cache(tmp_path / "hostile")
        return tmp_path / "hostile"

    return make


@pytest.mark.parametrize("change, codec", CASES)
def test_a_shard_that_breaks_the_format_is_refused_and_named(hostile, change: Change, codec: str) -> None:
    cache = hostile(change, codec)
    path, shards = cache_format.shard_path(cache, "train-00000"), CacheReader(cache, "train")
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        shards.read(range(4, -1, -1))
    assert str(caught.value).startswith(f"shard {path} cannot be read (")
    assert str(caught.value).count("\n") == 0
    assert len(shards.read(range(4, 8)).tokens) == 4, "the other shards are read"
    problems = verify_cache(cache)
    assert [problem for problem in problems if problem.startswith(f"{path}: ")] == problems != []
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("name", [*DATA_SETS, *LISTS])
def test_a_shard_made_again_by_the_format_is_read(hostile, sound, name: str) -> None:
    """So the cases above are refused for their one change."""
    cache = hostile(payload(name, lambda data: data) if name in LISTS else remade(name))
    assert verify_cache(cache) == []
    ours, theirs = (CacheReader(each, "train").read(range(10)) for each in (cache, sound["both"]))
    assert np.array_equal(ours.tokens, theirs.tokens)
    assert np.array_equal(ours.targets.ids, theirs.targets.ids)


def test_a_shard_that_unpacks_to_far_more_than_its_file_is_refused(sound, monkeypatch) -> None:
    manifest, path = read_manifest(sound["both"]), cache_format.shard_path(sound["both"], "train-00000")
    arguments = (path, manifest.codec, manifest.settings.seq_len, "train", 0, 4)
    check_structure(*arguments)
    monkeypatch.setattr(hdf5, "SLACK", 0)
    monkeypatch.setattr(hdf5, "LARGEST_RATIO", 0.1)
    with pytest.raises(ValueError, match=r"it declares \d+ bytes of data in a file of \d+"):
        check_structure(*arguments)


@pytest.mark.parametrize("codec", ["both", "dense", "tokens"])
def test_numbers_are_checked_once_and_again_when_the_file_has_changed(sound, tmp_path, codec, monkeypatch) -> None:
    cache, looked = tmp_path / "cache", []
    shutil.copytree(sound[codec], cache)
    for module, name in ((reader, "check_structure"), (shard, "check_stored"), (shard, "check_values")):
        check = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, name=name, check=check: looked.append(name) or check(*given))
    shards = CacheReader(cache, "train")
    once = ["check_structure", "check_stored", *(["check_values"] if codec == "both" else [])]
    for rows, expected in ([0, 1], once), ([1, 0], []), ([0, 2], once[1:]), ([0, 1, 2], []), ([3], once[1:]), ([3], []):
        looked.clear()
        shards.read(rows)
        assert looked == expected, rows
    os.utime(cache_format.shard_path(cache, "train-00000"))
    shards.close()
    looked.clear()
    shards.read([0])
    assert looked == once


def test_no_change_of_a_byte_that_passes_crashes_hdf5(sound, tmp_path) -> None:
    """In a process of its own: HDF5 reads a shard that is not refused to its end, or raises an error."""
    process = multiprocessing.get_context("fork").Process(target=_read_what_passes, args=(sound["both"], tmp_path))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0


def _read_what_passes(cache: Path, folder: Path) -> None:
    manifest, path = read_manifest(cache), folder / "changed.h5"
    content, luck, passed = cache_format.shard_path(cache, "train-00000").read_bytes(), random.Random(0), 0
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(luck.choice([1, 1, 2, 8])):
            place = luck.randrange(len(changed))
            changed[place] = luck.choice([0, 1, 127, 255, changed[place] ^ (1 << luck.randrange(8))])
        path.write_bytes(changed)
        arguments = (path, manifest.codec, manifest.settings.seq_len, "train", 0, 4)
        try:
            check_structure(*arguments)
            passed += 1
            check_content(*arguments)
        except ValueError:
            continue
    assert 40 < passed < 400


LOCK = """
import pathlib, sys, threading, h5py
from kdtrain.cache.read import reader
from kdtrain.errors import RunError

def read():
    try:
        reader.CacheReader(cache, "train").read([0])
    except RunError as error:
        errors.append(error)  # training raises it again in another thread
        print("refused", flush=True)

cache, errors, reader.check_structure = pathlib.Path(sys.argv[1]), [], lambda *given: None
thread = threading.Thread(target=read)
thread.start()
thread.join()
h5py.File(cache / "index.h5")
print("read")
"""


def test_an_error_in_a_reading_thread_releases_the_lock_of_hdf5(hostile) -> None:
    """The process has one lock: if a thread ends without releasing it, every read and the exit hang."""
    cache = hostile(TYPES["type for a data set"])
    done = subprocess.run([sys.executable, "-c", LOCK, str(cache)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "refused\nread\n"), done.stderr


def test_only_shards_are_read_and_never_the_index(sound, tmp_path) -> None:
    shutil.copytree(sound["both"], tmp_path / "cache")
    (tmp_path / "cache" / cache_format.INDEX).write_text("not HDF5")
    assert len(CacheReader(tmp_path / "cache", "train").read(range(10)).tokens) == 10
