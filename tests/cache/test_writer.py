"""A builder refuses what cannot be built, resumes from intact shards, and leaves alone what is not its own."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.format.spec import SAMPLING, CodecSpec
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.cache.write.folder import lock
from kdtrain.cache.write.writer import CacheBuilder, write_cache
from kdtrain.errors import RunError, UsageError


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_without_a_token_that_counts_is_refused_before_the_teacher_works(
    tmp_path: Path, workshop, codecs, split: str
) -> None:
    def teacher(tokens, segments):
        raise AssertionError

    splits = {"train": workshop.rows(3), "validation": workshop.rows(3)}
    splits[split] = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in splits[split]]
    with pytest.raises(UsageError, match=f"synthetic: no token of the {split} sequences counts"):
        write_cache(tmp_path / "c", workshop.settings(codecs["both"]), splits, teacher=teacher)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path, workshop, codecs) -> None:
    writer = CacheBuilder(tmp_path / "c", workshop.settings(codecs["tokens"]), teacher=None)
    with pytest.raises(UsageError, match="vocabulary has only 64"):
        writer.build("train", workshop.rows(3, vocab_size=500))


def test_a_non_finite_sequence_is_masked_out_and_counted(tmp_path: Path, workshop, codecs) -> None:
    """One of 1,200 sequences: its loss is masked, all others are unchanged."""
    sound, spec = workshop.teacher(), codecs["both"]

    def broken(tokens, segments):
        logits = sound(tokens, segments)
        hit = (tokens == bad_row).all(1)
        return logits.masked_fill(hit[:, None, None], float("nan"))

    bad_row = torch.from_numpy(list(workshop.rows(6))[5].tokens[:-1].astype(np.int64))
    manifests = []
    for name, teacher in (("sound", sound), ("broken", broken)):
        splits = {"train": workshop.rows(1200), "validation": workshop.rows(3, seed=1)}
        settings = workshop.settings(spec, sequences_per_shard=400, sequences={"train": 1200, "validation": 3})
        manifests.append(write_cache(tmp_path / name, settings, splits, teacher=teacher, batch_size=64))
    assert [manifest.splits["train"]["broken"] for manifest in manifests] == [0, 1]
    assert manifests[0].fidelity == manifests[1].fidelity
    one, other = (CacheReader(tmp_path / name, "train").read([4, 5, 6]) for name in ("sound", "broken"))
    assert not other.loss_mask[1].any()
    assert torch.equal(one.loss_mask[::2], other.loss_mask[::2])
    assert other.targets is not None
    for value in vars(other.targets).values():
        assert not torch.is_tensor(value) or torch.isfinite(value).all()
    assert verify_cache(tmp_path / "broken") == []


def test_more_than_one_broken_sequence_in_a_thousand_stops_the_build(tmp_path: Path, workshop, codecs) -> None:
    calls = []

    def teacher(tokens, segments):
        calls.append(len(tokens))
        return workshop.teacher()(tokens, segments) * float("nan")

    settings = workshop.settings(codecs["top_k"], sequences={"train": 4000, "validation": 3})
    splits = {"train": workshop.rows(4000), "validation": workshop.rows(3)}
    with pytest.raises(RunError, match=r"non-finite logits for .* more than one in a thousand"):
        write_cache(tmp_path / "c", settings, splits, teacher=teacher, batch_size=3)
    assert sum(calls) < 20
    for dtype, remedy in (("float32", "look at its weights"), ("float16", "load it in bfloat16 or float32")):
        settings = workshop.settings(codecs["top_k"], teacher={"dtype": dtype})
        with pytest.raises(RunError, match=remedy):
            write_cache(tmp_path / dtype, settings, workshop.splits(), teacher=teacher, batch_size=3)
    once = lambda tokens, segments: (  # noqa: E731
        workshop.teacher()(tokens, segments).index_fill(0, torch.tensor(0), float("inf"))
    )
    with pytest.raises(RunError, match=r"for 1 of 4 sequences \(the first is train 0\)"):
        write_cache(tmp_path / "d", workshop.settings(codecs["top_k"]), workshop.splits(), teacher=once, batch_size=10)


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


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_by_name(tmp_path: Path, workshop, codecs, finished: bool) -> None:
    folder = workshop.build(tmp_path / "c", codecs["top_k"])
    if not finished:
        (folder / cache_format.MANIFEST).unlink()
    codec = CodecSpec(kind="sparse", vocab_size=64, top_k=5)
    with pytest.raises(UsageError) as caught:  # caches of independent samples do not say how theirs were drawn
        CacheBuilder(folder, workshop.settings(codec, data={"source": "elsewhere"}, sampling=SAMPLING), teacher=None)
    for words in ("codec.top_k: 6 there, 5", "source: synthetic there, elsewhere", "sampling: None there, grid here"):
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_build_that_failed_before_its_first_shard_is_replaced_by_a_corrected_command(
    tmp_path: Path, workshop, codecs
) -> None:
    short = {"train": workshop.rows(3), "validation": []}
    with pytest.raises(UsageError, match="synthetic: the validation data give no whole sequence of 16 tokens"):
        write_cache(tmp_path / "c", workshop.settings(codecs["top_k"]), short, teacher=workshop.teacher())
    assert list((tmp_path / "c" / "shards").iterdir()) == []
    corrected = workshop.settings(CodecSpec(kind="sparse", vocab_size=64, top_k=5))
    write_cache(tmp_path / "c", corrected, workshop.splits(), teacher=workshop.teacher())
    assert verify_cache(tmp_path / "c") == []


def test_a_folder_with_other_files_is_refused(tmp_path: Path, workshop, codecs) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not a cache; choose another --out"):
        CacheBuilder(tmp_path, workshop.settings(codecs["tokens"]), teacher=None)
    with pytest.raises(UsageError, match="is a file"):
        CacheBuilder(tmp_path / "thesis.tex", workshop.settings(codecs["tokens"]), teacher=None)


@pytest.mark.parametrize("name", [cache_format.INDEX, cache_format.MANIFEST, cache_format.SETTINGS])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_build(tmp_path: Path, workshop, codecs, name) -> None:
    (tmp_path / "c" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match=f"c/{name} is a folder, and the cache needs that name for a file; move it"):
        CacheBuilder(tmp_path / "c", workshop.settings(codecs["tokens"]), teacher=None)
    assert list((tmp_path / "c").iterdir()) == [tmp_path / "c" / name]


def test_two_builders_are_kept_apart_and_the_lock_dies_with_its_holder(
    tmp_path: Path, workshop, codecs, monkeypatch
) -> None:
    folder, settings = tmp_path / "c", workshop.settings(codecs["top_k"])
    holds, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        writer = CacheBuilder(folder, settings, teacher=workshop.teacher(), batch_size=3)
        os.write(holds[1], b"x")
        os.read(release[0], 1)
        writer.build("train", workshop.rows(10))
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(holds[0], 1)
    with pytest.raises(UsageError, match=r"another process is building .* now; wait for it") as caught:
        workshop.build(folder, codecs["top_k"])
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="another process is building"):
        CacheBuilder(folder, settings, teacher=workshop.teacher(), all_ranks=True)
    lock(folder, 1).release()  # ranks of one command do not keep each other out
    os.write(release[1], b"x")
    os.waitpid(pid, 0)
    workshop.build(folder, codecs["top_k"])
    assert verify_cache(folder) == []
    assert not list(folder.glob(".building-*"))


def test_other_files_in_a_cache_stay_lock_nothing_and_alone_are_refused(tmp_path: Path, workshop, codecs) -> None:
    settings, teacher = workshop.settings(codecs["top_k"]), workshop.teacher()
    write_cache(tmp_path / "c", settings, workshop.splits(), teacher=teacher)
    others = [tmp_path / "c" / "shards" / "precious.json", tmp_path / "c" / ".building-foo"]
    for each in others:
        each.write_text("mine")
    (tmp_path / "c" / "manifest.json").unlink()
    write_cache(tmp_path / "c", settings, workshop.splits(), teacher=teacher)
    assert [each.read_text() for each in others] == ["mine", "mine"]
    (tmp_path / "d" / "shards").mkdir(parents=True)
    (tmp_path / "d" / "shards" / "precious.json").write_text("{}")
    with pytest.raises(UsageError, match="not a cache"):
        write_cache(tmp_path / "d", settings, workshop.splits(), teacher=teacher)
