"""The plan of a run in ranks that are not there, from shapes alone: `distill --dry-run --world-size N`."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch

from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.memory_plan import student_parameters
from kdtrain.run.recipe import lengths, open_models, plan_memory, refuse_with_tensor_ranks


def plan_ranks(given: DistillConfig, device: torch.device, held: ExitStack) -> dict[str, Any]:
    """Return the plan of a run in `--world-size` ranks as a table, from shapes alone: it loads and writes nothing.

    With `--device-memory` it plans for cards, whatever this machine has, unless `--device` names another device.

    UsageError: data, cache, student or options do not fit together, or not into `--device-memory`.
    """
    own = given.parallel
    planned = torch.device("cuda") if own.device_memory and given.device == "auto" else device
    teachers = RankLayout(tensor_size=own.teacher_tensor_parallel)
    request, formats = open_models(given, device, teachers, held=held, trial=True, planned=planned)
    facts = request.next().facts if given.data.data is None else None  # text is not read
    seq_len, size = lengths(request, facts)
    world = cast(int, given.world_size)
    for option, tensor in (
        ("--tensor-parallel", own.tensor_parallel),
        ("--teacher-tensor-parallel", own.teacher_tensor_parallel),
    ):
        if world % tensor:
            raise UsageError(f"{option} {tensor} does not divide --world-size {world}")
    student = request.student
    refuse_with_tensor_ranks(request, facts, formats)
    ranks = world // own.tensor_parallel
    free = own.device_memory and own.device_memory * 2**30
    plan, micro = plan_memory(replace(request, device=planned), facts, formats, ranks, free)
    return {
        "student": {"name": student.name, "parameters": student_parameters(student, size)},
        "parallel": {"ranks": world, "data ranks": ranks, **plan.table()},
        "plan": str(plan),
        "mode": formats.high,
        "batch": f"{given.batch_size} x {seq_len} tokens, {given.batch_size // (micro * ranks)} micro-batches of "
        f"{micro} on each data rank",
    }
