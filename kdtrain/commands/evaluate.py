"""`kdtrain evaluate`: measures a student against text and, where one is given, against a teacher.

Loss and perplexity compare with the text; KL, agreement and acceptance with the teacher. These are exact with an online
teacher or a dense cache. A cache with a top-k gives them over its entries and one bucket: a lower bound of KL, an upper
bound of acceptance. One of samples estimates KL without bias; samples alone have no agreement and acceptance.
Bits per byte compare students and teachers with different tokenizers on the same text.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.format.manifest import refuse_tokenizer
from kdtrain.cache.read.reader import LocalCache, open_cache
from kdtrain.checkpoint.sealed import entry_of, is_checkpoint
from kdtrain.config.commands import EvaluateConfig, partners
from kdtrain.data.corpus import documents_of
from kdtrain.errors import RunError, UsageError, log
from kdtrain.models.head import SplitModel
from kdtrain.models.last_word import is_right, passages
from kdtrain.models.loading import check_fits, configuration, refuse_long
from kdtrain.models.output_head import refuse_vocabulary
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import byte_lengths, digest_of, load_tokenizer
from kdtrain.monitor.facts import evaluations, is_run
from kdtrain.monitor.progress import bar, setup_logging
from kdtrain.monitor.record import add_evaluation
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.precision.modes import pick_mode
from kdtrain.ranks import pick_device
from kdtrain.run.build_cache import build_tokens, decided, refuse_no_rows
from kdtrain.run.saved_student import open_student, run_of, tokenizer_place
from kdtrain.run.tokenizer_view import differ, entries
from kdtrain.teaching.teacher import OnlineTeacher
from kdtrain.tokenizers.view_builder import build_view
from kdtrain.training.sources.aligned import AlignedSource
from kdtrain.training.sources.build import StudentSource
from kdtrain.training.sources.cache import CachedSource
from kdtrain.training.sources.source import Source
from kdtrain.training.student import Student
from kdtrain.training.validate import calibration, summary, validate


def main(config: EvaluateConfig) -> int:
    """Print loss, perplexity, KL, agreement, calibration and acceptance of each student; record them for runs.

    UsageError, RunError: as `evaluate`.
    """
    setup_logging()
    if config.dry_run:
        for name in config.student:
            _refuse_text(config, name)
        config.show("evaluate, dry run", {"students": list(config.student)})
        return 0
    results = [evaluate(config, name) for name in config.student]
    config.show(evaluations(results), results[0] if len(results) == 1 else {"students": results})
    return 0


def evaluate(config: EvaluateConfig, name: str) -> dict[str, Any]:
    """Measure one student, and record the numbers if it is a run's; return the object of `kdtrain evaluate --json`.

    UsageError: student, teacher and data do not fit together. RunError: the loss is non-finite.
    """
    device = pick_device(config.device)
    mode = pick_mode(config.precision, device)
    _refuse_text(config, name)
    student, tokenizer, checkpoint = open_student(name, device)
    with _source(config, name, tokenizer, device, mode, student) as (source, text, teacher):
        facts = source.facts
        refuse_vocabulary(student.vocab_size, facts.vocab_size, facts.tokenizer_size)
        check_fits(student, name, facts.seq_len, facts.document_mask)
        measured = Student(
            student,
            DistillationLoss(alpha=0.9),
            vocab_size=min(facts.vocab_size, student.vocab_size),
            mode=mode,
            document_mask=facts.document_mask,
        )
        with bar("evaluate", len(source)) as shown:

            def read(action: Callable[[], Batch]) -> Batch:
                shown.update(min(shown.done + config.batch_size, len(source)))
                return action()

            metrics = validate(
                measured.eval(),
                source,
                micro=config.batch_size,
                batches=None,
                read=read,
                byte_lengths=byte_lengths(facts.tokenizer),
            )
        assert metrics is not None
        loss = summary(metrics)["loss"]
        if not metrics.tokens:
            raise RunError(f"no token of the {config.data.split} split counts; take other data")
        if loss is not None and not math.isfinite(loss):
            raise RunError(f"--student {name} has a loss of {loss}; look at its weights")
        found = {"student": name, **text, "sequences": len(source), **summary(metrics)}
        if (error := metrics.divergence_error()) is not None:
            found["kl_error"] = error
        if config.last_word:
            found |= _last_words(config, student, load_tokenizer(tokenizer or facts.tokenizer or name), teacher)
        aligned = {name: each for name, each in (facts.alignment or {}).items() if each is not None}
        found |= {name: aligned[name] for name in ("disagreement", "entropy_kept") if name in aligned}
    if checkpoint is not None and is_run(run := run_of(checkpoint)):
        step = entry_of(checkpoint, checkpoint.name).step
        found = {"student": name, "checkpoint": checkpoint.name, "step": step, **found, "precision": mode}
        add_evaluation(run, found)
    return found | {"calibration": calibration(metrics)}


def _refuse_text(config: EvaluateConfig, name: str) -> None:
    """Raise UsageError, before any weights are loaded, if the tokenizers differ, the text is too short or of another
    split, or its rows are longer than a spec's positions."""
    place = tokenizer_place(name)
    data = config.data
    own = None if config.cross_tokenizer else digest_of(place)
    settings = None if config.cache is None else open_cache(config.cache).manifest.settings
    if not (is_run(Path(name)) or is_checkpoint(Path(name).resolve())):
        seq_len = data.seq_len if settings is None else settings.seq_len
        refuse_long(configuration(ModelSpec.read(name), 2), name, seq_len)
    if settings is not None:
        refuse_tokenizer(own, settings.tokenizer_digest)
        if data.split == "test" != settings.data.get("split"):
            hint = "make one with cache-teacher --split test, or give --data and --teacher"
            raise UsageError(f"--cache {config.cache} holds no test split; {hint}")
        return
    if config.teacher is not None:
        spec = ModelSpec.read(config.teacher, "teachers")
        theirs = digest_of(spec)
        if None not in (own, theirs) and own != theirs:
            both = f"--student {name} and --teacher {spec.name} have different tokenizers"
            raise UsageError(f"{both}; add --cross-tokenizer")
        place = spec.tokenizer or spec.source
    if place is not None:
        refuse_no_rows(None, data, load_tokenizer(place), {"validation": data.num_sequences})


