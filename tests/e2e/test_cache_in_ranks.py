"""`cache-teacher` in several ranks: the same cache for any number of them, also after one was killed.

The ranks are forks of one process that has imported everything, each with the environment that torchrun would give
it; one test starts torchrun itself.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from kdtrain.cache.provenance import read_manifest

OPTIONS = ("--teacher", "teacher", "--sequences-per-shard", 3, "--batch-size", 2, "--head", 4, "--draws", 6)

SERVER = """
import json, os, sys, time
import torch, torch.distributed
from kdtrain import cli, faults
from kdtrain.stages import cache_teacher, distill

torch.set_num_threads(1)
for line in sys.stdin:
    words, environments, said = json.loads(line)
    ranks = {}
    for number, environment in enumerate(environments):
        child = os.fork()
        if child:
            ranks[child] = number
            continue
        for handle, name in enumerate(("/dev/null", f"{said}.{number}.out", f"{said}.{number}.err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), handle)
        os.environ.update(environment)
        faults.read()
        code = 1
        try:
            cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    codes, ended = [None] * len(ranks), {}
    while None in codes:
        child, status = os.wait()
        codes[ranks[child]] = os.waitstatus_to_exitcode(status)
        ended[ranks[child]] = time.monotonic()
    print(json.dumps([codes, max(ended.values()) - min(ended.values())]), flush=True)
"""


def _same(folder: Path, expected: Path) -> None:
    """`assert_same` of test_cache_survives, and equal settings; digests of files are of HDF5's bytes."""
    source = importlib.util.spec_from_file_location("survives", Path(__file__).with_name("test_cache_survives.py"))
    assert source and source.loader
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    module.assert_same(folder, expected)
    assert read_manifest(folder).settings == read_manifest(expected).settings
    assert read_manifest(folder).digest == read_manifest(expected).digest
    assert not list(folder.glob(".building-*"))


class Ranks:
    """Starts a command in several ranks."""

    def __init__(self, bench) -> None:
        self.root, self.small = bench.root, bench.small
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=self.root, env=environment, text=True, stdin=PIPE, stdout=PIPE
        )
        self.fired = self.root / "fired-in-ranks"
        self.spread = 0.0
        """Seconds between the end of the first rank of the last command and that of the last."""

    def run(self, world: int, out: str, *more: object, **faults: str) -> list[tuple[int, str, str]]:
        """Code, stdout and stderr of each rank of `cache-teacher`; `rank1="POINT:kill:2"` is a fault on rank 1."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.fired.unlink(missing_ok=True)
        common = {"WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        environments = [
            {
                **common,
                **{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "KDTRAIN_FAULT": faults.get(f"rank{rank}", "")},
                "KDTRAIN_FAULT_LOG": str(self.fired),
            }
            for rank in range(world)
        ]
        words = [str(word) for word in ("cache-teacher", *OPTIONS, *self.small, "--out", out, *more)]
        assert self._server.stdin is not None and self._server.stdout is not None
        said = self.root / f"said-{out}"
        self._server.stdin.write(json.dumps([words, environments, str(said)]) + "\n")
        self._server.stdin.flush()
        codes, self.spread = json.loads(self._server.stdout.readline())
        texts = [[Path(f"{said}.{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(world)]
        if faults:
            assert self.fired.read_text().split() == [each.split(":")[0] for each in faults.values()]
        return [(code, *text) for code, text in zip(codes, texts, strict=True)]

    def ok(self, world: int, out: str, *more: object) -> Path:
        """The folder of the cache that `world` ranks have built."""
        ended = self.run(world, out, *more)
        assert [code for code, *_ in ended] == [0] * world, "\n".join(err for *_, err in ended)
        return self.root / out

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def ranks(bench) -> Iterator[Ranks]:
    ranks = Ranks(bench)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def of_one(ranks) -> Path:
    """The cache of one process."""
    return ranks.ok(1, "of-one")


@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks_build_the_cache_of_one_and_rank_0_alone_speaks(ranks, of_one, world) -> None:
    ended = ranks.run(world, f"of-{world}", "--json")
    assert [code for code, *_ in ended] == [0] * world, ended
    assert json.loads(ended[0][1])["ranks"] == world
    assert [(out, err) for _, out, err in ended[1:]] == [("", "")] * (world - 1)
    _same(ranks.root / f"of-{world}", of_one)


@pytest.mark.parametrize("first, then, victim", [(2, 3, 1), (3, 1, 0), (1, 2, 0)])
def test_killed_under_one_number_of_ranks_and_finished_under_another(ranks, of_one, first, then, victim) -> None:
    out = f"from-{first}-to-{then}"
    ended = ranks.run(first, out, **{f"rank{victim}": "cache.shard.after-batch:kill:3"})
    others = [each for rank, each in enumerate(ended) if rank != victim]
    assert ended[victim][0] == -signal.SIGKILL
    assert [code for code, *_ in others] == [1] * (first - 1)
    for _, _, err in others:
        assert "lost another rank" in err.splitlines()[-1] and "Traceback" not in err
    assert ranks.spread < 60
    shards = {path: path.stat().st_mtime_ns for path in (ranks.root / out / "shards").glob("*.h5")}
    assert shards
    _same(ranks.ok(then, out), of_one)
    kept = [path for path, when in shards.items() if path.stat().st_mtime_ns == when]
    assert kept == list(shards)


@pytest.mark.parametrize("world", [2, 3])
def test_a_teacher_in_parts_says_what_a_whole_one_says(ranks, of_one, world) -> None:
    """Rank 0 has more shards than others: forwards are taken together all the same."""
    out = f"parts-{world}"
    ended = ranks.run(world, out, "--teacher-parallel", "fsdp", rank1="cache.sidecar.before-rename:kill:2")
    assert [code for code, *_ in ended] == [-signal.SIGKILL if rank == 1 else 1 for rank in range(world)]
    _same(ranks.ok(world, out, "--teacher-parallel", "fsdp"), of_one)


def test_an_error_of_one_rank_is_said_by_it_and_ends_the_others(ranks, of_one) -> None:
    ended = ranks.run(2, "full", rank1="cache.shard.after-batch:enospc:2")
    assert [code for code, *_ in ended] == [1, 1]
    assert "No space left on device" in ended[1][2].splitlines()[-1]
    assert "lost another rank" in ended[0][2].splitlines()[-1]
    _same(ranks.ok(2, "full"), of_one)


def test_a_launch_beside_another_is_refused_by_one_line(ranks, of_one) -> None:
    from kdtrain.cache.claim import Lock

    folder = ranks.root / "taken"
    folder.mkdir()
    lock = Lock(folder, 2)  # a rank of another launch, whose first one is dead
    ended = ranks.run(2, "taken")
    assert [code for code, *_ in ended] == [2, 2]
    assert "another process is building taken now" in ended[0][2].splitlines()[-1]
    lock.release()
    _same(ranks.ok(2, "taken"), of_one)


def test_torchrun_says_which_rank_was_killed_and_what_it_left_is_finished(bench, ranks, of_one) -> None:
    words = [str(word) for word in ("cache-teacher", *OPTIONS, *bench.small, "--out", "by-torchrun", "--json")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kdtrain"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    fault = {"KDTRAIN_FAULT": "cache.sidecar.before-rename:kill:2"}
    started = time.monotonic()
    killed = subprocess.run(
        [*command, *words], cwd=bench.root, env={**variables, **fault}, capture_output=True, text=True
    )
    assert killed.returncode == 1 and "SIGKILL" in killed.stderr and time.monotonic() - started < 60
    _same(ranks.ok(2, "by-torchrun"), of_one)
