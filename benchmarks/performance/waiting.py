"""What waiting threads cost runs on a CPU, alone and two at once: `python -m benchmarks.performance.waiting`.

The threads of OpenMP's runtime spin while they wait for work, which is quickest for a process that has the cores to
itself, and takes them from another one. GOMP_SPINCOUNT and OMP_WAIT_POLICY say how long. The real command trains a
student of 5 million parameters in fp32, eager and compiled, alone and beside an equal run on the same cores; a round
goes through all sides, every second one in the other order. The rate of a run is the median of its later half of
steps, that of two runs is their mean; a figure is the median over rounds of the ratio to torch's own setting.
"""

import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import write
from benchmarks.harness.command import Kdtrain, claim, environment, options
from kdtrain.config.values import Options, option
from kdtrain.monitor.record import RunRecord

RESULTS = Path(__file__).parents[1] / "results" / "waiting.json"


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Measure tokens a second under several settings of how threads wait."""

    out: str
    """The folder of the cache and the runs."""
    sides: tuple[str, ...] = ("GOMP_SPINCOUNT=300000", "GOMP_SPINCOUNT=10000", "GOMP_SPINCOUNT=3000")
    """Settings of the environment; the first is the one that others are compared with, and libgomp's default."""
    rounds: int = option(5, least=1)
    """Runs of each side."""
    steps: int = option(12, least=4)
    """Steps of a run."""
    save: bool = True
    """Write the figures to benchmarks/results/waiting.json."""


def main(settings: Settings) -> None:
    """Train in turn, and write the figures."""
    if found := {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & os.environ.keys():
        raise SystemExit(f"waiting: unset {', '.join(sorted(found))} first")
    out = Path(settings.out)
    claim(out, settings)
    text = ("--data", "stdlib", "--seq-len", "128", "--num-workers", "0", "--num-sequences", "64")
    with Kdtrain() as kdtrain:
        kdtrain("cache-teacher", "--teacher", "stdlib-5m", "--out", str(out / "cache"), *text, "--precision", "fp32")
    rates: dict[str, dict[str, list[float]]] = {}
    for number in range(settings.rounds):
        for side in settings.sides[:: -1 if number % 2 else 1]:
            for kind in ("--no-compile", "--compile"):
                for many in (1, 2):
                    name = f"{'eager' if kind == '--no-compile' else 'compiled'}, {'alone' if many == 1 else 'two'}"
                    runs = [out / f"{side}{kind}-{many}-{number}-{each}" for each in range(many)]
                    rates.setdefault(name, {}).setdefault(side, []).append(_rate(settings, side, kind, runs))
    base = settings.sides[0]
    figures = {
        name: {
            side: {
                "tokens_per_second": [round(each, 1) for each in found],
                "ratio": statistics.median(a / b for a, b in zip(found, sides[base], strict=True)),
            }
            for side, found in sides.items()
        }
        for name, sides in rates.items()
    }
    record = {"settings": {k: v for k, v in vars(settings).items() if k not in ("out", "save")}, "figures": figures}
    record["environment"] = environment(runs[0])
    print(json.dumps(record, indent=1))
    if settings.save:
        write(RESULTS, record)


def _rate(settings: Settings, side: str, kind: str, runs: list[Path]) -> float:
    """Tokens a second of a run, the mean of those that train at once."""
    name, _, value = side.partition("=")
    words = (
        "distill",
        "--cache",
        str(Path(settings.out, "cache")),
        "--student",
        "stdlib-5m",
        kind,
        "--precision",
        "fp32",
    )
    size = ("--steps", str(settings.steps), "--batch-size", "4", "--eval-batches", "1", "--precision", "fp32")
    quiet = ("--log-to", "none", "--sample-freq", "0", "--histogram-freq", "0", "--yes")
    with Kdtrain(**{name: value}) as kdtrain, ThreadPoolExecutor(len(runs)) as pool:
        waiting = [pool.submit(kdtrain, *words, *size, *quiet, "--out", str(run)) for run in runs if not run.exists()]
        for each in waiting:
            each.result()
    rates = [RunRecord.read(run).median_rate() for run in runs]
    return statistics.fmean(each for each in rates if each is not None)


if __name__ == "__main__":
    main(options(Settings))
