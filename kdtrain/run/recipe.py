"""What a run is, resolved once from its options before a model is loaded.

`resolve` reads each spec and the manifest of the cache once, plans the data, chooses number formats, micro-batch and
memory plan, fills in the bounds of T, and refuses what cannot work before the folder of the run is touched. It then
takes the folder, loads an online teacher, and prepares the data.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kdtrain.cache.format.manifest import refuse_tokenizer
from kdtrain.config.choices import DIVERGENCES, GROWS_WITH_T, LOGGERS, MAXIMIZES, TEMPERATURES
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.config.rates import WORDS, Kind, rate_of
from kdtrain.config.sections import LoraConfig, ObjectiveConfig
from kdtrain.errors import UsageError, log, warn_early
from kdtrain.imports import optional
from kdtrain.models.attention import resolve_attention
from kdtrain.models.hub import ask_config
from kdtrain.models.loading import is_adapter, is_model_folder, with_weights_of
from kdtrain.models.spec import ModelSpec, teacher_spec, with_weights
from kdtrain.models.tokenizer import digest_of, tokenizer_digest
from kdtrain.net.address import parse_address
from kdtrain.objective.divergence import parse, refuse
from kdtrain.objective.targets import ANY_T
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.memory_plan import Job, MemoryPlan, fitting_micro_batch, job_of, plan_run, student_parameters
from kdtrain.precision.formats import Formats, formats_of
from kdtrain.precision.modes import why_not_compile, why_not_tf32
from kdtrain.ranks import free_everywhere, is_main, on_main, pick_device, raise_on_all_ranks, reported
from kdtrain.run.folder import restarted, run_lock, saved_choices
from kdtrain.tables import short
from kdtrain.training.sources.plan import DataPlan, Ordered, PlanRequest
from kdtrain.training.sources.source import Facts, Source

if TYPE_CHECKING:
    from kdtrain.teaching.teacher import OnlineTeacher

LEARNED_RANGE = (2 / 3, 4.0)
"""Default bounds of a learnable T: far above them T^2 KL rises again without limit."""
PARTS = ("cache", "student", "teacher")
"""What checkpoints belong to besides the options, and ranks compare."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The resolved options and opened data of a run, before its student is built."""

    given: DistillConfig
    """The options as given, with `--resume auto` where torchrun has restarted the run."""
    config: DistillConfig
    """As used: with the number of `--lr`, and bounds of T."""
    lr_from: str | None
    """Where `--lr auto` took its number from; None where one was given."""
    alpha_from: str | None
    """Why `--alpha auto` is a number here; else None."""
    device: torch.device
    layout: RankLayout
    resumed: bool
    """Whether `config.out` already holds this run."""
    student: ModelSpec
    """With its attention and its adapters resolved."""
    teacher: "OnlineTeacher | None"
    """The online teacher, loaded and not yet sharded."""
    sources: dict[str, Source]
    """The splits train and validation."""
    data: DataPlan
    """Where the sequences come from."""
    formats: Formats
    plan: MemoryPlan
    micro: int
    """Sequences in one forward of a rank."""
    total: int
    """Planned optimizer steps."""
    compiles: bool

    @property
    def facts(self) -> Facts:
        """The facts of the data."""
        return self.sources["train"].facts

    @property
    def cut(self) -> bool:
        """Whether no rank holds the whole student."""
        return self.plan.student == "fsdp" or self.layout.tensor_size > 1

    @property
    def has_teacher(self) -> bool:
        """Whether micro-batches have targets; without them the loss is cross-entropy."""
        return self.teacher is not None or self.facts.targets != "none"

    @property
    def distils(self) -> bool:
        """Whether the loss has a divergence."""
        return self.has_teacher and self.config.objective.distils

    @property
    def identity(self) -> dict[str, Any]:
        """The run that a checkpoint belongs to, as far as it is known before the models are loaded."""
        mixture = {"caches": self.members} if self.members else {}
        return {"cache": self.facts.identity, "options": self.config.deciding(), **mixture}

    @property
    def members(self) -> list[dict[str, Any]]:
        """The caches that a run mixes, as a table for people; empty with one cache."""
        return [
            {
                "name": name,
                "cache": each.facts.name,
                "digest": each.facts.identity,
                "teacher": each.facts.teacher.get("spec"),
                "targets": each.facts.targets,
                "sequences": len(each.place),
                "share": round(each.share, 6),
                "sequences_an_epoch": each.quota,
            }
            for name, each in self.facts.members.items()
        ]

    @property
    def teacher_name(self) -> str | None:
        """The spec of the teacher, online or of the cache; None without one."""
        return self.config.teacher or self.facts.teacher.get("spec")

    @property
    def loads(self) -> Path | None:
        """The run or checkpoint of `--load`; None for a model folder, whose weights `student` names."""
        path = self.config.checkpoint.load
        return None if path is None or is_model_folder(path) else path


