"""A training without a disk: a tiny student, and a source of random sequences with a random teacher."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdtrain.cache.reader import CachedBatch
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.config import (
    CheckpointConfig,
    DistillConfig,
    GuardsConfig,
    MonitorConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    StoppingConfig,
)
from kdtrain.models.head import SplitModel, split
from kdtrain.monitor.writers import Writers
from kdtrain.objective.targets import DenseTargets
from kdtrain.objective.temperature import build_temperature
from kdtrain.parallel.parallelize import Alone
from kdtrain.testing import tiny_model
from kdtrain.training.guards import DivergenceWatch, EarlyStopping, GradientExplosion, SpikeDetector
from kdtrain.training.reporter import Reporter
from kdtrain.training.run import Run
from kdtrain.training.state import Progress, TrainState, make_optimizer
from kdtrain.training.student import DistillStep

VOCABULARY, SEQ_LEN = 300, 8
CPU = torch.device("cpu")


class RandomSource:
    """`size` random sequences with dense targets; `masked` of them count no token, `broken` says nan."""

    overlaps = False
    vocab_size = VOCABULARY

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

    def read(self, indices: np.ndarray) -> CachedBatch:
        """The sequences `indices`; which were asked for is remembered."""
        self.reads.append(indices.tolist())
        rows = torch.as_tensor(indices)
        targets = DenseTargets.from_logits(self.logits[rows].flatten(0, 1), self.tokens[rows, 1:].flatten())
        segments = torch.zeros(len(rows), SEQ_LEN, dtype=torch.int64)
        return CachedBatch(self.tokens[rows], self.loss_mask[rows], segments, targets)


class Workshop:
    """Makes runs in a folder."""

    source = RandomSource

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def student(self, **config: Any) -> SplitModel:
        """The student of a run, with entries of its configuration."""
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
    ) -> Iterator[Run]:
        """A run of `steps` steps of 4 sequences, with the options of all sections given flat, and the model's."""
        out = self.folder / name
        out.mkdir(exist_ok=True)
        config = _config(out, steps, {"lr": 1e-2, "warmup_steps": 0, "batch_size": 4, **options})
        student = self.student(**model or {})
        temperature = _temperature(config.objective, steps)
        spikes = SpikeDetector.of(config.guards)
        divergence = DivergenceWatch(config.guards.divergence_factor)
        explosion, stopping = GradientExplosion(config.stopping), EarlyStopping(config.stopping)
        state = TrainState(
            student,
            temperature,
            make_optimizer(student, temperature, config.optimizer, config.objective),
            Progress(),
            watchers={
                **{"spikes": spikes, "divergence": divergence, "explosion": explosion, "stopping": stopping},
            },
        )
        step = DistillStep(
            student,
            temperature,
            config.objective,
            config.precision,
            vocab_size=VOCABULARY,
            seq_len=SEQ_LEN,
            has_teacher=True,
            mode="fp32",
            device=CPU,
            document_mask=False,
            compile=False,
        )
        keep = config.checkpoint
        store = Store(
            out / "checkpoints",
            keep_rolling=keep.keep_rolling,
            keep_epochs=keep.keep_epochs,
            keep_special=keep.keep_special,
        )
        run = Run(
            config=config,
            planned=steps,
            micro=config.micro_batch_size or config.batch_size,
            step=step,
            spread=Alone(step, student),
            state=state,
            store=store,
            saver=Saver(store, asynchronous=keep.async_save),
            train_source=train or RandomSource(10),
            validation_source=validation or RandomSource(5, seed=1),
            spikes=spikes,
            divergence=divergence,
            explosion=explosion,
            stopping=stopping,
            identity=IDENTITY,
        )
        run.writers = Writers(out, 0, None, MonitorConfig(tensorboard=False))
        run.reporter = Reporter(config, step, run.writers, run.validation_source, None, init="scratch", finished=0)
        yield run
        run.writers.close()


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