def _last_words(
    config: EvaluateConfig, student: SplitModel, tokenizer: Any, teacher: OnlineTeacher | None
) -> dict[str, Any]:
    """Return the share of passages whose last word student and teacher write, each in its own tokens."""
    found = dict[str, Any]()
    device = next(student.parameters()).device
    readers = {"last_word": (student.logits, tokenizer)}
    if teacher is not None:
        readers["teacher_last_word"] = (partial(teacher.logits, segments_BT=None), teacher.tokenizer)
    for name, (logits, own) in readers.items():
        documents = islice(documents_of(config.data, config.data.split), config.data.num_sequences)
        right = [is_right(logits, *each, device) for each in passages(documents, own, config.data.seq_len)]
        found |= {"passages": len(right), name: sum(right) / len(right)}
    return found


@contextmanager
def _source(
    config: EvaluateConfig,
    name: str,
    tokenizer: Path | str | None,
    device: torch.device,
    mode: str,
    student: SplitModel,
) -> Iterator[tuple[Source, dict[str, Any], OnlineTeacher | None]]:
    """Yield the source to measure on, its name and its teacher: a split of a cache, or text packed for the block."""
    teacher: OnlineTeacher | None = None
    vocab_size = student.vocab_size
    checks: list[Callable[[int, bool], None]] = [partial(check_fits, student, name)]
    across = config.cross_tokenizer
    own = digest_of(tokenizer)
    if across:
        if tokenizer is None or own is None:
            raise UsageError(f"--student {name} has no tokenizer to match; leave --cross-tokenizer out")
        entries(name, load_tokenizer(tokenizer), vocab_size)
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
        if config.cache is not None:
            cache = open_cache(config.cache)
            split = config.data.split
            text: dict[str, Any]
            made_of = cache.manifest.settings.data.get("split")  # its train split may be another split of the source
            text = {"split": split, "cache": cache.manifest.digest}
            if split == "test":
                split = "train"
            elif split == "train" and made_of in ("validation", "test"):
                text["split"] = made_of
            apart = across and differ(config, own, cache.manifest.settings.tokenizer_digest)
        else:
            apart = False
            text = {"split": config.data.split, "data": config.data.data, "teacher": config.teacher}
            if config.teacher is not None:
                spec = ModelSpec.read(config.teacher, "teachers")
                teacher = OnlineTeacher.open(spec, device, mode)
                teacher.load()
                checks.append(teacher.check)
                teacher.check(config.data.seq_len, config.data.document_mask is True)
                teacher.prepare()
                apart = across and differ(config, own, digest_of(spec))
                tokenizer = tokenizer or spec.tokenizer or spec.source
            if tokenizer is None:
                raise UsageError(f"--student {name} comes without a tokenizer; give --teacher, or --cache")
            loaded = teacher.tokenizer if teacher is not None and apart else load_tokenizer(tokenizer)
            width = len(loaded) if teacher is None else teacher.vocab_size
            packed, split = Path(folder) / "data", "train" if apart else "validation"  # where cells are merged from
            data = decided(config.data, packed, *checks)
            build_tokens(packed, data, loaded, width, {split: config.data.num_sequences})
            cache = LocalCache(packed)
        if apart and tokenizer is not None:
            how: dict[str, Any] = {"events": partners(config.special_tokens), "splits": (split,)}
            view = build_view(Path(folder) / "view", cache, load_tokenizer(tokenizer), **how)
            for line in view.lines():
                log.info("%s", line)
            yield StudentSource(AlignedSource(view, split), device, vocab_size, teacher), text, teacher
        else:
            yield StudentSource(CachedSource(cache[split]), device, vocab_size, teacher), text, teacher