@contextmanager
def allowing(config: DistillConfig, name: str, meaning: str = "") -> Iterator[None]:
    """Turn a refusal inside into a warning with `--allow-mismatch NAME`, and mention that option without it.

    meaning: what then happens.
    """
    try:
        yield
    except UsageError as error:
        if name in config.allow_mismatch:
            warn_early("mismatch", f"--allow-mismatch {name}: {error}{meaning and f'; {meaning}'}")
        elif name in ("tokenizer", "cache"):
            raise UsageError(f"{error}; or add --allow-mismatch {name}{meaning and f': {meaning}'}") from None
        else:
            raise


def resolve(given: DistillConfig, device: torch.device, held: ExitStack, earlier: Path | None = None) -> Recipe:
    """Resolve the options of a run, inside `run_device` and `same_ranks`, and load its teacher.

    It writes the data of the run alone. The folder is locked after all refusals that do not need it.

    held: releases the folder's lock, and ends a capture.
    earlier: for a trial, whose folder nobody else has: that of the run, whose attention, rate and alpha it would keep.

    UsageError: data, cache, student or options do not fit together. RunError: the folder cannot be written.
    """
    own = given.parallel
    layout = RankLayout.of_ranks(device, own.tensor_parallel, own.shard_size)
    teachers = layout  # whose ranks compute a forward of the teacher together
    if own.teacher_tensor_parallel not in (1, own.tensor_parallel):
        teachers = RankLayout.of_ranks(device, own.teacher_tensor_parallel, option="--teacher-tensor-parallel")
    if on_main(lambda: restarted(given)):
        given = replace(given, checkpoint=replace(given.checkpoint, resume="auto"))
    attention, rate, alpha = on_main(lambda: saved_choices(given, earlier or given.out))  # before the plan of memory
    free = free_everywhere(device, own.device_memory)
    with raise_on_all_ranks():
        for name, text in given.monitor.loggers:
            LOGGERS.get(name).ready(text)
        request, formats = open_models(given, device, teachers, held=held, trial=earlier is not None)
    teacher = request.teacher
    data = request.next()
    masked = on_main(data.masked)
    with raise_on_all_ranks():
        facts = data.facts
        seq_len, size = lengths(request, facts)
        _refuse_other_tokenizer(request, facts)
        compiles = _compiles(given, device)
        if request.student.attention != "auto" or attention is None:
            attention = request.student.attention
        attention = resolve_attention(
            attention, device, formats.high, compiled=compiles, length=seq_len, document_mask=masked
        )
        request = replace(request, student=replace(request.student, attention=attention))
        plan, micro = plan_memory(request, facts, formats, layout.data_size, free)
        together = plan.teacher == "fsdp" or own.teacher_tensor_parallel > 1
        if facts is not None and facts.alignment is not None and teacher is not None and together:
            raise UsageError(
                "a teacher with another tokenizer reads other numbers of rows on each rank, and cannot be sharded or "
                "cut over ranks; use --teacher-parallel replicate without --teacher-tensor-parallel, or a cache"
            )
        with_bounds(given.objective, facts, teacher is not None)
        refuse_with_tensor_ranks(request, facts, formats)
        lr, lr_from = _rate(given, request.student, size, rate)
    on_main(lambda: _look(given))
    resumed = held.enter_context(run_lock(given)) if earlier is None else False
    if teacher is not None:
        on_main(data.refuse_no_rows)
        with raise_on_all_ranks():  # before its text is packed, which may take hours
            teacher.load(sharded=plan.teacher == "fsdp")
            teacher.check(seq_len, given.data.document_mask is True)  # of auto `TextData` decides
    sources, rows = data.prepare(resumed)
    with raise_on_all_ranks():
        if layout.tensor_size > 1 and getattr(sources["train"], "write_collective", None) is not None:
            raise UsageError("--tensor-parallel cannot be used with text that ranks write; use --parallel ddp")
        objective = with_bounds(given.objective, sources["train"].facts, teacher is not None)
        objective, alpha_from = _with_alpha(objective, sources["train"].facts, alpha)
        if teacher is not None:
            _pack(teacher, rows, micro)
    return Recipe(
        given=given,
        config=replace(given, **data.options, objective=objective, optimizer=replace(given.optimizer, lr=lr)),
        lr_from=lr_from,
        alpha_from=alpha_from,
        device=device,
        layout=layout,
        resumed=resumed,
        student=request.student,
        teacher=teacher,
        sources=sources,
        data=data,
        formats=formats,
        plan=plan,
        micro=micro,
        total=given.total_steps(len(sources["train"])),
        compiles=compiles,
    )


