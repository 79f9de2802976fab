"""A build resumes from intact shards, and leaves a finished cache alone."""

from pathlib import Path

import numpy as np
import pytest

from kdtrain.cache.build.folder import lock
from kdtrain.cache.build.writer import CacheBuilder, write_cache
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import CodecSpec
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import RunError


def test_a_resume_runs_the_teacher_only_for_what_is_missing(tmp_path: Path, workshop, codecs) -> None:
    folder, spec = tmp_path / "c", codecs["top_k"]
    workshop.build(folder, spec)
    before = workshop.content(folder)
    (folder / cache_format.MANIFEST).unlink()
    cache_format.sidecar_path(folder, "train-00001").unlink()
    calls, seen = [], []

    def teacher(tokens, segments):
        calls.append(len(tokens))
        return workshop.teacher()(tokens, segments)

    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    write_cache(folder, workshop.settings(spec), workshop.splits(), teacher=teacher, batch_size=4, progress=progress)
    assert calls == [4, 1, 1, 1]  # one shard, then three held sequences for the fidelity
    assert seen[-1][0] == 13
    after = workshop.content(folder)
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before if "ids" in name)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:700] + b"x" + data[701:]])
def test_a_resume_builds_a_damaged_shard_again(tmp_path: Path, workshop, codecs, damage) -> None:
    folder, whole = (workshop.build(tmp_path / name, codecs["top_k"]) for name in "ab")
    (folder / cache_format.MANIFEST).unlink()
    path = cache_format.shard_path(folder, "train-00001")
    path.write_bytes(damage(path.read_bytes()))
    workshop.build(folder, codecs["top_k"])
    assert verify_cache(folder) == []
    workshop.assert_equal(folder, whole)


def test_a_shard_of_other_text_is_built_again(tmp_path: Path, workshop, codecs) -> None:
    folder, spec = tmp_path / "c", codecs["top_k"]
    workshop.build(folder, spec)
    (folder / cache_format.MANIFEST).unlink()
    fresh = {"train": workshop.rows(7, seed=9), "validation": workshop.rows(3, seed=1)}
    write_cache(folder, workshop.settings(spec), fresh, teacher=workshop.teacher(), batch_size=3)
    expected = tmp_path / "expected"
    fresh = {"train": workshop.rows(7, seed=9), "validation": workshop.rows(3, seed=1)}
    write_cache(expected, workshop.settings(spec), fresh, teacher=workshop.teacher(), batch_size=3)
    workshop.assert_equal(folder, expected)


def test_a_finished_cache_is_left_alone_and_needs_no_lock(tmp_path: Path, workshop, codecs) -> None:
    folder = workshop.build(tmp_path / "c", codecs["top_k"])
    held = lock(folder, 0)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    def teacher(*_: object) -> None:
        raise AssertionError("the teacher ran")

    manifest = write_cache(folder, workshop.settings(codecs["top_k"]), workshop.splits(), teacher=teacher)
    assert manifest == read_manifest(folder)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    held.release()


def test_two_ranks_build_the_cache_of_one(whole: Path, tmp_path: Path, workshop, monkeypatch) -> None:
    spec = CodecSpec(kind="sparse", vocab_size=64, top_k=4, num_samples=8)
    settings, folder = workshop.settings(spec), tmp_path / "c"
    writers = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        writers.append(CacheBuilder(folder, settings, teacher=workshop.teacher(), batch_size=3, all_ranks=True))
        for split, rows in workshop.splits().items():
            writers[rank].build(split, rows)
        writers[rank].close()
    writers[0].finish()
    workshop.assert_equal(folder, whole)


def test_a_missing_shard_of_another_rank_stops_the_finish(tmp_path: Path, workshop, codecs, monkeypatch) -> None:
    settings = workshop.settings(codecs["tokens"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    writer = CacheBuilder(tmp_path / "c", settings, teacher=None, all_ranks=True)
    writer.build("train", workshop.rows(10))
    with pytest.raises(RunError, match=r"train-00001.json is missing"):
        writer.finish()
