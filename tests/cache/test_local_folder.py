"""The local folder of caches that lie elsewhere: kept once, never past its limit, shared by processes."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kdtrain.cache.read import local_store
from kdtrain.errors import RunError, UsageError
from kdtrain.library import Cache
from tests.fetched import assert_same, room_for, shards_here
from tests.web import Web, serving


def test_the_same_cache_from_two_places_is_kept_once(web: Web, whole: Path, home: Path) -> None:
    with serving(whole.parent) as other:
        Cache(web.url)["train"][0]
        Cache(f"{other.url}/{whole.name}")["train"][0]
        assert not [path for path in other.requests if path.endswith(".h5")]
    rows, _ = local_store.listing()
    assert [len(row["from"]) for row in rows] == [2] and len(list((home / "caches").iterdir())) == 1


def test_a_shard_that_was_damaged_here_is_moved_aside_and_fetched_again(web: Web, home: Path, whole: Path) -> None:
    Cache(web.url)["train"][0]
    path = next(home.rglob("train-00000.h5"))
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    assert_same(Cache(web.url)["train"][0], Cache(whole)["train"][0])
    assert [each.name for each in path.parent.glob("*damaged*")] == ["train-00000.h5.damaged-1"]
    path.write_bytes(b"short")
    assert_same(Cache(web.url)["train"][0], Cache(whole)["train"][0])


def test_a_damaged_shard_that_another_process_set_aside_first_is_fetched_once(
    web: Web, home: Path, whole: Path
) -> None:
    one, other = Cache(web.url).remote, Cache(web.url).remote
    assert one is not None and other is not None
    record = one.manifest.splits["train"]["shards"][0]
    path = one.ensure(record)
    path.write_bytes(b"x" * record["bytes"])
    other.ensure(record)
    one.put_aside(record)
    other.put_aside(record)  # it is gone
    path.with_name(f"{path.name}.damaged-1").rename(path)
    one.ensure(record)
    other.ensure(record)
    one.put_aside(record)
    assert one.ensure(record).read_bytes() == (whole / "shards" / path.name).read_bytes()
    other.put_aside(record)  # what is there now is good
    assert path.exists() and len(list(path.parent.glob("*damaged*"))) == 1


def test_a_shard_that_was_set_aside_makes_room_before_any_other(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = room_for(web, home, 2.2)
    cache = Cache(web.url, local_limit=limit)
    assert cache.remote is not None
    record = cache.manifest.splits["train"]["shards"][0]
    cache.remote.ensure(record).write_bytes(b"x" * record["bytes"])
    cache.remote.put_aside(record)
    cache["train"][0]
    monkeypatch.setattr("kdtrain.cache.read.remote._FULL", 0.3)
    cache["train"][4]
    assert not list(home.rglob("*damaged*")) and shards_here(home) >= {"train-00000", "train-00001"}
    assert local_store.listing()[1] <= limit * local_store.GB


def test_another_cache_under_a_known_address_is_said(
    web: Web, tmp_path: Path, workshop, codecs, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Cache(web.url)["train"]
    web.root = workshop.build(tmp_path / "other", codecs["dense"])
    with pytest.raises(RunError, match=r"instead of|SHA-256 differs"):  # the manifest that was read first counts
        reader[0]
    assert Cache(web.url).manifest.digest != reader.manifest.digest
    assert "another cache lies there than before" in caplog.text


def test_the_local_folder_never_grows_past_its_limit_and_what_was_read_longest_ago_goes_first(
    web: Web, home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = home / "other"
    other.mkdir(parents=True)
    (other / "mine.h5").write_bytes(bytes(1000))
    sizes = [each["bytes"] for each in Cache(web.url).manifest.splits["train"]["shards"]]
    rest = sum(each.lstat().st_size for each in home.rglob("*") if each.is_file()) + 2000
    limit = (rest + sizes[0] + sizes[1] + 10) / local_store.GB
    monkeypatch.setattr("kdtrain.cache.read.reader.MAX_OPEN", 1)
    cache = Cache(web.url, local_limit=limit)
    order = [0, 4, 8, 0, 9, 5, 1, 8]
    for row in order:
        assert_same(cache["train"][row], Cache(whole)["train"][row])
        assert local_store.listing()[1] <= limit * local_store.GB
        assert len(shards_here(home)) <= 2
    assert (other / "mine.h5").exists()
    cache["train"].close()
    assert shards_here(home) == {"train-00000", "train-00002"}


def test_a_limit_below_the_largest_shard_is_refused_and_files_of_others_are_never_removed(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"no room for manifest.json below --local-limit"):
        Cache(web.url, local_limit=1e-6)
    Cache(web.url)
    with pytest.raises(UsageError, match=r"--local-limit 1e-06 is less than its largest shard"):
        Cache(web.url, local_limit=1e-6)
    largest = max(local_store.sizes(Cache(web.url).manifest).values())
    mine = home / "mine.bin"
    mine.write_bytes(bytes(2 * largest))
    monkeypatch.setattr("kdtrain.cache.read.remote._FULL", 0.2)
    with pytest.raises(RunError, match=r"no room for .* below --local-limit"):
        Cache(web.url, local_limit=2 * largest / local_store.GB)["train"][0]
    assert mine.stat().st_size == 2 * largest


def test_a_shard_that_another_process_has_open_is_not_removed_for_room(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Cache(web.url)["train"]
    one[0]
    time.sleep(0.2)
    handle = local_store.hold(next(home.rglob("train-00000.h5")))
    assert handle is not None
    monkeypatch.setattr("kdtrain.cache.read.remote._FULL", 0.3)
    for name in ("train-00001", "train-00002"):
        for path in home.rglob(f"{name}.h5"):
            path.unlink()
    taken = local_store.listing()[1]
    two = Cache(web.url, local_limit=(taken + 100) / local_store.GB)["train"]
    with pytest.raises(RunError, match="in use"):
        two[4]
    os.close(handle)
    assert two[4]["tokens"].numel() and "train-00000" not in shards_here(home)


@pytest.mark.parametrize("caches", [1, 2])
def test_readers_give_way_to_one_another_below_a_small_limit(
    web: Web, home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, caches: int
) -> None:
    limit = room_for(web, home, 2.2)
    monkeypatch.setattr("kdtrain.cache.read.remote._FULL", 0.5)
    opened = [Cache(web.url, local_limit=limit) for _ in range(caches)]
    train, validation = opened[0]["train"], opened[-1]["validation"]
    for reader, split in ((train, "train"), (validation, "validation"), (train, "train")):
        for row in range(len(reader)):
            assert_same(reader[row], Cache(whole)[split][row])
        assert local_store.listing()[1] <= limit * local_store.GB


def test_readers_in_two_threads_give_way_to_one_another(
    web: Web, home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, folder = Cache(web.url, local_limit=room_for(web, home, 2.2)), Cache(whole)
    monkeypatch.setattr("kdtrain.cache.read.remote._FULL", 5.0)
    readers = {split: cache[split] for split in cache}
    for row in range(len(folder["train"])):  # all the room is taken
        readers["train"][row]

    def read(split: str) -> None:
        for row in [0, len(folder[split]) - 1] * 8:
            assert_same(readers[split][row], folder[split][row])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read, split) for split in readers]:
            done.result(timeout=60)


def test_no_link_in_the_local_folder_is_followed(web: Web, home: Path, tmp_path: Path) -> None:
    Cache(web.url)["train"][0]
    path = next(home.rglob("train-00000.h5"))
    path.unlink()
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="is a link"):
        Cache(web.url)
    assert (tmp_path / "target").read_bytes() == b"precious"
