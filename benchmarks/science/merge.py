"""Caches that add up: what a sum of samples is worth, and what it costs.

`python -m benchmarks.science.merge` writes benchmarks/results/merge.json, with the real commands on a CPU:

    error    squared error of the estimated probabilities, summed over the vocabulary, a token: of 25 samples, of the
             merged 25 + 25, of 50 drawn at once, and of 25 + 25 whose grids lie at random to each other
    size     bytes a token of each of these caches
    speed    tokens a second of adding, cutting and appending, at V = 2,048 and, for a synthetic teacher like the
             shipped one, at V = 151,936; run it on an idle machine

That a sum is the capture of all bit by bit, in either order and after kills, is held by tests/cache/test_merge.py. The
record's figures of that (`sum`) and of several teachers' mixtures are of earlier commits, which it names.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, TEACHER, write
from benchmarks.harness.command import kdtrain
from benchmarks.harness.machine import commit, machine
from benchmarks.harness.models import teacher_logits
from benchmarks.performance import cache_material
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.writer import write_cache
from kdtrain.library import Cache
from kdtrain.objective.targets import SparseTargets
from kdtrain.plugins.caches.merge import merge, subset

CPU = torch.device("cpu")


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200, help="sequences to train on")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--large", type=int, default=12, help="sequences of 512 tokens at V = 151,936; 0: none")
    parser.add_argument("--result", type=Path, default=RESULTS / "merge.json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        text = f"--data stdlib --seq-len {asked.seq_len} --num-sequences {asked.rows} --validation-sequences 8"
        text += " --sequences-per-shard 64"
        made = _capture(home, text.split())
        found: dict[str, Any] = {"rows": asked.rows, "seq_len": asked.seq_len, "error": _error(home)}
        found["speed"] = {"V = 2048": _speed(home / "a", home / "b", home / "small")}
        if asked.large:
            found["speed"]["V = 151936"] = _large(home / "large", asked.large)
        found["size"] = {name: each["bytes_per_token"] for name, each in made.items()}
    write(asked.result, {**found, "commit": commit(), "machine": machine(CPU)})
    print(json.dumps({name: found[name] for name in ("error", "size", "speed")}, indent=1))
    return 0


FP32 = ("--precision", "fp32", "--device", "cpu")


def _capture(home: Path, text: list[str]) -> dict[str, Any]:
    teacher = ["cache-teacher", "--teacher", TEACHER, *FP32]
    made = {"25": kdtrain(*teacher, *text, "--num-samples", "25", "--out", f"{home}/a")}
    made["its refinement"] = kdtrain(*teacher, "--refine", f"{home}/a", "--out", f"{home}/b")
    made["50"] = kdtrain(*teacher, *text, "--num-samples", "50", "--out", f"{home}/whole")
    made["25, another seed"] = kdtrain(*teacher, *text, "--num-samples", "25", "--seed", "1", "--out", f"{home}/other")
    made["25 + 25"] = kdtrain("merge", f"{home}/a", f"{home}/b", "--out", f"{home}/ab")
    return made


def _tokens(home: Path) -> Tensor:
    reader = Cache(home / "a")["train"]
    return reader.read(range(len(reader))).tokens


def _shares(targets: SparseTargets, vocab_size: int) -> Tensor:
    """Compute the share of each entry in the samples of a token, [N, V]."""
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
    """Measure tokens a second of a merge of two caches, of a cut to each half, and of a merge of the halves."""
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
