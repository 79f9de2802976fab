"""Training steps as `kdtrain distill` takes them, of an existing model.

A `Bench` holds a `Trainer` and takes steps with its `stepper`, without `fit`: no validation, log or TensorBoard, and no
checkpoints unless a section makes them. All sides that are compared share one student and one optimizer; each has its
own source.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.record import Options
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.write.writer import write_cache
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import GuardsConfig, MonitorConfig, OptimizerConfig, PrecisionConfig, StoppingConfig
from kdtrain.errors import RunError
from kdtrain.models.attention import choose_kernel
from kdtrain.models.head import SplitModel
from kdtrain.objective.alpha import Alpha
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.targets import Targets
from kdtrain.objective.temperature import Temperature, build_temperature
from kdtrain.precision.modes import Switch, head_dtype
from kdtrain.teaching.local import LocalTeacher
from kdtrain.training.signals import StopRequest
from kdtrain.training.sources.build import StudentSource
from kdtrain.training.sources.cache import CachedSource
from kdtrain.training.sources.source import Facts, Source, feed
from kdtrain.training.state import Progress
from kdtrain.training.step import Status
from kdtrain.training.student import Student
from kdtrain.training.trainer import Trainer


class Tokens:
    """A source of tokens on the device, without targets."""

    overlaps, repeatable = False, True

    def __init__(self, tokens_nT1: torch.Tensor, device: torch.device, vocab_size: int | None = None) -> None:
        size, length = vocab_size or int(tokens_nT1.max()) + 1, tokens_nT1.shape[1] - 1
        self.tokens = tokens_nT1.to(device)
        self.facts = Facts(name="tokens", identity="", seq_len=length, vocab_size=size, tokenizer_size=size)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices`, every token of which counts."""
        first, last = int(indices[0]), int(indices[-1])
        if np.array_equal(indices, np.arange(first, last + 1)):
            return held_batch(self.tokens[first : last + 1], None)  # a view: no copy and no wait
        return held_batch(self.tokens[torch.as_tensor(indices, device=self.tokens.device)], None)


class Held(Tokens):
    """A source that always gives one batch of another source, on the device, with its targets: a step reads nothing."""

    def __init__(self, batch: Batch, facts: Facts) -> None:
        super().__init__(batch.tokens, batch.tokens.device)
        self.batch, self.facts = batch, facts

    def read(self, indices: np.ndarray) -> Batch:
        """Return the held batch, whatever the indices."""
        return self.batch


def held_batch(tokens_BT1: torch.Tensor, targets: Targets | None) -> Batch:
    """Make a batch in which every token counts and every sequence is one document."""
    mask_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    return Batch(tokens_BT1, mask_BT, torch.zeros_like(tokens_BT1[:, 1:]), targets)


