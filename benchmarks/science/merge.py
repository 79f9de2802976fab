"""Caches that add up: bit by bit, after kills, and after cuts.

`python -m benchmarks.science.merge` writes benchmarks/results/merge.json, with the real commands on a CPU:

    sum      25 samples, refined to 50 and merged in both orders, against one capture of 50: files that are equal; and
             the same merge killed ten times, at labelled places and at random moments, and resumed
    error    squared error of the estimated probabilities, summed over the vocabulary, a token: of 25 samples, of the
             merged 25 + 25, of 50 drawn at once, and of 25 + 25 whose grids lie at random to each other
    size     bytes a token of each of these caches
    speed    tokens a second of adding, cutting and appending, at V = 2,048 and, for a synthetic teacher like the
             shipped one, at V = 151,936; run it on an idle machine
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, TEACHER, write
from benchmarks.harness.command import Kdtrain
from benchmarks.harness.machine import commit, machine
from benchmarks.harness.models import teacher_logits
from benchmarks.performance import cache_material
from kdtrain.cache.build.writer import write_cache
from kdtrain.cache.format.codec import CodecSpec
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.tools.merge import merge
from kdtrain.cache.tools.subset import subset
from kdtrain.library import Cache
from kdtrain.objective.targets import SparseTargets

CPU = torch.device("cpu")
FAULTS = ("cache.shard.before-rename", "cache.shard.after-publish", "cache.sidecar.before-rename")
FAULTS += ("cache.index.before-rename", "cache.manifest.before-rename")


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200, help="sequences to train on")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--large", type=int, default=12, help="sequences of 512 tokens at V = 151,936; 0: none")
    parser.add_argument("--result", type=Path, default=RESULTS / "merge.json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Kdtrain() as kdtrain:
        home = Path(scratch)
        text = f"--data stdlib --seq-len {asked.seq_len} --num-sequences {asked.rows} --validation-sequences 8"
        text += " --sequences-per-shard 64"
        made = _capture(kdtrain, home, text.split())
        found: dict[str, Any] = {
            "rows": asked.rows,
            "seq_len": asked.seq_len,
            "sum": _equal(home) | {"kills": _killed(home)},
            "error": _error(home),
        }
        found["speed"] = {"V = 2048": _speed(home / "a", home / "b", home / "small")}
        if asked.large:
            found["speed"]["V = 151936"] = _large(home / "large", asked.large)
        found["size"] = {name: each["bytes_per_token"] for name, each in made.items()}
    write(asked.result, {**found, "commit": commit(), "machine": machine(CPU)})
    print(json.dumps({name: found[name] for name in ("sum", "error", "size", "speed")}, indent=1))
    return 0 if found["sum"]["equal"] and all(found["sum"]["kills"].values()) else 1


FP32 = ("--precision", "fp32", "--device", "cpu")


def _capture(kdtrain: Kdtrain, home: Path, text: list[str]) -> dict[str, Any]:
    teacher = ["cache-teacher", "--teacher", TEACHER, *FP32]
    made = {"25": kdtrain(*teacher, *text, "--num-samples", "25", "--out", f"{home}/a")}
    made["its refinement"] = kdtrain(*teacher, "--refine", f"{home}/a", "--out", f"{home}/b")
    made["50"] = kdtrain(*teacher, *text, "--num-samples", "50", "--out", f"{home}/whole")
    made["25, another seed"] = kdtrain(*teacher, *text, "--num-samples", "25", "--seed", "1", "--out", f"{home}/other")
    made["25 + 25"] = kdtrain("merge", f"{home}/a", f"{home}/b", "--out", f"{home}/ab")
    kdtrain("merge", f"{home}/b", f"{home}/a", "--out", f"{home}/ba")
    return made


def _files(folder: Path) -> dict[str, str]:
    """SHA-256 of all files but manifest and card, which name the parents of a merge."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", "README.md")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _equal(home: Path) -> dict[str, Any]:
    whole, merged = _files(home / "whole"), [_files(home / name) for name in ("ab", "ba")]
    digests = {Cache(home / name).manifest.digest for name in ("ab", "ba")}
    return {"files": len(whole), "equal": all(each == whole for each in merged), "manifests_equal": len(digests) == 1}


