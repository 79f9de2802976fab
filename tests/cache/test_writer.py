"""A build that is killed, starved or pointed at the wrong folder loses nothing that was published."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from kdtrain import faults
from kdtrain.cache import layout
from kdtrain.cache.claim import Lock
from kdtrain.cache.codec import ABSENT, CodecSpec
from kdtrain.cache.provenance import read_manifest, verify_cache
from kdtrain.cache.reader import CacheReader
from kdtrain.cache.writer import FAULT_POINTS, CacheWriter, write_cache
from kdtrain.errors import RunError, UsageError
from kdtrain.objective.targets import SparseTargets

REPEATED = [point for point in FAULT_POINTS if point.startswith(("cache.shard", "cache.sidecar"))]
KILLS = [(point, 1) for point in FAULT_POINTS] + [(point, 3) for point in REPEATED]
SCRIPT = Path(__file__).with_name("build_script.py")


def run(folder: Path, codec: str = "both", *more: str, fault: str = "") -> subprocess.CompletedProcess:
    """The build of `codec` in a process of its own, with a fault; its log is FOLDER.log."""
    (folder.parent / "tokenizer").mkdir(exist_ok=True)
    (folder.parent / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "KDTRAIN_FAULT": fault, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    environment["KDTRAIN_FAULT_LOG"] = f"{folder}.log"
    command = [sys.executable, str(SCRIPT), str(folder), codec, *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def content(folder: Path) -> dict[str, np.ndarray]:
    """Every data set of every shard."""
    found = {}
    for path in sorted((folder / layout.SHARDS).glob("*.h5")):
        with h5py.File(path) as file:
            parts = {name: file[name] for name in file if name != layout.DICTIONARY}
            if layout.DICTIONARY in file:
                parts |= {f"{layout.DICTIONARY}/{name}": each for name, each in file[layout.DICTIONARY].items()}
            found |= {f"{path.name}/{name}": dataset[:] for name, dataset in parts.items()}
    return found


def assert_equal(one: Path, other: Path) -> None:
    left, right = content(one), content(other)
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert np.array_equal(values, right[name], equal_nan=values.dtype.kind == "f"), name
    ours, theirs = read_manifest(one), read_manifest(other)
    assert ours.splits["train"]["tokens_sha256"] == theirs.splits["train"]["tokens_sha256"]
    assert ours.fidelity == theirs.fidelity


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "cache"
    assert run(folder).returncode == 0
    return folder


def test_a_cache_is_laid_out_as_documented(whole: Path) -> None:
    names = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    shards = ["train-00000", "train-00001", "train-00002", "validation-00000"]
    expected = {f"shards/{name}.{suffix}" for name in shards for suffix in ("h5", "json")}
    assert names == expected | {"manifest.json", "settings.json", "index.h5", "tokenizer/tokenizer.json"}
    assert verify_cache(whole) == []
    splits = read_manifest(whole).splits
    assert [shard["sequences"] for shard in splits["train"]["shards"]] == [4, 4, 2]
    assert splits["validation"]["sequences"] == 3


def _fork_build(folder: Path, workshop, fault: str) -> int:
    """Build in a fork of this process, with `fault`; its exit status as `waitpid` gives it."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.environ["KDTRAIN_FAULT"], os.environ["KDTRAIN_FAULT_LOG"] = fault, f"{folder}.log"
            faults._faults = faults._wanted()
            faults._calls.clear()
            spec = CodecSpec(kind="sparse", vocab_size=64, head=4, draws=8)
            options = {
                "tokenizer": folder.parent / "tokenizer",
                "batch_size": 3,
                "teacher": workshop.teacher(),
            }
            write_cache(folder, workshop.settings(spec), workshop.splits(), **options)
            status = 0
        except (RunError, UsageError):
            status = 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("point, call", KILLS)
def test_a_killed_writer_run_again_gives_the_uninterrupted_cache(
    whole: Path, tmp_path: Path, workshop, point: str, call: int
) -> None:
    shutil.copytree(whole.parent / "tokenizer", tmp_path / "tokenizer")
    folder = tmp_path / "cache"
    assert _fork_build(folder, workshop, f"{point}:kill:{call}") == -9
    assert Path(f"{folder}.log").read_text().strip() == point
    assert _fork_build(folder, workshop, "") == 0
    assert verify_cache(folder) == []
    assert_equal(folder, whole)
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.glob(".building-*"))


