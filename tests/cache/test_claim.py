"""A folder with other files, another cache, or another builder is left alone."""

import os
import signal
from pathlib import Path

import pytest

from kdtrain.cache.build.folder import lock
from kdtrain.cache.build.writer import CacheBuilder, write_cache
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import SAMPLING, CodecSpec
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import UsageError


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
