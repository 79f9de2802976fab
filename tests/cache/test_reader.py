"""A reader returns what the writer stored, in any order."""

import importlib
import os
import pickle
import resource
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch

from kdtrain.cache.format import hdf5
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import decode, encode_sequences
from kdtrain.cache.format.spec import STEP_SLOPE, STEP_SPREAD, STEP_VALUE, CodecSpec, datasets
from kdtrain.cache.read import reader
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.read.shard import Runs, Shard
from kdtrain.errors import RunError, UsageError
from kdtrain.files import file_digest
from kdtrain.objective.targets import SparseTargets
from tests.cache.fork_kit import answer_of


@pytest.fixture(scope="module")
def cache(tmp_path_factory, workshop, codecs) -> Path:
    return workshop.build(tmp_path_factory.mktemp("reader") / "cache", codecs["both"])


@pytest.mark.parametrize("name", ["top_k", "num_samples", "weighted", "both", "whole", "dense", "tokens"])
def test_a_round_trip_gives_what_was_encoded(tmp_path: Path, workshop, codecs, name: str) -> None:
    spec = codecs[name]
    batch = CacheReader(workshop.build(tmp_path / "c", spec), "train").read(range(10))
    rows = list(workshop.rows(10))
    tokens = torch.tensor(np.stack([row.tokens for row in rows])).long()
    assert torch.equal(batch.tokens, tokens)
    assert torch.equal(batch.loss_mask, torch.tensor(np.stack([row.loss_mask for row in rows])))
    assert torch.equal(batch.segments, torch.tensor(np.stack([row.segments for row in rows])).long())
    if name == "tokens":
        assert batch.targets is None
        return
    logits = workshop.teacher()(tokens[:, :-1], None)
    arrays = encode_sequences(logits, tokens[:, 1:], spec, seed=3, split="train", first=0)
    expected = decode(arrays, spec)
    assert type(batch.targets) is type(expected)
    exact = ["ids", "counts", "top_k", "num_samples", "knots"]
    if isinstance(batch.targets, SparseTargets) and isinstance(expected, SparseTargets) and expected.only_at_one:
        found_NV, expected_NV = (_counts(targets, spec.vocab_size) for targets in (batch.targets, expected))
        assert torch.equal(found_NV, expected_NV)
        exact = exact[2:]
    if name == "dense":
        exact = [*vars(expected)]
    for field in exact:
        value, found = getattr(expected, field), getattr(batch.targets, field)
        assert torch.equal(value, found) if torch.is_tensor(value) else value == found, field
    if isinstance(batch.targets, SparseTargets) and isinstance(expected, SparseTargets):
        _assert_within_the_stated_errors(batch.targets, expected)


def _counts(targets: SparseTargets, vocab_size: int) -> torch.Tensor:
    """Count how often each entry was drawn, [N, V + 1]; the absent ones last."""
    zeros = torch.zeros(len(targets), vocab_size + 1)
    return zeros.scatter_add(1, targets.ids.clamp(max=vocab_size), targets.counts)


def _assert_within_the_stated_errors(found: SparseTargets, expected: SparseTargets) -> None:
    for field in ["label_logprob"] if found.only_at_one else ["logprobs", "label_logprob"]:
        value = getattr(expected, field)
        assert ((getattr(found, field) - value).abs() <= (1 - value) / 383).all(), field
    step = torch.tensor([STEP_VALUE] * len(found.knots) + [STEP_SLOPE] * len(found.knots))
    assert ((found.tail - expected.tail).abs() <= 0.51 * step).all()
    assert torch.allclose(found.logit_mean, expected.logit_mean, atol=0.51 * STEP_SPREAD)
    assert torch.allclose(found.logit_std, expected.logit_std, atol=0.51 * STEP_SPREAD)


@pytest.mark.parametrize("indices", [[9, 0, 5, 5, 2, 9], [7], [3, 4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]])
def test_sequences_come_in_the_requested_order(cache: Path, indices: list[int]) -> None:
    shards = CacheReader(cache, "train")
    whole, some = shards.read(range(len(shards))), shards.read(indices)
    assert torch.equal(some.tokens, whole.tokens[indices])
    assert isinstance(some.targets, SparseTargets)
    assert isinstance(whole.targets, SparseTargets)
    ids = whole.targets.ids.reshape(10, -1, some.targets.ids.shape[1])[indices]
    assert torch.equal(some.targets.ids, ids.flatten(0, 1))


