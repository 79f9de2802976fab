"""How student and teacher are spread over the ranks: a pure function of sizes, options and free memory.

What a rank needs is estimated at the moments at which it can be largest, and the largest counts:

    teach     the teacher's forward, before the student's
    head      the end of the student's forward: all activations, and a chunk of logits in the output head
    backward  its end: all gradients, and what the last layer needs on the way
    save      on a CPU: the copy that is written in the background

of these parts, in bytes, for P parameters of the student of which L in layers, V rows of width D in its head, N tokens
in a micro-batch, w ranks that share one copy (1 unless sharded), c bytes a number in products (2 or 4):

    weights and moments   12 P / w                        fp32 masters, two fp32 moments (AdamW)
    snapshots             as many again, each             of adaptive quantisation, where they lie in memory
    gradients             4 P, under DDP all the time; sharded 4 P / w, and 4 P while micro-batches are added up
    gathered              sharded: 4 (P - L), the root, and two layers of c L / layers
    activations           N k, k bytes a token by what autograd keeps (`models.outline`)
    output head           4 V D (its gradient) + 2 c N D (hidden states and theirs) + copies of its weight in bf16
                          + a chunk of logits, several times (`LOGITS`)
    teacher               its weights, / w with w ranks; its head in fp32; its hidden states, 4 N D

Both whole on each rank is the first choice, because it exchanges least; then the teacher in parts, then the student
in parts, then both. What fits nowhere is refused, with what would help. `USABLE` of the free memory is planned with.

What it gives up: buffers of the communication library, the allocator's waste, and compiled graphs, which keep less.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from kdtrain.config import ParallelConfig
from kdtrain.errors import UsageError

Student = Literal["single", "ddp", "fsdp"]
Teacher = Literal["none", "replicate", "fsdp"]

USABLE = 0.95
"""The share of a device's free memory that a plan may fill."""
LOGITS = {"cached": 5.0, "online": 14.0, "compiled": 2.0, "compiled online": 6.0}
"""How many tensors as large as a chunk of logits live at once in the objective's engine."""
GIB = 2**30