@pytest.mark.parametrize("point", [p for p in FAULT_POINTS if not p.endswith(("rename", "folder-fsync"))])
def test_a_full_disk_at_any_point_keeps_what_was_published(whole: Path, tmp_path: Path, workshop, point: str) -> None:
    shutil.copytree(whole.parent / "tokenizer", tmp_path / "tokenizer")
    folder = tmp_path / "cache"
    assert _fork_build(folder, workshop, f"{point}:enospc:1") == 1
    assert not list((folder / "shards").glob("*.tmp"))
    assert _fork_build(folder, workshop, "") == 0
    assert_equal(folder, whole)


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    """A limit on the size of a file makes the kernel refuse the write inside HDF5, as a full disk does."""
    process = run(tmp_path / "cache", "dense", "40000")
    assert process.returncode == 1, process.stderr
    assert process.stderr.count("\n") == 1, process.stderr
    assert f"cannot write {tmp_path}/cache/shards/train-00000.h5: File too large" in process.stderr
    assert [path.name for path in (tmp_path / "cache" / "shards").iterdir()] == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, workshop, codecs) -> None:
    with pytest.raises(RunError, match="cannot write /proc/kdtrain"):
        CacheWriter("/proc/kdtrain", workshop.settings(codecs["tokens"]), teacher=None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=r"cannot write .*file/cache"):
        CacheWriter(tmp_path / "file" / "cache", workshop.settings(codecs["tokens"]), teacher=None)


def test_a_resume_runs_the_teacher_only_for_what_is_missing(tmp_path: Path, workshop, codecs) -> None:
    folder, spec = tmp_path / "c", codecs["head"]
    workshop.build(folder, spec)
    before = content(folder)
    (folder / layout.MANIFEST).unlink()
    layout.sidecar_path(folder, "train-00001").unlink()
    calls, seen = [], []

    def teacher(tokens, segments):
        calls.append(len(tokens))
        return workshop.teacher()(tokens, segments)

    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    write_cache(folder, workshop.settings(spec), workshop.splits(), teacher=teacher, batch_size=4, progress=progress)
    assert calls == [4, 1, 1, 1]  # one shard, then three held sequences for the fidelity
    assert seen[-1][0] == 13
    after = content(folder)
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before if "ids" in name)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:700] + b"x" + data[701:]])
def test_a_resume_builds_a_damaged_shard_again(tmp_path: Path, workshop, codecs, damage) -> None:
    folder, whole = (workshop.build(tmp_path / name, codecs["head"]) for name in "ab")
    (folder / layout.MANIFEST).unlink()
    path = layout.shard_path(folder, "train-00001")
    path.write_bytes(damage(path.read_bytes()))
    workshop.build(folder, codecs["head"])
    assert verify_cache(folder) == []
    assert_equal(folder, whole)


def test_a_shard_of_other_text_is_built_again(tmp_path: Path, workshop, codecs) -> None:
    folder, spec = tmp_path / "c", codecs["head"]
    workshop.build(folder, spec)
    (folder / layout.MANIFEST).unlink()
    fresh = {"train": workshop.rows(7, seed=9), "validation": workshop.rows(3, seed=1)}
    write_cache(folder, workshop.settings(spec), fresh, teacher=workshop.teacher(), batch_size=3)
    expected = tmp_path / "expected"
    fresh = {"train": workshop.rows(7, seed=9), "validation": workshop.rows(3, seed=1)}
    write_cache(expected, workshop.settings(spec), fresh, teacher=workshop.teacher(), batch_size=3)
    assert_equal(folder, expected)


def test_a_finished_cache_is_left_alone(tmp_path: Path, workshop, codecs) -> None:
    folder = workshop.build(tmp_path / "c", codecs["head"])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    def teacher(*_: object) -> None:
        raise AssertionError("the teacher ran")

    manifest = write_cache(folder, workshop.settings(codecs["head"]), workshop.splits(), teacher=teacher)
    assert manifest == read_manifest(folder)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_by_name(tmp_path: Path, workshop, codecs, finished: bool) -> None:
    folder = workshop.build(tmp_path / "c", codecs["head"])
    if not finished:
        (folder / layout.MANIFEST).unlink()
    changed = workshop.settings(CodecSpec(kind="sparse", vocab_size=64, head=5), data={"source": "elsewhere"})
    with pytest.raises(UsageError) as caught:
        CacheWriter(folder, changed, teacher=workshop.teacher())
    assert "codec.head: 6 there, 5 asked" in str(caught.value)
    assert "data.source: synthetic there, elsewhere asked" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_other_things_is_refused(tmp_path: Path, workshop, codecs) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="no cache; choose another --out"):
        CacheWriter(tmp_path, workshop.settings(codecs["tokens"]), teacher=None)
    with pytest.raises(UsageError, match="is a file"):
        CacheWriter(tmp_path / "thesis.tex", workshop.settings(codecs["tokens"]), teacher=None)


