"""`kdtrain prune`: cuts a teacher to the shape of a student, by what matters on the text of a cache."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import kdtrain as kd
from kdtrain.cache.read.reader import CacheReader
from kdtrain.errors import UsageError, log
from kdtrain.files import file_digest, json_digest
from kdtrain.models.export import export_lock, export_model
from kdtrain.models.loading import configuration, model_digest, parameter_count, plain_config
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import digest_of
from kdtrain.monitor.progress import bar, setup_logging
from kdtrain.outputs import OutFolder
from kdtrain.plugins.prune import PruneConfig
from kdtrain.plugins.prune.cut import Shape, choose, prune, pruned_config, roles_of, wanted_shape
from kdtrain.plugins.prune.scores import Scores, Subject, mean_loss
from kdtrain.precision.modes import pick_mode
from kdtrain.ranks import pick_device
from kdtrain.tables import Table, number, short
from kdtrain.teaching.local import LocalTeacher
from kdtrain.teaching.teacher import OnlineTeacher

_MOST_REMOVED = 0.5
"""The share of parameters that may go at once; beyond it distillation recovers poorly, and one prunes in steps."""
_VALIDATED = 64
"""Sequences of the validation split on which teacher and pruned model are compared."""


def main(config: PruneConfig) -> int:
    """Score the teacher, or finish scoring it, write the pruned model, and print what it is.

    UsageError: teacher, shape, cache and folder do not fit together. RunError: the disk is full or refuses the write.
    """
    setup_logging()
    OutFolder(config.out).refuse()
    device = pick_device(config.device)
    needed: dict[str, Path | str | None] = {"--cache": config.cache, "--scores": config.scores}
    needed |= ModelSpec.paths_of(config.teacher, "the teacher", "teachers")
    needed |= ModelSpec.paths_of(config.like, "--like")
    with export_lock(config.out, needed, overwrite=config.overwrite):
        result = _prune(config, device, pick_mode(config.precision, device))
    config.show(_page(config, result), result)
    return 0


def _prune(config: PruneConfig, device: torch.device, mode: str) -> dict[str, Any]:
    spec, like = ModelSpec.read(config.teacher, "teachers"), ModelSpec.read(config.like)
    if not spec.is_local or spec.init == "teacher-layers":
        kind = "made of layers of another model" if spec.is_local else f"a teacher of kind {spec.kind}"
        raise UsageError(f"{spec.name} is {kind}; only a model with weights of its own is pruned")
    known = configuration(spec, None)
    roles = roles_of(known, spec.name)
    after = wanted_shape(like, known, spec.name)
    before = Shape.of(known, roles)
    large = parameter_count(spec.name, known, trust_remote_code=spec.trust_remote_code)
    small = parameter_count(like.name, pruned_config(known, like, after, list(range(after.layers))))
    if 1 - small / large > _MOST_REMOVED and not config.allow_high_pruning_ratio:
        raise UsageError(
            f"--like {like.name} has {short(small)} of the {short(large)} parameters of {spec.name}: "
            f"{100 - 100 * small / large:.0f} % would go, and of more than {100 * _MOST_REMOVED:.0f} % distillation "
            "recovers poorly; prune and distil in two steps, or add --allow-high-pruning-ratio"
        )

    cache = kd.Cache(config.cache)
    settings = cache.manifest.settings
    reader = cache["train"]
    digests = {digest_of(spec), settings.tokenizer_digest} - {None}
    if len(digests) > 1 or known.vocab_size < settings.tokenizer_size:
        raise UsageError(f"--cache {cache.name} is of another tokenizer than {spec.name}; give a cache of the same")
    teacher = LocalTeacher(replace(spec, weights=None), device, mode)
    teacher.load()
    model = teacher.model.model
    weights = model_digest(model, torch.float32)
    identity = json_digest({"weights": weights, "architecture": plain_config(model.config)})
    teacher.check(settings.seq_len, settings.document_mask)

    sequences = min(config.num_sequences, len(reader))
    subject = Subject(teacher=identity, cache=cache.manifest.digest, sequences=sequences, precision=mode)
    path = config.scores or config.out.parent / f"scores-{subject.key}.safetensors"
    busy = f"another process writes {path}; wait for it, or name another file with --scores"
    with OutFolder(path.parent).claimed(path.name, busy):
        scores = Scores(path, subject, roles, before)
        _complete(scores, teacher, reader, config.batch_size, after.layers < before.layers)
    importance = scores.importance()
    cut = choose(importance, roles, before, after)
    student = prune(model, like, after, cut, importance.shares)
    small, large = (sum(each.numel() for each in one.parameters()) for one in (student, model))  # ties as they are

    held_out = cache["validation" if "validation" in cache else "train"]
    losses = {}
    for name, each in (("teacher", teacher), ("pruned", _running(student.to(device), mode))):
        losses[name] = mean_loss(each, held_out, min(_VALIDATED, len(held_out)), config.batch_size)
    layers: dict[str, Any] = {"layers": cut.layers}
    if importance.losses is not None:
        layers["loss_without_layer"] = importance.losses.tolist()
    made = {"of": spec.name, "parameters": small, "teacher_parameters": large, "removed": 1 - small / large, **layers}
    origin = {**made, "weights_digest": weights, "scores": file_digest(path), "sequences": sequences}
    tokenizer = cache.tokenizer
    aside = export_model(
        student.cpu(),
        tokenizer if tokenizer.is_dir() else None,
        config.out,
        dtype=spec.dtype,
        origin={"cache": cache.manifest.digest, "pruned": origin},
    )
    if aside:
        log.warning("%s held more than an export, and is now %s", config.out, aside)
    sizes = {name: [getattr(after, name), getattr(before, name)] for name in ("width", "neurons", "heads", "groups")}
    return {"student": str(config.out), **made, "sizes": sizes, "validation_loss": losses, "scores": str(path)}


def _running(model: Any, mode: str) -> LocalTeacher:
    teacher = OnlineTeacher.of(model.float() if mode == "fp32" else model, mode)
    assert isinstance(teacher, LocalTeacher)
    return teacher


def _complete(scores: Scores, teacher: LocalTeacher, reader: CacheReader, batch: int, depth: bool) -> None:
    done, total = scores.work(depth, done=True), scores.work(depth)
    if done == total:
        log.info("%s has the scores", scores.path)
        return
    how = f"{scores.subject.precision} on {teacher.device}"
    log.info("scoring (%s) %d sequences of %s into %s", how, scores.subject.sequences, reader.name, scores.path)
    with bar("score", total, done, "forwards") as shown:
        scores.complete(teacher, reader, batch, depth, shown)


def _page(config: PruneConfig, result: dict[str, Any]) -> Iterator[Any]:
    small, large = result["parameters"], result["teacher_parameters"]
    removed = f"{100 * result['removed']:.0f} % removed"
    yield f"{config.out}: {short(small)} of the {short(large)} parameters of {result['of']}, {removed}"
    yield ""
    names = {
        "width": "embedding channels",
        "neurons": "MLP neurons",
        "heads": "attention heads",
        "groups": "key/value heads",
    }
    rows = [(words, *result["sizes"][name]) for name, words in names.items()]
    yield Table.of(("", "kept", "of"), rows, left=("",))
    yield f"layers {', '.join(map(str, result['layers']))}"
    losses = result["validation_loss"]
    yield f"validation loss {number(losses['pruned'])} before distillation, the teacher's {number(losses['teacher'])}"
    yield f"scores in {result['scores']}, for other shapes"
    words = f"--cache {shlex.quote(config.cache)} --student {shlex.quote(str(config.out))}"
    yield f"Next: kdtrain distill {words} --out runs/{shlex.quote(config.out.name)}"
