"""Builds a training run from its options: data, student, teacher, temperature, optimizer, guards.

A run without a cache packs its text once into a cache of bare tokens in its own folder. All runs then read in the same
way and the same order, in constant memory, and a resumed run does not tokenize again.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from kdtrain.cache.manifest import Manifest, check_student, check_tokenizer
from kdtrain.cache.reader import CacheReader
from kdtrain.commands.agreement import agree, weights_digest
from kdtrain.commands.build_cache import build_tokens, holds_tokens
from kdtrain.commands.common import (
    check_fits,
    compiled_teacher,
    digest_of,
    open_teacher,
    teacher_hidden_states,
    wide_head,
)
from kdtrain.commands.resume import allowing
from kdtrain.commands.run_folder import deciding
from kdtrain.config import DistillConfig
from kdtrain.config.choices import DIVERGENCES, GROWS_WITH_T, MAXIMIZES, TEMPERATURES
from kdtrain.errors import UsageError
from kdtrain.files import set_aside
from kdtrain.models.attention import choose_kernel
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import (
    architecture,
    checkpoint_activations,
    generation_settings,
    load_student,
    load_tokenizer,
    model_digest,
)
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.monitor.progress import log
from kdtrain.objective.divergence import refuse
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.temperature import Temperature, build_temperature
from kdtrain.parallel.memory_plan import Plan, fitting_micro_batch, free_everywhere, plan_run
from kdtrain.parallel.parallelize import parallelize, shard
from kdtrain.precision.backends import Formats, formats_of, policy
from kdtrain.precision.collect import Collector
from kdtrain.precision.controller import Adaptive, PrecisionController
from kdtrain.precision.linear import convert
from kdtrain.precision.modes import compiles_teacher, head_dtype, why_not_compile, why_not_tf32
from kdtrain.ranks import is_main, on_main, pick_device, raise_on_all_ranks, reported, world_size
from kdtrain.training.data import CachedSource, OnlineSource, Source
from kdtrain.training.schedule import decay_start, total_steps
from kdtrain.training.student import Student, plan_hidden_loss
from kdtrain.training.trainer import Trainer


def micro_batch(config: DistillConfig) -> int:
    """Return the number of sequences in one forward of a rank; with `--micro-batch-size auto` the largest.

    Raises:
        UsageError: the batch size or `--shard-size` does not fit the number of ranks, or `--compile-mode` the size.
    """
    ranks, batch, micro = world_size(), config.batch_size, config.micro_batch_given
    if (size := config.parallel.shard_size) is not None and ranks % size:
        raise UsageError(f"--shard-size {size} does not divide {ranks} ranks; choose one that does")
    if batch % (ranks * (micro or 1)):
        by = f" x --micro-batch-size {micro}" if micro else ""
        raise UsageError(f"--batch-size {batch} is not a multiple of {ranks} ranks{by}; choose one that is")
    micro = micro or batch // ranks
    if config.precision.compile_mode == "reduce-overhead" and batch > ranks * micro:
        raise UsageError(
            "--compile-mode reduce-overhead replays CUDA graphs, which would overwrite the gradients that the "
            f"{batch // (ranks * micro)} micro-batches of a step add up; use --compile-mode max-autotune or default, "
            f"or --micro-batch-size {batch // ranks}"
        )
    return micro


@contextmanager
def run_device(config: DistillConfig) -> Iterator[torch.device]:
    """Yield the device of a run; while the block runs, torch is set as `--deterministic` and `--tf32` ask.

    Raises:
        UsageError: this machine does not have the device, or the device has no TF32.
    """
    asked, memory = config.precision, cast(Any, torch.utils.deterministic)
    if asked.deterministic:
        # cuBLAS is deterministic only with this, and reads it once: it must be there before the first call of CUDA
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = pick_device(config.device)
    if asked.tf32 and (why := why_not_tf32(device)) is not None:
        error = UsageError(f"--tf32 cannot be used on {device}: {why}; leave it out")
        raise error if device.type == "cuda" else reported(error)
    with ExitStack() as before:
        if asked.deterministic:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            enabled = torch.are_deterministic_algorithms_enabled()
            before.callback(torch.use_deterministic_algorithms, enabled, warn_only=warns)
            before.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
            torch.use_deterministic_algorithms(True)  # also makes inductor choose kernels without timing them
            memory.fill_uninitialized_memory = False  # it would fill each new tensor, and nothing reads that
        if asked.tf32:
            before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            # not `torch.backends.cuda.matmul.fp32_precision`, under which inductor fails
            torch.set_float32_matmul_precision("high")
        yield device


def _loading_device(kind: str, device: torch.device) -> torch.device:
    """Where a model is loaded: a model that is sharded later may be too large for one device."""
    return torch.device("cpu") if kind == "fsdp" else device


LEARNED_RANGE = (2 / 3, 4.0)
"""Default bounds of a learnable T: far above them T^2 KL rises again without limit."""


@dataclass(frozen=True)
class BuiltRun:
    """A run that has not started, and its parts.

    Args:
        trainer: the run; `trainer.config` has the bounds of T filled in, and its logs are not open yet.
        spec: the student.
        manifest: of the cache, or of the run's own cache of tokens.
        folder: that cache.
        plan: how the run is parallelized.
        quantised: log lines on what is quantised.
        hidden: log lines on which hidden states are compared.
    """

    trainer: Trainer
    spec: ModelSpec
    manifest: Manifest
    folder: Path
    plan: Plan
    quantised: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The student's parameters over all ranks, each counted once."""
        return sum(each.numel() for each in self.trainer.student.model.parameters())

    def open(self, init: str | None = None) -> None:
        """Open the trainer's logs; `init` is where the student's weights come from, None: as in its spec."""
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        self.trainer.open(tokenizer, init=init or self.spec.init, samples=self.manifest.codec.num_samples)


