"""The parts of a training run, put together from the options: data, student, teacher, temperature, optimizer, guards.

Text that does not come from a cache is packed once into a cache of bare tokens inside the run, so that all three read
the same way, in the same order, in flat memory, and a resume never tokenises again.

A run's models over its ranks: what each rank takes of a step, and how student and teacher are spread.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kdtrain.cache.manifest import Manifest, check_student, check_tokenizer
from kdtrain.cache.reader import CacheReader
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.commands.agreement import agree, weights_digest
from kdtrain.commands.build_cache import build_tokens, holds_tokens, logit_width
from kdtrain.commands.common import ask_layers, check_fits, digest_of, open_teacher, wide_head
from kdtrain.commands.resume import allowing
from kdtrain.commands.run_folder import deciding
from kdtrain.config import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.files import set_aside
from kdtrain.models.head import SplitModel, default_probe, split
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
from kdtrain.objective.temperature import Temperature, build_temperature
from kdtrain.parallel.memory_plan import Plan, fitting_micro_batch, free_everywhere, plan_run
from kdtrain.parallel.parallelize import Alone, Replicated, Sharded, shard
from kdtrain.precision import backends as formats
from kdtrain.precision.collect import Collector
from kdtrain.precision.controller import Adaptive, Controller
from kdtrain.precision.linear import convert
from kdtrain.precision.loss_scale import LossScale
from kdtrain.precision.modes import head_dtype, why_not_compile
from kdtrain.ranks import is_main, on_main, pick_device, raise_on_all_ranks, world_size
from kdtrain.training.data import CachedSource, OnlineSource, Source
from kdtrain.training.guards import DivergenceWatch, EarlyStopping, GradientExplosion, SpikeDetector
from kdtrain.training.nan_hooks import NanHooks
from kdtrain.training.run import Run
from kdtrain.training.schedule import decay_steps
from kdtrain.training.state import Progress, TrainState, make_optimizer
from kdtrain.training.student import DistillStep, HiddenPlan, plan_hidden_loss


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
    student: SplitModel, plan: Plan, device: torch.device, mode: formats.Formats, config: DistillConfig, compile: bool
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


def parallelize(plan: Plan, step: DistillStep) -> Alone:
    """What the training step is called through."""
    if plan.student == "single":
        return Alone(step, step.student)
    if plan.student == "fsdp":
        return Sharded(step, step.student)
    own = {name for name, _ in step.named_parameters() if not name.startswith("student.")}
    return Replicated(step, step.student, own, lambda: step.student.logits(default_probe(step.student.model)))


LEARNED_RANGE = (2 / 3, 4.0)
"""Bounds of a learnable T that were left open: far above them T^2 KL rises again, and has no top."""


@dataclass(frozen=True)
class Assembled:
    """A run that has not begun, and what it was made of.

    Args:
        run: its parts; `run.config` has the bounds of T filled in, `run.writers` is not open yet.
        spec: the student.
        manifest: the cache (or the run's own cache of tokens) it reads.
        folder: where that cache lies.
        hidden: the losses between hidden states, where they are asked for.
        lines: what is quantised, for the log.
        plan: how it is spread over ranks.
    """

    run: Run
    spec: ModelSpec
    manifest: Manifest
    folder: Path
    hidden: HiddenPlan | None = None
    lines: tuple[str, ...] = ()
    plan: Plan = field(default_factory=lambda: Plan("single", "none"))


def assemble(config: DistillConfig, goes_on: bool) -> Assembled:
    """Put together the run that `config` describes; but for the tokens of `--data`, nothing is written.

    Args:
        goes_on: whether `config.out` holds this run already.

    Raises:
        UsageError: data, cache, student or options do not go together.
    """
    device = pick_device(config.device)
    free = free_everywhere(device, config.parallel.device_memory)
    with raise_on_all_ranks():
        plan = formats.formats_of(config.precision, config.quantization, device)
        micro = micro_batch(config)
        if config.micro_batch_size == "auto":
            micro = fitting_micro_batch(config, device, free)
        over_ranks = plan_run(replace(config, micro_batch_size=micro), device, free)
    mode = plan.high
    if config.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself
        torch.use_deterministic_algorithms(True)
    teacher = None
    with raise_on_all_ranks():
        spec = read_spec(config.student)
        if config.teacher is not None:
            teacher = open_teacher(read_spec(config.teacher), loading_device(over_ranks.teacher, device), mode)
    folder = config.cache or Path(on_main(lambda: str(_tokens(config, spec, teacher, goes_on))))
    with raise_on_all_ranks():
        readers = {name: CacheReader(folder, name) for name in ("train", "validation")}
        manifest = readers["train"].manifest
        student = _student(config, spec, manifest, loading_device(over_ranks.student, device))
        hidden = plan_hidden_loss(config.objective, student, teacher, config.seed)
        config = _with_temperature_bounds(config, manifest)
        has_teacher = teacher is not None or manifest.codec.kind != "tokens"
        if has_teacher:
            _refuse_objective(config, manifest)
        lines = [*plan.lines, *_quantize(config, plan, student)]
        collector = _collector(config, plan, student)
        identity: dict[str, object] = {
            "cache": manifest.digest,
            "options": deciding(config),
            "student": {"name": spec.name, "architecture": architecture(student), "attention": spec.attention},
            "generation": generation_settings(student),
            "teacher": None if teacher is None else model_digest(teacher),
        }
    compared = {name: identity[name] for name in ("cache", "student", "teacher")}
    agree(lambda: {**compared, "the student's weights": weights_digest(student)})
    document_mask = manifest.settings.document_mask
    total = _total_steps(config, len(readers["train"]))
    compiles = _compiles(config, device)
    cut_student(student, over_ranks, device, plan, config, compiles)
    if teacher is not None:
        cut_teacher(teacher, over_ranks, device)
    if hidden is not None:
        hidden.loss.to(device)

    vocab_size = min(manifest.vocab_size, logit_width(student))
    sources: dict[str, Source] = {}
    for name, reader in readers.items():
        cached = CachedSource(reader, device, vocab_size)
        sources[name] = cached
        if teacher is not None:
            layers = hidden.teacher_layers if hidden is not None and name == "train" else ()
            asked = ask_layers(teacher, device, mode, layers)
            sources[name] = OnlineSource(cached, asked, wide_head(teacher), document_mask)
    temperature = _temperature(config, total).to(device)
    adaptive = _adaptive(config, plan, total)
    scale = LossScale(mode == "fp16")
    spikes = SpikeDetector.of(config.guards)
    divergence = DivergenceWatch(config.guards.divergence_factor)
    explosion, stopping = GradientExplosion(config.stopping), EarlyStopping(config.stopping)
    state = TrainState(
        student,
        temperature,
        make_optimizer(student, temperature, config.optimizer, config.objective, hidden.loss if hidden else None),
        Progress(),
        hidden.loss if hidden else nn.Module(),
        watchers={
            **{"spikes": spikes, "divergence": divergence, "explosion": explosion, "stopping": stopping},
            "scale": scale,
        },
    )
    if adaptive is not None:
        state.watchers["adaptive"] = adaptive
    step = DistillStep(
        student,
        temperature,
        config.objective,
        config.precision,
        vocab_size=vocab_size,
        seq_len=manifest.settings.seq_len,
        has_teacher=has_teacher,
        mode=mode,
        device=device,
        document_mask=document_mask,
        compile=compiles,
        by_layer=over_ranks.student == "fsdp",
        hidden_loss=hidden.loss if hidden else None,
        layers=hidden.student_layers if hidden else (),
        switch=plan.switch,
        quantized=None if plan.choice is None else plan.choice.mode,
    )
    store = _store(config)
    run = Run(
        config=config,
        planned=total,
        micro=micro,
        step=step,
        spread=parallelize(over_ranks, step),
        state=state,
        store=store,
        saver=Saver(store, config.checkpoint.async_save, config.checkpoint.disk_patience),
        train_source=sources["train"],
        validation_source=sources["validation"],
        spikes=spikes,
        divergence=divergence,
        explosion=explosion,
        stopping=stopping,
        scale=scale,
        adaptive=adaptive,
        collector=collector,
        hooks=NanHooks(step) if config.guards.nan_hooks == "always" else None,
        identity=identity,
    )
    return Assembled(run, spec, manifest, folder, hidden, tuple(lines), over_ranks)


def _quantize(config: DistillConfig, plan: formats.Formats, student: SplitModel) -> list[str]:
    """Make the student's linear layers switchable where the plan wants it; what was done, for the log."""
    if plan.choice is None:
        return []
    options, model = config.precision, student.model
    first, last = options.quant_skip_first, options.quant_skip_last
    head = model.get_output_embeddings()
    done = convert(model, plan.switch, plan.choice.backend, head=head, skip_first=first, skip_last=last)
    return [str(done)]


def _adaptive(config: DistillConfig, plan: formats.Formats, total: int) -> Adaptive | None:
    if plan.choice is None or not config.quantization.time_resume:
        return None
    options = config.optimizer
    decay_start = total - decay_steps(total, options)
    policy = formats.policy(config.quantization, plan.choice.mode, options.lr_schedule, decay_start)
    forward_only = config.quantization.quant_fallback_scope == "forward"
    return Adaptive(Controller(policy), plan.switch, "high-forward" if forward_only else "high")


def _collector(config: DistillConfig, plan: formats.Formats, student: SplitModel) -> Collector | None:
    pattern, every = config.precision.collect_tensors, config.precision.collect_every
    if pattern is None:
        return None
    dtype = head_dtype(plan.high) or torch.float32
    path = config.out / "tensors.h5" if is_main() else None
    return Collector(path, student.model, pattern, every, plan.recipe, dtype)


def _store(config: DistillConfig) -> Store:
    keep = config.checkpoint
    return Store(
        config.out / "checkpoints",
        keep_rolling=keep.keep_rolling,
        keep_epochs=keep.keep_epochs,
        keep_special=keep.keep_special,
        keep_aside=keep.keep_aside,
    )


def _tokens(config: DistillConfig, spec: ModelSpec, teacher: SplitModel | None, goes_on: bool) -> Path:
    """The run's own cache of bare tokens, by the teacher's tokenizer, or by the student's where there is no teacher."""
    tokenizer_of = spec if config.teacher is None else read_spec(config.teacher)
    if teacher is not None:
        check_fits(teacher, tokenizer_of.name, config.data.seq_len, config.data.document_mask)
    tokenizer = load_tokenizer(tokenizer_of)
    width = len(tokenizer) if teacher is None else logit_width(teacher)
    folder = config.out / "data"
    try:
        build_tokens(folder, config.data, tokenizer, width)
    except UsageError:
        if goes_on or not holds_tokens(folder):
            raise
        set_aside(config.out, folder.name, "left")  # other tokens, of a try that was refused before it became a run
        build_tokens(folder, config.data, tokenizer, width)
    return folder


def _student(config: DistillConfig, spec: ModelSpec, manifest: Manifest, device: torch.device) -> SplitModel:
    """The student, its weights in fp32, proven to split into backbone and head, and to hold the vocabulary."""
    named = spec.config is None or "vocab_size" in spec.config
    model = load_student(spec, vocab_size=None if named else manifest.vocab_size, seed=config.seed, device=str(device))
    if config.activation_checkpointing:
        checkpoint_activations(model)
    student = split(model)
    check_student(manifest, logit_width(student))
    check_fits(student, spec.name, manifest.settings.seq_len, manifest.settings.document_mask)
    with allowing("tokenizer", config):
        check_tokenizer(manifest, digest_of(spec if spec.tokenizer or spec.init == "pretrained" else None))
    if not student.fused:
        log.info("student %s: output head not split off: %s", spec.name, student.reason)
    return student


def _with_temperature_bounds(config: DistillConfig, manifest: Manifest) -> DistillConfig:
    """`config` with the bounds of T that were left open, and a T that the cache is right at."""
    objective = config.objective
    valid = manifest.temperature_range or {"min": 0.25, "max": 20.0}
    low = objective.temperature_min or max(valid["min"], LEARNED_RANGE[0])
    high = objective.temperature_max or min(valid["max"], LEARNED_RANGE[1])
    used = [objective.temperature]
    used += [objective.temperature_end] if objective.temperature_mode == "schedule" else []
    learnable = objective.learns_temperature
    used += [low, high] if learnable else []
    if manifest.codec.kind != "tokens" and not all(valid["min"] <= each <= valid["max"] for each in used):
        raise UsageError(
            f"temperatures {sorted(set(used))} leave the cache's range of {valid['min']:.3g} to {valid['max']:.3g}; "
            "choose --temperature, --temperature-end, --temperature-min and --temperature-max inside"
        )
    if learnable and valid["min"] == valid["max"]:
        raise UsageError(
            f"--temperature-mode {objective.temperature_mode} needs more than one T, and the cache is right at T = "
            f"{valid['min']:g} only; use --temperature-mode fixed"
        )
    if learnable and not low < objective.temperature < high:
        raise UsageError(f"--temperature {objective.temperature} must lie between the bounds {low:.3g} and {high:.3g}")
    if low == high:
        return config  # a cache that is right at one T only, and a T that stays there: nothing is to be bounded
    return replace(config, objective=replace(objective, temperature_min=low, temperature_max=high))


def _refuse_objective(config: DistillConfig, manifest: Manifest) -> None:
    objective, codec = config.objective, manifest.codec
    if objective.distils:
        dense = codec.kind != "sparse"
        refuse(objective.divergence, objective.tail, top_k=codec.top_k, num_samples=codec.num_samples, dense=dense)
        if dense and (objective.divergence, objective.temperature_mode) == ("tvd", "adversarial"):
            raise UsageError(
                "--temperature-mode adversarial cannot be used with --divergence tvd over whole distributions, whose "
                "loss grows with T without end; use --temperature-mode fixed, another --divergence, or a sparse cache"
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
        total_steps=max(total - 1, 1),  # the last step is number total - 1 and stands at the end of a schedule
    )


def _total_steps(config: DistillConfig, sequences: int) -> int:
    if config.epochs is not None:
        return max(round(config.epochs * sequences / config.batch_size), 1)
    if config.steps is None and config.checkpoint.override_opt_param_scheduler and config.optimizer.decay_steps:
        return config.optimizer.warmup_steps + config.optimizer.decay_steps  # a decay alone, from another run's weights
    return config.steps or 2000


def _compiles(config: DistillConfig, device: torch.device) -> bool:
    if not config.precision.compile:
        return False
    if config.guards.nan_hooks == "always":
        log.info("not compiled: --nan-hooks always looks at every module, which a compiled graph does not know")
        return False
    reason = why_not_compile(device)
    if reason is not None:
        log.info("not compiled: %s; the run is slower, and its result the same to rounding", reason)
    return reason is None
