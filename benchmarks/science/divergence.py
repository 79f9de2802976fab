"""What the rules for spikes and for divergence find, and their false alarms.

`kdtrain sweep benchmarks/science/divergence.toml --out runs/divergence` trains sound runs and runs that go wrong, with
all rules off. `python -m benchmarks.science.divergence [--runs runs/divergence]` reads their losses from
`metrics.jsonl`, feeds them to each rule, and writes benchmarks/results/divergence.json. The rules of `kdtrain.training`
are those of the command; the others are written out here again: a factor of the mean, and median + 6 scaled MADs of the
last 128 clean losses, both of the whole loss.

A doubled loss is made of a sound run: from a step on, the loss of that step (nats) is added to the loss and to each of
its parts, as it is where a student moves away from text and teacher alike. It counts as found if the alarm comes within
20 steps.
"""

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import RESULTS, ROOT, write
from benchmarks.harness.machine import cpu_model, version
from kdtrain.config.sections import GuardsConfig
from kdtrain.monitor.record import Line, RunRecord
from kdtrain.training.guards import DivergenceWatch, SpikeDetector

SOUND = ("demo", "wsd", "cosine", "learned-t", "schedule-t", "alpha", "sampled", "small-batch", "pre")
WRONG = ("lr10", "lr1", "pre-lr0.1", "pre-lr0.01")
WITHIN, EVERY = 20, 5

Rule = Callable[[Line], bool]


def main() -> int:
    """Judge the runs, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "divergence", help="the folder of the sweep")
    parser.add_argument("--result", type=Path, default=RESULTS / "divergence.json")
    given = parser.parse_args()
    series = {name: RunRecord.read(given.runs / name / "seed-0").metrics for name in (*SOUND, *WRONG)}
    table = {name: judge(make, series) for name, make in RULES.items()}
    where = {"date": time.strftime("%Y-%m-%d"), "torch": version("torch"), "cpu": cpu_model()}
    record = {"environment": where, "sound": SOUND, "wrong": WRONG, "rules": table}
    write(given.result, record)
    for name, found in table.items():
        wrong = ", ".join(f"{run} {step}" for run, step in found["wrong"].items())
        print(f"{name:34} false alarms {found['false_alarms']}; at step: {wrong}; doubled: {found['doubled']}")
    return 0


def doubled(series: list[Line], begin: int) -> list[Line]:
    """Return `series` as if its loss had doubled at step `begin`."""
    added = next(line["loss"] for line in series if line["step"] == begin and "loss" in line)
    parts = ("loss", "ce", "kd_T1", "validation/loss")
    return [
        {name: value + added * (name in parts) for name, value in line.items()} if line["step"] >= begin else line
        for line in series
    ]


def factor() -> Rule:
    """Make a rule: above 3 times the mean of the last 128 clean losses, three times in a row."""
    return _row(lambda clean: 3 * math.fsum(clean) / len(clean))


def mad() -> Rule:
    """Make a rule: above median + 6 * 1.4826 * MAD of the last 128 clean losses, three times in a row."""

    def threshold(clean: deque[float]) -> float:
        middle = median(clean)
        return middle + 6 * 1.4826 * max(median(abs(each - middle) for each in clean), 1e-3 * abs(middle))

    return _row(threshold)


def _row(threshold: Callable[[deque[float]], float]) -> Rule:
    clean: deque[float] = deque(maxlen=128)
    high = 0

    def alarm(line: Line) -> bool:
        nonlocal high
        if "loss" not in line or not math.isfinite(line["loss"]):
            return False
        if len(clean) >= 20 and line["loss"] > threshold(clean):
            high += 1
            return high >= 3
        clean.append(line["loss"])
        high = 0
        return False

    return alarm


def spike() -> Rule:
    """Make a rule of `SpikeDetector`, as the command has it."""
    detector = SpikeDetector(GuardsConfig().spike_patience)

    def alarm(line: Line) -> bool:
        if "loss" not in line:
            return False
        parts = {"ce": line.get("ce", line["loss"])} | ({"kd_T1": line["kd_T1"]} if "kd_T1" in line else {})
        return detector.update(int(line["step"]), parts) is not None

    return alarm


def divergence() -> Rule:
    """Make a rule of `DivergenceWatch`, as the command has it."""
    watch = DivergenceWatch(GuardsConfig().max_loss_ratio)

    def alarm(line: Line) -> bool:
        if "validation/loss" in line:
            return watch.validated(line["validation/loss"])
        return watch.update(line.get("ce", line["loss"]))

    return alarm


def both() -> Rule:
    """Make the rule of the command's two together."""
    rules = spike(), divergence()

    def alarm(line: Line) -> bool:
        alarms = [rule(line) for rule in rules]  # each has to see every line
        return any(alarms)

    return alarm


RULES: dict[str, Callable[[], Rule]] = {
    "loss, 3 x mean": factor,
    "loss, median + 6 MAD": mad,
    "parts, median and MAD": spike,
    "above the beginning": divergence,
    "the command: both": both,
}


def first_alarm(make: Callable[[], Rule], series: list[Line]) -> int | None:
    """Return the step of the first alarm."""
    rule = make()
    return next((int(line["step"]) for line in series if rule(line)), None)


def judge(make: Callable[[], Rule], series: dict[str, list[Line]]) -> dict[str, Any]:
    """Count false alarms on sound runs and doubled losses that are found; note the step of the alarm on wrong runs."""
    false = {name: step for name in SOUND if (step := first_alarm(make, series[name])) is not None}
    delays = {name: [*_delays(make, series[name])] for name in SOUND}
    late = {name: sum(each > WITHIN for each in found) for name, found in delays.items()}
    return {
        "false_alarms": false,
        "wrong": {name: first_alarm(make, series[name]) for name in WRONG},
        "doubled": {name: f"{len(found) - late[name]} of {len(found)}" for name, found in delays.items()},
        "longest_delay": {name: max(found) if max(found) < math.inf else None for name, found in delays.items()},
    }


def _delays(make: Callable[[], Rule], series: list[Line]) -> Iterator[float]:
    last = int(max(line["step"] for line in series))
    for begin in range(2, last - WITHIN, EVERY):
        step = first_alarm(make, doubled(series, begin))
        yield math.inf if step is None or step < begin else step - begin


if __name__ == "__main__":
    sys.exit(main())