def test_too_little_text_is_refused(tmp_path: Path, workshop, codecs) -> None:
    writer = CacheWriter(tmp_path / "c", workshop.settings(codecs["tokens"]), teacher=None)
    with pytest.raises(UsageError, match="validation data give no whole sequence of 16 tokens"):
        writer.build("validation", [])


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path, workshop, codecs) -> None:
    writer = CacheWriter(tmp_path / "c", workshop.settings(codecs["tokens"]), teacher=None)
    with pytest.raises(UsageError, match="vocabulary has only 64"):
        writer.build("train", workshop.rows(3, vocab_size=500))


def test_two_ranks_build_the_cache_of_one(whole: Path, tmp_path: Path, workshop) -> None:
    spec = CodecSpec(kind="sparse", vocab_size=64, head=4, draws=8)
    settings, folder = workshop.settings(spec), tmp_path / "c"
    for rank in (1, 0):
        writer = CacheWriter(folder, settings, teacher=workshop.teacher(), batch_size=3, rank=rank, world=2)
        for split, rows in workshop.splits().items():
            writer.build(split, rows)
    writer.finish()
    assert_equal(folder, whole)


def test_a_missing_shard_of_another_rank_stops_the_finish(tmp_path: Path, workshop, codecs) -> None:
    settings = workshop.settings(codecs["tokens"])
    writer = CacheWriter(tmp_path / "c", settings, teacher=None, rank=0, world=2)
    writer.build("train", workshop.rows(10))
    with pytest.raises(RunError, match=r"train-00001.json is not there"):
        writer.finish()