class Bench:
    """One student and its optimizer, stepped over any source.

    Args:
        student: split, on the device.
        batch: sequences in a step, all of them one micro-batch.
        mode: fp32, bf16: the high format.
        switch, quantized: of a student whose layers switch.
        has_teacher: True if the loss is that of a distillation.
    """

    def __init__(
        self,
        student: SplitModel,
        options: Options,
        *,
        vocab_size: int,
        seq_len: int,
        batch: int,
        mode: str = "bf16",
        switch: Switch | None = None,
        quantized: str | None = None,
        has_teacher: bool = True,
        lr: float = 3e-4,
        total: int = 10_000,
        temperature_mode: str = "fixed",
        folder: Path | None = None,
    ) -> None:
        folder = folder or options.scratch / "run"
        config = DistillConfig(
            student="bench",
            out=folder,
            cache=folder / "cache",
            steps=total,
            batch_size=batch,
            device=str(options.device),
            optimizer=OptimizerConfig(lr=lr, lr_schedule="constant", warmup_steps=min(20, total)),
            precision=PrecisionConfig(compile=options.compile),
            guards=GuardsConfig(spike_patience=0, nan_hooks="off"),
            monitor=MonitorConfig(log_to="none"),
            stopping=StoppingConfig(early_stopping=False),
        )
        choose_kernel(student.model.config, batch, seq_len, head_dtype(mode), options.device)
        temperature = build_temperature(temperature_mode, start=2.0, minimum=1.0, maximum=4.0, total_steps=total)
        self.temperature, self.device = temperature.to(options.device), options.device
        module = Student(
            student,
            DistillationLoss(alpha=0.9 if has_teacher else 0.0, temperature=self.temperature),
            vocab_size=vocab_size,
            mode=mode,
            compile=options.compile,
            by_layer=options.by_layer,
            switch=switch,
            quantized=quantized,
        )
        empty = Tokens(torch.zeros(1, seq_len + 1, dtype=torch.int64), options.device)
        self.trainer = Trainer(*(config, module, empty, empty), total_steps=total, micro=batch, seq_len=seq_len)
        folder.mkdir(parents=True, exist_ok=True)
        self.trainer.open(None, init="scratch")
        self.trainer.stepper.halves_for = 0  # see `step`
        self.batch, self.seq_len, self.optimizer = batch, seq_len, self.trainer.state.optimizer
        self.has_teacher, self.tokens = has_teacher, batch * seq_len  # tokens of a step
        self.stop = StopRequest()  # never entered: signals end a benchmark as they end any script

    def steps(self, source: Source, shuffled: bool = False) -> Callable[[], dict[str, float]]:
        """Return a function that takes the next step over a source and returns its numbers; batches are read ahead.

        The bench's temperature holds, or T = 1 for a source that is right at no other.

        shuffled: the sequences come in a fixed random order, else in that of the source.
        """
        order = np.random.RandomState(0).permutation(len(source)) if shuffled else np.arange(len(source))
        starts = max(len(source) - self.batch + 1, 1)
        batches = feed(source, lambda number: order[number * self.batch % starts :][: self.batch], self.batch)
        taught = self.has_teacher and source.facts.targets != "none"
        at_one = Temperature(1.0).to(self.device) if source.facts.temperature_range == (1.0, 1.0) else None

        def step() -> dict[str, float]:
            self.trainer.student.loss.alpha = Alpha(0.9 if taught else 0.0)  # sides of one bench differ
            self.trainer.student.loss.temperature = at_one or self.temperature
            found = self.step(next(batches))
            assert ("kd" in found) == taught, "a side that is not what its name says"
            return found

        return step

    def step(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Take one optimizer step over its micro-batches.

        Raises:
            torch.OutOfMemoryError: it does not fit; unlike a run, a bench never halves the micro-batch, which would
                make this side and all after it another measurement. The next step begins without its gradients.
        """
        try:
            result = self.trainer.stepper.take(batches, self.stop)
        except RunError as error:
            if error.reason != "oom":
                raise
            self.optimizer.zero_grad(set_to_none=True)
            raise torch.OutOfMemoryError(str(error)) from None
        assert result.status is Status.TAKEN
        return result.metrics

    def restart(self, weights: dict[str, torch.Tensor]) -> None:
        """Return to step 0, with these weights and an optimizer without state."""
        with torch.no_grad():
            for name, own in self.trainer.student.model.named_parameters():
                own.copy_(weights[name])
        self.optimizer.state.clear()
        self.trainer.state.snapshots.clear()
        self.trainer.state.progress = Progress()


def make_cache(folder: Path, rows: list[Any], teacher: Any, codec: CodecSpec, seq_len: int, batch_size: int) -> None:
    """Build a cache of one split, `rows`, in `folder`, if there is none yet."""
    settings = CacheSettings(codec=codec, seq_len=seq_len, tokenizer_size=codec.vocab_size, sequences={"train": None})
    write_cache(folder, settings, {"train": rows}, teacher=teacher, batch_size=batch_size)


def codec_of(name: str, vocab_size: int) -> CodecSpec:
    """Return the codec of a side: `dense`, `samples-50`, or a top-k as `12` or `sparse-12`."""
    if name == "dense":
        return CodecSpec(kind="dense", vocab_size=vocab_size)
    number = {"num_samples" if name.startswith("samples") else "top_k": int(name.rpartition("-")[2])}
    return CodecSpec(kind="sparse", vocab_size=vocab_size, **number)


def teacher_of(model: SplitModel, mode: str, compile: bool) -> LocalTeacher:
    """Prepare a teacher as a run does: on a GPU its layers are compiled."""
    teacher = LocalTeacher.of(model, mode)
    teacher.prepare(compile=compile)
    return teacher


def online(source: Source, model: SplitModel, mode: str, compile: bool) -> Source:
    """Return the sequences of a source, with whole distributions of a teacher at hand."""
    device, vocab_size = next(model.parameters()).device, min(source.facts.vocab_size, model.vocab_size)
    return StudentSource(source, device, vocab_size, teacher_of(model, mode, compile))


def cached(folder: Path, device: torch.device, split: str = "train") -> Source:
    """Open a split of a cache, on the device."""
    reader = CacheReader(folder, split)
    return StudentSource(CachedSource(reader), device, reader.manifest.vocab_size)
