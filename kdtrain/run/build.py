"""Builds a run by its recipe: student, teacher, temperature, sources, optimizer and guards."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from kdtrain.errors import log
from kdtrain.models.attention import choose_kernel
from kdtrain.models.head import SplitModel, router_weight, split
from kdtrain.models.loading import (
    architecture,
    check_fits,
    checkpoint_activations,
    generation_settings,
    load_student,
    vocabulary,
)
from kdtrain.models.output_head import refuse_vocabulary
from kdtrain.models.tokenizer import learn_ends, load_tokenizer
from kdtrain.objective.alpha import build_alpha
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.temperature import build_temperature
from kdtrain.parallel.parallelize import parallelize, shard
from kdtrain.precision.modes import head_dtype
from kdtrain.ranks import is_main, raise_on_all_ranks, world_size
from kdtrain.run.recipe import PARTS, Recipe
from kdtrain.run.run import Run
from kdtrain.training.observers import ObserverRequest, observers_of
from kdtrain.training.schedule import decay_start
from kdtrain.training.sources.build import StudentSource
from kdtrain.training.sources.source import meet
from kdtrain.training.student import Student
from kdtrain.training.trainer import Trainer

if TYPE_CHECKING:
    from kdtrain.objective.hidden import HiddenLoss
    from kdtrain.precision.controller import Adaptive
    from kdtrain.teaching.teacher import OnlineTeacher


def build(recipe: Recipe) -> Run:
    """Build the run of `recipe`, inside `run_device`; writes nothing.

    UsageError: cache, student and teacher do not fit together, or differ between ranks.
    """
    config, device, plan = recipe.config, recipe.device, recipe.plan
    with raise_on_all_ranks():
        if recipe.facts.members:
            _keep_members_apart(recipe)
        model = _load_student(recipe)
        teacher = recipe.teacher
        if teacher is not None:
            teacher.meet(model)
        hidden = None
        if config.objective.hidden_loss != "none":
            from kdtrain.objective.hidden import plan_hidden_loss

            hidden = plan_hidden_loss(config.objective, model, teacher, config.seed)
        quantised = _quantize(recipe, model)
        dtype = head_dtype(recipe.formats.high) or torch.float32
        request = ObserverRequest(
            config=config, model=model.model, recipe=recipe.formats.recipe, dtype=dtype, main=is_main()
        )
        observers = observers_of(request)
        identity = recipe.identity | _identity(recipe, model, teacher)
        answers = None if teacher is None else dict(teacher.identity)
    compared = {name: identity[name] for name in PARTS} | {"the teacher's answers": answers}
    if world_size() > 1:  # a module that a single process does not load
        from kdtrain.parallel.agreement import agree, code, weights_digest

        agree(lambda: {**compared, "the student's weights": weights_digest(model), **code()})
    if recipe.layout.tensor_size > 1:  # a module that other runs do not load
        from kdtrain.parallel import tensor

        size = recipe.facts.vocab_size
        cuts = config.parallel.cuts_rows(recipe.facts.seq_len, config.objective)
        tensor.apply(model, recipe.layout, device, vocab_size=min(size, model.vocab_size), sequence=cuts)
    mesh = recipe.layout.sharing(plan.shard_size)
    if plan.student == "fsdp":  # before the optimizer, which holds the parameters
        shard(model, mesh, dtype=recipe.formats.gathered)
    if teacher is not None:
        teacher.prepare(mesh=mesh if plan.teacher == "fsdp" else None, compile=recipe.compiles)
    student = _student(recipe, model, hidden)
    with raise_on_all_ranks():
        for source in recipe.sources.values():
            meet(source, student, teacher)
    shared = (device, student.vocab_size, teacher)
    layers = () if hidden is None else hidden.teacher_layers
    trainer = Trainer(
        config,
        student,
        StudentSource(recipe.sources["train"], *shared, layers),
        StudentSource(recipe.sources["validation"], *shared),
        total_steps=recipe.total,
        micro=recipe.micro,
        seq_len=recipe.facts.seq_len,
        wrapper=parallelize(student, plan.student, recipe.layout, plan.accumulate),
        adaptive=_adaptive(recipe),
        observers=observers,
        identity=identity,
    )
    return Run(recipe, trainer, identity, quantised, "" if hidden is None else hidden.describe())


def _keep_members_apart(recipe: Recipe) -> None:
    """Make a mixture keep the targets of its members apart where alpha is measured on each."""
    from kdtrain.training.sources.mixture import MixtureSource

    if isinstance(train := recipe.sources["train"], MixtureSource):
        train.by_member = recipe.has_teacher and recipe.config.objective.alpha == "auto"


def _load_student(recipe: Recipe) -> SplitModel:
    """Check the student against the data, load it with fp32 weights, and split it into backbone and head."""
    config, spec, facts = recipe.config, recipe.student, recipe.facts
    if spec.init == "pretrained":
        refuse_vocabulary(vocabulary(spec), facts.vocab_size, facts.tokenizer_size)
    size = None if spec.config is None or "vocab_size" in spec.config else facts.vocab_size
    whole = not recipe.cut and spec.weights is None  # else it may be too large for one device
    model = load_student(spec, vocab_size=size, seed=config.seed, device=str(recipe.device) if whole else "cpu")
    if facts.end_tokens and facts.tokenizer is not None:
        line = learn_ends(model, facts.end_tokens, load_tokenizer(facts.tokenizer))
        if line is not None:
            log.info("%s", line)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    student = split(model)
    if spec.lora is not None or config.freeze_head:
        from kdtrain.models.adapters import restrict

        restrict(student, spec.lora, config.freeze_head, config.seed)
    if spec.weights is not None:
        from kdtrain.models.adapters import frozen_names
        from kdtrain.models.frozen import pack

        pack(student.model, spec.weights, fused=student.fused, device=recipe.device)
        student.frozen = frozen_names(student)
    refuse_vocabulary(student.vocab_size, facts.vocab_size, facts.tokenizer_size)
    check_fits(student, spec.name, facts.seq_len, facts.document_mask)
    if not student.fused:
        log.info("student %s: output head not split off: %s", spec.name, student.reason)
    return student


def _identity(recipe: Recipe, model: SplitModel, teacher: "OnlineTeacher | None") -> dict[str, Any]:
    """Return what checkpoints belong to, as far as the models determine it."""
    attention = recipe.student.attention
    student: dict[str, Any] = {"name": recipe.student.name, "architecture": architecture(model), "attention": attention}
    student |= {"router_weight": weight} if (weight := router_weight(model.model)) else {}
    if model.frozen:
        student["base"] = model.base
        student |= {} if recipe.student.weights is None else {"weights": recipe.student.weights}
        student |= {"freeze_head": True} if recipe.config.freeze_head else {}
        student |= {} if model.lora is None else {"lora": dataclasses.asdict(model.lora)}
    digest = None if teacher is None else teacher.digest  # of the whole weights
    if teacher is not None and teacher.spec.weights is not None:
        digest = f"{digest} in {teacher.spec.weights}"
    return {"student": student, "generation": generation_settings(model), "teacher": digest}


def _quantize(recipe: Recipe, model: SplitModel) -> tuple[str, ...]:
    """Make the student's linear layers switchable, if the run quantises; return log lines on that."""
    formats, options = recipe.formats, recipe.config.precision
    if formats.choice is None:
        return formats.lines
    from kdtrain.models.adapters import adapter_parts
    from kdtrain.precision.linear import convert

    skip = {"skip_first": options.quant_skip_first, "skip_last": options.quant_skip_last}
    head = model.model.get_output_embeddings()
    backend = formats.choice.backend
    whole = not recipe.cut  # else each rank would hold all quantised weights
    own = adapter_parts(model.model)
    done = convert(model.model, formats.switch, backend, head=head, adapters=own, hold=whole, **skip)
    return *formats.lines, str(done)


