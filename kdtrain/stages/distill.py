"""`kdtrain distill`: train a student from a cache, from an online teacher, or by cross-entropy on text.

Text that does not come from a cache is packed once into a cache of bare tokens inside the run, so that all three read
the same way, in the same order, in flat memory, and a resume never tokenises again.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kdtrain.cache.provenance import Manifest, check_student, check_tokenizer
from kdtrain.cache.reader import CacheReader
from kdtrain.checkpoint.store import Store, load
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import (
    architecture,
    checkpoint_activations,
    export_model,
    load_student,
    load_tokenizer,
    model_digest,
)
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.writers import Writers
from kdtrain.objective.divergence import refuse
from kdtrain.objective.temperature import Temperature, build_temperature
from kdtrain.parallel.world import peak_memory_mb, pick_device, refuse_many_processes
from kdtrain.precision.modes import pick_mode, why_not_compile
from kdtrain.stages.build import build_tokens, holds_tokens, logit_width
from kdtrain.stages.common import ask_layers, check_fits, digest_of, open_teacher, show, wide_head
from kdtrain.stages.run_folder import claim, deciding, make, refuse_changes, write_description, write_origin
from kdtrain.training.hidden import HiddenPlan, plan_hidden_loss
from kdtrain.training.loop import Run, train
from kdtrain.training.source import CachedSource, OnlineSource, Source
from kdtrain.training.state import Progress, TrainState, make_optimizer
from kdtrain.training.step import DistillStep
from kdtrain.training.stopping import interruptible

LEARNED_RANGE = (2 / 3, 4.0)
"""Bounds of a learnable T that were left open: far above them T^2 KL rises again, and has no top."""


def main(config: DistillConfig) -> int:
    """Train the student of `config` and export it; 0 when done or gracefully stopped.

    Raises:
        UsageError: data, cache, student or options do not go together.
        RunError: the training failed.
    """
    try:
        with interruptible():
            return _distill(config)
    except KeyboardInterrupt:
        log.info("stopped while not training; the same command goes on")
        show(f"distill {config.out}", {"run": str(config.out), "stopped_by": "signal"}, config.json)
        return 0


def _distill(config: DistillConfig) -> int:
    setup_logging()
    device = pick_device(config.device)
    mode = pick_mode(config.precision.precision, device)
    refuse_many_processes()
    if config.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself
        torch.use_deterministic_algorithms(True)
    spec = read_spec(config.student)
    goes_on = claim(config)
    teacher = None if config.teacher is None else open_teacher(read_spec(config.teacher), device, mode)
    folder = config.cache or _tokens(config, spec, teacher, goes_on)
    readers = {name: CacheReader(folder, name) for name in ("train", "validation")}
    manifest = readers["train"].manifest
    student = _student(config, spec, manifest, device)
    hidden = plan_hidden_loss(config.objective, student, teacher, config.seed)
    config = _with_temperature_bounds(config, manifest)
    document_mask = manifest.settings.document_mask
    total = _total_steps(config, len(readers["train"]))

    vocab_size = min(manifest.vocab_size, logit_width(student))
    sources: dict[str, Source] = {}
    for name, reader in readers.items():
        cached = CachedSource(reader, device, vocab_size)
        sources[name] = cached
        if teacher is not None:
            layers = hidden.teacher_layers if hidden is not None and name == "train" else ()
            asked = ask_layers(teacher, device, mode, layers)
            sources[name] = OnlineSource(cached, asked, wide_head(teacher), document_mask)
    has_teacher = teacher is not None or manifest.codec.kind != "tokens"
    if has_teacher:
        _refuse_objective(config, manifest)
    temperature = _temperature(config, total).to(device)
    state = TrainState(
        student,
        temperature,
        make_optimizer(student, temperature, config.optimizer, config.objective, hidden.loss if hidden else None),
        Progress(),
        hidden.loss if hidden else nn.Module(),
    )
    run = Run(
        config=config,
        total=total,
        micro=config.micro_batch_size or config.batch_size,
        step=DistillStep(
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
            compile=_compiles(config, device),
            hidden_loss=hidden.loss if hidden else None,
            layers=hidden.student_layers if hidden else (),
        ),
        state=state,
        store=Store(config.out / "checkpoints", config.checkpoint.keep_rolling),
        writers=None,  # type: ignore[arg-type]  # opened below, once the step to go on from is known
        train_source=sources["train"],
        validation_source=sources["validation"],
        identity={
            "cache": manifest.digest,
            "options": deciding(config),
            "student": {"name": spec.name, "architecture": architecture(student), "attention": spec.attention},
            "teacher": None if teacher is None else model_digest(teacher),
        },
    )
    make(config.out)
    resumed = None
    if goes_on or config.checkpoint.resume not in ("auto", "never"):
        resumed = _resume(run)  # before anything is written: a run with other options is refused and stays as it was
    write_description(config, _facts(run, spec, manifest))
    setup_logging(config.out / "train.log")
    at = state.progress
    try:
        run.writers = Writers(config.out, at.step, at.validated_step, config.monitor.tensorboard)
        _announce(run, spec, manifest, resumed, hidden)
        train(run)
        run.writers.close()
    except OSError as error:
        where = error.filename or config.out
        raise RunError(f"{where}: {error.strerror or error}; published checkpoints are intact") from None
    return _finish(run, folder)


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
        shutil.rmtree(folder)  # other tokens, of a try that was refused before it became a run
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
    with _allowing("tokenizer", config):
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
    if learnable and not low < objective.temperature < high:
        raise UsageError(f"--temperature {objective.temperature} must lie between the bounds {low:.3g} and {high:.3g}")
    if low == high:
        return config  # a cache that is right at one T only, and a T that stays there: nothing is to be bounded
    return replace(config, objective=replace(objective, temperature_min=low, temperature_max=high))


def _refuse_objective(config: DistillConfig, manifest: Manifest) -> None:
    objective, codec = config.objective, manifest.codec
    if objective.distils:
        dense = codec.kind != "sparse"
        refuse(objective.divergence, objective.tail, head=codec.head, draws=codec.draws, dense=dense)
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
    return config.steps or 2000


def _compiles(config: DistillConfig, device: torch.device) -> bool:
    if not config.precision.compile:
        return False
    reason = why_not_compile(device)
    if reason is not None:
        log.info("not compiled: %s; the run is slower, and its result the same to rounding", reason)
    return reason is None


def _resume(run: Run) -> Path | None:
    """Take over the checkpoint that `--resume` names, and say which; None and anew where `auto` finds none."""
    wanted = run.config.checkpoint.resume
    if wanted == "auto":
        name, damaged = run.store.newest_valid()
        for text in damaged:
            log.warning(text)
        if name is None:
            log.warning("no valid checkpoint in %s; starting anew", run.store.folder)
            return None
        path = (run.store.folder / name).resolve()
    else:
        path = run.store.choose(wanted)
    checkpoint = load(path)
    refuse_changes(checkpoint.state["options"], run.config)
    for what in ("cache", "student", "teacher"):
        with _allowing(what, run.config):
            if checkpoint.state[what] != run.identity[what]:
                raise UsageError(f"{path} was trained with another {what}; give that one, or name another --out")
    run.state.load(checkpoint.tensors, checkpoint.state)
    run.step.temperature.set_step(max(run.state.progress.step - 1, 0))
    if run.state.progress.step > run.total:
        raise UsageError(f"{path.name} is beyond --steps {run.total}; raise --steps or name another --out")
    run.checkpointed = (run.state.progress.step, run.state.progress.validated_step)
    best = f"step-{run.state.progress.best_step or 0:08d}"
    if run.store.problem(best) is None:
        run.store.link("best", best)  # a kill may have come between the checkpoint and its link
    if path.parent != run.store.folder.resolve():
        return path
    if wanted == "auto":
        return run.store.folder / path.name  # what is later is damaged, and stays to be looked at
    if left := run.store.set_aside_after(run.state.progress.step):
        log.info("set aside %s, which this run goes back behind", ", ".join(left))
    return run.store.folder / path.name


@contextmanager
def _allowing(name: str, config: DistillConfig) -> Iterator[None]:
    """Turn a refusal inside into a warning where `--allow-mismatch NAME` was given, and say so where it was not."""
    try:
        yield
    except UsageError as error:
        if name in config.allow_mismatch:
            log.warning("--allow-mismatch %s: %s", name, error)
        elif name in ("tokenizer", "cache"):
            raise UsageError(f"{error}; or add --allow-mismatch {name}") from None
        else:
            raise


def _facts(run: Run, spec: ModelSpec, manifest: Manifest) -> dict[str, Any]:
    """What environment.json says beside the libraries."""
    parameters = sum(each.numel() for each in run.state.student.parameters())
    return {
        "student": {"name": spec.name, "parameters": parameters, "vocab_size": logit_width(run.state.student)},
        "cache": manifest.digest,
        "device": str(run.step.device),
        "mode": run.step.mode,
        "compiled": run.step.compile_objective,
    }


def _announce(run: Run, spec: ModelSpec, manifest: Manifest, resumed: Path | None, hidden: HiddenPlan | None) -> None:
    config, settings = run.config, manifest.settings
    parameters = sum(each.numel() for each in run.state.student.parameters())
    distils = run.step.has_teacher and config.objective.distils
    kind = f"distillation from {_teacher_name(config, manifest)}" if distils else "cross-entropy"
    log.info(
        "%s: %s of %s (%s parameters), %d steps of %d x %d tokens, %s on %s",
        config.out,
        kind,
        spec.name,
        f"{parameters:,}",
        run.total,
        config.batch_size,
        settings.seq_len,
        run.step.mode,
        run.step.device,
    )
    if hidden is not None:
        log.info(hidden.describe())
    if resumed is not None:
        log.info("going on from %s", resumed)
    event = "start" if resumed is None else "resume"
    run.writers.event(event, run.state.progress.step)


def _teacher_name(config: DistillConfig, manifest: Manifest) -> str:
    return config.teacher or str((manifest.settings.teacher or {}).get("spec"))


def _finish(run: Run, folder: Path) -> int:
    """Export the best student and print what became of the run."""
    progress, config = run.state.progress, run.config
    distils = run.step.has_teacher and config.objective.distils
    result: dict[str, Any] = {
        "run": str(config.out),
        "step": progress.step,
        "steps": run.total,
        "stopped_by": run.stopped_by,
        "tokens": progress.tokens,
        "seconds": round(run.seconds, 1),
        "tokens_per_second": round(run.tokens / run.seconds, 1) if run.seconds else None,
        "temperature": float(run.step.temperature.value().detach()) if distils else None,
        "best_validation_loss": progress.best_loss,
        "best_step": progress.best_step,
        "peak_memory_mb": round(peak_memory_mb(run.step.device), 1),
    }
    if run.stopped_by is None:
        if progress.best_step:
            run.state.load(*_best(run))
        export_model(run.state.student, folder / "tokenizer", config.out / "student")
        write_origin(config.out / "student", str(run.identity["cache"]), progress.step)
        result["student"] = str(config.out / "student")
    show(f"distill {config.out}", result, config.json)
    return 0


def _best(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        path = run.store.choose("best")
    except (UsageError, RunError) as error:
        log.warning("%s; taking the newest instead", error)
        path = run.store.choose("latest")
    checkpoint = load(path)
    return checkpoint.tensors, checkpoint.state