@pytest.mark.parametrize("indices", [[], [10], [-1, 3]])
def test_a_missing_sequence_is_an_index_error(cache: Path, indices: list[int]) -> None:
    with pytest.raises(IndexError):
        CacheReader(cache, "train").read(indices)


def test_a_missing_split_is_named(cache: Path) -> None:
    with pytest.raises(UsageError, match="no split 'test'; it has train, validation"):
        CacheReader(cache, "test")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the readers of earlier tests, which would have a share of the bounds."""
    monkeypatch.setattr(reader, "_readers", weakref.WeakValueDictionary())


def test_a_closed_shard_keeps_its_lists_up_to_a_bound_and_while_its_file_is_the_same(
    tmp_path: Path, workshop, codecs, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    cache = workshop.build(tmp_path / "c", codecs["both"])
    opened, lists, masks = Mock(wraps=h5py.File), Mock(wraps=hdf5.read_dictionary), Mock(wraps=Runs)
    for name, counted in (("h5py.File", opened), ("read_dictionary", lists), ("Runs", masks)):
        monkeypatch.setattr(f"kdtrain.cache.read.shard.{name}", counted)

    def counts(order: list[int]) -> tuple[int, int, int]:
        for each in (opened, lists, masks):
            each.reset_mock()
        for index in order:
            assert torch.equal(shards.read([index]).tokens[0], expected[index])
        assert len(shards._open) == 1
        return opened.call_count, lists.call_count, masks.call_count

    expected = CacheReader(cache, "train").read(range(10)).tokens
    monkeypatch.setattr(reader, "MAX_OPEN", 1)
    shards = CacheReader(cache, "train")
    order = [0, 9, 5, 0, 5, 9]
    assert counts(order) == (6, 3, 6)
    assert counts(order[:-1]) == (5, 0, 0)

    path = cache_format.shard_path(cache, "train-00000")
    path.write_bytes(path.read_bytes())
    assert counts([9, 0, 9, 0]) == (4, 1, 2)
    assert not pickle.loads(pickle.dumps(shards))._closed
    held = {number: each.nbytes for number, each in (*shards._open.items(), *shards._closed.items())}
    shards.close()
    assert (len(held), min(held.values()) > 1000, len(shards._closed)) == (3, True, 0)

    monkeypatch.setattr(reader, "MAX_LISTS", max(held.values()))
    for index in order * 2:
        shards.read([index])
        assert sum(each.nbytes for each in shards._closed.values()) <= max(held.values())
    assert len(shards._closed) == 1
    monkeypatch.setattr(reader, "MAX_LISTS", 0)
    assert counts(order) == (6, 6, 12)


def test_the_readers_of_a_process_share_both_bounds_and_those_of_a_fork_have_their_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    readers = [CacheReader(shutil.copytree(cache, tmp_path / str(number)), "train") for number in range(3)]
    expected = CacheReader(cache, "train").read(range(10)).tokens
    for each in readers:
        each.read([0, 5, 9])
    lists = max(each.nbytes for each in readers[0]._open.values())
    for each in readers:
        each.close()
    monkeypatch.setattr(reader, "MAX_OPEN", 4)
    monkeypatch.setattr(reader, "MAX_LISTS", 2 * lists)

    def held() -> tuple[int, int, int]:
        for index in (0, 9, 5, 9, 0):
            for each in readers:
                assert torch.equal(each.read([index]).tokens[0], expected[index])
        closed = [each for own in readers for each in own._closed.values()]
        return sum(len(each._open) for each in readers), len(closed), sum(each.nbytes for each in closed)

    def in_a_fork() -> tuple[list[int], tuple[int, int, int]]:
        readers[0].read([0])
        return [*readers[0]._open], held()

    opened, closed, size = held()
    assert (opened, closed) == (4, 2) and size <= 2 * lists
    assert [[*each._open] for each in readers] == [[0], [0], [2, 0]], "what was read last stays open"
    assert answer_of(in_a_fork) == ([0], (opened, closed, size))


def test_readers_of_many_caches_stay_within_the_files_that_a_process_may_open(tmp_path: Path, workshop, codecs) -> None:
    cache = workshop.build(tmp_path / "c", codecs["top_k"], sequences_per_shard=1)
    folders = [shutil.copytree(cache, tmp_path / str(number)) for number in range(3)]
    expected = CacheReader(cache, "train").read(range(10)).tokens

    def in_a_fork() -> tuple[int, int, bool]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        own = importlib.reload(reader)
        readers = [own.CacheReader(folder, "train") for folder in folders]
        right = [torch.equal(each.read(range(10)).tokens, expected) for each in readers]
        return own.MAX_OPEN, sum(len(each._open) for each in readers), all(right)

    assert answer_of(in_a_fork) == (20, 20, True)


def test_threads_that_share_a_reader_each_get_their_own_sequences(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(reader, "MAX_OPEN", 2)
    shards = CacheReader(cache, "train")
    expected = shards.read(range(10)).tokens
    wrong: list[int] = []

    def work(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(10, size=50).tolist():
            if not torch.equal(shards.read([index]).tokens[0], expected[index]):
                wrong.append(index)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert wrong == []


def test_a_reader_that_was_forked_while_a_thread_read_is_not_stuck_and_opens_its_own_files(cache: Path) -> None:
    shards = CacheReader(cache, "train")
    tokens, opened = shards.read([0]).tokens.tolist(), shards._open[0]

    def in_a_fork() -> tuple[list, bool, bool]:
        return shards.read([0]).tokens.tolist(), shards._open[0] is opened, shards._process == os.getpid()

    with shards._lock():
        found = answer_of(in_a_fork)
    assert found == (tokens, False, True)


def test_a_missing_shard_or_cache_is_an_error_that_names_it(tmp_path: Path, workshop, codecs) -> None:
    cache = workshop.build(tmp_path / "c", codecs["top_k"])
    shards = CacheReader(cache, "train")
    cache_format.shard_path(cache, "train-00001").unlink()
    shards.read([0])
    with pytest.raises(RunError, match=r"train-00001.h5 cannot be read \(it is missing\): .*verify"):
        shards.read([4])
    cache.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"the cache .*/c is gone and shard train-00001.h5 .*put it back"):
        shards.read([4])


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def _place_in_a_chunk(path: Path) -> int:
    with h5py.File(path) as file:
        chunk = file["numbers"].id.get_chunk_info(1)
        return int(chunk.byte_offset + chunk.size // 2)


def test_a_flip_anywhere_in_a_shard_never_reaches_the_trainer(tmp_path: Path, workshop, codecs) -> None:
    cache = workshop.build(tmp_path / "c", codecs["top_k"])
    path = cache_format.shard_path(cache, "train-00001")
    sound = path.read_bytes()
    for place in range(5, len(sound), len(sound) // 40):
        _flip(path, place)
        with pytest.raises(RunError, match=r"train-00001.* SHA-256 differs"):
            CacheReader(cache, "train").read([5])
        path.write_bytes(sound)
    CacheReader(cache, "train").read([5])
    _flip(path, _place_in_a_chunk(path))  # without the digest, for a flip after the comparison
    with pytest.raises(OSError, match=r"filter|Fletcher32"):  # in the words of the release of HDF5
        Shard(path, codecs["top_k"]).read(np.array([1]), checked=False)


def test_a_shard_is_verified_again_when_its_file_changes(tmp_path: Path, workshop, codecs, monkeypatch) -> None:
    cache = workshop.build(tmp_path / "c", codecs["top_k"])
    calls = []
    monkeypatch.setattr(reader, "file_digest", lambda path: calls.append(path.name) or file_digest(path))
    monkeypatch.setattr(reader, "MAX_OPEN", 1)
    shards = CacheReader(cache, "train")
    for index in (0, 9, 0, 9, 5):
        shards.read([index])
    assert calls == ["train-00000.h5", "train-00002.h5", "train-00001.h5"]
    pickle.loads(pickle.dumps(shards)).read([0])
    assert len(calls) == 3
    path = cache_format.shard_path(cache, "train-00000")
    _flip(path, path.stat().st_size // 2)
    with pytest.raises(RunError, match=r"train-00000.* SHA-256 differs"):
        shards.read([0])


def test_dense_blocks_stay_small(tmp_path: Path) -> None:
    for vocab_size in (2048, 151_936, 262_144):
        entry = datasets(CodecSpec(kind="dense", vocab_size=vocab_size), 512)["logprobs"]
        assert 2**19 <= 2 * np.prod(entry.chunk) <= 2**22
