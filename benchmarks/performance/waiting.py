"""What waiting threads cost training on a CPU, alone and two at once: `python -m benchmarks.performance.waiting`.

The threads of OpenMP's runtime spin while they wait for work, which is quickest for a process that has the cores to
itself, and takes them from another one. GOMP_SPINCOUNT says how long. A side is a process, or two at once, that trains
a student of stdlib-5m's shape by cross-entropy in fp32, eager or compiled; a round goes through all sides, every second
one in the other order. The rate of a process is the median over its later steps, that of two is their mean; a figure
is the median over rounds of the ratio to libgomp's own setting, 300,000.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import RESULTS, write
from benchmarks.harness.command import options
from benchmarks.harness.machine import cpu_model, version
from benchmarks.harness.timing import beside
from kdtrain.config.values import Options, option


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Measure tokens a second under several settings of how threads wait."""

    spins: tuple[str, ...] = option(("300000", "1000"), several=True)
    """Values of GOMP_SPINCOUNT; the first is the one that others are compared with."""
    kinds: tuple[str, ...] = option(("eager", "compiled"), several=True)
    """How the student runs."""
    rounds: int = option(5, least=1)
    """Processes of each side."""
    steps: int = option(16, least=4)
    """Steps of a process, of which the later half is timed."""
    worker: str = ""
    """Train, eager or compiled, and print the rate: what a side starts."""
    save: bool = True
    """Write the figures to benchmarks/results/waiting.json."""


def main(settings: Settings) -> None:
    """Train in turn, and write the figures."""
    if settings.worker:
        print(_train(settings.worker == "compiled", settings.steps))
        return
    if found := {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & os.environ.keys():
        raise SystemExit(f"waiting: unset {', '.join(sorted(found))} first")
    rates: dict[str, dict[str, list[float]]] = {}
    for number in range(settings.rounds):
        for spins in settings.spins[:: -1 if number % 2 else 1]:
            for kind in settings.kinds:
                for many in (1, 2):
                    found = rates.setdefault(f"{kind}, {'alone' if many == 1 else 'two at once'}", {})
                    found.setdefault(spins, []).append(_rate(settings, spins, kind, many))
                    print(number, kind, many, spins, round(found[spins][-1], 1), file=sys.stderr, flush=True)
    figures: dict[str, Any] = {}
    for name, sides in rates.items():
        for spins, each in sides.items():
            figures.setdefault(name, {})[spins] = beside(each, sides[settings.spins[0]], "ratio")
    machine = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_model(), "cores": os.cpu_count()}
    record = {"settings": {"rounds": settings.rounds, "steps": settings.steps}, "figures": figures}
    record["environment"] = machine | {"torch": version("torch")}
    print(json.dumps(record, indent=1))
    if settings.save:
        write(RESULTS / "waiting.json", record)


def _rate(settings: Settings, spins: str, kind: str, many: int) -> float:
    """Measure the tokens a second of a process, the mean of `many` that train at once."""
    command = [sys.executable, "-m", "benchmarks.performance.waiting", "--worker", kind, "--steps", str(settings.steps)]
    setting = os.environ | {"GOMP_SPINCOUNT": spins}
    running = [subprocess.Popen(command, env=setting, stdout=subprocess.PIPE, text=True) for _ in range(many)]
    return statistics.fmean(float(each.communicate()[0].split()[-1]) for each in running)


def _train(compiled: bool, steps: int) -> float:
    import torch

    import kdtrain as kd
    from kdtrain.models.loading import load_student
    from kdtrain.models.spec import ModelSpec

    spec = ModelSpec.read("stdlib-5m", "students")
    model = load_student(spec, vocab_size=2048, seed=0, device="cpu")
    if compiled:
        model.model = torch.compile(model.model, dynamic=False)
    student = kd.Student(model, kd.DistillationLoss(alpha=0.0))
    tokens_BT1 = torch.randint(2048, (4, 129), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens_BT1, "loss_mask": torch.ones(4, 128, dtype=torch.bool)}
    batch["segments"] = torch.zeros(4, 128, dtype=torch.int64)
    optimizer, seconds = torch.optim.AdamW(student.parameters(), 1e-4), list[float]()
    for _ in range(steps):
        started = time.perf_counter()
        student(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return 512 / statistics.median(seconds[steps // 2 :])


if __name__ == "__main__":
    main(options(Settings))
