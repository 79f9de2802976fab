"""The course of a learned temperature: T^2 KL against T on real logits, and the paths of the three modes.

`python -m benchmarks.science.temperature [--out runs/temperature] [--quick]` writes benchmarks/results/temperature.json
(with --quick, which is a test of this script, it writes into --out) and draws benchmarks/figures/temperature.png.

The teacher is the one that ships, the student is trained from its cache by the command. Measured are

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
from benchmarks.harness.command import Kdtrain, environment
from benchmarks.harness.models import open_teacher
from benchmarks.harness.study import Study
from kdtrain.config.choices import DIVERGENCES
from kdtrain.models.head import split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import read_spec
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.temperature import build_temperature
from kdtrain.run.saved_student import open_student

BOUNDS = (2 / 3, 4.0)
MODES = ("minimize", "adversarial", "likelihood")
STARTS = (0.75, 0.9, 1.1, 1.4, 1.8, 2.3, 2.9, 3.6)
TRAINING_STARTS = (0.8, 1.5, 3.5)
GRID = [round(float(T), 4) for T in np.geomspace(0.25, 20, 60)]
CPU = torch.device("cpu")


def main() -> None:
    """Measure, write the record, draw it."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--out", type=Path, default=Path("runs/temperature"))
    arguments.add_argument("--quick", action="store_true", help="a few steps of everything; the record goes into --out")
    given = arguments.parse_args()
    steps = (
        {"student": 4, "training": 3, "frozen": 5} if given.quick else {"student": 100, "training": 200, "frozen": 150}
    )
    with Kdtrain() as kdtrain:
        record = measure(kdtrain, given.out, steps)
    write((given.out if given.quick else RESULTS) / "temperature.json", record)
    print(*figures.draw_temperature(record, given.out if given.quick else FIGURES))


def measure(kdtrain: Kdtrain, out: Path, steps: dict[str, int]) -> dict[str, Any]:
    """The whole record."""
    sequences = 64 if steps["student"] < 50 else 1600
    cache = ("--teacher", TEACHER, "--data", "stdlib", "--seq-len", "256", "--num-sequences", f"{sequences}")
    common = ("--student", STUDENT, "--batch-size", "8", "--lr", "3e-3")
    study = Study(out, kdtrain, {"cache": (*cache, "--validation-sequences", "32", "--top-k", "12")}, common)
    last, every = steps["student"], max(steps["student"] // 5, 1)
    length = ("--steps", f"{last}", "--eval-freq", f"{last}", "--checkpoint-freq", f"{every}")
    study.train("student", *length, "--temperature", "1")
    logits = Logits(out)

    def trained(name: str, entry: tuple[str, float]) -> dict[str, Any]:
        """T in a run of the command, and what its events say of a bound."""
        mode, start = entry
        learned = ("--temperature", f"{start}", "--temperature-mode", mode, "--temperature-lr", "0.1")
        _, run = study.train(name, "--steps", f"{steps['training']}", "--eval-freq", f"{steps['training']}", *learned)
        bounds = [event.details["bound"] for event in run.events if event.event == "temperature-bound"]
        return {
            "mode": mode,
            "start": start,
            "T": [round(line["T"], 4) for line in run.steps],
            "bound": bounds[-1] if bounds else None,
            "validation_kl": run.validations[-1]["validation/kl"],
        }

    return {
        "settings": {
            "teacher": TEACHER,
            "student": STUDENT,
            "head": 12,
            "bounds": BOUNDS,
            "steps": steps,
            "grid": GRID,
        },
        "environment": environment(out / "student"),
        "curves": [
            *(logits.curve(step, kind, "forward-kl") for step in (0, every, last) for kind in ("cache", "whole")),
            *(
                logits.curve(last, "cache", name)
                for name in DIVERGENCES.builtin
                if name not in ("forward-kl", "logit-mse")
            ),
        ],
        "frozen": [logits.path(last, mode, start, steps["frozen"]) for mode in MODES for start in STARTS],
        "training": study.records({f"{mode}-{T}": (mode, T) for mode in MODES for T in TRAINING_STARTS}, trained),
    }


class Logits:
    """Hidden states of the student at a step, and the teacher's targets, on four sequences of the validation split."""

    def __init__(self, out: Path) -> None:
        self.out = out
        source = cached(out / "cache", CPU, "validation")
        whole = online(source, open_teacher(), "fp32")
        self.batches = {"cache": source.read(np.arange(4)), "whole": whole.read(np.arange(4))}

    def loss(self, step: int, kind: str) -> Any:
        """T, divergence -> T^2 D of the student after `step` steps: the mean over tokens, differentiable in T alone."""
        if step:
            student = open_student(str(self.out / f"student/checkpoints/step-{step:08d}"), CPU)[0]
        else:
            student = split(load_student(read_spec(STUDENT), vocab_size=2048, seed=0, device="cpu"))
        student, batch = student.eval().requires_grad_(False), self.batches[kind]
        hidden_ND = student(batch.tokens[:, :-1]).flatten(0, 1)
        tokens_N = batch.tokens[:, 1:].flatten(), batch.loss_mask.flatten()
        common = {"alpha": 1.0, "vocab_size": 2048, "normalizer": batch.loss_mask.sum()}

        def loss(T: Any, divergence: str = "forward-kl") -> torch.Tensor:
            asked = {"temperature": T, "divergence": divergence}
            return distillation_loss(hidden_ND, student.head, *tokens_N, batch.targets, **asked, **common).loss

        return loss

    def curve(self, step: int, kind: str, divergence: str) -> dict[str, Any]:
        """The loss over the grid, and the T of its maximum within the bounds."""
        print(f"curve: {divergence}, step {step}, {kind}", file=sys.stderr)
        loss = self.loss(step, kind)
        values = [loss(T, divergence).item() for T in GRID]
        inside = [(value, T) for value, T in zip(values, GRID, strict=True) if BOUNDS[0] <= T <= BOUNDS[1]]
        return {"divergence": divergence, "step": step, "targets": kind, "loss": values, "top": max(inside)[1]}

    def path(self, step: int, mode: str, start: float, steps: int) -> dict[str, Any]:
        """T before each of `steps` updates by Adam, and after the last."""
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