def _killed(home: Path) -> dict[str, bool]:
    """Whether each merge that was killed came out the same when it was run again."""
    chance, found = random.Random(0), {}
    for number, fault in enumerate([*FAULTS, *[""] * 5]):
        out = home / f"killed-{number}"
        command = [sys.executable, "-m", "kdtrain", "merge", f"{home}/a", f"{home}/b", "--out", str(out), "--json"]
        environment = os.environ | ({"KDTRAIN_FAULT": f"{fault}:kill"} if fault else {})
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(command, env=environment, **quiet)
        name = fault
        if not fault:
            while not (out / "shards").exists() and child.poll() is None:
                time.sleep(0.01)
            moment = chance.uniform(0.02, 0.8)
            time.sleep(moment)
            child.kill()
            name = f"after {moment:.2f} s"
        killed = child.wait() == -signal.SIGKILL
        again = subprocess.run(command, **quiet)
        found[name] = killed and again.returncode == 0 and _files(out) == _files(home / "whole")
    return found


def _tokens(home: Path) -> Tensor:
    reader = Cache(home / "a")["train"]
    return reader.read(range(len(reader))).tokens


def _shares(targets: SparseTargets, vocab_size: int) -> Tensor:
    """[N, V] the share of each entry in the samples of a token."""
    counts_NV = torch.zeros(len(targets.ids), vocab_size + 1)
    counts_NV.scatter_add_(1, targets.ids.clamp(max=vocab_size), targets.counts)
    return counts_NV[:, :vocab_size] / targets.num_samples


def _error(home: Path) -> dict[str, float]:
    teacher, tokens_BT = teacher_logits(TEACHER), _tokens(home)
    readers = {name: Cache(home / name)["train"] for name in ("a", "other", "ab", "whole")}
    squares = dict.fromkeys(("25", "25 + 25", "50 at once", "25 + 25 of two seeds"), 0.0)
    for row, tokens_T in enumerate(tokens_BT):
        p_NV = teacher(tokens_T[None, :-1], None)[0].softmax(-1)
        drawn = {name: _shares(reader.read([row]).targets, p_NV.shape[1]) for name, reader in readers.items()}  # type: ignore[arg-type]
        sides = (drawn["a"], drawn["ab"], drawn["whole"], (drawn["a"] + drawn["other"]) / 2)
        for name, each in zip(squares, sides, strict=True):
            squares[name] += (each - p_NV).square().sum().item()
    return {name: value / tokens_BT[:, 1:].numel() for name, value in squares.items()}


def _speed(one: Path, other: Path, out: Path) -> dict[str, float]:
    """Tokens a second of one merge of two caches, one cut to half, and one merge of what was cut."""
    length, (a, b) = Cache(one).manifest.settings.seq_len, (Cache(one), Cache(other))
    middle = len(a["train"]) // 2
    works = {
        "add": lambda: merge([a, b], out / "add"),
        "cut": lambda: subset(a, out / "cut", rows=(0, middle)),
        "cut, the rest": lambda: subset(a, out / "rest", rows=(middle, None)),
        "append": lambda: merge([Cache(out / "cut"), Cache(out / "rest")], out / "append"),
    }
    found = {}
    for name, work in works.items():
        started = time.monotonic()
        manifest = work()
        tokens = sum(split["sequences"] for split in manifest.splits.values()) * length
        found[name] = tokens / (time.monotonic() - started)
    return found


def _large(home: Path, number: int) -> dict[str, float]:
    facts = json.loads((RESULTS / "cache.json").read_text())["figures"]["teacher synthetic-151936"]
    material = cache_material.synthetic(151_936, number, cache_material.shipped(number, 512), facts)
    for name, sampling in (("a", "grid"), ("b", "grid+1/50")):
        settings = CacheSettings(
            codec=CodecSpec(kind="sparse", vocab_size=151_936, num_samples=25),
            seq_len=512,
            tokenizer_size=151_936,
            sampling=sampling,
            teacher={"spec": material.name},
        )
        write_cache(home / name, settings, material.rows, teacher=material.teacher, batch_size=1)
    return _speed(home / "a", home / "b", home)


if __name__ == "__main__":
    sys.exit(main())
