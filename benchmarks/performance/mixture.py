"""What a mixture of caches costs a run: `python -m benchmarks.performance.mixture`, on a quiet machine.

The real command trains the shipped student's shape from caches of the shipped teacher, in turn from one cache and from
mixtures at 3:1: of two caches of samples (`same`: one set of targets a micro-batch), of samples and a top-k (`codecs`:
a loss for each part of a micro-batch), and of samples and bare tokens (`replay`). Each side runs once a round; its
tokens a second are the median of the later half of its steps, and a figure is the median over rounds of the ratio to
one cache in the same round; every second round goes through the sides in the other order, since a machine that others
use drifts within a round. `--micro-batch-size` smaller than the batch makes most micro-batches hold one member.

`compile`: the same with compiled layers; `recompilations` counts what torch.compile compiled again, once a side.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, write
from benchmarks.harness.command import claim, environment, kdtrain, options
from benchmarks.harness.timing import beside
from kdtrain.config.values import Options, option
from kdtrain.monitor.record import RunRecord

SIDES: dict[str, tuple[str, ...]] = {
    "one": ("samples",),
    "same": ("samples", "others"),
    "codecs": ("samples", "top"),
    "replay": ("samples", "tokens/data"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Measure tokens a second of runs that mix caches against a run of one."""

    out: str
    """The folder of caches and runs."""
    rounds: int = option(5, least=1)
    """Runs of each side."""
    steps: int = option(60, least=2)
    """Steps of a run."""
    sequences: int = option(512, least=16)
    """Sequences of a cache."""
    seq_len: int = option(256, least=16)
    """Tokens of a sequence."""
    batch_size: int = option(16, least=4)
    """Sequences of a step."""
    micro_batch_size: int = option(4, least=1)
    """Sequences of a forward, beside the whole batch in one."""
    sides: tuple[str, ...] = tuple(SIDES)
    """What to run, `one` among it."""
    compile: bool = False
    """Compile the student's layers, and count recompilations."""
    save: bool = True
    """Write the figures to benchmarks/results/mixture.json."""


def main(settings: Settings) -> None:
    """Build the caches, train in turn, and write the figures."""
    claim(Path(settings.out), settings)
    _caches(settings)
    rates: dict[str, list[float]] = {}
    for number in range(settings.rounds):
        for micro in dict.fromkeys((settings.batch_size, settings.micro_batch_size)):
            for side in settings.sides[:: -1 if number % 2 else 1]:
                run = Path(settings.out, f"{side}-{micro}-{number}")
                if not (run / "result.json").exists():
                    kdtrain(*_words(settings, side, micro, run))
                rate = RunRecord.read(run).median_rate()
                assert rate is not None
                rates.setdefault(f"{side}, micro-batches of {micro}", []).append(rate)
    figures: dict[str, Any] = {}
    for name, each in rates.items():
        figures[name] = beside(each, rates[f"one{name[name.index(',') :]}"], "to_one_cache")
    if settings.compile:
        figures["recompilations"] = {side: _recompilations(settings, side) for side in settings.sides}
    found = {"settings": {k: str(v) for k, v in vars(settings).items() if k not in ("out", "save")}, "figures": figures}
    found["environment"] = environment(Path(settings.out, f"one-{settings.batch_size}-0"))
    print(json.dumps(found, indent=1))
    if settings.save:
        write(RESULTS / "mixture.json", found)


def _caches(settings: Settings) -> None:
    text = ("--data", "stdlib", "--seq-len", str(settings.seq_len), "--num-workers", "0")
    counts = ("--num-sequences", str(settings.sequences), "--validation-sequences", "16")
    kinds = {
        "samples": ("--num-samples", "50"),
        "others": ("--num-samples", "50", "--seed", "1"),
        "top": ("--top-k", "12"),
    }
    for name, codec in kinds.items():
        out = ("--out", str(Path(settings.out, name)))
        kdtrain("cache-teacher", "--teacher", "stdlib-5m", *out, *text, *counts, *codec)
    plain = Path(settings.out, "tokens")
    if not plain.exists():
        student = ("--student", "stdlib-1m", "--steps", "1", "--no-compile", "--log-to", "none")
        kdtrain("distill", *text, *counts, *student, "--out", str(plain))


def _words(settings: Settings, side: str, micro: int, run: Path) -> list[str]:
    caches = [word for name in SIDES[side] for word in ("--cache", str(Path(settings.out, name)))]
    caches += ["--cache-weights", "3,1"] if len(SIDES[side]) > 1 else []
    size = ["--batch-size", str(settings.batch_size), "--micro-batch-size", str(micro)]
    quiet = ["--eval-freq", str(settings.steps), "--checkpoint-freq", str(settings.steps), "--log-to", "none"]
    compiled = "--compile" if settings.compile else "--no-compile"
    words = ["distill", *caches, "--student", "stdlib-1m", "--out", str(run), "--steps", str(settings.steps)]
    return [*words, *size, *quiet, compiled]


def _recompilations(settings: Settings, side: str) -> int:
    words = _words(settings, side, settings.micro_batch_size, Path(settings.out, f"{side}-recompilations"))
    command = [sys.executable, "-m", "kdtrain", *words]
    said = subprocess.run(command, env=os.environ | {"TORCH_LOGS": "recompiles"}, capture_output=True, text=True)
    if said.returncode:
        raise SystemExit(said.stderr)
    return len(re.findall("Recompiling function", said.stderr))


if __name__ == "__main__":
    main(options(Settings))