def test_the_index_is_read_without_kdtrain(whole: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    code = (
        "import sys, h5py, hdf5plugin, json, numpy as np\n"
        "file = h5py.File(sys.argv[1])\n"
        "total = lambda values: np.nan_to_num(values.astype(float)).sum()\n"
        "sums = {f'{s}/{n}': total(d[:]) for s in file for n, d in file[s].items() if n != 'dictionary'}\n"
        "assert 'kdtrain' not in sys.modules\n"
        "head, shape = int(file['train'].attrs['head']), file['train/ids'].shape\n"
        "groups = {f'{s}/{n}': group for s in file for n, group in file[s]['dictionary'].items()}\n"
        "lists = {f'{n}/{d}': total(v[:]) for n, group in groups.items() for d, v in group.items()}\n"
        "print(json.dumps({'sums': sums, 'lists': lists, 'shape': shape, 'head': head}))"
    )
    command = [sys.executable, "-c", code, str(moved / "index.h5")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)
    assert found["shape"] == [10, 12, 16]
    assert found["head"] == 4
    names = {f"train/train-0000{number}" for number in range(3)} | {"validation/validation-00000"}
    assert {name.rsplit("/", 1)[0] for name in found["lists"]} == names
    assert len(found["lists"]) == 4 * len(names)
    for split in ("train", "validation"):
        for name in layout.datasets(CodecSpec(kind="sparse", vocab_size=64, head=4, draws=8), 16):
            parts = [v for key, v in content(moved).items() if key.startswith(split) and key.endswith(f"/{name}")]
            total = sum(np.nan_to_num(part.astype(float)).sum() for part in parts)
            assert found["sums"][f"{split}/{name}"] == pytest.approx(total, rel=1e-9), name


def test_an_index_whose_shard_is_gone_reads_as_fill_values(tmp_path: Path, workshop, codecs) -> None:
    folder = workshop.build(tmp_path / "c", codecs["head"])
    layout.shard_path(folder, "train-00000").unlink()
    with h5py.File(folder / "index.h5") as file:
        assert (file["train/ids"][0] == 65_535).all()
        assert (file["train/numbers"][0] == 65_535).all()
        assert file["train/dictionary"].get("train-00000") is None
        assert (file["train/tokens"][0] == 65_535).all()
        assert (file["train/numbers"][4, -1] < 65_535).all()


@pytest.mark.parametrize("kind", [{"kind": "sparse", "head": 4, "draws": 4}, {"kind": "dense"}])
def test_a_vocabulary_of_151936_is_cached_with_wide_ids(tmp_path: Path, workshop, kind: dict) -> None:
    spec = CodecSpec(vocab_size=151_936, **kind)
    splits = {
        "train": workshop.rows(2, vocab_size=151_936),
        "validation": workshop.rows(1, vocab_size=151_936),
    }
    manifest = write_cache(tmp_path / "c", workshop.settings(spec), splits, teacher=workshop.teacher(151_936))
    with h5py.File(tmp_path / "c" / "index.h5") as file:
        assert file["train/tokens"].dtype == np.uint32
        assert file["train/tokens"][:].max() > 65_535
    assert manifest.temperature_range
    assert manifest.fidelity
    assert manifest.fidelity["T=1"]["kl_bucket"] < 1e-3


def test_every_data_set_is_checksummed_and_compressed(whole: Path) -> None:
    with h5py.File(layout.shard_path(whole, "train-00000")) as file:
        for name, dataset in file["dictionary"].items():
            assert dataset.fletcher32, name
        for name, dataset in file.items():
            if name == "dictionary":
                continue
            assert dataset.fletcher32, name
            assert {"32008", "32015"} & dataset._filters.keys(), name
            number = len(dataset) if name in ("loss_mask", "segments") else 1
            assert dataset.chunks == (number, *dataset.shape[1:]), name


def test_the_recipe_of_the_format_page_reads_what_the_reader_reads(whole: Path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[2] / "cache" / "README.md").read_text()
    recipe = page.split("```python\n")[1].split("```")[0].replace("cache/NAME", str(whole))
    found: dict[str, Any] = {}
    for row in (0, 5, 9):
        exec(recipe.replace("row = 0", f"row = {row}"), found)
        targets = CacheReader(whole, "train").read([row]).targets
        assert isinstance(targets, SparseTargets)
        absent = targets.ids.numpy() == ABSENT
        assert np.array_equal(found["absent"].T, absent)
        assert np.array_equal(found["ids"].T[~absent], targets.ids.numpy()[~absent])
        assert np.allclose(found["logprobs"].T[~absent], targets.logprobs.numpy()[~absent], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["both", "dense"])
def test_a_sequence_without_numbers_is_masked_out_and_counted(tmp_path: Path, workshop, codecs, kind: str) -> None:
    """One of 1,200 sequences: its loss is masked, all others are as they were."""
    sound, spec = workshop.teacher(), codecs[kind]

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

    settings = workshop.settings(codecs["head"], sequences={"train": 4000, "validation": 3})
    splits = {"train": workshop.rows(4000), "validation": workshop.rows(3)}
    with pytest.raises(RunError, match=r"not numbers for .* more than one in a thousand"):
        write_cache(tmp_path / "c", settings, splits, teacher=teacher, batch_size=3)
    assert sum(calls) < 20
    once = lambda tokens, segments: (  # noqa: E731
        workshop.teacher()(tokens, segments).index_fill(0, torch.tensor(0), float("inf"))
    )
    with pytest.raises(RunError, match=r"for [12] of .*the first is train 0"):
        write_cache(tmp_path / "d", workshop.settings(codecs["head"]), workshop.splits(), teacher=once, batch_size=10)


def test_two_builders_are_kept_apart_and_the_lock_dies_with_its_holder(tmp_path: Path, workshop, codecs) -> None:
    folder, settings = tmp_path / "c", workshop.settings(codecs["head"])
    holds, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        writer = CacheWriter(folder, settings, teacher=workshop.teacher(), batch_size=3)
        os.write(holds[1], b"x")
        os.read(release[0], 1)
        writer.build("train", workshop.rows(10))
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(holds[0], 1)
    with pytest.raises(UsageError, match=r"another process is building .* now; wait for it") as caught:
        workshop.build(folder, codecs["head"])
    assert "\n" not in str(caught.value)
    CacheWriter(folder, settings, teacher=workshop.teacher(), rank=1, world=2).close()
    os.write(release[1], b"x")
    os.waitpid(pid, 0)
    workshop.build(folder, codecs["head"])
    assert verify_cache(folder) == []
    assert not list(folder.glob(".building-*"))


def test_a_finished_cache_needs_no_lock(tmp_path: Path, workshop, codecs) -> None:
    folder = workshop.build(tmp_path / "c", codecs["head"])
    lock = Lock(folder, 0)
    workshop.build(folder, codecs["head"])
    lock.release()


def test_files_of_others_in_a_folder_of_shards_are_neither_built_among_nor_deleted(
    tmp_path: Path, workshop, codecs
) -> None:
    settings, teacher = workshop.settings(codecs["head"]), workshop.teacher()
    write_cache(tmp_path / "c", settings, workshop.splits(), teacher=teacher)
    precious = tmp_path / "c" / "shards" / "precious.json"
    precious.write_text("{}")
    (tmp_path / "c" / "manifest.json").unlink()
    write_cache(tmp_path / "c", settings, workshop.splits(), teacher=teacher)
    assert precious.exists()
    (tmp_path / "d" / "shards").mkdir(parents=True)
    (tmp_path / "d" / "shards" / "precious.json").write_text("{}")
    with pytest.raises(UsageError, match="no cache"):
        write_cache(tmp_path / "d", settings, workshop.splits(), teacher=teacher)
