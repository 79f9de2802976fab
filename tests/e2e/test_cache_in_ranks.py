"""`cache-teacher` in several ranks: the same cache for any number of them, also after one was killed.

The ranks are forks of one process that has imported everything, each with the environment that torchrun would give
it; one test starts torchrun itself.
"""

import importlib.util
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.tools.verify import verify_cache

CUT = ("--teacher-tensor-parallel", 2)
OPTIONS = ("--teacher", "teacher", "--sequences-per-shard", 3, "--batch-size", 2, "--top-k", 4, "--num-samples", 6)


def _same(folder: Path, expected: Path) -> None:
    """Assert `assert_same` of test_cache_survives, and equal settings; digests of files are of HDF5's bytes."""
    source = importlib.util.spec_from_file_location("survives", Path(__file__).with_name("test_cache_survives.py"))
    assert source and source.loader
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    module.assert_same(folder, expected)
    assert read_manifest(folder).settings == read_manifest(expected).settings
    assert read_manifest(folder).digest == read_manifest(expected).digest
    assert not list(folder.glob(".building-*"))


class Cached:
    """`cache-teacher` in several ranks."""

    def __init__(self, bench: Any) -> None:
        self.bench, self.root = bench, bench.root

    def run(self, world: int, out: str, *more: object, fault: str | None = None) -> list[Any]:
        """Run the command on each rank; `fault` may be that of one, as in `POINT:kill:2@1`."""
        return self.bench.launch(world, "cache-teacher", *OPTIONS, *self.bench.small, "--out", out, *more, fault=fault)

    def ok(self, world: int, out: str, *more: object) -> Path:
        """Build a cache in `world` ranks, of which the first alone prints; return its folder."""
        self.bench.ok(world, "cache-teacher", *OPTIONS, *self.bench.small, "--out", out, *more)
        return self.root / out


@pytest.fixture(scope="module")
def ranks(ranks_of) -> Cached:
    return Cached(ranks_of)


@pytest.fixture(scope="module")
def of_one(ranks) -> Path:
    """Build the cache of one process."""
    return ranks.ok(1, "of-one")


def test_the_other_ranks_need_no_cache_that_the_first_has_not_finished(ranks, of_one):
    ended = ranks.run(2, "late", fault="cache.before-finish:hang:1@0")
    assert [each.code for each in ended] == [0, 0]
    _same(ranks.root / "late", of_one)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.torture), 3])
def test_several_ranks_build_the_cache_of_one_and_only_rank_0_prints(ranks, of_one, world) -> None:
    folder = ranks.ok(world, f"of-{world}")
    _same(folder, of_one)


@pytest.mark.parametrize("first, then, victim", [(2, 3, 1), (3, 1, 0), (1, 2, 0)])
def test_killed_under_one_number_of_ranks_and_finished_under_another(ranks, of_one, first, then, victim) -> None:
    out = f"from-{first}-to-{then}"
    ended = ranks.run(first, out, fault=f"cache.shard.after-batch:kill:3@{victim}")
    others = [each for rank, each in enumerate(ended) if rank != victim]
    assert ended[victim].code == -signal.SIGKILL
    assert [each.code for each in others] == [1] * (first - 1)
    assert ["lost another rank" in each.refusal() for each in others] == [True] * (first - 1)
    assert ranks.bench.apart < 300
    shards = {path: path.stat().st_mtime_ns for path in (ranks.root / out / "shards").glob("*.h5")}
    assert shards
    _same(ranks.ok(then, out), of_one)
    kept = [path for path, when in shards.items() if path.stat().st_mtime_ns == when]
    assert kept == list(shards)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.torture)])
def test_a_sharded_teacher_builds_the_cache_of_a_whole_one(ranks, of_one, world) -> None:
    """Rank 0 has more shards than others: forwards are taken together all the same."""
    out = f"parts-{world}"
    ended = ranks.run(world, out, "--teacher-parallel", "fsdp", fault="cache.sidecar.before-rename:kill:2@1")
    assert [each.code for each in ended] == [-signal.SIGKILL if rank == 1 else 1 for rank in range(world)]
    _same(ranks.ok(world, out, "--teacher-parallel", "fsdp"), of_one)


@pytest.mark.parametrize(
    "world, more", [(2, ()), pytest.param(4, ("--teacher-parallel", "fsdp"), marks=pytest.mark.torture)]
)
def test_tensor_ranks_of_a_teacher_build_the_cache_of_a_whole_one_but_for_ties(ranks, of_one, world, more) -> None:
    """Rank 0 has more shards than others, and each its own sequences; sums in parts round the last bit otherwise."""
    found, expected = (LocalCache(each) for each in (ranks.ok(world, f"cut-{world}", *CUT, *more), of_one))
    assert found.manifest.settings == expected.manifest.settings and verify_cache(found.folder) == []
    differing, entries = 0, 0
    for split in expected:
        for one, other in zip(expected[split], found[split], strict=True):
            for name in ("tokens", "loss_mask", "segments"):
                assert torch.equal(one[name], other[name])
            for name in ("ids", "counts"):
                differing, entries = differing + int((one[name] != other[name]).sum()), entries + one[name].numel()
            for name in ("logprobs", "label_logprob", "tail"):
                assert (one[name] - other[name]).abs().max() < 0.06, "more than one step of a stored code"
    assert differing <= entries / 1000


