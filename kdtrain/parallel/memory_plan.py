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
    activations           N k, k bytes a token by what autograd keeps (`model_footprint`)
    output head           4 V D (its gradient) + 2 c N D (hidden states and theirs) + copies of its weight in bf16
                          + a chunk of logits, several times (`LOGITS`)
    teacher               its weights, / w with w ranks; its head in fp32; its hidden states, 4 N D

Both whole on each rank is the first choice, because it exchanges least; then the teacher in parts, then the student
in parts, then both. What fits nowhere is refused, with what would help. `USABLE` of the free memory is planned with.

What it gives up: buffers of the communication library, the allocator's waste, and compiled graphs, which keep less.

A model's footprint comes from its spec alone: it is built and run once over one sequence with tensors that have shapes
and no numbers (PyTorch's fake tensors), so that a model of any size takes a tenth of a second and no memory, and of the
hub only the configuration is read. A model whose code needs numbers is planned by its options alone, which is logged.
A compiled graph keeps about two thirds of what this counts; emulated formats keep copies that it does not count.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kdtrain.cache.manifest import read_manifest
from kdtrain.config import CacheTeacherConfig, DistillConfig, ParallelConfig
from kdtrain.errors import UsageError
from kdtrain.models.attention import CAUSAL_SDPA
from kdtrain.models.hub import attention_option
from kdtrain.models.loading import checkpoint_activations, load_tokenizer, vocabulary
from kdtrain.models.scratch import configuration, layers_config
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.monitor.progress import log
from kdtrain.objective import matmul
from kdtrain.objective.logits import chunk_rows
from kdtrain.precision import backends as formats
from kdtrain.precision.modes import head_dtype
from kdtrain.ranks import all_gather_object, is_main, world_size


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """Sizes of a model; numbers of parameters are of distinct ones, a tied head counts once."""

    name: str
    parameters: int
    layers: int
    in_layers: int
    """Parameters in all layers; the others are embedding, last norm and output head."""
    width: int
    """D, what the output head takes."""
    vocabulary: int
    """Rows of the output head."""
    tied: bool
    """Whether the head's weight is the embedding's."""
    kept: float
    """Bytes a token that a forward keeps for the backward."""
    kept_by_checkpoints: float
    """The same with activation checkpointing; equal where the model cannot."""
    weight_bytes: int = 4
    """Of a stored weight."""


def model_footprint(
    spec: ModelSpec, *, vocab_size: int | None, seq_len: int, mode: str, trained: bool
) -> ModelFootprint:
    """The outline of a student (`trained`) or a teacher.

    vocab_size: of a `[config]` that leaves it out. mode: number format of its forward, fp32, bf16 or fp16.

    Raises:
        UsageError: there is no such model, or transformers does not know its kind.
        Exception: of any kind, where a model does not run without numbers.
    """
    config = _configuration(spec, vocab_size)
    weight_bytes = 4 if trained or mode == "fp32" else torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size()
    found = _measured(spec, config, seq_len, mode, recompute=False)
    found = replace(found, weight_bytes=weight_bytes)
    if trained and found.kept_by_checkpoints:
        recomputed = _measured(spec, config, seq_len, mode, recompute=True)
        return replace(found, kept_by_checkpoints=recomputed.kept)
    return replace(found, kept_by_checkpoints=found.kept)


def _configuration(spec: ModelSpec, vocab_size: int | None) -> PreTrainedConfig:
    if spec.init == "teacher-layers" and spec.config is None:
        return layers_config(_configuration(read_spec(cast(str, spec.teacher)), None), spec.layers)
    return configuration(spec, vocab_size)


def _measured(spec: ModelSpec, config: PreTrainedConfig, seq_len: int, mode: str, recompute: bool) -> ModelFootprint:
    """`kept_by_checkpoints` is 1 where the model can recompute its layers, else 0."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        model = _fake(spec, config)
        if recompute:
            checkpoint_activations(model)
        own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        tokens_BT = torch.zeros(1, seq_len, dtype=torch.int64)
        with _kept(own) as kept, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            result = model.base_model(input_ids=tokens_BT, use_cache=False)
        layers = _layers(model)
        head: Any = model.get_output_embeddings()
        return ModelFootprint(
            name=spec.name,
            parameters=sum(each.numel() for each in model.parameters()),
            layers=len(layers),
            in_layers=sum(each.numel() for layer in layers for each in layer.parameters()),
            width=int(result.last_hidden_state.shape[-1]),
            vocabulary=int(head.weight.shape[0]),
            tied=head.weight is model.get_input_embeddings().weight,
            kept=sum(kept.values()) / seq_len,
            kept_by_checkpoints=float(model.supports_gradient_checkpointing),
        )


def _fake(spec: ModelSpec, config: PreTrainedConfig) -> Any:
    model: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        attn_implementation=attention_option(spec.attention),
        trust_remote_code=spec.trust_remote_code,
        dtype=torch.float32,
    )
    if model.config._attn_implementation == "sdpa":  # as training does, and without a mask that needs numbers
        model.set_attn_implementation(CAUSAL_SDPA)
    return model.train()


@contextmanager
def _kept(own: set[int]) -> Iterator[dict[int, int]]:
    """Bytes by storage of what autograd keeps while the block runs, the model's own tensors left out."""
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            held.append(storage)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers: the members of the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


Student = Literal["single", "ddp", "fsdp"]
Teacher = Literal["none", "replicate", "fsdp"]

USABLE = 0.95
"""The share of a device's free memory that a plan may fill."""
LOGITS = {"cached": 5.0, "online": 14.0, "compiled": 2.0, "compiled online": 6.0}
"""How many tensors as large as a chunk of logits live at once in the objective's engine."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, of the numbers that decide its memory."""

    student: ModelFootprint
    teacher: ModelFootprint | None
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


def _gradients(student: ModelFootprint, shared: int, adds_up: bool) -> float:
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
    mode = formats.formats_of(config.precision, config.quantization, device).high
    spec, teacher = read_spec(config.student), None if config.teacher is None else read_spec(config.teacher)
    settings = None if config.cache is None else read_manifest(config.cache).settings
    seq_len = config.data.seq_len if settings is None else settings.seq_len
    size = _vocabulary(spec, teacher) if settings is None else settings.vocab_size
    looked_at = _footprint(spec, None if "vocab_size" in (spec.config or {}) else size, seq_len, mode, trained=True)
    asked = None if teacher is None else _footprint(teacher, None, seq_len, mode, trained=False)
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
        packed_head=device.type == "cpu" and mode == "bf16" and matmul.usable(),
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
    teacher = _footprint(spec, None, config.data.seq_len, mode, trained=False)
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


def teacher_bytes(teacher: ModelFootprint, tokens: int, shared: int) -> float:
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
    known = [each for each in all_gather_object(free_memory(device, given)) if each is not None]
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


def _footprint(
    spec: ModelSpec, vocab_size: int | None, seq_len: int, mode: str, *, trained: bool
) -> ModelFootprint | None:
    try:
        return model_footprint(spec, vocab_size=vocab_size, seq_len=seq_len, mode=mode, trained=trained)
    except UsageError:
        raise
    except Exception as error:  # whatever a model's own code may raise when tensors have no numbers
        if is_main():
            said = " ".join(str(error).split())[:120]
            log.info("memory of %s not estimated: %s: %s", spec.name, type(error).__name__, said)
        return None
