"""Hooks that name the first non-finite tensor of a step, forward or backward.

`NanHooks` checks the teacher's targets, every parameter, the inputs and outputs of every module, the parts of the loss,
and in the backward pass the gradients of the same tensors. It keeps the first non-finite one: everything its module
received before was finite. `find_first` runs the micro-batches of a step again with such hooks, in eager mode, because
a compiled graph has no modules and calls no hook that was added later. `write_bundle` writes what reproduces the
finding.

What it gives up: each check waits for the device, so that a step with hooks is several times slower; a number that only
the compiled graph gets wrong is not found; masks (arguments with `mask` in their name) may hold infinities and are not
checked.
"""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kdtrain import __version__
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import shareable
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import LossOutput
from kdtrain.parallel.parallelize import peak, total_norm
from kdtrain.ranks import local, world_size
from kdtrain.training.observers import Observer, StepView
from kdtrain.training.student import Student

_NORM = "the norm of all gradients"
_PREFIX = "model.model."
"""The student's prefix before the names of transformers."""


@dataclass(frozen=True)
class Finding:
    """The first non-finite tensor of a step."""

    module: str
    """The module it belongs to, by its name in transformers; or `teacher`, `objective`, `temperature`."""
    tensor: str
    """Which of its tensors: input, output, a parameter, the gradient of one of these, targets, a part of the loss."""
    direction: str
    """`forward` or `backward`."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    bad: int
    """How many of its entries are NaN or infinite."""
    place: tuple[int, ...]
    """Index of the first of them."""
    micro_batch: int
    """The micro-batch of the step, from 1."""
    order: int = 0
    """Its number among the tensors checked in its micro-batch: tensor ranks, which run in step, sum a NaN to all."""

    @property
    def when(self) -> tuple[bool, int, bool, int]:
        """Orders the findings of several ranks by time: the total norm comes after all micro-batches."""
        return self.tensor.startswith(_NORM), self.micro_batch, self.direction == "backward", self.order

    def __str__(self) -> str:
        if not self.module:
            return f"out of memory in micro-batch {self.micro_batch}: eager mode with hooks takes more memory"
        entries = f"{self.bad} of {int(np.prod(self.shape))} entries" if self.shape else "its one entry"
        at = f", the first at {list(self.place)}" if self.place else ""
        return (
            f"{self.module}: {self.tensor} is the first non-finite tensor ({self.direction} of micro-batch "
            f"{self.micro_batch}, {entries}, shape {list(self.shape)}{at})"
        )


class NanHooks(Observer):
    """Hooks on a student and all of its modules, from now until `remove`; they see eager calls only.

    `take` returns the first finding since the last call, and restarts the count of micro-batches. As an observer of
    steps they drop the findings of what ran between two steps, such as a validation.
    """

    def __init__(self, student: Student) -> None:
        self._first: Finding | None = None
        self._micro_batch = self._checked = 0
        hooks = student.register_forward_pre_hook(self._begin), student.register_forward_hook(self._end)
        self._handles: list[Any] = [*hooks]
        for name, module in student.named_modules():
            if module not in (student, student.loss):
                public_name = _public(name) or type(module).__name__
                self._handles.append(module.register_forward_pre_hook(self._input_hook(public_name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._output_hook(public_name)))
        for name, parameter in student.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(name)))

    def before_step(self, step: StepView) -> None:
        """Drop the findings from before the step."""
        self.take()

    def take(self) -> Finding | None:
        """Return the first finding since the last call, or None; the next micro-batch is number 1."""
        first = self._first
        self._first = None
        self._micro_batch = 0
        return first

    def remove(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()

    def _check(self, module: str, what: str, direction: str, tensor: Any) -> None:
        """Keep `tensor`, if it is one of numbers, as the finding if it is the first non-finite one."""
        numbers = isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())
        if self._first is not None or not numbers:
            return
        self._checked += 1
        tensor = local(tensor.detach())
        # 8-bit formats have no isfinite of their own
        good = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
        if not good.all():
            bad = good.logical_not().nonzero()
            place = tuple(bad[0].tolist())
            where = (module, what, direction, tuple(tensor.shape), len(bad), place)
            self._first = Finding(*where, self._micro_batch, self._checked)

    def _check_gradient(self, module: str, what: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._check(module, f"the gradient of {what}", "backward", gradient))

    def _begin(self, student: nn.Module, arguments: tuple[Batch, ...]) -> None:
        self._micro_batch += 1
        self._checked = 0
        batch = arguments[0]
        mask_N = batch.rows().mask
        for number, states_ND in enumerate(batch.states):
            self._check("teacher", f"hidden states {number}", "forward", states_ND.masked_fill(~mask_N[:, None], 0))
        if batch.targets is not None:  # log 0 in a dense distribution is clamped to a finite value
            for what, tensor in batch.targets.where(mask_N).shown().items():
                self._check("teacher", what, "forward", tensor)
        for name, parameter in student.named_parameters():
            self._check(*_owner(name), "forward", parameter)

    def _end(self, student: nn.Module, arguments: Any, result: LossOutput) -> None:
        sums = {"cross_entropy": result.ce, "kd": result.kd, "hidden": result.hidden, "router": result.router}
        for name, value in sums.items():
            self._check("objective", f"the sum {name}", "forward", value)
        self._check("objective", "the loss", "forward", result.loss)

    def _input_hook(self, name: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def hook(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
            for value in tree_leaves((positional, {key: each for key, each in named.items() if "mask" not in key})):
                self._check(name, "its input", "forward", value)
            return tuple(map(own_view, positional)), {key: own_view(value) for key, value in named.items()}

        def own_view(value: Any) -> Any:
            """Return a view whose gradient comes from this module alone."""
            if not (isinstance(value, Tensor) and value.requires_grad):
                return value
            view = value.view_as(value)
            self._check_gradient(name, "its input", view)
            return view

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, result: Any) -> None:
            for value in tree_leaves(result):
                self._check(name, "its output", "forward", value)
                self._check_gradient(name, "its output", value)

        return hook

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        module, what = _owner(name)

        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._check(module, f"the gradient of {what}", "backward", parameter.grad)

        return hook


def find_first(student: Student, batches: Sequence[Batch], normalizer: float) -> Finding | None:
    """Run the micro-batches of a step again, in eager mode and with hooks; None where all tensors are finite.

    Clears the gradients before and after. The caller seeds the random generators. On one rank the search ends with the
    first finding; on several all micro-batches run, because every rank must take part. Running out of memory is
    reported as a finding.
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
                    return hooks._first
            # the squares of finite gradients may exceed fp32
            gradients = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
            if not gradients or total_norm(list(gradients.values())).isfinite():
                return hooks._first
            module, what = _owner(max(gradients, key=lambda name: peak(gradients[name])))
            which = f"{_NORM}, with that of {what} as the largest,"
            return hooks._first or Finding(module, which, "backward", (), 1, (), len(batches))
    except torch.OutOfMemoryError:
        return Finding("", "", "", (), 0, (), hooks._micro_batch)
    finally:
        hooks.remove()
        student.zero_grad(set_to_none=True)