def build_run(config: DistillConfig, resuming: bool) -> BuiltRun:
    """Build the run of `config`, inside `run_device`; writes nothing except the tokens of `--data`.

    Args:
        resuming: whether `config.out` already holds this run.

    Raises:
        UsageError: data, cache, student or options do not fit together.
    """
    device = pick_device(config.device)
    free = free_everywhere(device, config.parallel.device_memory)
    with raise_on_all_ranks():
        formats = formats_of(config.precision, config.quantization, device)
        micro = micro_batch(config)
        if config.micro_batch_size == "auto":
            micro = micro_batch(replace(config, micro_batch_size=fitting_micro_batch(config, device, free)))
        plan = plan_run(replace(config, micro_batch_size=micro), device, free)
    teacher = None
    with raise_on_all_ranks():
        spec = read_spec(config.student)
        if config.teacher is not None:
            teacher = open_teacher(read_spec(config.teacher), _loading_device(plan.teacher, device), formats.high)
    folder = config.cache or Path(on_main(lambda: str(_tokens(config, spec, teacher, resuming))))
    with raise_on_all_ranks():
        readers = {name: CacheReader(folder, name) for name in ("train", "validation")}
        manifest = readers["train"].manifest
        model = _model(config, spec, manifest, _loading_device(plan.student, device))
        hidden = plan_hidden_loss(config.objective, model, teacher, config.seed)
        config = _with_temperature_bounds(config, manifest)
        has_teacher = teacher is not None or manifest.codec.kind != "tokens"
        if has_teacher:
            _check_objective(config, manifest)
        lines = list(formats.lines)
        if formats.choice is not None:
            skip = {"skip_first": config.precision.quant_skip_first, "skip_last": config.precision.quant_skip_last}
            head = model.model.get_output_embeddings()
            lines.append(str(convert(model.model, formats.switch, formats.choice.backend, head=head, **skip)))
        collector = None
        if (pattern := config.precision.collect_tensors) is not None:
            path = config.out / "tensors.h5" if is_main() else None
            dtype = head_dtype(formats.high) or torch.float32
            every, raw = config.precision.collect_every, config.precision.collect_raw
            collector = Collector(path, model.model, pattern, every, formats.recipe, dtype, raw)
        identity: dict[str, object] = {
            "cache": manifest.digest,
            "options": deciding(config),
            "student": {"name": spec.name, "architecture": architecture(model), "attention": spec.attention},
            "generation": generation_settings(model),
            "teacher": None if teacher is None else model_digest(teacher),
        }
    compared = {name: identity[name] for name in ("cache", "student", "teacher")}
    agree(lambda: {**compared, "the student's weights": weights_digest(model)})
    total = total_steps(config, len(readers["train"]))
    compiles = _compiles(config, device)
    if plan.student == "fsdp":  # before the optimizer, which holds the parameters
        shard(model, device, dtype=formats.gathered, shard_size=plan.shard_size)
    if teacher is not None and plan.teacher == "fsdp":
        shard(teacher, device, shard_size=plan.shard_size)
    compiled = compiled_teacher(teacher) if teacher is not None and compiles_teacher(compiles, device) else None

    if not manifest.settings.document_mask:
        length, narrow = manifest.settings.seq_len, head_dtype(formats.high)
        if (chosen := choose_kernel(model.model.config, micro, length, narrow, device)) is not None:
            log.info("%s", chosen)

    objective = config.objective
    student = Student(
        model,
        DistillationLoss(
            divergence=objective.divergence,
            alpha=objective.alpha if has_teacher else 0.0,
            tail=objective.tail,
            temperature=_temperature(config, total).to(device),
        ),
        vocab_size=min(manifest.vocab_size, model.vocab_size),
        mode=formats.high,
        document_mask=manifest.settings.document_mask,
        compile=compiles,
        compile_mode=config.precision.torch_compile_mode,
        by_layer=plan.student != "single",
        hidden_loss=None if hidden is None else hidden.loss.to(device),
        hidden_weight=objective.hidden_weight,
        layers=() if hidden is None else hidden.student_layers,
        switch=formats.switch,
        quantized=None if formats.choice is None else formats.choice.mode,
    )
    sources: dict[str, Source] = {}
    for name, reader in readers.items():
        cached = CachedSource(reader, device, student.vocab_size)
        sources[name] = cached
        if teacher is not None:
            layers = hidden.teacher_layers if hidden is not None and name == "train" else ()
            forward = teacher_hidden_states(teacher, device, formats.high, layers, compiled)
            sources[name] = OnlineSource(cached, forward, wide_head(teacher), student.document_mask)
    trainer = Trainer(
        config,
        student,
        sources["train"],
        sources["validation"],
        total_steps=total,
        micro=micro,
        seq_len=manifest.settings.seq_len,
        has_teacher=has_teacher,
        engine=parallelize(student, plan.student, plan.accumulate),
        adaptive=_adaptive(config, formats, total),
        collector=collector,
        identity=identity,
    )
    described = () if hidden is None else (hidden.describe(),)
    return BuiltRun(trainer, spec, manifest, folder, plan, tuple(lines), described)