def open_models(
    config: DistillConfig,
    device: torch.device,
    teachers: RankLayout,
    *,
    held: ExitStack,
    trial: bool,
    planned: torch.device | None = None,
) -> tuple[PlanRequest, Formats]:
    """Open student and online teacher, without their weights, as the request of the run's data; choose the formats.

    teachers: the ranks that compute a forward of the teacher together. held, trial: of `PlanRequest`. planned: the
    device of the teacher in a plan for other machines.
    """
    student = student_spec(config)
    formats = formats_of(config.precision, config.quantization, device)
    student = with_base_weights(config, student, formats, device)
    teacher = None
    if config.teacher is not None and config.online:
        from kdtrain.teaching.teacher import OnlineTeacher

        spec = teacher_spec(config.teacher, student)
        spec = with_weights(spec, config.teacher_weights, "--teacher-weights", config.parallel.teacher_parallel)
        teacher = OnlineTeacher.open(spec, planned or device, formats.high)
        if config.parallel.teacher_tensor_parallel > 1:
            teacher.cut(teachers, alike=min(teachers.tensor_size, config.parallel.tensor_parallel))

    def capturing(of_cache: CacheTeacherConfig) -> Callable[[Ordered], None]:
        from kdtrain.run import capture  # a run that captures nothing does without

        return capture.capturing(config, student, device, of_cache)

    request = PlanRequest(
        config=config,
        student=student,
        teacher=teacher,
        device=device,
        held=held,
        trial=trial,
        capturing=capturing,
        names=(*config.plans,),
    )
    return request, formats


def lengths(request: PlanRequest, facts: Facts | None) -> tuple[int, int | None]:
    """Return the tokens of a sequence and of the vocabulary; without facts of the data the latter may be unknown."""
    if facts is not None:
        return facts.seq_len, facts.vocab_size
    return request.config.data.seq_len, None if request.teacher is None else request.teacher.vocab_size


def plan_memory(
    request: PlanRequest, facts: Facts | None, formats: Formats, ranks: int, free: float | None
) -> tuple[MemoryPlan, int]:
    """Return the plan of memory on so many data ranks, and the sequences in a forward. UsageError: it does not fit.

    free: see `free_everywhere`.
    """
    config, teacher = request.config, request.teacher
    seq_len, size = lengths(request, facts)
    footprint = None if teacher is None else teacher.footprint(seq_len)
    job = job_of(config, formats.high, request.device, request.student, seq_len, size, footprint)
    micro = micro_batch(config, ranks, job, free)

    def can_cut(tensor: int) -> bool:
        cut = replace(config, parallel=replace(config.parallel, tensor_parallel=tensor))
        try:
            refuse_with_tensor_ranks(replace(request, config=cut), facts, formats)
        except UsageError:
            return False
        return True

    return plan_run(config, job and replace(job, micro_batch_size=micro), free, can_cut), micro


def _refuse_other_tokenizer(request: PlanRequest, facts: Facts | None) -> None:
    """Refuse a student with another tokenizer than the data have, or the teacher of text that is not packed yet."""
    student, theirs = request.student, None
    if facts is not None:
        theirs = facts.tokenizer_digest
    elif request.teacher is not None:
        theirs = tokenizer_digest(request.teacher.tokenizer)
    if student.init == "pretrained":
        ask_config(student)  # a model that is refused is not refused for its tokenizer
    meaning = "the ids are taken to mean the same, and the student gets the teacher's tokenizer"
    with allowing(request.config, "tokenizer", meaning):
        own = digest_of(student if student.tokenizer or student.init == "pretrained" else None)
        refuse_tokenizer(own, theirs)


