"""The complete state of a run, as named tensors and plain numbers.

The student's weights are fp32 masters. Weights that are not trained (`SplitModel.frozen`) are not part of the state: a
digest in the identity of a checkpoint stands for them. The cursor is integers: with the seed it decides which sequences
come next. The state needs no random generators, because each step seeds them from (seed, step).

A checkpoint also holds the snapshots in memory that adaptive quantisation may restore, under names of their own:
otherwise a run that resumes between the ends of two windows would restore another state than an uninterrupted run.
"""

import math
import random
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch
from msgspec import Meta
from torch import nn
from torch.distributed.tensor import DTensor

from kdtrain.checkpoint import shards
from kdtrain.checkpoint.sealed import read_state
from kdtrain.checkpoint.store import Checkpoint, load
from kdtrain.config.choices import Weights
from kdtrain.config.sections import GuardsConfig, StoppingConfig
from kdtrain.errors import RunError
from kdtrain.files import typed
from kdtrain.objective.alpha import MeasuredAlpha, of_before
from kdtrain.parallel.parallelize import cut_like, part_of, reshard
from kdtrain.precision.loss_scale import LossScale
from kdtrain.ranks import local
from kdtrain.training.guards import Guards, Watcher
from kdtrain.training.optimizers import Optimizer
from kdtrain.training.sources.source import Growing
from kdtrain.training.student import Student

if TYPE_CHECKING:
    from kdtrain.precision.controller import Adaptive

_PREFIX = "snapshot."


def packed(snapshots: Iterable[Checkpoint]) -> dict[str, torch.Tensor]:
    """Return the tensors of `snapshots`, oldest first, with the number of the snapshot in their names."""
    return {
        f"{_PREFIX}{number}.{name}": tensor
        for number, kept in enumerate(snapshots)
        for name, tensor in kept.tensors.items()
    }


def unpacked(tensors: Mapping[str, torch.Tensor], states: list[dict[str, Any]]) -> deque[Checkpoint]:
    """Return the snapshots of a checkpoint, oldest first; `states` are their plain numbers."""
    snapshots: deque[Checkpoint] = deque()
    for number, state in enumerate(states):
        prefix = f"{_PREFIX}{number}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        snapshots.append(snapshot(own, state))
    return snapshots


