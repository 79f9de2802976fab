"""The plan of a run in ranks that are not there, from shapes alone: `distill --dry-run --world-size N`."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.memory_plan import job_of, plan_run, student_parameters
from kdtrain.precision.formats import formats_of
from kdtrain.run.recipe import (
    capturing_of,
    micro_batch,
    open_run_teacher,
    refuse_with_tensor_ranks,
    student_spec,
    tensor_ranks_fit,
    with_base_weights,
)
from kdtrain.training.sources.plan import PlanRequest


def plan_ranks(given: DistillConfig, device: torch.device, held: ExitStack) -> dict[str, Any]:
    """Return the plan of a run in `--world-size` ranks as a table, from shapes alone: it loads and writes nothing.

    With `--device-memory` it plans for cards, whatever this machine has, unless `--device` names another device.

    UsageError: data, cache, student or options do not fit together, or not into `--device-memory`.
    """
    own = given.parallel
    planned = torch.device("cuda") if own.device_memory and given.device == "auto" else device
    student = student_spec(given)
    formats = formats_of(given.precision, given.quantization, device)
    student = with_base_weights(given, student, formats, device)
    teacher = open_run_teacher(given, student, formats, planned, RankLayout(tensor_size=own.teacher_tensor_parallel))
    options: dict[str, Any] = {"config": given, "student": student, "teacher": teacher, "device": device}
    options |= {"held": held, "trial": True, "capturing": partial(capturing_of, given, student, device)}
    facts = None
    seq_len = given.data.seq_len
    size = None if teacher is None else teacher.vocab_size
    if given.data.data is None:  # text is not read
        facts = PlanRequest(**options, names=(*given.plans,)).next().facts
    if facts is not None:
        seq_len, size = facts.seq_len, facts.vocab_size
    world = cast(int, given.world_size)
    for option, tensor in (
        ("--tensor-parallel", own.tensor_parallel),
        ("--teacher-tensor-parallel", own.teacher_tensor_parallel),
    ):
        if world % tensor:
            raise UsageError(f"{option} {tensor} does not divide --world-size {world}")
    refuse_with_tensor_ranks(given, student, size, facts, formats)
    footprint = None if teacher is None else teacher.footprint(seq_len)
    job = job_of(given, formats.high, planned, student, seq_len, size, footprint)
    free = own.device_memory and own.device_memory * 2**30
    ranks = world // own.tensor_parallel
    micro = micro_batch(given, ranks, job, free)
    can_cut = partial(tensor_ranks_fit, given, student, size, facts, formats)
    plan = plan_run(given, job and replace(job, micro_batch_size=micro), free, can_cut)
    return {
        "student": {"name": student.name, "parameters": student_parameters(student, size)},
        "parallel": {"ranks": world, "data ranks": ranks, **plan.table()},
        "plan": str(plan),
        "mode": formats.high,
        "batch": f"{given.batch_size} x {seq_len} tokens, {given.batch_size // (micro * ranks)} micro-batches of "
        f"{micro} on each data rank",
    }