def refuse_with_tensor_ranks(request: PlanRequest, facts: Facts | None, formats: Formats) -> None:
    """Raise a UsageError if a run has tensor ranks, and what they are not made for."""
    if request.config.parallel.tensor_parallel > 1:
        from kdtrain.parallel.tensor import refuse_with  # which other runs do not load

        refuse_with(request.config, request.student, lengths(request, facts)[1], facts, formats)


def _rate(
    config: DistillConfig, student: ModelSpec, vocab_size: int | None, earlier: float | None
) -> tuple[float, str | None]:
    """Return the peak learning rate, and where `--lr auto` took it from; earlier: the rate of a resumed run."""
    if config.optimizer.lr != "auto":
        return config.optimizer.peak_lr, None
    if earlier is not None:
        return earlier, "that of its checkpoints"
    lr, source = table_rate(config, student, vocab_size)
    return lr, f"{source}; kdtrain find-lr measures it"


def _with_alpha(objective: ObjectiveConfig, facts: Facts, earlier: float | None) -> tuple[ObjectiveConfig, str | None]:
    """Return `objective` with a number in place of an `auto` that cannot be measured, and why it cannot.

    earlier: that of a resumed run.
    """
    if objective.alpha != "auto":
        return objective, None
    if earlier is not None:
        return replace(objective, alpha=earlier), "as it began"
    if not all(each.labels for each in facts.taught):
        return replace(objective, alpha=objective.first_alpha), "as its cache lacks log p of labels"
    return objective, None


def _pack(teacher: "OnlineTeacher", rows: Source, micro: int) -> None:
    """Hold the teacher's weights in their format; what that costs is measured on the first of `rows`."""
    from kdtrain.teaching.teacher import MEASURED

    starts = range(0, min(len(rows), MEASURED), micro) if is_main() else range(0)
    first = (rows.read(np.arange(at, min(at + micro, len(rows), MEASURED))) for at in starts)
    teacher.pack(first, document_mask=rows.facts.document_mask)


@contextmanager
def run_device(config: DistillConfig) -> Iterator[torch.device]:
    """Yield the device of a run; while the block runs, torch is set as `--deterministic` and `--tf32` ask.

    UsageError: this machine does not have the device, or the device has no TF32.
    """
    options = config.precision
    memory = cast(Any, torch.utils.deterministic)
    if options.deterministic:
        # cuBLAS is deterministic only with this, and reads it once: it must be there before the first call of CUDA
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = pick_device(config.device)
    if options.tf32 and (why := why_not_tf32(device)) is not None:
        error = UsageError(f"--tf32 cannot be used on {device}: {why}; leave it out")
        raise error if device.type == "cuda" else reported(error)
    with ExitStack() as before:
        if options.deterministic:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            enabled = torch.are_deterministic_algorithms_enabled()
            before.callback(torch.use_deterministic_algorithms, enabled, warn_only=warns)
            before.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
            torch.use_deterministic_algorithms(True)  # also makes inductor choose kernels without timing them
            memory.fill_uninitialized_memory = False  # it would fill each new tensor, and nothing reads that
        if options.tf32:
            before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            # not `torch.backends.cuda.matmul.fp32_precision`, under which inductor fails
            torch.set_float32_matmul_precision("high")
        yield device


def student_spec(config: DistillConfig) -> ModelSpec:
    """Return the spec of the student, with its adapters, and a model folder's weights where `--load` names one.

    UsageError: it cannot be read, or the options do not fit it.
    """
    student = ModelSpec.read(config.student)
    folder = config.checkpoint.load
    model = folder is not None and is_model_folder(folder)
    if folder is not None and (model or is_adapter(folder)) and config.checkpoint.override_opt_param_scheduler:
        raise UsageError(
            f"--override-opt-param-scheduler has no effect with the {'model' if model else 'adapter'} folder {folder}, "
            "which has no schedule; leave it out"
        )
    if folder is not None and model:
        student = with_weights_of(folder, student)
    return replace(student, lora=_lora(config, student))


def _look(config: DistillConfig) -> None:
    """Look at the rows of caches from elsewhere. UsageError: one cannot be right."""
    addresses = [each for each in config.cache if parse_address(each)]
    if not addresses:
        return
    from kdtrain.cache.read.reader import open_cache
    from kdtrain.cache.tools.self_check import Look

    for cache in [open_cache(each) for each in addresses]:
        seen = Look.at(cache)
        for finding in () if seen is None else seen.findings:
            if "cache" not in config.allow_mismatch:
                raise UsageError(f"{cache.name} does not look right: {finding}; or add --allow-mismatch cache")
            warn_early("mismatch", f"--allow-mismatch cache: {cache.name} does not look right: {finding}")