def _student(recipe: Recipe, model: SplitModel, hidden: "HiddenLoss | None") -> Student:
    """Build the student and its objective as one module."""
    facts, formats, objective = recipe.facts, recipe.formats, recipe.config.objective
    if not facts.document_mask:
        shape = (recipe.micro, facts.seq_len, head_dtype(formats.high), recipe.device)
        if (chosen := choose_kernel(model.model.config, *shape)) is not None:
            log.info("%s", chosen)
    taught = [each.facts.targets != "none" for each in facts.members.values()] or [recipe.has_teacher]
    low, high = objective.temperature_min, objective.temperature_max
    temperature = build_temperature(
        objective.temperature_mode,
        start=objective.temperature,
        minimum=objective.temperature if low is None else low,
        maximum=objective.temperature if high is None else high,
        end=objective.temperature_end,
        total_steps=max(recipe.total - 1, 1),  # steps count from 0: step total - 1 is the end of the schedule
    )
    return Student(
        model,
        DistillationLoss(
            divergence=objective.divergence,
            alpha=build_alpha(objective, recipe.total, taught),
            tail=objective.tail,
            temperature=temperature.to(recipe.device),
        ).to(recipe.device),
        vocab_size=min(facts.vocab_size, model.vocab_size),
        mode=formats.high,
        document_mask=facts.document_mask,
        compile=recipe.compiles,
        compile_mode=recipe.config.precision.torch_compile_mode,
        by_layer=recipe.plan.student != "single" or recipe.layout.tensor_size > 1,
        hidden_loss=None if hidden is None else hidden.to(recipe.device),
        hidden_weight=objective.hidden_weight,
        layers=() if hidden is None else hidden.student_layers,
        switch=formats.switch,
        quantized=None if formats.choice is None else formats.choice.mode,
    )


def _adaptive(recipe: Recipe) -> "Adaptive | None":
    options, formats = recipe.config.quantization, recipe.formats
    if formats.choice is None or not options.time_resume:
        return None
    from kdtrain.precision.backends import policy
    from kdtrain.precision.controller import Adaptive

    schedule = recipe.config.optimizer
    rules = policy(options, formats.choice.mode, schedule.lr_schedule, decay_start(recipe.total, schedule))
    forward_only = options.quant_fallback_scope == "forward"
    return Adaptive(rules, formats.switch, "high-forward" if forward_only else "high")
