"""A build that is killed or meets a full disk loses no published shard, and a resume gives the uninterrupted cache."""

import resource
import shutil
import signal
from pathlib import Path

import pytest

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.cache.write.writer import CacheBuilder, write_cache
from kdtrain.errors import RunError, UsageError
from tests.cache.fork_kit import FAULT_POINTS, answer_of, exit_of

KILLS = [(point, 3 if point.startswith(("cache.shard", "cache.sidecar")) else 1) for point in FAULT_POINTS]


def _fork_build(folder: Path, workshop, fault: str = "") -> int:
    """Build in a fork of this process, with `fault`; return the exit code."""
    settings = workshop.settings(CodecSpec(kind="sparse", vocab_size=64, top_k=4, num_samples=8))
    options = {"tokenizer": folder.parent / "tokenizer", "batch_size": 3, "teacher": workshop.teacher()}
    return exit_of(lambda: write_cache(folder, settings, workshop.splits(), **options), fault, Path(f"{folder}.log"))


@pytest.mark.parametrize("point, call", KILLS)
def test_a_killed_writer_resumes_to_the_uninterrupted_cache(
    whole: Path, tmp_path: Path, workshop, point: str, call: int
) -> None:
    shutil.copytree(whole.parent / "tokenizer", tmp_path / "tokenizer")
    folder = tmp_path / "cache"
    assert _fork_build(folder, workshop, f"{point}:kill:{call}") == -9
    assert Path(f"{folder}.log").read_text().strip() == point
    assert _fork_build(folder, workshop) == 0
    assert verify_cache(folder) == []
    workshop.assert_equal(folder, whole)
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.glob(".building-*"))


@pytest.mark.parametrize("point", [p for p in FAULT_POINTS if not p.endswith(("rename", "folder-fsync", "publish"))])
def test_a_full_disk_at_any_point_keeps_what_was_published(whole: Path, tmp_path: Path, workshop, point: str) -> None:
    shutil.copytree(whole.parent / "tokenizer", tmp_path / "tokenizer")
    folder = tmp_path / "cache"
    assert _fork_build(folder, workshop, f"{point}:enospc:1") == 1
    assert not list((folder / "shards").glob("*.tmp"))
    assert _fork_build(folder, workshop) == 0
    workshop.assert_equal(folder, whole)


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path, workshop) -> None:
    """A limit on the size of a file makes the kernel refuse the write inside HDF5, as a full disk does."""

    def limited() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        with pytest.raises(RunError) as caught:
            workshop.build(tmp_path / "cache", CodecSpec(kind="dense", vocab_size=2048))
        return str(caught.value)

    line = answer_of(limited)
    assert line.startswith(f"cannot write {tmp_path}/cache/shards/train-00000.h5: File too large") and "\n" not in line
    assert "ulimit -f" in line and "writable" not in line
    assert [path.name for path in (tmp_path / "cache" / "shards").iterdir()] == []


def test_a_full_disk_in_a_library_written_in_rust_is_one_line_too(tmp_path: Path, workshop, codecs) -> None:
    """tokenizers raises a bare Exception; the same command resumes."""

    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("No space left on device (os error 28)")

    settings, teacher = workshop.settings(codecs["top_k"]), workshop.teacher()
    with pytest.raises(RunError, match=r"^cannot write .*/c/tokenizer: No space left on device; [^\n]*free some space"):
        CacheBuilder(tmp_path / "c", settings, teacher=teacher, tokenizer=Full())
    assert not list((tmp_path / "c").glob(".building-*"))
    assert verify_cache(workshop.build(tmp_path / "c", codecs["top_k"])) == []


def test_an_impossible_folder_is_named(tmp_path: Path, workshop, codecs) -> None:
    with pytest.raises(UsageError, match="/proc/kdtrain cannot be made: No such file or directory; name another"):
        CacheBuilder("/proc/kdtrain", workshop.settings(codecs["tokens"]), teacher=None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"file/cache cannot be made: Not a directory"):
        CacheBuilder(tmp_path / "file" / "cache", workshop.settings(codecs["tokens"]), teacher=None)
