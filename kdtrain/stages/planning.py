"""The plan of a run or of a cache, made of options and of models' configurations before anything is loaded.

Models are looked at by `models.outline`. One that cannot be looked at so, because its code needs numbers, is planned
with by its options alone, with a line that says so, and is refused by the device's own memory at worst.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch

from kdtrain.cache.provenance import read_manifest
from kdtrain.config import CacheTeacherConfig, DistillConfig
from kdtrain.errors import UsageError
from kdtrain.models.loading import load_tokenizer, vocabulary
from kdtrain.models.outline import Outline, outline
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.monitor.progress import log
from kdtrain.objective import brgemm
from kdtrain.objective.logits import chunk_rows
from kdtrain.parallel.plan import GIB, USABLE, Job, Plan, choose
from kdtrain.parallel.world import gathered, is_main, world_size
from kdtrain.precision import plan as formats
from kdtrain.precision.modes import head_dtype

CACHE_LOGITS = 6.0
"""How many tensors as large as a batch of logits live at once while a teacher is cached."""


def plan_run(config: DistillConfig, device: torch.device, free: float | None) -> Plan:
    """How a run's student and teacher are spread over the ranks there are.

    free: see `free_everywhere`.

    Raises:
        UsageError: it does not fit, or there is no such model or cache.
    """
    own = config.parallel
    if world_size() == 1 and (own.parallel != "auto" or own.teacher_parallel != "auto" or own.shard_size is not None):
        log.info("one process holds everything: --parallel, --teacher-parallel and --shard-size are for torchrun")
    job = job_of(config, device)
    return choose(config.parallel, world_size(), online=config.teacher is not None, job=job, free=free)


def fitting_micro_batch(config: DistillConfig, device: torch.device, free: float | None) -> int:
    """What `--micro-batch-size auto` is: a rank's share of a step, halved until the plan finds room for it.

    free: see `free_everywhere`; without it, or where a model cannot be looked at, the whole share.

    Raises:
        UsageError: as `plan_run`, of the smallest.
    """
    micro, job = config.batch_size // world_size(), job_of(config, device)
    while job is not None:
        try:
            tried = replace(job, micro_batch_size=micro)
            choose(config.parallel, world_size(), online=config.teacher is not None, job=tried, free=free)
            break
        except UsageError:
            if micro % 2:
                raise
            micro //= 2
    return micro


def job_of(config: DistillConfig, device: torch.device) -> Job | None:
    """What the plan must know of a run; None where a model cannot be looked at."""
    mode = formats.plan(config.precision, config.quantization, device).high
    spec, teacher = read_spec(config.student), None if config.teacher is None else read_spec(config.teacher)
    settings = None if config.cache is None else read_manifest(config.cache).settings
    seq_len = config.data.seq_len if settings is None else settings.seq_len
    size = _vocabulary(spec, teacher) if settings is None else settings.vocab_size
    looked_at = _outline(spec, None if "vocab_size" in (spec.config or {}) else size, seq_len, mode, trained=True)
    asked = None if teacher is None else _outline(teacher, None, seq_len, mode, trained=False)
    if looked_at is None or (teacher is not None and asked is None):
        return None
    narrow = head_dtype(mode)
    return Job(
        student=looked_at,
        teacher=asked,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_given,
        seq_len=seq_len,
        chunk_rows=chunk_rows(looked_at.vocabulary, looked_at.width, narrow or torch.float32, device.type),
        compute_bytes=4 if narrow is None else 2,
        activation_checkpointing=config.activation_checkpointing,
        compiled=config.precision.compile and config.guards.nan_hooks != "always",
        packed_head=device.type == "cpu" and mode == "bf16" and brgemm.usable(),
        copies=device.type == "cpu" and config.checkpoint.async_save,
        snapshots=_snapshots(config),
    )


def _snapshots(config: DistillConfig) -> int:
    """States that adaptive quantisation keeps in memory."""
    own = config.quantization
    return own.quant_recovery_buffer if own.time_resume and own.quant_snapshot == "memory" else 0


def shards_teacher(config: CacheTeacherConfig, spec: ModelSpec, mode: str, free: float | None) -> bool:
    """Whether a teacher that is cached is put on the ranks in parts.

    free: see `free_everywhere`.

    Raises:
        UsageError: it does not fit; or parts are wanted and there is one process.
    """
    wanted, world = config.parallel.teacher_parallel, world_size()
    if wanted == "fsdp" and world == 1:
        raise UsageError("--teacher-parallel fsdp needs several processes; start the command with torchrun")
    teacher = _outline(spec, None, config.data.seq_len, mode, trained=False)
    if teacher is None or free is None:
        return wanted == "fsdp"
    ways = [("replicate", 1)] * (wanted != "fsdp") + [("fsdp", world)] * (wanted != "replicate" and world > 1)
    needs = {name: teacher_bytes(teacher, config.batch_size * config.data.seq_len, shared) for name, shared in ways}
    for name, need in needs.items():
        if need <= USABLE * free:
            return name == "fsdp"
    least = min(needs.values())
    raise UsageError(
        f"the teacher {spec.name} needs {least / GIB:.2f} GiB on each of {world} devices and {free / GIB:.2f} GiB are "
        "free: use a smaller --batch-size, more ranks (torchrun), or a larger device"
    )


def teacher_bytes(teacher: Outline, tokens: int, shared: int) -> float:
    """Bytes a rank needs to cache a teacher that `shared` ranks hold together."""
    whole = teacher.parameters
    if shared > 1:
        whole = teacher.parameters - teacher.in_layers
        whole += teacher.in_layers // shared + 2 * teacher.in_layers // max(teacher.layers, 1)
    wide = 4.0 * teacher.vocabulary * teacher.width if teacher.weight_bytes < 4 else 0.0
    logits = CACHE_LOGITS * 4.0 * tokens * teacher.vocabulary
    return teacher.weight_bytes * whole + wide + logits + tokens * teacher.kept / max(teacher.layers, 1)


def free_everywhere(device: torch.device, given: float | None) -> float | None:
    """The least that any rank has free, in bytes, so that all plan the same; every rank must call it.

    given: GiB to plan with instead.
    """
    known = [each for each in gathered(free_memory(device, given)) if each is not None]
    return min(known, default=None)


def free_memory(device: torch.device, given: float | None) -> float | None:
    """Bytes that are free for a rank; None where nobody knows.

    given: GiB to plan with instead. The ranks of a node share what a CPU has.
    """
    if given is not None:
        return given * GIB
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limits = [each for each in (_available(), _control_group()) if each is not None]
    return min(limits) / int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if limits else None


def _available() -> float | None:
    """Bytes that Linux could give without swapping."""
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _control_group() -> float | None:
    """Bytes that this process's control group has left, where it sets a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(float(limit) - float(used), 0.0)


def _vocabulary(spec: ModelSpec, teacher: ModelSpec | None) -> int:
    """The vocabulary that a student without one of its own gets."""
    if teacher is not None:
        return vocabulary(teacher)
    return len(load_tokenizer(spec)) if spec.config is not None and "vocab_size" not in spec.config else 0


def _outline(spec: ModelSpec, vocab_size: int | None, seq_len: int, mode: str, *, trained: bool) -> Outline | None:
    try:
        return outline(spec, vocab_size=vocab_size, seq_len=seq_len, mode=mode, trained=trained)
    except UsageError:
        raise
    except Exception as error:  # whatever a model's own code may raise when tensors have no numbers
        if is_main():
            said = " ".join(str(error).split())[:120]
            log.info("memory of %s not estimated: %s: %s", spec.name, type(error).__name__, said)
        return None
