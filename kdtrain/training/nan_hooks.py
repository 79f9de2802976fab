"""Hooks that name the first tensor of a step that is not finite, forward or backward.

`NanHooks` looks at the teacher's targets, at every parameter, at what goes into and comes out of every module, at the
parts of the loss, and on the way back at the gradients of the same tensors. The first bad one is kept: by then its
module had only finite ones. `find_first` runs the micro-batches of a step again under such hooks, in eager mode, since
a compiled graph neither knows modules nor calls a hook that came after it. `write_bundle` keeps what shows the finding.

What it gives up: every look waits for the device, so that a step with hooks is several times slower; a number that only
the compiled graph gets wrong is not found; masks (arguments with `mask` in their name) may hold infinities and are not
looked at.
"""

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor, nn

from kdtrain import __version__
from kdtrain.cache.reader import CachedBatch
from kdtrain.config import DistillConfig, sections
from kdtrain.objective.loss import LossOutput
from kdtrain.objective.targets import EMPTY, DenseTargets
from kdtrain.parallel.parallelize import peak, total_norm
from kdtrain.ranks import local, world_size
from kdtrain.training.data import TaughtBatch
from kdtrain.training.student import Student

_NORM = "the norm of all gradients"
_PREFIX = "model.model."
"""What stands before the names that transformers gives."""


@dataclass(frozen=True)
class Finding:
    """The first tensor of a step that was not finite."""

    module: str
    """The module it belongs to, by the name transformers gives it; or `teacher`, `objective`, `temperature`."""
    tensor: str
    """Which of its tensors: input, output, a parameter, the gradient of one of these, targets, a part of the loss."""
    direction: str
    """`forward` or `backward`."""
    shape: tuple[int, ...]
    """Of the tensor."""
    bad: int
    """How many of its entries are NaN or infinite."""
    place: tuple[int, ...]
    """Index of the first of them."""
    micro_batch: int
    """In which micro-batch of the step, from 1."""

    @property
    def when(self) -> tuple[bool, int, bool]:
        """What puts findings of several ranks in the order of time: the norm of all comes after all micro-batches."""
        return self.tensor.startswith(_NORM), self.micro_batch, self.direction == "backward"

    @classmethod
    def of_no_memory(cls, micro_batch: int) -> "Finding":
        """What is known when memory ran out on the way."""
        return cls("", "", "", (), 0, (), micro_batch)

    def __str__(self) -> str:
        if not self.module:
            return f"memory ran out in micro-batch {self.micro_batch}, of which eager mode with hooks takes more"
        entries = f"{self.bad} of {int(np.prod(self.shape))} entries" if self.shape else "its one entry"
        at = f", the first at {list(self.place)}" if self.place else ""
        return (
            f"{self.module}: {self.tensor} is the first tensor that is not finite ({self.direction} of micro-batch "
            f"{self.micro_batch}, {entries}, shape {list(self.shape)}{at})"
        )


