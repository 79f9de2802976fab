"""One training run: its parts, put together by the stage, and passed through the loop."""

import time
from dataclasses import dataclass, field

import numpy as np

from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.config import DistillConfig
from kdtrain.data import order
from kdtrain.monitor.writers import Writers
from kdtrain.parallel.parallelize import Alone
from kdtrain.precision.collect import Collector
from kdtrain.precision.controller import Adaptive
from kdtrain.precision.loss_scale import LossScale
from kdtrain.ranks import rank, world_size
from kdtrain.training.data import Feed, Source
from kdtrain.training.guards import DivergenceWatch, EarlyStopping, GradientExplosion, SpikeDetector
from kdtrain.training.nan_hooks import NanHooks
from kdtrain.training.reporter import BoundWatch, Reporter
from kdtrain.training.schedule import decay_steps
from kdtrain.training.state import TrainState
from kdtrain.training.student import DistillStep


@dataclass
class Run:
    """What a training run consists of.

    Args:
        config: every option.
        planned: optimizer steps in all; a plateau may end the run before (`total`).
        micro: sequences in a micro-batch of one rank.
        spread: what the step is called through, and when gradients are exchanged between ranks.
        spikes, divergence, explosion, stopping: the guards that look at the numbers of each step; their memory is in
            `state.watchers`.
        scale: what the loss is multiplied by before the backward, in fp16.
        adaptive: when the student is quantised; None where that does not change.
        collector: of statistics of tensors, where they are asked for.
        identity: what the checkpoint says it belongs to (configuration, cache, student).
        writers, reporter: opened once the step to begin at is known.
        stopped_by: the signal that ended training, if one did.
        seconds, tokens: spent and trained on by this process; a clock is no part of the state.
        hooks: those of `--nan-hooks always`.
        waited: seconds that this rank waited for the data of the step in work.
        saved_at: when this process saved last, or began, in seconds of its clock.
        halves_until: the last step in which a micro-batch without memory is halved, which is done once.
        published: the step, and the step that was validated, of the newest checkpoint.
    """

    config: DistillConfig
    planned: int
    micro: int
    step: DistillStep
    spread: Alone
    state: TrainState
    store: Store
    saver: Saver
    train_source: Source
    validation_source: Source
    spikes: SpikeDetector
    divergence: DivergenceWatch
    explosion: GradientExplosion
    stopping: EarlyStopping
    scale: LossScale = field(default_factory=lambda: LossScale(False))
    adaptive: Adaptive | None = None
    collector: Collector | None = None
    identity: dict[str, object] = field(default_factory=dict)
    writers: Writers = field(init=False)
    reporter: Reporter = field(init=False)
    hooks: NanHooks | None = None
    stopped_by: str | None = None
    seconds: float = 0.0
    tokens: int = 0
    waited: float = 0.0
    halves_until: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    published: tuple[int, int | None] | None = None
    bounds: BoundWatch = field(default_factory=BoundWatch)

    @property
    def total(self) -> int:
        """Optimizer steps in all, as is known now."""
        begun = self.state.progress.decay_from
        return self.planned if begun is None else begun + decay_steps(self.planned, self.config.optimizer)

    @property
    def micros(self) -> int:
        """Micro-batches in a step, on each rank."""
        return self.config.batch_size // (self.micro * world_size())

    def sequences(self, cursor: int) -> np.ndarray:
        """The numbers of the sequences of the step that begins at `cursor`, those of all ranks."""
        return order.batch(self.config.seed, cursor, self.config.batch_size, len(self.train_source))

    def share(self, cursor: int) -> np.ndarray:
        """Those that this rank trains on: an even part in order, so that a step is the same for any number of ranks."""
        return np.array_split(self.sequences(cursor), world_size())[rank()]

    def feed(self) -> Feed:
        """The data from the cursor on."""
        cursor, size = self.state.progress.sequences, self.config.batch_size
        return Feed(self.train_source, lambda step: self.share(cursor + step * size), self.micro)

    def finished(self) -> bool:
        """Whether there is no step left to take: the last one is taken, or the run was stopped early."""
        return self.state.progress.step >= self.total or self.state.progress.stopped is not None