def table_rate(config: DistillConfig, student: ModelSpec, vocab_size: int | None) -> tuple[float, str]:
    """Return the rate of `config.rates` for a run of `config`, and what it trains; vocab_size: the data's, if known."""
    begun = student.init != "scratch" or config.checkpoint.load is not None
    kind: Kind = "pretrained" if begun else "fresh"
    if student.lora is not None:
        kind = "lora"
    parameters = student_parameters(student, vocab_size)
    return rate_of(kind, parameters).lr, f"{WORDS[kind]}, {short(parameters)} parameters"


def _lora(config: DistillConfig, student: ModelSpec) -> LoraConfig | None:
    """Return the adapters that options, spec and `--load` agree on; refuse what cannot be, and a missing `peft`."""
    start = config.checkpoint.load
    if start is None or not is_adapter(start):
        lora = config.lora.over(student.lora)
    else:
        from kdtrain.models.adapters import read_adapter

        loaded = read_adapter(start)
        lora = config.lora.over(loaded if student.lora is None else student.lora.over(loaded))
        same = {f"lora_{name}": getattr(loaded, f"lora_{name}") for name in ("rank", "alpha", "rslora", "dora")}
        if lora is not None and replace(lora, **same) != lora:
            raise UsageError(f"--load {start} is {loaded}, and the options or the spec ask for {lora}; leave them out")
    if lora is None:
        return None
    optional("peft", "lora", "--lora-rank" if student.lora is None else f"[lora] in the spec of {student.name}")
    if config.freeze_head:
        raise UsageError("--freeze-head has no effect with adapters, which never train the head; leave it out")
    return lora


def with_base_weights(config: DistillConfig, spec: ModelSpec, formats: Formats, device: torch.device) -> ModelSpec:
    """Return the student's spec with the format of its frozen weights; refuse what that cannot be combined with."""
    spec = with_weights(spec, config.base_weights, "--base-weights", config.parallel.parallel)
    if (kind := spec.weights) is None:
        return spec
    what = f"--base-weights {kind}"
    if spec.lora is None:
        raise UsageError(f"{what} is for weights that are not trained, and all are; add --lora-rank, or leave it out")
    if spec.lora.lora_dora:
        raise UsageError(f"{what} cannot be used with --lora-dora, which needs whole weights; leave one of them out")
    if formats.choice is not None:
        raise UsageError(
            f"{what} cannot be used with --precision {formats.choice.mode}, which would quantise the frozen weights "
            "again; use --precision bf16, or leave it out"
        )
    from kdtrain.models.frozen import refuse_weights

    refuse_weights(kind, "--base-weights", device)
    return spec


