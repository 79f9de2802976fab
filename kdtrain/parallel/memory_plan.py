"""The memory plan: how the ranks hold student and teacher, as a pure function of sizes, options and free memory.

A rank's memory is estimated at the moments at which it can be largest, and the largest counts:

    teach     the teacher's forward, before the student's
    head      the end of the student's forward: all activations, and a chunk of logits in the output head
    backward  its end: all gradients, and the activations of the last layer

The parts are, in bytes, for a student of P parameters, L of them in its layers, and a head of V rows of width D; for N
tokens in a micro-batch, w ranks that share one copy (1 unless sharded), c bytes a number in products (2 or 4):

    weights and moments   (4 + s) P / w                   fp32 masters, and s of the optimizer's (AdamW: 8)
    snapshots             as many again, each             of adaptive quantisation, if they are in memory, on a CPU
    copy for the save     as many again, on a CPU: the buffers of background saves are kept from one to the next
    gradients             4 P, under DDP all the time; sharded 4 P / w, and 4 P while micro-batches are added up, unless
                          their gradients are exchanged at once (`--accumulate sharded`)
    gathered              sharded: 4 (P - L), the root, and two layers of c L / layers
    activations           N k + o, the bytes that autograd keeps (`model_footprint`): k a token, o once a micro-batch,
                          most of it autocast's weights in bf16, which a sharded student gathers in that format
    output head           4 V D (its gradient) + 2 c N D (hidden states and theirs) + copies of its weight in bf16
                          + a chunk of logits, several times (`LOGITS`)
    teacher               its weights, / w with w ranks; its head in fp32; its hidden states, 4 N D

Of weights that are not trained, P counts in neither moments, gradients, snapshots nor the copy for a save: 4 P / w, or
the bytes of the fewer bits in which they are held.

The first choice is both whole on each rank, because it exchanges least; then the teacher sharded, then the student,
then both; then the same with a sharded student whose micro-batches add up sharded gradients. A job that does not fit in
any way is refused, with what would help. A plan may fill `USABLE` of the free memory.

Given up: buffers of the communication library, the allocator's waste and the copies that emulated formats keep are not
counted, nor a packed weight while it is unpacked; a compiled graph keeps about two thirds of the activations counted
here.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from kdtrain.config.choices import OPTIMIZERS
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.config.sections import ParallelConfig
from kdtrain.errors import UsageError, log
from kdtrain.models.loading import configuration, parameter_count
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.logits import WEIGHT_CHUNKS, chunk_rows
from kdtrain.parallel.footprint import ModelFootprint, footprint_of
from kdtrain.precision.modes import head_dtype
from kdtrain.ranks import world_size
from kdtrain.tables import size

USABLE = 0.95
"""The share of a device's free memory that a plan may fill."""
LOGITS = {(False, False): 5.0, (False, True): 14.0, (True, False): 2.0, (True, True): 6.0}
"""Tensors as large as a chunk of logits that exist at once in the objective's engine: compiled, with a teacher."""
CACHE_LOGITS = 6.0
"""Tensors as large as a batch of logits that exist at once while a teacher is cached."""
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Job:
    """The numbers of a run that decide its memory."""

    student: ModelFootprint
    teacher: ModelFootprint | None  # an online teacher
    batch_size: int  # sequences in a step over all ranks
    micro_batch_size: int | None  # sequences in a forward of a rank; all of its share when None
    seq_len: int
    chunk_rows: int  # rows of logits that are computed at a time
    compute_bytes: int  # bytes of a number in matrix products: 2 in bf16 and fp16, 4 in fp32
    activation_checkpointing: bool = False
    compiled: bool = False
    copies: bool = False  # True if the copy of a background save is in the same memory, as on a CPU
    waiting_rows: int = 0  # rows beside a chunk whose 16-bit gradients in the logits wait for dWeight
    state_bytes: float = 8.0  # of the optimizer's state for one trained number
    snapshots: int = 0  # states that adaptive quantisation keeps in the same memory
    floor: ModelFootprint | None = None  # of the student, what each of any number of tensor ranks has

    def cut(self, ranks: int, rows: bool) -> "Job":
        """Return the job of one of some tensor ranks. rows: they cut the residual stream, and each keeps of a block the
        positions that it takes in, in the format of products.
        """
        whole = 2.0 * self.student.width * self.compute_bytes if rows else None
        return replace(self, student=self.student.part(ranks, whole), floor=self.student.part(1 << 40, whole))

    def micro(self, world: int) -> int:
        """Return the sequences in a forward of one of `world` ranks."""
        return self.micro_batch_size or max(self.batch_size // world, 1)


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of memory: the part of student and teacher on each rank, and the bytes that it needs."""

    student: Literal["single", "ddp", "fsdp"]
    """The whole student in the only process, the whole of it on each rank, or a shard of it."""
    teacher: Literal["none", "replicate", "fsdp"]
    """No online teacher, the whole of it on each rank, or a shard of it."""
    shard_size: int | None = None
    """Ranks that share one copy of a sharded model; all when None."""
    accumulate: Literal["whole", "sharded"] = "whole"
    """The gradients of a sharded student that micro-batches add up on a rank."""
    tensor: int = 1
    """Tensor ranks, each of which has a part of a student; the rest of the plan is that of the data ranks."""
    teacher_tensor: int = 1
    """Tensor ranks, each of which has a part of a teacher's layers."""
    needs: dict[str, float] = field(default_factory=dict, compare=False)
    """Bytes a rank needs, by part, at the moment of the largest sum; empty without an estimate."""
    stays: dict[str, float] = field(default_factory=dict, compare=False)
    """Of them, those of any number of tensor ranks."""
    moment: str = ""
    """The moment of the largest sum."""
    proposed: str = ""
    """Another layout that fits, and why it may be better."""
    free: float | None = None
    """Free bytes of a device."""

    @property
    def total(self) -> float:
        """Bytes a rank needs in all."""
        return sum(self.needs.values())

    def table(self) -> dict[str, Any]:
        """Return the plan for people and for JSON; memory in GiB a rank."""
        shown: dict[str, Any] = {"student": self.student, "teacher": self.teacher}
        shown |= {"tensor ranks": self.tensor} if self.tensor > 1 else {}
        shown |= {"the teacher's tensor ranks": self.teacher_tensor} if self.teacher_tensor > 1 else {}
        if "fsdp" in (self.student, self.teacher):
            shown["ranks that share a copy"] = self.shard_size or "all"
        if self.student == "fsdp":
            shown["gradients added up"] = self.accumulate
        if self.needs:
            shown["GiB a rank"] = round(self.total / GIB, 3)
            shown["of it"] = {name: round(each / GIB, 3) for name, each in self.needs.items()}
            stays = {name: round(each / GIB, 3) for name, each in self.stays.items()}
            if any(stays.values()):
                shown["of it, whatever the tensor ranks"] = {name: each for name, each in stays.items() if each}
            shown["most at"] = self.moment
        if self.free is not None:
            shown["GiB free"] = round(self.free / GIB, 3)
        shown |= {"proposed": self.proposed} if self.proposed else {}
        return shown

    def __str__(self) -> str:
        shards = f"sharded over {self.shard_size or 'all'} ranks"
        student = {"single": "whole", "ddp": "whole on each rank (DDP)", "fsdp": f"{shards} (FSDP2)"}[self.student]
        teacher = {"none": "", "replicate": ", the teacher whole on each", "fsdp": f", the teacher {shards}"}
        if self.teacher_tensor > 1:
            teacher = {name: f"{text}, cut over {self.teacher_tensor} tensor ranks" for name, text in teacher.items()}
        if self.tensor > 1:
            cut = f"cut over {self.tensor} tensor ranks"
            more = {"single": "", "ddp": ", the same on each data rank", "fsdp": f", each part {shards}"}[self.student]
            student = cut + more.replace("ranks", "data ranks")
        return f"the student {student}{teacher[self.teacher]}"


def choose(
    options: ParallelConfig,
    world: int,
    *,
    online: bool,
    job: Job | None = None,
    free: float | None = None,
    proposed: str = "",
) -> MemoryPlan:
    """Choose the plan for `world` ranks.

    online: a teacher runs while the student trains. job: the sizes; nothing is estimated or refused without it.
    free: free bytes of each device; nothing is refused without it. proposed: see `propose`.

    UsageError: the job does not fit (with the numbers and what would help).
    """
    plans = [estimated(plan, job, world) if job else plan for plan in _candidates(options, world, online, job)]
    if job is None or free is None:
        return plans[0]
    for plan in plans:
        if plan.total <= USABLE * free:
            return replace(plan, free=free, proposed=proposed if plan.student == "fsdp" else "")
    least = min(plans, key=lambda plan: plan.total)
    parts = ", ".join(f"{name} {size(each / MIB)}" for name, each in least.needs.items())
    who = job.student.name if job.teacher is None else f"{job.student.name} and its teacher {job.teacher.name}"
    helps = [*filter(None, [proposed]), *_what_helps(options, world, job, free)]
    devices = world * options.tensor_parallel
    raise UsageError(
        f"{who} need {size(least.total / MIB)} on {'the device' if devices == 1 else f'each of {devices} devices'} "
        f"({parts}; student {least.student}, teacher {least.teacher}), and {size(free / MIB)} are free: "
        + (f"it would fit with {'; or with '.join(helps)}" if helps else "take a smaller model, or larger devices")
    )


def _candidates(options: ParallelConfig, world: int, online: bool, job: Job | None) -> list[MemoryPlan]:
    """Return the plans that the options allow, in order of preference."""
    if world == 1:
        return [MemoryPlan("single", "replicate" if online else "none")]
    students: list[Literal["ddp", "fsdp"]] = ["ddp", "fsdp"]
    teachers: list[Literal["none", "replicate", "fsdp"]] = ["replicate", "fsdp"] if online else ["none"]
    if job is not None and job.student.packed:
        students.remove("fsdp")
    if job is not None and job.teacher is not None and job.teacher.packed:
        teachers.remove("fsdp")
    elif online and options.teacher_tensor_parallel not in (1, options.tensor_parallel):
        teachers.remove("fsdp")  # the data ranks of both differ
    ways: list[Literal["whole", "sharded"]] = ["whole", "sharded"]
    return [
        MemoryPlan(student, teacher, options.shard_size, way)
        for way in ways
        for student in students
        for teacher in teachers
        if options.parallel in ("auto", student)
        and (teacher == "none" or options.teacher_parallel in ("auto", teacher))
        and (way == "whole" if student == "ddp" else options.accumulate in ("auto", way))
    ]


def _fits(options: ParallelConfig, world: int, job: Job, free: float) -> bool:
    plans = (estimated(plan, job, world) for plan in _candidates(options, world, job.teacher is not None, job))
    return any(plan.total <= USABLE * free for plan in plans)


def _what_helps(options: ParallelConfig, world: int, job: Job, free: float) -> Iterator[str]:
    """Yield changes that each make the job fit; smaller micro-batches with checkpointing if neither is enough alone."""
    micro = job.micro(world)
    smaller = {f"--micro-batch-size {micro >> n}": micro >> n for n in range(1, 32) if micro % (1 << n) == 0}
    tried = {text: replace(job, micro_batch_size=size) for text, size in smaller.items()}
    if not job.activation_checkpointing:
        recomputed = replace(job, activation_checkpointing=True)
        tried["--activation-checkpointing"] = recomputed
        for text, size in smaller.items():
            tried[f"{text} --activation-checkpointing"] = replace(recomputed, micro_batch_size=size)
    yield from [text for text, changed in tried.items() if _fits(options, world, changed, free)][:1]
    free_choice = replace(options, parallel="auto", teacher_parallel="auto", accumulate="auto")
    if free_choice != options and _fits(free_choice, world, job, free):
        also = "--accumulate auto, " if options.accumulate != "auto" else ""
        yield f"{also}--parallel auto and --teacher-parallel auto"
    if job.teacher is not None and _fits(options, world, replace(job, teacher=None), free):
        yield "a cache (kdtrain cache-teacher first, then --cache)"
    for more in (world << power for power in range(1, 11)):
        share = replace(job, micro_batch_size=min(micro, max(job.batch_size // more, 1)))
        if _fits(replace(free_choice, shard_size=None), more, share, free):
            yield f"{more * options.tensor_parallel} ranks"
            return


def estimated(plan: MemoryPlan, job: Job, world: int) -> MemoryPlan:
    """Return `plan` with the bytes that each of `world` ranks needs."""
    moments = _moments(plan, job, world)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    stays = {} if job.floor is None else _moments(plan, replace(job, student=job.floor), world)[moment]
    needs = {name: each for name, each in moments[moment].items() if each}
    return replace(plan, needs=needs, stays=stays, moment=moment)


def _moments(plan: MemoryPlan, job: Job, world: int) -> dict[str, dict[str, float]]:
    """Return the bytes by part at each moment at which a rank's memory can be largest."""
    student = job.student
    teacher = job.teacher
    tokens = job.micro(world) * job.seq_len
    shared, by_teacher = ((plan.shard_size or world) if each == "fsdp" else 1 for each in (plan.student, plan.teacher))
    masters = (4 + job.state_bytes) * student.trained / shared
    held = forward = gathered = 0.0
    if teacher is not None:
        held = _teacher_held(teacher, by_teacher) + 4.0 * tokens * teacher.width
        forward = _of_a_layer(teacher, tokens)  # nothing is kept
    if shared > 1:
        layers = 2 * job.compute_bytes * student.in_layers / max(student.layers, 1)
        gathered = 4.0 * (student.parameters - student.in_layers) + layers
    always = {
        "weights and moments": masters + student.frozen_bytes * student.frozen / shared,
        "snapshots": job.snapshots * masters,
        "copy for the save": masters if job.copies else 0.0,
        "teacher": held,
        "gathered": gathered,
    }
    first, added, last = _gradients(plan, job, world, shared)
    activations, head = _activations(job, tokens, shared), _output_head(job, tokens)
    return {
        "teach": {**always, "gradients": first, "teacher's forward": forward},
        "head": {**always, "gradients": added, "activations": activations, "output head": head},
        "backward": {**always, "gradients": last, "activations": _of_a_layer(student, tokens)},
    }


def _gradients(plan: MemoryPlan, job: Job, world: int, shared: int) -> tuple[float, float, float]:
    """Return the bytes of gradients at each moment; shared: ranks that share a copy of the student."""
    student = job.student
    whole = last = 4.0 * student.trained
    adds_up = plan.student == "ddp" or job.batch_size > job.micro(world) * world
    some = 4.0 * _root_and_two(student.trained, student.in_layers - student.frozen_in_layers, student.layers)
    if shared > 1:  # the shards, and either all until they are reduced, or those of the root and two layers
        last = whole / shared + (whole if adds_up and plan.accumulate == "whole" else some)
    if student.tied and not student.frozen_head:
        last += 4.0 * student.vocabulary * student.width  # of the embedding
    before = whole if plan.accumulate == "whole" else whole / shared
    # DDP's buckets, of which gradients are views, exist from the first step on.
    return whole if plan.student == "ddp" else 0.0, before if adds_up else 0.0, last


def _activations(job: Job, tokens: int, shared: int) -> float:
    """Return the bytes that the student's forward keeps; shared: ranks that share a copy of it."""
    kept, once = job.student.kept, job.student.kept_once
    if job.activation_checkpointing:
        kept, once = job.student.kept_by_checkpoints, job.student.kept_once_by_checkpoints
    if shared > 1 and job.compute_bytes == 2:  # the layers' weights are gathered so, and freed
        once = max(once - 2.0 * job.student.in_layers, 0.0)
    return tokens * kept + once


def _output_head(job: Job, tokens: int) -> float:
    """Return the bytes of the head's gradient and copies, of hidden states and theirs, and of a chunk of logits."""
    student, compute = job.student, job.compute_bytes
    logits = LOGITS[job.compiled, job.teacher is not None] * 4.0 * min(job.chunk_rows, tokens)
    weight = 2.0 if compute == 2 else 0.0
    if not student.frozen_head:
        weight += 4.0
        logits += 2.0 * min(job.waiting_rows, max(tokens - job.chunk_rows, 0))
    states = 2.0 * compute * tokens * student.width
    return weight * (student.vocabulary * student.width) + states + logits * student.vocabulary


def _root_and_two(numbers: int, in_layers: int, layers: int) -> float:
    """Return how many of `numbers` are gathered at once: all but the numbers `in_layers`, and two layers' numbers."""
    return numbers - in_layers + 2.0 * in_layers / max(layers, 1)


def _of_a_layer(model: ModelFootprint, tokens: int) -> float:
    """Return the bytes that a forward of one layer keeps."""
    return (tokens * model.kept + model.kept_once) / max(model.layers, 1)


def _teacher_held(teacher: ModelFootprint, shared: int) -> float:
    """Return the bytes of a teacher's weights on one of the ranks that share them, its root and two layers gathered."""
    numbers = teacher.parameters / shared
    if shared > 1:
        numbers += _root_and_two(teacher.parameters, teacher.in_layers, teacher.layers)
    beside = teacher.weight_bytes < 4 or shared > 1 or teacher.cut > 1
    wide = 4.0 * teacher.vocabulary * teacher.width if beside else 0.0
    return teacher.weight_bytes * numbers + wide


def plan_run(
    config: DistillConfig, job: Job | None, free: float | None, can_cut: Callable[[int], bool] = lambda _: False
) -> MemoryPlan:
    """Choose the plan of a run; job: see `job_of`; free: see `free_everywhere`. UsageError: it does not fit.

    can_cut: whether so many tensor ranks could cut the student.
    """
    own = config.parallel
    if (config.world_size or world_size()) == 1 and (
        own.parallel != "auto" or own.teacher_parallel != "auto" or own.shard_size is not None
    ):
        log.info("one process holds everything: --parallel, --teacher-parallel and --shard-size are for torchrun")
    world = _data_ranks(config)
    proposed = ""
    if job is not None and free is not None and own.parallel == "auto" and own.tensor_parallel == 1:
        proposed = propose(config, job, free, can_cut)
    plan = choose(own, world, online=config.online, job=job, free=free, proposed=proposed)
    return replace(plan, tensor=own.tensor_parallel, teacher_tensor=own.teacher_tensor_parallel)


def propose(config: DistillConfig, job: Job, free: float, can_cut: Callable[[int], bool]) -> str:
    """Return the options for tensor ranks with which a run fits that has no room for whole copies, and why; or "".

    Tensor ranks of a node first, as few as fit, then sharded parts: only within a node are activations exchanged as
    fast as they are needed. can_cut: see `plan_run`.
    """
    world = _data_ranks(config)
    own = config.parallel
    if world == 1 or _fits(replace(own, parallel="ddp", accumulate="auto"), world, job, free):
        return ""
    node = int(os.environ.get("LOCAL_WORLD_SIZE") or min(world, 8))
    sizes = [size for size in range(2, node + 1) if node % size == 0 and world % size == 0 and can_cut(size)]
    sizes = [size for size in sizes if world // size % (own.shard_size or 1) == 0]
    ways: list[tuple[Literal["ddp", "fsdp"], list[int]]] = [("ddp", sizes), ("fsdp", sizes[::-1])]
    for engine, tried in ways:
        for cut_over in tried:
            parallel = replace(own, parallel=engine, accumulate="auto", tensor_parallel=cut_over)
            cut = job.cut(cut_over, parallel.cuts_rows(job.seq_len, config.objective))
            if (engine == "ddp" or world > cut_over) and _fits(parallel, world // cut_over, cut, free):
                also = "" if engine == "ddp" else ", and FSDP2 shards their parts over data ranks"
                how = f"--tensor-parallel {cut_over}" + (" --parallel fsdp" if also else "")
                return f"{how} (no rank has room for a whole copy; the ranks of a node cut it first{also})"
    return ""


def _data_ranks(config: DistillConfig) -> int:
    return (config.world_size or world_size()) // config.parallel.tensor_parallel


def fitting_micro_batch(config: DistillConfig, share: int, job: Job | None, free: float | None) -> int:
    """Return the size for `--micro-batch-size auto`: a rank's share of a step, halved until it fits or is odd.

    free: see `free_everywhere`; without it, or for a model that cannot be measured, the whole share.
    """
    micro = share
    if job is not None and free is not None:
        ranks = _data_ranks(config)
        while micro % 2 == 0 and not _fits(config.parallel, ranks, replace(job, micro_batch_size=micro), free):
            micro //= 2
    return micro


def job_of(
    config: DistillConfig,
    mode: str,
    device: torch.device,
    student: ModelSpec,
    seq_len: int,
    vocab_size: int | None = None,
    teacher: ModelFootprint | None = None,
) -> Job | None:
    """Return the sizes of a run in `mode`; None if the student or an online teacher cannot be measured.

    vocab_size: of the data, for a student whose spec names none; None: the size of the student's tokenizer.
    """
    on_gpu = device.type == "cuda"
    how = {"seq_len": seq_len, "mode": mode, "on_gpu": on_gpu, "freeze_head": config.freeze_head}
    measured = footprint_of(student, vocab_size=_vocabulary(student, vocab_size), trained=True, **how)
    if measured is None or (config.online and teacher is None):
        return None
    narrow = head_dtype(mode)
    quantization = config.quantization
    rows = chunk_rows(measured.vocabulary, measured.width, narrow or torch.float32, device.type)
    in_memory = device.type == "cpu" and quantization.time_resume and quantization.quant_snapshot == "memory"
    job = Job(
        student=measured,
        teacher=teacher,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_given,
        seq_len=seq_len,
        chunk_rows=rows,
        waiting_rows=(WEIGHT_CHUNKS.get(device.type, 1) - 1) * rows if narrow == torch.bfloat16 else 0,
        compute_bytes=4 if narrow is None else 2,
        activation_checkpointing=config.activation_checkpointing,
        compiled=config.precision.compile and config.guards.nan_hooks != "always",
        copies=device.type == "cpu" and config.checkpoint.async_save,
        state_bytes=OPTIMIZERS.get(config.optimizer.optimizer).state_bytes,
        snapshots=quantization.quant_recovery_buffer if in_memory else 0,
    )
    ranks = config.parallel.tensor_parallel
    return job if ranks == 1 else job.cut(ranks, config.parallel.cuts_rows(seq_len, config.objective))


def student_parameters(student: ModelSpec, vocab_size: int | None) -> int:
    """Count the parameters of a student without adapters, also of one that does not run without numbers."""
    config = configuration(student, _vocabulary(student, vocab_size))
    return parameter_count(student.name, config, trust_remote_code=student.trust_remote_code)


def _vocabulary(student: ModelSpec, vocab_size: int | None) -> int | None:
    if vocab_size is None and student.config is not None and "vocab_size" not in student.config:
        return len(load_tokenizer(student))
    return vocab_size


def shards_teacher(
    config: CacheTeacherConfig, teacher: ModelFootprint | None, free: float | None, seq_len: int
) -> bool:
    """Return whether cache-teacher shards its teacher over the ranks.

    teacher: None if it cannot be estimated. free: see `free_everywhere`.

    Raises:
        UsageError: the teacher does not fit, or one process cannot shard it.
    """
    wanted, cut = config.parallel.teacher_parallel, config.parallel.teacher_tensor_parallel
    world = world_size() // cut
    if wanted == "fsdp" and world == 1:
        several = f"more than {cut} processes" if cut > 1 else "several processes"
        raise UsageError(f"--teacher-parallel fsdp needs {several}; start the command with torchrun")
    if teacher is None or free is None:
        return wanted == "fsdp"
    tokens = config.batch_size * seq_len
    working = CACHE_LOGITS * 4.0 * tokens * teacher.vocabulary + _of_a_layer(teacher, tokens)
    ways = [] if wanted == "fsdp" else [1]
    if wanted != "replicate" and world > 1 and not teacher.packed:
        ways.append(world)
    needs = {shared: working + _teacher_held(teacher, shared) for shared in ways}
    for shared, need in needs.items():
        if need <= USABLE * free:
            return shared > 1
    raise UsageError(
        f"the teacher {teacher.name} needs {size(min(needs.values()) / MIB)} on each of {world * cut} devices and "
        f"{size(free / MIB)} are free: use a smaller --batch-size, more ranks (torchrun), or a larger device"
    )