def _adaptive(config: DistillConfig, formats: Formats, total: int) -> Adaptive | None:
    if formats.choice is None or not config.quantization.time_resume:
        return None
    options = config.optimizer
    last = decay_start(total, options)
    rules = policy(config.quantization, formats.choice.mode, options.lr_schedule, last)
    forward_only = config.quantization.quant_fallback_scope == "forward"
    return Adaptive(PrecisionController(rules), formats.switch, "high-forward" if forward_only else "high")


def _tokens(config: DistillConfig, spec: ModelSpec, teacher: SplitModel | None, resuming: bool) -> Path:
    """Build the run's own cache of bare tokens with the teacher's tokenizer, or without a teacher the student's."""
    tokenizer_of = spec if config.teacher is None else read_spec(config.teacher)
    if teacher is not None:
        check_fits(teacher, tokenizer_of.name, config.data.seq_len, config.data.document_mask)
    tokenizer = load_tokenizer(tokenizer_of)
    width = len(tokenizer) if teacher is None else teacher.vocab_size
    folder = config.out / "data"
    try:
        build_tokens(folder, config.data, tokenizer, width)
    except UsageError:
        if resuming or not holds_tokens(folder):
            raise
        set_aside(config.out, folder.name, "left")  # the tokens of an earlier attempt with other options
        build_tokens(folder, config.data, tokenizer, width)
    return folder