class NanHooks:
    """Hooks on a student and all of its modules, from now until `remove`; they see eager calls only.

    `take` gives the first finding since it was last called, and begins to count micro-batches anew.
    """

    def __init__(self, student: Student) -> None:
        self._first: Finding | None = None
        self._micro_batch = 0
        self._handles: list[Any] = [
            student.register_forward_pre_hook(self._begin),
            student.register_forward_hook(self._end),
        ]
        for name, module in student.named_modules():
            if module not in (student, student.loss):
                called = _public(name) or type(module).__name__
                self._handles.append(module.register_forward_pre_hook(self._entered(called), with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._left(called)))
        for name, parameter in student.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))

    def take(self) -> Finding | None:
        """The first finding since the last call, or None; the next micro-batch is number 1."""
        first, self._first, self._micro_batch = self._first, None, 0
        return first

    def remove(self) -> None:
        """Take every hook off."""
        while self._handles:
            self._handles.pop().remove()

    def _look(self, module: str, what: str, direction: str, tensor: Tensor) -> None:
        """Keep `tensor` as the finding if it is the first bad one."""
        if self._first is not None or not (tensor.is_floating_point() or tensor.is_complex()):
            return
        tensor = local(tensor.detach())
        # one byte a number: those formats have no isfinite of their own
        good = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
        if not good.all():
            bad = good.logical_not().nonzero()
            place = tuple(bad[0].tolist())
            self._first = Finding(module, what, direction, tuple(tensor.shape), len(bad), place, self._micro_batch)

    def _on_gradient(self, module: str, what: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._look(module, f"the gradient of {what}", "backward", gradient))

    def _begin(self, student: nn.Module, arguments: tuple[CachedBatch, ...]) -> None:
        self._micro_batch += 1
        for what, tensor in _said(arguments[0]):
            self._look("teacher", what, "forward", tensor)
        for name, parameter in student.named_parameters():
            self._look(*_owner(name), "forward", parameter)

    def _end(self, student: nn.Module, arguments: Any, result: LossOutput) -> None:
        for name, value in (("cross_entropy", result.ce), ("kd", result.kd), ("hidden", result.hidden)):
            self._look("objective", f"the sum {name}", "forward", value)
        self._look("objective", "the loss", "forward", result.loss)

    def _entered(self, name: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def hook(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
            for value in (*positional, *(value for key, value in named.items() if "mask" not in key)):
                for tensor in _tensors(value):
                    self._look(name, "its input", "forward", tensor)
            return tuple(map(mine, positional)), {key: mine(value) for key, value in named.items()}

        def mine(value: Any) -> Any:
            """A view, whose gradient is what this module sends back and nothing that others do."""
            if not (isinstance(value, Tensor) and value.requires_grad):
                return value
            view = value.view_as(value)
            self._on_gradient(name, "its input", view)
            return view

        return hook

    def _left(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, result: Any) -> None:
            for tensor in _tensors(result):
                self._look(name, "its output", "forward", tensor)
                self._on_gradient(name, "its output", tensor)

        return hook

    def _accumulated(self, name: str) -> Callable[[Tensor], None]:
        module, what = _owner(name)

        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._look(module, f"the gradient of {what}", "backward", parameter.grad)

        return hook


def find_first(student: Student, batches: Sequence[CachedBatch], normalizer: float) -> Finding | None:
    """Run the micro-batches of a step again, in eager mode and with hooks; None where all of it is finite.

    Gradients are dropped before and after. What the random generators are to draw is for the caller to set. All of it
    runs, whatever is found, where other ranks have to take part.
    Running out of memory is told as a finding of its own, and ends nothing.
    """
    student.zero_grad(set_to_none=True)
    hooks = NanHooks(student)
    try:
        with student.eager():
            for batch in batches:
                loss = student(batch, normalizer).loss
                if hooks._first is None or world_size() > 1:
                    loss.backward()
                if hooks._first is not None and world_size() == 1:
                    break
            norm = None if hooks._first is not None and world_size() == 1 else _norm(student, len(batches))
        return hooks._first or norm
    except torch.OutOfMemoryError:
        return Finding.of_no_memory(hooks._micro_batch)
    finally:
        hooks.remove()
        student.zero_grad(set_to_none=True)


def write_bundle(
    folder: Path, config: DistillConfig, indices: np.ndarray, batches: Sequence[CachedBatch], finding: Finding | None
) -> None:
    """Write what shows a finding: `batch.safetensors` (tokens, masks, sequence numbers) and `finding.json`.

    With the checkpoint from before the step and the cache this is the whole step: targets are found by their numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: [getattr(batch, name) for batch in batches] for name in ("tokens", "loss_mask", "segments")}
    tensors = {name: torch.cat(values).cpu().contiguous() for name, values in parts.items()}
    save_file(tensors | {"sequences": torch.as_tensor(indices.copy())}, folder / "batch.safetensors")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    about = {
        "finding": None if finding is None else asdict(finding) | {"text": str(finding)},
        "options": sections(config),
        "versions": {"kdtrain": __version__, "python": platform.python_version(), **versions},
    }
    (folder / "finding.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _norm(student: Student, micro_batch: int) -> Finding | None:
    """The norm of finite gradients can be infinite: their squares have to fit into fp32 as well."""
    gradients = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    if not gradients or total_norm(list(gradients.values())).isfinite():
        return None
    largest = max(gradients, key=lambda name: peak(gradients[name]))
    module, what = _owner(largest)
    return Finding(module, f"{_NORM}, with that of {what} as the largest,", "backward", (), 1, (), micro_batch)


def _said(batch: CachedBatch) -> Iterator[tuple[str, Tensor]]:
    """The teacher's numbers for the tokens that count, by name; log 0, which a whole distribution may hold, is fine."""
    mask_N = rearrange(batch.loss_mask, "B T -> (B T)")
    for number, states_ND in enumerate(batch.states if isinstance(batch, TaughtBatch) else ()):
        yield f"hidden states {number}", states_ND.masked_fill(~mask_N[:, None], 0)
    if batch.targets is None:
        return
    targets = batch.targets.where(mask_N)
    for field in dataclasses.fields(targets):
        value = getattr(targets, field.name)
        if isinstance(value, Tensor):
            yield field.name, value.clamp_min(EMPTY) if isinstance(targets, DenseTargets) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or results, however they are packed."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for each in value.values() for tensor in _tensors(each))
    elif isinstance(value, tuple | list):
        yield from (tensor for each in value for tensor in _tensors(each))


def _public(name: str) -> str:
    """The name that transformers gives to what the student calls `name`."""
    name = name.removeprefix("loss.")
    return name.removeprefix(_PREFIX) if name != _PREFIX[:-1] else ""


def _owner(parameter: str) -> tuple[str, str]:
    """Module and own name of a parameter."""
    module, _, name = _public(parameter).rpartition(".")
    return module, name
