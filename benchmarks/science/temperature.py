"""The course of a learned temperature: T^2 KL against T on real logits, and the paths of the three modes.

`kdtrain sweep benchmarks/science/temperature.toml --out runs/temperature` trains the students from a cache of the
shipped teacher; then `python -m benchmarks.science.temperature [--runs runs/temperature]` writes
benchmarks/results/temperature.json and draws benchmarks/figures/temperature.png. Measured are

- `curves`: the loss T^2 D over a grid of T, for the student at several steps of its training, over the cache (head and
  tail bucket) and over the teacher's whole distribution, and for each divergence at its last step;
- `frozen`: the path of T alone, from many starts, for a student that stands still, by Adam;
- `training`: T in real runs of the command, from three starts a mode, while the student learns.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import figures
from benchmarks.harness import FIGURES, RESULTS, STUDENT, TEACHER, write
from benchmarks.harness.bench import cached, online
from benchmarks.harness.command import environment
from benchmarks.harness.models import open_teacher
from kdtrain.config.choices import DIVERGENCES
from kdtrain.models.head import split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.record import RunRecord
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.temperature import build_temperature
from kdtrain.run.saved_student import open_student

BOUNDS = (2 / 3, 4.0)
MODES = ("minimize", "adversarial", "likelihood")
STARTS = (0.75, 0.9, 1.1, 1.4, 1.8, 2.3, 2.9, 3.6)
TRAINING_STARTS = (0.8, 1.5, 3.5)
EARLY, LAST, FROZEN = 20, 100, 150
"""Steps after which the student's logits are taken, and for how many T is trained beside them."""
GRID = [round(float(T), 4) for T in np.geomspace(0.25, 20, 60)]
CPU = torch.device("cpu")


def main() -> None:
    """Measure, write the record, draw it."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--runs", type=Path, default=Path("runs/temperature"), help="the folder of the sweep")
    arguments.add_argument("--out", type=Path, help="where record and picture are written, instead of benchmarks/")
    given = arguments.parse_args()
    record = measure(given.runs)
    write((given.out or RESULTS) / "temperature.json", record)
    print(*figures.draw_temperature(record, given.out or FIGURES))


def measure(runs: Path) -> dict[str, Any]:
    """Measure the whole record."""
    logits, student = Logits(runs), runs / "student" / "seed-0"
    others = [name for name in DIVERGENCES.builtin if name not in ("forward-kl", "logit-mse")]
    settings = {"teacher": TEACHER, "student": STUDENT, "top_k": 12, "bounds": BOUNDS, "grid": GRID}
    return {
        "settings": settings | {"steps": {"student": LAST, "frozen": FROZEN}},
        "environment": environment(student),
        "curves": [
            *(logits.curve(step, kind, "forward-kl") for step in (0, EARLY, LAST) for kind in ("cache", "whole")),
            *(logits.curve(LAST, "cache", name) for name in others),
        ],
        "frozen": [logits.path(LAST, mode, start, FROZEN) for mode in MODES for start in STARTS],
        "training": [trained(runs, mode, start) for mode in MODES for start in TRAINING_STARTS],
    }


def trained(runs: Path, mode: str, start: float) -> dict[str, Any]:
    """Return T in a run of the command, and what its events say of a bound."""
    run = RunRecord.read(runs / f"{mode}-{start}" / "seed-0")
    bounds = [event.details["bound"] for event in run.events if event.event == "temperature-bound"]
    return {
        "mode": mode,
        "start": start,
        "T": [round(line["T"], 4) for line in run.steps],
        "bound": bounds[-1] if bounds else None,
        "validation_kl": run.validations[-1]["validation/kl"],
    }


class Logits:
    """The student's hidden states at a step, and the teacher's targets, on four sequences of the validation split."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        source = cached(runs / "caches" / "text", CPU, "validation")
        whole = online(source, open_teacher(), "fp32", compile=False)
        self.batches = {"cache": source.read(np.arange(4)), "whole": whole.read(np.arange(4))}

    def loss(self, step: int, kind: str) -> Any:
        """Return the function T, divergence -> T^2 D of the student after `step` steps.

        T^2 D is the mean over tokens, differentiable in T alone.
        """
        if step:
            student = open_student(str(self.runs / f"student/seed-0/checkpoints/step-{step:08d}"), CPU)[0]
        else:
            student = split(load_student(ModelSpec.read(STUDENT), vocab_size=2048, seed=0, device="cpu"))
        student, batch = student.eval().requires_grad_(False), self.batches[kind]
        hidden_ND = student(batch.tokens[:, :-1]).flatten(0, 1)
        tokens_N = batch.tokens[:, 1:].flatten(), batch.loss_mask.flatten()
        common = {"alpha": 1.0, "vocab_size": 2048, "normalizer": batch.loss_mask.sum()}

        def loss(T: Any, divergence: str = "forward-kl") -> torch.Tensor:
            asked = {"temperature": T, "divergence": divergence}
            return distillation_loss(hidden_ND, student.head, *tokens_N, batch.targets, **asked, **common).loss

        return loss

    def curve(self, step: int, kind: str, divergence: str) -> dict[str, Any]:
        """Compute the loss over the grid, and the T of its maximum within the bounds."""
        print(f"curve: {divergence}, step {step}, {kind}", file=sys.stderr)
        loss = self.loss(step, kind)
        values = [loss(T, divergence).item() for T in GRID]
        inside = [(value, T) for value, T in zip(values, GRID, strict=True) if BOUNDS[0] <= T <= BOUNDS[1]]
        return {"divergence": divergence, "step": step, "targets": kind, "loss": values, "top": max(inside)[1]}

    def path(self, step: int, mode: str, start: float, steps: int) -> dict[str, Any]:
        """Return T before each of `steps` updates by Adam, and after the last."""
        print(f"path: {mode} from {start}", file=sys.stderr)
        loss, batch = self.loss(step, "cache"), self.batches["cache"]
        temperature = build_temperature(
            mode, start=start, minimum=BOUNDS[0], maximum=BOUNDS[1], total_steps=max(steps - 1, 1)
        )
        optimizer, path = torch.optim.Adam(temperature.parameters(), lr=0.1), []
        mask_N = batch.loss_mask.flatten()
        for number in range(steps):
            temperature.set_step(number)
            path.append(round(temperature.value().item(), 4))
            own = temperature.auxiliary_loss(batch.targets, mask_N, mask_N.sum())
            optimizer.zero_grad()
            (loss(temperature.value()) if own is None else own).backward()
            optimizer.step()
        path.append(round(temperature.value().item(), 4))
        return {"mode": mode, "start": start, "T": path, "bound": temperature.at_bound()}


if __name__ == "__main__":
    main()