def _model(config: DistillConfig, spec: ModelSpec, manifest: Manifest, device: torch.device) -> SplitModel:
    """Load the student with fp32 weights, split it into backbone and head, and check it against the cache."""
    named = spec.config is None or "vocab_size" in spec.config
    model = load_student(spec, vocab_size=None if named else manifest.vocab_size, seed=config.seed, device=str(device))
    if config.activation_checkpointing:
        checkpoint_activations(model)
    student = split(model)
    check_student(manifest, student.vocab_size)
    check_fits(student, spec.name, manifest.settings.seq_len, manifest.settings.document_mask)
    with allowing("tokenizer", config):
        check_tokenizer(manifest, digest_of(spec if spec.tokenizer or spec.init == "pretrained" else None))
    if not student.fused:
        log.info("student %s: output head not split off: %s", spec.name, student.reason)
    return student


def _with_temperature_bounds(config: DistillConfig, manifest: Manifest) -> DistillConfig:
    """Return `config` with default bounds of T; refuse a T outside the range in which the cache is valid."""
    objective = config.objective
    valid = manifest.temperature_range or {"min": 0.25, "max": 20.0}
    low = objective.temperature_min or max(valid["min"], LEARNED_RANGE[0])
    high = objective.temperature_max or min(valid["max"], LEARNED_RANGE[1])
    used = [objective.temperature]
    used += [objective.temperature_end] if objective.schedules_temperature else []
    learnable = objective.learns_temperature
    used += [low, high] if learnable else []
    more = ", or build a cache with --top-k, which serves others" if manifest.codec.counts_only else ""
    if manifest.codec.kind != "tokens" and not all(valid["min"] <= each <= valid["max"] for each in used):
        raise UsageError(
            f"temperatures {sorted(set(used))} leave the cache's range of {valid['min']:.3g} to {valid['max']:.3g}; "
            f"choose --temperature, --temperature-end, --temperature-min and --temperature-max inside{more}"
        )
    if learnable and valid["min"] == valid["max"]:
        raise UsageError(
            f"--temperature-mode {objective.temperature_mode} needs more than one T, and the cache is valid at T = "
            f"{valid['min']:g} only; use --temperature-mode fixed{more}"
        )
    if learnable and not low < objective.temperature < high:
        raise UsageError(f"--temperature {objective.temperature} must lie between the bounds {low:.3g} and {high:.3g}")
    if low == high:
        return config  # the cache is valid at one T only, which is fixed: there are no bounds
    return replace(config, objective=replace(objective, temperature_min=low, temperature_max=high))


def _check_objective(config: DistillConfig, manifest: Manifest) -> None:
    objective, codec = config.objective, manifest.codec
    if objective.distils:
        dense = codec.kind != "sparse"
        refuse(objective.divergence, objective.tail, top_k=codec.top_k, num_samples=codec.num_samples, dense=dense)
        grows = dense and DIVERGENCES.has(objective.divergence.partition(":")[0], GROWS_WITH_T)
        if grows and TEMPERATURES.has(objective.temperature_mode, MAXIMIZES):
            raise UsageError(
                f"--temperature-mode {objective.temperature_mode} cannot be used with --divergence "
                f"{objective.divergence} over whole distributions, whose loss grows with T without limit; use "
                "--temperature-mode fixed, another --divergence, or a sparse cache"
            )


def _temperature(config: DistillConfig, total: int) -> Temperature:
    objective = config.objective
    low, high = objective.temperature_min, objective.temperature_max
    return build_temperature(
        objective.temperature_mode,
        start=objective.temperature,
        minimum=objective.temperature if low is None else low,
        maximum=objective.temperature if high is None else high,
        end=objective.temperature_end,
        schedule=objective.temperature_schedule,
        total_steps=max(total - 1, 1),  # steps count from 0: step total - 1 is the end of the schedule
    )


def _compiles(config: DistillConfig, device: torch.device) -> bool:
    if not config.precision.compile:
        return False
    if config.guards.nan_hooks == "always":
        log.info("not compiled: --nan-hooks always needs the modules, which a compiled graph does not have")
        return False
    reason = why_not_compile(device)
    if reason is not None:
        log.info("not compiled: %s; the run is slower, with the same result to rounding", reason)
    return reason is None
