"""A training without a disk: a tiny student, and a source of random sequences with a random teacher."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdtrain import faults
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import (
    CheckpointConfig,
    GuardsConfig,
    MonitorConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    StoppingConfig,
)
from kdtrain.models.head import SplitModel, split
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.targets import DenseTargets
from kdtrain.objective.temperature import build_temperature
from kdtrain.testing import tiny_model
from kdtrain.training.sources.source import Facts
from kdtrain.training.student import Student
from kdtrain.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))

VOCABULARY, SEQ_LEN = 300, 8
FACTS = Facts(
    name="random", identity="c", seq_len=SEQ_LEN, vocab_size=VOCABULARY, tokenizer_size=VOCABULARY, targets="dense"
)
CPU = torch.device("cpu")


class RandomSource:
    """`size` random sequences with dense targets; `masked` of them have no unmasked token, `broken` has a NaN."""

    facts, vocab_size = FACTS, VOCABULARY
    overlaps = False
    repeatable = True

    def __init__(self, size: int, seed: int = 0, masked: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (size, SEQ_LEN + 1), generator=generator)
        self.loss_mask = torch.rand(size, SEQ_LEN, generator=generator) < 0.7
        self.loss_mask[list(masked)] = False
        self.logits = 2 * torch.randn(size, SEQ_LEN, VOCABULARY, generator=generator)
        self.logits[list(broken)] = float("nan")
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices`, and record them."""
        self.reads.append(indices.tolist())
        rows = torch.as_tensor(indices)
        targets = DenseTargets.from_logits(self.logits[rows].flatten(0, 1), self.tokens[rows, 1:].flatten())
        segments = torch.zeros(len(rows), SEQ_LEN, dtype=torch.int64)
        return Batch(self.tokens[rows], self.loss_mask[rows], segments, targets)


class Workshop:
    """A maker of runs in a folder."""

    source = RandomSource

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def student(self, **config: Any) -> SplitModel:
        """Make the student of a run, with entries of its configuration."""
        return split(tiny_model("llama", VOCABULARY, seed=3, **config))

    @contextmanager
    def run(
        self,
        name: str = "run",
        train: Any = None,
        validation: Any = None,
        steps: int = 4,
        model: dict[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Trainer]:
        """Prepare a run of `steps` steps of 4 sequences, with the options of all sections given flat, and the model's.

        It validates before its first step and after its last one, unless `eval_freq` is given.
        """
        out = self.folder / name
        out.mkdir(exist_ok=True)
        config = _config(out, steps, {"lr": 1e-2, "warmup_steps": 0, "batch_size": 4, "eval_freq": steps, **options})
        student = self.student(**model or {})
        loss = DistillationLoss(
            divergence=config.objective.divergence,
            alpha=config.objective.alpha,
            tail=config.objective.tail,
            temperature=_temperature(config.objective, steps),
        )
        trainer = Trainer(
            config,
            Student(student, loss, vocab_size=VOCABULARY),
            train or RandomSource(10),
            validation or RandomSource(5, seed=1),
            total_steps=steps,
            micro=config.micro_batch_size or config.batch_size,
            seq_len=SEQ_LEN,
            identity=IDENTITY,
        )
        trainer.open(None, init="scratch")
        trainer.stepper.halves_for = 0
        yield trainer
        trainer.writers.close()


IDENTITY: dict[str, Any] = {
    "cache": "c",
    "options": {},
    "student": {"name": "s", "architecture": {}, "attention": "sdpa"},
    "teacher": None,
}


def _config(out: Path, steps: int, options: dict[str, Any]) -> DistillConfig:
    kinds = {
        "objective": ObjectiveConfig,
        "optimizer": OptimizerConfig,
        "precision": PrecisionConfig,
        "guards": GuardsConfig,
        "stopping": StoppingConfig,
        "checkpoint": CheckpointConfig,
        "monitor": MonitorConfig,
    }
    taken = {name: {k: v for k, v in options.items() if k in kind.__annotations__} for name, kind in kinds.items()}
    left = {k: v for k, v in options.items() if not any(k in inner for inner in taken.values())}
    parts = {name: kind(**taken[name]) for name, kind in kinds.items()}
    return DistillConfig(student="tiny", out=out, cache=Path("none"), steps=steps, **left, **parts)


def _temperature(objective: ObjectiveConfig, steps: int) -> Any:
    return build_temperature(
        objective.temperature_mode, start=objective.temperature, minimum=0.5, maximum=8.0, total_steps=steps
    )


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], set[str]]]:
    """Plant faults as KDTRAIN_FAULT does; the returned set holds the faults that have fired."""

    def plant(text: str) -> set[str]:
        monkeypatch.setenv("KDTRAIN_FAULT", text)
        faults.read()
        return faults._fired

    yield plant
    monkeypatch.delenv("KDTRAIN_FAULT", raising=False)
    faults.read()


@pytest.fixture
def small(monkeypatch):
    """Measure on little text, before every second or third step."""
    monkeypatch.setattr("kdtrain.objective.alpha.LEAST_TOKENS", 1)
    monkeypatch.setattr("kdtrain.training.withheld.TOKENS", 64)
    monkeypatch.setattr("kdtrain.training.withheld.SHARE", 1.0)