def write_bundle(
    folder: Path, config: DistillConfig, indices: np.ndarray, batches: Sequence[Batch], finding: Finding | None
) -> None:
    """Write what reproduces a finding: `batch.safetensors` (tokens, masks, sequence indices) and `finding.json`.

    With the cache and the checkpoint from before the step this is the whole step: the indices lead to the targets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: [getattr(batch, name) for batch in batches] for name in ("tokens", "loss_mask", "segments")}
    tensors = {name: torch.cat(values).cpu().contiguous() for name, values in parts.items()}
    save_file(tensors | {"sequences": torch.as_tensor(indices.copy())}, folder / "batch.safetensors")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    report = {
        "finding": None if finding is None else asdict(finding) | {"text": str(finding)},
        "options": shareable(config),
        "versions": {"kdtrain": __version__, "python": platform.python_version(), **versions},
    }
    (folder / "finding.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _public(name: str) -> str:
    """Return the name in transformers of the student's module or parameter `name`."""
    name = name.removeprefix("loss.")
    return name.removeprefix(_PREFIX) if name != _PREFIX[:-1] else ""


def _owner(parameter: str) -> tuple[str, str]:
    """Return the module of a parameter, and its name there."""
    module, _, name = _public(parameter).rpartition(".")
    return module, name