class Outline(Protocol):
    """What a plan must know of a model, see `models.outline.Outline`."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def in_layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def kept(self) -> float: ...
    @property
    def kept_by_checkpoints(self) -> float: ...
    @property
    def weight_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, of the numbers that decide its memory."""

    student: Outline
    teacher: Outline | None
    """An online teacher."""
    batch_size: int
    """Sequences in a step over all ranks."""
    micro_batch_size: int | None
    """Sequences in a forward of a rank; all of its share when None."""
    seq_len: int
    chunk_rows: int
    """Rows of logits that are made at a time."""
    compute_bytes: int
    """Bytes of a number in matrix products: 2 in bf16 and fp16, 4 in fp32."""
    activation_checkpointing: bool = False
    compiled: bool = False
    packed_head: bool = False
    """Whether products with the head's weight take a further copy of it, as on CPUs with bf16."""
    copies: bool = False
    """Whether the copy of a background save lies in the same memory, as on a CPU."""
    snapshots: int = 0
    """States that adaptive quantisation keeps in memory; a background save copies them as well."""

    def micro(self, world: int) -> int:
        """Sequences in a forward of one of `world` ranks."""
        return self.micro_batch_size or max(self.batch_size // world, 1)

    def accumulates(self, world: int) -> bool:
        """Whether a step has several micro-batches on a rank."""
        return self.batch_size > self.micro(world) * world


@dataclass(frozen=True)
class Plan:
    """What each rank holds."""

    student: Student
    """The whole student in the one process there is, the whole of it on each rank, or a part of it."""
    teacher: Teacher
    """No online teacher, the whole of it on each rank, or a part of it."""
    shard_size: int | None = None
    """Ranks that share one copy of what is sharded; all when None."""
    needs: dict[str, float] = field(default_factory=dict, compare=False)
    """Bytes a rank needs, by part, at the moment at which they are most; empty where nothing was estimated."""
    moment: str = ""
    """Which moment that is."""
    free: float | None = None
    """Bytes that were free on a device."""

    @property
    def total(self) -> float:
        """Bytes a rank needs in all."""
        return sum(self.needs.values())

    def table(self) -> dict[str, Any]:
        """The plan for people and for JSON; memory in GiB a rank."""
        shown: dict[str, Any] = {"student": self.student, "teacher": self.teacher}
        if "fsdp" in (self.student, self.teacher):
            shown["ranks that share a copy"] = self.shard_size or "all"
        if self.needs:
            shown["GiB a rank"] = round(self.total / GIB, 3)
            shown["of it"] = {name: round(each / GIB, 3) for name, each in self.needs.items()}
            shown["most at"] = self.moment
        if self.free is not None:
            shown["GiB free"] = round(self.free / GIB, 3)
        return shown

    def __str__(self) -> str:
        shards = "all ranks" if self.shard_size is None else f"{self.shard_size} ranks"
        words = {"single": "whole", "ddp": "whole on each (DDP)", "fsdp": f"cut up over {shards} (FSDP2)"}
        teacher = {
            "none": "",
            "replicate": ", the teacher whole on each",
            "fsdp": f", the teacher cut up over {shards}",
        }
        return f"the student {words[self.student]}{teacher[self.teacher]}"


def choose(
    options: ParallelConfig, world: int, *, online: bool, job: Job | None = None, free: float | None = None
) -> Plan:
    """The plan for `world` ranks.

    Args:
        online: whether there is a teacher to be asked while the student trains.
        job: what is trained; nothing is estimated or refused without it.
        free: bytes that are free on each device; nothing is refused without them.

    Raises:
        UsageError: it does not fit, with the numbers and what would help; or the ranks cannot be divided as asked.
    """
    if world > 1 and options.shard_size is not None and world % options.shard_size:
        raise UsageError(f"--shard-size {options.shard_size} does not divide {world} ranks; choose one that does")
    plans = [estimated(plan, job, world) if job else plan for plan in _candidates(options, world, online)]
    if job is None or free is None:
        return plans[0]
    for plan in plans:
        if plan.total <= USABLE * free:
            return replace(plan, free=free)
    raise UsageError(_refusal(options, world, job, free, min(plans, key=lambda plan: plan.total)))


def _candidates(options: ParallelConfig, world: int, online: bool) -> Iterator[Plan]:
    """What the options allow, in the order in which it is preferred."""
    if world == 1:
        yield Plan("single", "replicate" if online else "none")
        return
    pairs: list[tuple[Student, Teacher]] = [
        *(("ddp", "replicate"), ("ddp", "fsdp"), ("fsdp", "replicate"), ("fsdp", "fsdp")),
    ]
    for student, teacher in pairs:
        asked = options.parallel in ("auto", student) and options.teacher_parallel in ("auto", teacher)
        if not online:
            asked, teacher = options.parallel in ("auto", student) and teacher == "replicate", "none"
        if asked:
            yield Plan(student, teacher, options.shard_size)


def estimated(plan: Plan, job: Job, world: int) -> Plan:
    """`plan` with what a rank of `world` needs."""
    moments = _moments(plan, job, world)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    needs = {name: each for name, each in moments[moment].items() if each}
    return replace(plan, needs=needs, moment=moment)


def _moments(plan: Plan, job: Job, world: int) -> dict[str, dict[str, float]]:
    """Bytes by part at each moment."""
    student, tokens = job.student, job.micro(world) * job.seq_len
    shared = (plan.shard_size or world) if plan.student == "fsdp" else 1
    held = _teacher_held(plan, job, tokens, world)
    root, in_layer = student.parameters - student.in_layers, student.in_layers / max(student.layers, 1)
    held_state = 12 * student.parameters / shared
    state = {"weights and moments": held_state, "snapshots": job.snapshots * held_state} | held
    gathered = {"gathered": 4.0 * root + 2 * job.compute_bytes * in_layer if shared > 1 else 0.0}
    # DDP's buckets, of which gradients are views, are there from the first step on
    whole = job.accumulates(world) or plan.student == "ddp"
    buckets = {"gradients": 4.0 * student.parameters if plan.student == "ddp" else 0.0}
    kept = student.kept_by_checkpoints if job.activation_checkpointing else student.kept
    layer = tokens * student.kept / max(student.layers, 1)
    head_weight = student.vocabulary * student.width
    head = 4.0 * head_weight + 2.0 * job.compute_bytes * tokens * student.width
    if job.compute_bytes == 2:
        head += (4.0 if job.packed_head else 2.0) * head_weight
    head += _logits(job, tokens)
    embedding = 4.0 * head_weight if student.tied else 0.0
    return {
        "teach": state | gathered | buckets | {"teacher's forward": _teacher_forward(job, tokens)},
        "head": state
        | gathered
        | {"gradients": 4.0 * student.parameters if whole else 0.0}
        | {"activations": tokens * kept, "output head": head},
        "backward": state
        | gathered
        | {"gradients": _gradients(student, shared, whole) + embedding, "activations": layer},
        "save": state | buckets | {"copy for the save": (1 + job.snapshots) * held_state if job.copies else 0.0},
    }


def _gradients(student: Outline, shared: int, adds_up: bool) -> float:
    """At the end of a backward: in parts, but for the root and two layers, or for all of them until they are sent."""
    if shared == 1:
        return 4.0 * student.parameters
    whole = student.parameters - student.in_layers + 2 * student.in_layers / max(student.layers, 1)
    return 4.0 * student.parameters / shared + 4.0 * (student.parameters if adds_up else whole)


def _logits(job: Job, tokens: int) -> float:
    """Bytes of the objective's working tensors."""
    kind = " ".join(["compiled"] * job.compiled + ["online"] * (job.teacher is not None)) or "cached"
    return LOGITS[kind] * 4.0 * min(job.chunk_rows, tokens) * job.student.vocabulary


def _teacher_held(plan: Plan, job: Job, tokens: int, world: int) -> dict[str, float]:
    """What an online teacher takes as long as the run lasts."""
    teacher = job.teacher
    if teacher is None:
        return {}
    shared = (plan.shard_size or world) if plan.teacher == "fsdp" else 1
    weights = teacher.weight_bytes * teacher.parameters / shared
    if shared > 1:
        weights += teacher.weight_bytes * (teacher.parameters - teacher.in_layers)
        weights += 2.0 * teacher.weight_bytes * teacher.in_layers / max(teacher.layers, 1)
    wide = 4.0 * teacher.vocabulary * teacher.width if teacher.weight_bytes < 4 or shared > 1 else 0.0
    return {"teacher": weights + wide + 4.0 * tokens * teacher.width}


def _teacher_forward(job: Job, tokens: int) -> float:
    """What a layer of the teacher needs on the way; nothing is kept."""
    return 0.0 if job.teacher is None else tokens * job.teacher.kept / max(job.teacher.layers, 1)


def _refusal(options: ParallelConfig, world: int, job: Job, free: float, plan: Plan) -> str:
    parts = ", ".join(f"{name} {each / GIB:.2f}" for name, each in plan.needs.items())
    devices = "the device" if world == 1 else f"each of {world} devices"
    who = job.student.name if job.teacher is None else f"{job.student.name} and its teacher {job.teacher.name}"
    how = f"student {plan.student}, teacher {plan.teacher}"
    helps = list(_what_helps(options, world, job, free))
    return (
        f"{who} need {plan.total / GIB:.2f} GiB on {devices} ({parts}; {how}), "
        f"and {free / GIB:.2f} GiB are free: "
        + (f"it would fit with {'; or with '.join(helps)}" if helps else "take a smaller model, or larger devices")
    )


def _what_helps(options: ParallelConfig, world: int, job: Job, free: float) -> Iterator[str]:
    """Changes that make it fit, each by itself; the two that need no other machine together where neither does."""

    def fits(job: Job, options: ParallelConfig = options, world: int = world) -> bool:
        plans = (estimated(plan, job, world) for plan in _candidates(options, world, job.teacher is not None))
        return any(plan.total <= USABLE * free for plan in plans)

    found = 0
    for recompute in dict.fromkeys((job.activation_checkpointing, True)):
        wanted = " --activation-checkpointing" if recompute and not job.activation_checkpointing else ""
        for micro in _smaller(job.micro(world), keep=bool(wanted)):
            if not found and fits(replace(job, micro_batch_size=micro, activation_checkpointing=recompute)):
                found += 1
                size = f"--micro-batch-size {micro}" if micro != job.micro(world) else ""
                yield f"{size}{wanted}".strip()
    free_choice = replace(options, parallel="auto", teacher_parallel="auto")
    if free_choice != options and fits(job, free_choice):
        yield "--parallel auto and --teacher-parallel auto"
    if job.teacher is not None and fits(replace(job, teacher=None)):
        yield "a cache (kdtrain cache-teacher first, then --cache)"
    for more in (world * 2**power for power in range(1, 11)):
        micro = min(job.micro(world), max(job.batch_size // more, 1))
        if fits(replace(job, micro_batch_size=micro), replace(free_choice, shard_size=None), more):
            yield f"{more} ranks"
            return


def _smaller(micro: int, keep: bool) -> list[int]:
    """`micro` itself where it is to be kept, and its divisors by halves."""
    sizes = [micro] if keep else []
    while micro % 2 == 0:
        micro //= 2
        sizes.append(micro)
    return sizes