def test_a_refinement_is_the_same_in_several_ranks_also_after_one_was_killed(ranks) -> None:
    samples = ("--teacher", "teacher", "--sequences-per-shard", 3, "--num-samples", 5, *ranks.bench.small)
    ranks.bench.ok(1, "cache-teacher", *samples, "--out", "samples")
    refine = ("cache-teacher", "--teacher", "teacher", "--refine", "samples", "--precision", "fp32", "--out")
    ranks.bench.ok(1, *refine, "more-of-1")
    ended = ranks.bench.launch(2, *refine, "more-of-2", fault="cache.sidecar.before-rename:kill:2@1")
    assert [each.code for each in ended] == [1, -signal.SIGKILL]
    ranks.bench.ok(2, *refine, "more-of-2")
    _same(ranks.root / "more-of-2", ranks.root / "more-of-1")


def test_an_error_of_one_rank_is_reported_by_it_and_ends_the_others(ranks, of_one) -> None:
    first, second = ranks.run(2, "no-space", fault="cache.shard.after-batch:enospc:2@1")
    assert (first.code, second.code) == (1, 1)
    assert "No space left on device" in second.refusal()
    assert "lost another rank" in first.refusal()
    _same(ranks.ok(2, "no-space"), of_one)


def test_a_launch_beside_another_is_refused_by_one_line(ranks, of_one) -> None:
    from kdtrain.cache.write.folder import lock

    folder = ranks.root / "taken"
    folder.mkdir()
    held = lock(folder, 2)  # a rank of another launch, whose first one is dead
    first, second = ranks.run(2, "taken")
    assert (first.code, second.code, second.stderr) == (2, 2, "")
    assert "another process is building taken now" in first.refusal()
    held.release()
    _same(ranks.ok(2, "taken"), of_one)


def test_a_dry_run_shows_how_each_engine_is_spread(ranks, of_one) -> None:
    run = ("--cache", "of-one", "--student", "student.toml", "--batch-size", 8, *ranks.bench.eager, "--steps", 2)
    plans = {}
    for engine in ("ddp", "fsdp"):
        before = sorted(ranks.root.iterdir())
        done = ranks.bench.ok(2, "distill", *run, "--out", "dry", "--dry-run", "--parallel", engine, "--json")
        assert [path for path in sorted(ranks.root.iterdir()) if path not in before and "said" not in path.name] == []
        assert done.json["batch"] == "8 x 32 tokens, 1 micro-batch of 4 on each of 2 ranks"
        plans[engine] = done.json["parallel"]
    assert [(plan["ranks"], plan["student"]) for plan in plans.values()] == [(2, "ddp"), (2, "fsdp")]
    assert plans["ddp"]["of it"] != plans["fsdp"]["of it"]
    tensor = ("--tensor-parallel", 2, "--precision", "fp32", "--log-to", "none")
    done = ranks.bench.ok(2, "distill", *run[:6], *tensor, "--steps", 2, "--out", "dry", "--dry-run", "--json")
    assert "not compiled: torch.compile fails on the parts of tensor ranks" in done.stderr
    assert done.json["compiled"] is False and done.json["parallel"]["tensor ranks"] == 2
    numbers = 4 * 8 * 32 * 32  # bytes of the hidden states of all rows; the student has one layer, of two blocks
    in_parts = numbers * (2 + 2 + 2) + numbers * (2 + 2)  # begun, left and joined again, and summed up
    sent = in_parts / 2 + (2 * numbers + 4 * 3 * 32)  # and embedding, head and three norms
    assert done.json["parallel"]["GB sent a step"] == pytest.approx(sent / 1e9)
    # with one micro-batch in fp32 both send the same: half of gathering twice and scattering once, or of two exchanges
    assert plans["fsdp"]["GB sent a step"] > 0.5 * plans["ddp"]["GB sent a step"] > 0


def test_bad_input_is_one_line_of_one_rank(ranks, of_one) -> None:
    for more, said in (
        (("--teacher-tensor-parallel", 3), "--teacher-tensor-parallel 3 does not divide 2 ranks; start"),
        ((*CUT, "--teacher-parallel", "fsdp"), "--teacher-parallel fsdp needs more than 2 processes"),
        ((*CUT, "--teacher-weights", "int8"), "--teacher-tensor-parallel cannot cut --teacher-weights int8"),
        (("--data", "missing"), "--data is given 2 times"),
        (("--top-k", 301), "more than the vocabulary of 300"),
    ):
        first, second = ranks.run(2, "bad", *more)
        assert (first.code, second.code, second.stderr) == (2, 2, "")
        assert said in first.refusal()


def test_inputs_that_do_not_fit_are_refused_by_one_rank_for_all(ranks, of_one) -> None:
    first, second = ranks.run(2, "too-large", "--device-memory", 0.0001)
    assert (first.code, second.code, second.stderr) == (2, 2, "")
    assert "on each of 2 devices" in first.refusal()
    assert not (ranks.root / "too-large").exists()


def test_torchrun_names_the_killed_rank_and_its_shards_are_finished_later(bench, ranks, of_one) -> None:
    words = [str(word) for word in ("cache-teacher", *OPTIONS, *bench.small, "--out", "by-torchrun", "--json")]
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kdtrain", *words)
    started = time.monotonic()
    (killed,) = bench.server.run(*command, folder=bench.root, KDTRAIN_FAULT="cache.sidecar.before-rename:kill:2")
    assert killed.returncode == 1 and "SIGKILL" in killed.stderr
    assert time.monotonic() - started < 500  # less than what ranks wait for each other
    _same(ranks.ok(2, "by-torchrun"), of_one)