def micro_batch(config: DistillConfig, ranks: int, job: Job | None, free: float | None) -> int:
    """Return the sequences in one forward of a rank; with `--micro-batch-size auto` as many as fit."""
    batch, micro = config.batch_size, config.micro_batch_given
    if (size := config.parallel.shard_size) is not None and ranks % size:
        raise UsageError(f"--shard-size {size} does not divide {ranks} ranks; choose one that does")
    if batch % (ranks * (micro or 1)):
        by = f" x --micro-batch-size {micro}" if micro else ""
        raise UsageError(f"--batch-size {batch} is not a multiple of {ranks} ranks{by}; choose one that is")
    if config.micro_batch_size == "auto":
        micro = fitting_micro_batch(config, batch // ranks, job, free)
    micro = micro or batch // ranks
    if config.precision.compile_mode == "reduce-overhead" and batch > ranks * micro:
        raise UsageError(
            "--compile-mode reduce-overhead replays CUDA graphs, which would overwrite the gradients that the "
            f"{batch // (ranks * micro)} micro-batches of a step add up; use --compile-mode max-autotune or default, "
            f"or --micro-batch-size {batch // ranks}"
        )
    return micro


def with_bounds(objective: ObjectiveConfig, facts: Facts | None, online: bool) -> ObjectiveConfig:
    """Return `objective` with default bounds of T; refuse what the targets are not good for.

    facts: of the data, if they are known; None for text that is not packed yet.
    """
    least, most = ANY_T if facts is None else facts.temperature_range
    low = objective.temperature_min or max(least, LEARNED_RANGE[0])
    high = objective.temperature_max or min(most, LEARNED_RANGE[1])
    used = {objective.temperature}
    if objective.schedules_temperature:
        used.add(objective.temperature_end)
    if objective.learns_temperature:
        used |= {low, high}
    if facts is not None:
        if facts.alignment is not None:
            _refuse_across_tokenizers(objective, used)
        _refuse_temperatures(objective, facts, used, online)
    if objective.learns_temperature and not low < objective.temperature < high:
        raise UsageError(f"--temperature {objective.temperature} must lie between the bounds {low:.3g} and {high:.3g}")
    if objective.distils and facts is not None and facts.taught:
        _refuse_divergence(
            objective, [(each.top_k, each.num_samples, each.targets == "dense") for each in facts.taught]
        )
    elif objective.distils and online:
        _refuse_divergence(objective, [(0, 0, True)])
    if low == high:
        return objective  # the cache is valid at one T only, which is fixed: there are no bounds
    return replace(objective, temperature_min=low, temperature_max=high)


def _refuse_across_tokenizers(objective: ObjectiveConfig, used: set[float]) -> None:
    """Refuse all but forward KL at T = 1, with the default tail; used: the temperatures that a run may reach."""
    if used != {1.0}:
        raise UsageError("across tokenizers the targets are right at T = 1 only; use --temperature 1")
    if "sampled" not in DIVERGENCES.get(parse(objective.divergence)[0]).accepts or objective.tail != "ghost":
        raise UsageError(
            f"--divergence {objective.divergence} with --tail {objective.tail} cannot be computed across "
            "tokenizers; use forward-kl, and leave --tail out"
        )


def _refuse_temperatures(objective: ObjectiveConfig, facts: Facts, used: set[float], online: bool) -> None:
    """Refuse temperatures that the targets do not have; used: those that a run may reach."""
    least, most = facts.temperature_range
    counts_only = any(each.targets == "sparse" and not each.top_k for each in facts.taught)
    more = ", or build a cache with --top-k, which serves others" if counts_only else ""
    if facts.taught and not all(least <= each <= most for each in used):
        raise UsageError(
            f"temperatures {sorted(used)} leave the cache's range of {least:.3g} to {most:.3g}; "
            f"choose --temperature, --temperature-end, --temperature-min and --temperature-max inside{more}"
        )
    learning = f"--temperature-mode {objective.temperature_mode} needs"
    if objective.learns_temperature and not online and not facts.taught:
        raise UsageError(
            f"{learning} a teacher to learn T from, and {facts.name} has none; use --temperature-mode fixed"
        )
    if objective.learns_temperature and least == most:
        raise UsageError(
            f"{learning} more than one T, and the cache is valid at T = {least:g} only; use --temperature-mode "
            f"fixed{more}"
        )


def _refuse_divergence(objective: ObjectiveConfig, targets: list[tuple[int, int, bool]]) -> None:
    """Refuse a divergence that cannot be computed; targets: of each kind the top-k, the samples, and if it is dense."""
    for top_k, samples, dense in targets:
        refuse(objective.divergence, objective.tail, top_k=top_k, num_samples=samples, dense=dense)
    grows = DIVERGENCES.has(objective.divergence.partition(":")[0], GROWS_WITH_T)
    whole = any(dense for *_, dense in targets)
    if grows and whole and TEMPERATURES.has(objective.temperature_mode, MAXIMIZES):
        raise UsageError(
            f"--temperature-mode {objective.temperature_mode} cannot be used with --divergence "
            f"{objective.divergence} over whole distributions, whose loss grows with T without limit; use "
            "--temperature-mode fixed, another --divergence, or a sparse cache"
        )


def _compiles(config: DistillConfig, device: torch.device) -> bool:
    if not config.precision.compile:
        return False
    if config.guards.nan_hooks == "always":
        log.info("not compiled: --nan-hooks always needs the modules, which a compiled graph does not have")
        return False
    if config.parallel.tensor_parallel > 1:
        log.info("not compiled: torch.compile fails on the parts of tensor ranks; the run is slower")
        return False
    reason = why_not_compile(device)
    if reason is not None:
        log.info("not compiled: %s; the run is slower, with the same result to rounding", reason)
    return reason is None