def snapshot(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Checkpoint:
    """Make a snapshot of these tensors and numbers."""
    return Checkpoint(f"snapshot of step {state['progress']['step']}", tensors, state)


Count = Annotated[int, Meta(ge=0, le=2**53)]


@dataclass
class Validations:
    """What the validations of a run found so far."""

    first_loss: float | None = None
    """Validation cross-entropy before the first step of this run, nats."""
    last_loss: float | None = None
    """The last finite validation cross-entropy, nats."""
    best_loss: float | None = None
    """The validation cross-entropy at `best_step`, nats: the lowest so far, unless a score marks the best."""
    teacher_loss: float | None = None
    """The teacher's own validation cross-entropy, nats, where the targets hold it."""
    best_step: Count | None = None
    """The best step that was validated."""
    first_score: float | None = None
    """The source's score before the first step of this run, where it has one."""
    best_score: float | None = None
    """That at `best_step`: the highest so far."""
    validated_step: Count | None = None
    """The step of the last validation."""

    def improved_by(self, loss: float, score: float | None) -> bool:
        """Return whether a validation is the best so far: by its score where there is one, otherwise by its loss."""
        if score is not None:
            return math.isfinite(score) and (self.best_score is None or score > self.best_score)
        return self.best_loss is None or loss < self.best_loss

    def forget_best(self) -> None:
        """Forget the best step: its checkpoint is gone, or is another run's."""
        self.best_loss = self.best_step = self.best_score = None


@dataclass
class Progress(Validations):
    """The progress of a run, and the counts of what happened to it."""

    step: Count = 0
    """Optimizer steps taken."""
    sequences: Count = 0
    """The cursor: how many sequences of the endless stream of epochs the run has trained on or left out."""
    epoch: Count = 0
    """Finished passes over the training split that have a checkpoint."""
    tokens: Count = 0
    """Unmasked tokens trained on."""
    loss: float | None = None
    """Loss of the last step."""
    skips: Count = 0
    """Steps skipped because the loss or a gradient was non-finite."""
    skips_in_a_row: Count = 0
    """Skips since the last step taken."""
    rollbacks: Count = 0
    """How often the run was rolled back."""
    lr_factor: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The product of the factors by which rollbacks reduced the learning rate."""
    skipped_data: list[Annotated[list[Count], Meta(min_length=2, max_length=2)]] = field(default_factory=list)
    """[first, last) sequences of the stream that each rollback left out."""
    stopped: str | None = None
    """Why the run was stopped early, or None."""
    decay_from: Count | None = None
    """The step at which a plateau began the decay of `wsd` early."""
    members: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Of a mixture: the first, the last and the teacher's validation cross-entropy of each member, nats."""
    bytes_per_token: Annotated[float, Meta(gt=0)] | None = None
    """Of the validation text, where its tokenizer tells bytes."""

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Return a validation loss of this run, nats per token, in bits per byte; None where either is unknown."""
        return None if loss is None or self.bytes_per_token is None else loss / self.bytes_per_token / math.log(2)


class _Student(TypedDict):
    name: str
    architecture: dict[str, Any]
    attention: str
    base: NotRequired[str]
    """Digest of the weights that are not trained, and not in the checkpoint."""
    weights: NotRequired[Weights]
    """The format in which these were held."""
    lora: NotRequired[dict[str, Any]]
    freeze_head: NotRequired[bool]


class _Numbers(TypedDict):
    """The return value of `TrainState.own_numbers`."""

    progress: Progress
    watchers: dict[str, dict[str, Any]]
    source: NotRequired[dict[str, Any]]


class _Saved(_Numbers):
    """The contents of `state.json`."""

    cache: str
    options: dict[str, dict[str, Any]]
    student: _Student
    teacher: str | None
    generation: NotRequired[dict[str, Any]]
    caches: NotRequired[list[dict[str, Any]]]
    snapshots: NotRequired[list[_Numbers]]


def read_saved(path: Path) -> dict[str, Any]:
    """Return the numbers, options and digests of an undamaged checkpoint folder.

    Raises:
        RunError: a key is missing or has another type; a seal does not prove who wrote the checkpoint.
    """
    try:
        state = read_state(path)
        typed(state, _Saved)
    except ValueError as error:
        raise RunError(f"{path}/state.json is not what a run writes: {error}") from error
    return state


def load_saved(path: Path, like: shards.Like | None = None) -> Checkpoint:
    """Load a checkpoint with `checkpoint.store.load`, after `read_saved` has checked its numbers.

    Raises:
        RunError: one of the two fails.
    """
    read_saved(path)
    return load(path, like)


@dataclass
class TrainState:
    """The student with all learned parameters, the optimizer, the progress, and the watchers."""

    student: Student
    optimizer: Optimizer
    progress: Progress = field(default_factory=Progress)
    guards: Guards = field(default_factory=lambda: Guards(GuardsConfig(), StoppingConfig(), fp16=False))
    """Watch the numbers of each step."""
    adaptive: "Adaptive | None" = None
    """Decides when the student is quantised; None where the mode does not change."""
    snapshots: deque[Checkpoint] = field(default_factory=deque)
    """Earlier states in memory that adaptive quantisation may restore, oldest first."""
    growing: Growing | None = None
    """The training text, where it appears during the run."""

    @property
    def watchers(self) -> dict[str, "Watcher[Any] | LossScale | Adaptive"]:
        """The guards and the controller of adaptive quantisation, by their names in a checkpoint."""
        return vars(self.guards) | ({} if self.adaptive is None else {"adaptive": self.adaptive})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return named tensors of the complete state; tied weights appear once."""
        return self.own_tensors() | packed(self.snapshots)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return `tensors` without the snapshots."""
        named = self._held()
        for name, parameter in self._parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                named[f"optimizer.{name}.{key}"] = value
        return named

    def like(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """Return the parameter by which this tensor of a checkpoint is sharded; None where it is not sharded."""
        name = re.sub(rf"^{re.escape(_PREFIX)}\d+\.", "", name)
        for part, parameter in self._parameters():
            matches = name == part or name.startswith(f"optimizer.{part}.")
            if matches and isinstance(parameter, DTensor) and parameter.shape == shape:
                return parameter
        return None

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not tensors."""
        return self.own_numbers() | ({"snapshots": [each.state for each in self.snapshots]} if self.snapshots else {})

    def own_numbers(self) -> dict[str, Any]:
        """Return `numbers` without the snapshots."""
        progress = asdict(self.progress)
        for name in ("members", "first_score", "best_score"):  # most runs have none, and keep the form of before
            if progress[name] in (None, {}):
                del progress[name]
        return {
            "progress": progress,
            "watchers": {name: watcher.state_dict() for name, watcher in self.watchers.items()},
            **({} if self.growing is None else {"source": self.growing.state_dict(self.progress.sequences)}),
        }

    def load(
        self,
        tensors: dict[str, torch.Tensor],
        numbers: dict[str, Any],
        *,
        leave: Collection[str] = (),
        memory: bool = True,
        same_data: bool = True,
    ) -> None:
        """Load a checkpoint into the same parameter objects.

        Args:
            leave: parts that keep their values (`temperature`, `hidden`, `alpha`), because the checkpoint's are of
                another kind.
            memory: whether to load the state of the watchers and the snapshots.
            same_data: whether it is a checkpoint of a run over the same data.

        Raises:
            RunError: an entry is missing, unknown, or of another shape or type.
        """
        if memory and self.adaptive is not None:
            self.snapshots = unpacked(tensors, numbers.get("snapshots", []))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}
        if isinstance(self.student.loss.alpha, MeasuredAlpha):
            tensors = of_before(tensors)
        reshard(self.student.model)  # parameters that a forward left gathered would be out of date
        left = {*leave}
        tensors = {name: each for name, each in tensors.items() if left.isdisjoint(name.split(".")[:2])}
        own = {name: each for name, each in self._held().items() if name.partition(".")[0] not in left}
        saved = {name for name in tensors if not name.startswith("optimizer.")}
        if wrong := sorted(own.keys() ^ saved):
            raise RunError(f"the checkpoint does not fit this student; entries that differ: {wrong[:3]}")
        with torch.no_grad():
            for name, current in own.items():
                _refuse_unlike(name.partition(".")[2], tensors[name], current.shape, current.dtype)
                local(current).copy_(part_of(tensors[name], current))
        self.optimizer.state.clear()
        for name, parameter in self._parameters():
            prefix = f"optimizer.{name}."
            moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if moments:
                # fused AdamW reads and writes beyond the end of smaller tensors
                slots = self.optimizer.slots(parameter)
                if slots.keys() != moments.keys():
                    text = f"{prefix.removesuffix('.')} has {sorted(moments)}; an optimizer keeps {sorted(slots)}"
                    raise RunError(f"the checkpoint's {text}")
                for key, shape in slots.items():
                    _refuse_unlike(f"{prefix}{key}", moments[key], shape, torch.float32)
                # sharded like their parameter and on its device; fused AdamW keeps its step counter there too
                self.optimizer.state[parameter] = {key: cut_like(value, parameter) for key, value in moments.items()}
        if unknown := sorted(numbers["progress"].keys() - asdict(self.progress).keys()):
            raise RunError(f"the checkpoint's progress has '{unknown[0]}', which is unknown to this kdtrain")
        self.progress = Progress(**numbers["progress"])
        states = {**numbers["watchers"], **({"source": numbers["source"]} if "source" in numbers else {})}
        parts: dict[str, Any] = {**self.watchers, **({"source": self.growing} if self.growing and same_data else {})}
        for name, part in parts.items():
            if memory and name in states:
                try:
                    part.load_state_dict(states[name])
                except ValueError as error:
                    raise RunError(f"the checkpoint's '{name}' is not what a run writes: {error}") from error

    def _parts(self) -> list[tuple[str, nn.Module]]:
        student = self.student
        hidden = nn.Module() if student.hidden_loss is None else student.hidden_loss
        loss = student.loss
        return [
            ("student", student.model),
            ("temperature", loss.temperature),
            ("hidden", hidden),
            ("alpha", loss.alpha),
        ]

    def _held(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all parts by name; tied weights appear once."""
        return {f"{part}.{name}": each for part, module in self._parts() for name, each in _once(module).items()}

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"{part}.{name}", each) for part, module in self._parts() for name, each in module.named_parameters()]


def seed_everything(seed: int, step: int, data_rank: int = 0) -> None:
    """Seed Python, NumPy and torch from (seed, step), so that a repeated step draws the same random numbers.

    Each data rank draws different numbers; otherwise dropout would drop the same units on every rank.
    """
    parts = [seed, step, data_rank] if data_rank else [seed, step]
    mixed = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def _once(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of `module` without the second name of a tied weight, and without frozen entries."""
    seen: set[int] = set()
    unique = {}
    frozen = getattr(module, "frozen", ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and name not in frozen:
            unique[name] = tensor.detach()
        seen.add(id(tensor))
    return unique


def _refuse_unlike(name: str, saved: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if saved.shape != shape:
        raise RunError(f"the checkpoint's {name} has shape {list(saved.shape)}, the student's {list(shape)}")
    if saved.dtype != dtype:
        raise RunError(f"the checkpoint's {name} has type {saved.dtype}, the student's {dtype}")
