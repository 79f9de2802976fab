"""What a checkpoint costs: how long training stands still for one, and how long it takes until it is on the disk.

`python benchmarks/checkpoint.py [--only saves|training] [--quick]` writes benchmarks/results/checkpoint.json, or the
part of it that was measured (not with --quick).

Saves: the state of the demo's student with its optimizer, and 1 GiB of tensors, are saved in place and in the
background. `stall` is the time for which the caller stands still, `total` the time until the checkpoint is published
(files, digests, flushing, links): medians of all saves but the first, which allocates the buffers and whose stall is
given by itself. `taken` is what the caller loses to a save in all, the stall included: matrix products, enough to last
longer than the save, are timed with and without a save in flight, on all threads, so that what the background takes
from the processor, the memory and the interpreter counts as well.

Training: the real command at the demo's settings, a checkpoint every 250 steps, in place and in the background; the
share is the time stood still, as the run's events tell it, over the time of all steps.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.models.loading import load_student
from kdtrain.models.spec import read_spec

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "checkpoint.json"
GOAL = 0.5
"""Per cent of the training time that checkpoints every 250 steps may cost."""


def main() -> int:
    """Measure all of it; 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=6, help="saves of each kind")
    parser.add_argument("--steps", type=int, default=500, help="steps of each training")
    parser.add_argument("--only", choices=("saves", "training"), help="measure one part and leave the other as it is")
    parser.add_argument("--quick", action="store_true", help="small tensors, no training, and no result file")
    options = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() and not options.quick else {}
    result |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.machine()}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if options.quick:
            result["saves"] = {"small": saves(scratch, {"a": torch.randn(1000, 1000)}, 2)}
        else:
            if options.only != "saves":
                result["training"] = training(scratch, options.steps)
            if options.only != "training":
                large = {f"t{number:03d}": torch.randn(1024, 1024) for number in range(256)}
                result["saves"] = {
                    "demo": saves(scratch, demo_state(), options.saves),
                    "1 GiB": saves(scratch, large, options.saves),
                }
    print(json.dumps(result, indent=1))
    if options.quick:
        return 0
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int("training" in result and result["training"]["background"]["share_percent"] > GOAL)


def demo_state() -> dict[str, torch.Tensor]:
    """The tensors of the demo's student as a checkpoint has them: weights, two moments and a counter each."""
    spec = read_spec(str(ROOT / "students" / "stdlib-1m.toml"))
    tensors = {}
    for name, weight in load_student(spec, vocab_size=2048, seed=0, device="cpu").named_parameters():
        tensors |= {name: weight.detach(), f"{name}.exp_avg": torch.randn_like(weight)}
        tensors |= {f"{name}.exp_avg_sq": torch.rand_like(weight), f"{name}.step": torch.tensor(1.0)}
    return tensors


def saves(scratch: Path, tensors: dict[str, torch.Tensor], number: int) -> dict[str, Any]:
    """Stall and total of saves in place and in the background, in seconds."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    result: dict[str, Any] = {"MiB": round(size / 2**20, 1), "tensors": len(tensors), "saves": number}
    for kind, asynchronous in (("in_place", False), ("background", True)):
        saver = Saver(Store(scratch / f"saves-{size}-{kind}", keep_rolling=2), asynchronous)
        stalls, totals, taken = [], [], []
        for step in range(number):
            started = time.perf_counter()
            stalls.append(saver.save([f"step-{step:08d}"], step, tensors, {"step": step}))
            saver.wait()
            totals.append(time.perf_counter() - started)
        for step in range(number, 2 * number):
            taken.append(lost(saver, step, tensors, statistics.median(totals)))
        saver.close()
        result[kind] = {"first_stall": stalls[0], "stall": statistics.median(stalls[1:])}
        result[kind] |= {"total": statistics.median(totals[1:]), "taken": statistics.median(taken)}
    return result


def lost(saver: Saver, step: int, tensors: dict[str, torch.Tensor], seconds: float) -> float:
    """By how many seconds a save delays work that would take about as long as the save, and a little longer."""
    alone = work(count := max(int(1.5 * seconds / (work(20) / 20)), 20))
    started = time.perf_counter()
    saver.save([f"step-{step:08d}"], step, tensors, {"step": step})
    work(count)
    both = time.perf_counter() - started
    saver.wait()
    return both - (alone + work(count)) / 2


def work(count: int) -> float:
    """The seconds that `count` products of two matrices take, each asked for by the interpreter."""
    left, right = torch.ones(512, 512), torch.ones(512, 512)
    started = time.perf_counter()
    for _ in range(count):
        torch.mm(left, right)
    return time.perf_counter() - started


def training(scratch: Path, steps: int) -> dict[str, Any]:
    """The share of the training time for which a run stands still, by the real command."""
    cache = scratch / "cache"
    data = ("--data", "stdlib", "--seq-len", "256", "--num-sequences", "512", "--top-k", "16")
    kdtrain("cache-teacher", "--teacher", "teachers/stdlib-5m.toml", "--out", str(cache), *data)
    result: dict[str, Any] = {"steps": steps}
    for kind, flag in (("background", "--async-save"), ("in_place", "--no-async-save")):
        out = scratch / kind
        argv = ("--cache", str(cache), "--student", "students/stdlib-1m.toml", "--out", str(out), "--steps", str(steps))
        done = kdtrain("distill", *argv, "--lr", "3e-3", "--batch-size", "16", "--eval-freq", str(steps), flag)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        stalls = [event["stood_still"] for event in events if event["event"] == "checkpoint"]
        share = 100 * sum(stalls) / done["seconds"]
        result[kind] = {"seconds": done["seconds"], "stalls": stalls, "share_percent": share}
    return result


def kdtrain(*argv: str) -> dict[str, Any]:
    """The JSON object that `kdtrain ARGV` prints."""
    command = [sys.executable, "-m", "kdtrain", *argv, "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
