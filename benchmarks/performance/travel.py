"""Training from a cache on a web server against the same cache in a folder: tokens a second, and the bits.

`python -m benchmarks.performance.travel [--pairs 5] [--steps 150] [--sequences 512]` writes
benchmarks/results/travel.json.

The real `kdtrain distill` with the shipped teacher and a student, from the folder and from a server of Python's own on
this machine, in turn. `cold` begins with an empty KDTRAIN_HOME, so that it fetches and checks every shard within its
first steps; `warm` has all of them there. A run's tokens a second are those of its result.json, from its first step to
its last, validation and the fetching of shards included. The figure is the median over pairs of the ratio to the
folder. The seconds of the whole command are given too.
"""

import argparse
import functools
import json
import statistics
import tempfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness import RESULTS, STUDENT, TEACHER, write
from benchmarks.harness.command import environment, kdtrain

GOAL = 0.97


class Quiet(SimpleHTTPRequestHandler):
    """A server of the files of a folder, without a log."""

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def main() -> int:
    """Measure; 0 when the bits are equal and the cold ratio reaches the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS / "travel.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        return _measure(root, options)


def _measure(root: Path, options: argparse.Namespace) -> int:
    cache = root / "cache"
    size = ("--num-sequences", str(options.sequences), "--sequences-per-shard", "64")
    kdtrain("cache-teacher", "--teacher", TEACHER, "--data", "stdlib", *size, "--out", str(cache))
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(cache)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    rows: list[dict[str, dict[str, float]]] = []
    equal = True
    for pair in range(options.pairs):
        row, weights = {}, {}
        kinds = ["folder", "cold", "warm"]
        for kind in kinds if pair % 2 == 0 else ["cold", "warm", "folder"]:
            run = root / f"run-{pair}-{kind}"
            where = str(cache) if kind == "folder" else url
            row[kind] = _train(where, run, options.steps, KDTRAIN_HOME=str(root / f"home-{pair}"), HF_HUB_OFFLINE="")
            weights[kind] = load_file(run / "student" / "model.safetensors")
            last = environment(run)
        equal &= all(_same(weights["folder"], weights[kind]) for kind in ("cold", "warm"))
        rows.append(row)
        print(json.dumps(row))
    server.shutdown()
    ratios = {
        kind: statistics.median(row[kind]["tokens_per_second"] / row["folder"]["tokens_per_second"] for row in rows)
        for kind in ("cold", "warm")
    }
    shards = sorted((cache / "shards").glob("*.h5"))
    record = {
        **last,
        **{"pairs": options.pairs, "steps": options.steps, "sequences": options.sequences, "shards": len(shards)},
        "bytes": sum(path.stat().st_size for path in shards),
        "ratio_to_folder": ratios,
        "goal": GOAL,
        "bits_equal": equal,
        "runs": rows,
    }
    print(json.dumps({key: value for key, value in record.items() if key != "runs"}, indent=1))
    write(options.out, record)
    return int(not equal or ratios["cold"] < GOAL)


def _train(cache: str, run: Path, steps: int, **environment: str) -> dict[str, float]:
    plain = ("--log-to", "none", "--no-compile", "--eval-freq", "1000000")
    started = time.monotonic()
    words = ("--cache", cache, "--student", STUDENT, "--out", str(run), "--steps", str(steps), *plain)
    kdtrain("distill", *words, **environment)
    seconds = time.monotonic() - started
    result = json.loads((run / "result.json").read_text())
    return {"tokens_per_second": result["tokens_per_second"], "seconds": seconds}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


if __name__ == "__main__":
    raise SystemExit(main())
