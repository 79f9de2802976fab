"""A run's models over its ranks: what each rank takes of a step, and how student and teacher are spread."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kdtrain.config import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, default_probe
from kdtrain.parallel.plan import Plan
from kdtrain.parallel.world import world_size
from kdtrain.parallel.wrap import Alone, Replicated, Sharded, shard
from kdtrain.precision import plan as formats
from kdtrain.precision.modes import head_dtype
from kdtrain.training.step import DistillStep


def micro_batch(config: DistillConfig) -> int:
    """Sequences in one forward of a rank.

    Raises:
        UsageError: the ranks cannot share a step out evenly, or cannot be put into rows of `--shard-size`.
    """
    ranks, batch, micro = world_size(), config.batch_size, config.micro_batch_given
    if (size := config.parallel.shard_size) is not None and ranks % size:
        raise UsageError(f"--shard-size {size} does not divide {ranks} ranks; choose one that does")
    if batch % (ranks * (micro or 1)):
        by = f" x --micro-batch-size {micro}" if micro else ""
        raise UsageError(f"--batch-size {batch} is no multiple of {ranks} ranks{by}; choose one that is")
    return micro or batch // ranks


def loading_device(kind: str, device: torch.device) -> torch.device:
    """Where a model is loaded: one that is cut up may be too large for the device before it is."""
    return torch.device("cpu") if kind == "fsdp" else device


def cut_teacher(teacher: SplitModel, plan: Plan, device: torch.device) -> None:
    """Cut an online teacher up in place where the plan says so; it has no gradients and no optimizer."""
    if plan.teacher == "fsdp":
        shard(teacher, device, shard_size=plan.shard_size)


def cut_student(
    student: SplitModel, plan: Plan, device: torch.device, mode: formats.Plan, config: DistillConfig, compile: bool
) -> None:
    """Cut the student up in place where the plan says so; before its optimizer is made, which holds its parameters."""
    if plan.student != "fsdp":
        return
    compiled: Callable[[Any], Any] | None = None
    if compile:
        compiled = partial(torch.compile, dynamic=False, mode=compile_mode(config))
    # what is quantised is quantised from fp32
    dtype = head_dtype(mode.high) if mode.choice is None else None
    shard(student, device, dtype=dtype, shard_size=plan.shard_size, compile=compiled)


def compile_mode(config: DistillConfig) -> str | None:
    """What torch.compile calls the mode."""
    mode = config.precision.compile_mode
    return None if mode == "default" else mode


def spread(plan: Plan, step: DistillStep) -> Alone:
    """What the training step is called through."""
    if plan.student == "single":
        return Alone(step, step.student)
    if plan.student == "fsdp":
        return Sharded(step, step.student)
    own = {name for name, _ in step.named_parameters() if not name.startswith("student.")}
    return Replicated(step, step.student, own, lambda: step.student.logits(default_probe(step.student.model)))
