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
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.format.manifest import refuse_tokenizer
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.read.remote import open_cache
from kdtrain.config import EvaluateConfig
from kdtrain.config.commands import partners
from kdtrain.errors import RunError, UsageError
from kdtrain.models.loading import check_fits
from kdtrain.models.output_head import refuse_vocabulary
from kdtrain.models.spec import read_spec
from kdtrain.models.tokenizer import byte_lengths, digest_of, load_tokenizer
from kdtrain.monitor.progress import bar, log, setup_logging
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.precision.modes import pick_mode
from kdtrain.ranks import pick_device, refuse_many_processes
from kdtrain.run.build_cache import build_tokens
from kdtrain.run.saved_student import open_student
from kdtrain.run.tokenizer_view import differ, entries
from kdtrain.tables import show
from kdtrain.teaching.online import OnlineTeacher, open_online_teacher
from kdtrain.tokenizers.view_builder import build_view
from kdtrain.training.sources.aligned import AlignedSource
from kdtrain.training.sources.build import build_source
from kdtrain.training.sources.cache import CachedSource
from kdtrain.training.sources.source import Source
from kdtrain.training.student import Student
from kdtrain.training.validate import calibration, summary, validate


def main(config: EvaluateConfig) -> int:
    """Print loss, perplexity, KL, agreement, calibration and acceptance of the student.

    UsageError, RunError: as `evaluate`.
    """
    setup_logging()
    refuse_many_processes()
    result = evaluate(config)
    if not config.json:
        del result["calibration"]  # 45 numbers, too many for the table
    show(f"evaluate {config.student}", result, config.json)
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Measure the student of `config`: what `kdtrain evaluate --json` prints.

    UsageError: student, teacher and data do not fit together. RunError: the loss is non-finite.
    """
    device = pick_device(config.device)
    mode = pick_mode(config.precision, device)
    student, tokenizer = open_student(config.student, device)
    with _source(config, tokenizer, device, mode, student.vocab_size) as source:
        facts = source.facts
        if config.cache is not None:
            refuse_tokenizer(digest_of(tokenizer), facts.tokenizer_digest)
        refuse_vocabulary(student.vocab_size, facts.vocab_size, facts.tokenizer_size)
        check_fits(student, config.student, facts.seq_len, facts.document_mask)
        measured = Student(
            student,
            DistillationLoss(),
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
            raise RunError(f"--student {config.student} has a loss of {loss}; look at its weights")
        read_from = {"split": config.data.split, "sequences": len(source)}
        found = {"student": config.student, **read_from, **summary(metrics)}
        aligned = {name: each for name, each in (facts.alignment or {}).items() if each is not None}
        found |= {name: aligned[name] for name in ("disagreement", "entropy_kept") if name in aligned}
    return found | {"calibration": calibration(metrics)}


@contextmanager
def _source(
    config: EvaluateConfig, tokenizer: Path | str | None, device: torch.device, mode: str, vocab_size: int
) -> Iterator[Source]:
    """Yield the data to measure on: a split of a cache, or text packed into a temporary folder."""
    teacher: OnlineTeacher | None = None
    across, own = config.cross_tokenizer, digest_of(tokenizer)
    if across:
        if tokenizer is None or own is None:
            raise UsageError(f"--student {config.student} has no tokenizer to match; leave --cross-tokenizer out")
        entries(config.student, load_tokenizer(tokenizer), vocab_size)
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
        if config.cache is not None:
            cache, split = open_cache(config.cache), config.data.split
            apart = across and differ(config, own, cache.manifest.settings.tokenizer_digest)
        else:
            apart = False
            if config.teacher is not None:
                spec = read_spec(config.teacher, "teachers")
                teacher = open_online_teacher(spec, device, mode)
                teacher.load()
                teacher.check(config.data.seq_len, config.data.document_mask)
                teacher.prepare()
                theirs = digest_of(spec)
                apart = across and differ(config, own, theirs)
                if not apart and None not in (own, theirs) and own != theirs:
                    text = f"--student {config.student} and --teacher {spec.name} have different tokenizers"
                    raise UsageError(f"{text}; add --cross-tokenizer")
                tokenizer = tokenizer or spec.tokenizer or spec.source
            if tokenizer is None:
                raise UsageError(f"--student {config.student} comes without a tokenizer; give --teacher, or --cache")
            loaded = teacher.tokenizer if teacher is not None and apart else load_tokenizer(tokenizer)
            width = len(loaded) if teacher is None else teacher.vocab_size
            packed, split = Path(folder) / "data", "train" if apart else "validation"  # where cells are merged from
            build_tokens(packed, config.data, loaded, width, {split: config.data.num_sequences})
            cache = LocalCache(packed)
        if apart and tokenizer is not None:
            how: dict[str, Any] = {"events": partners(config.special_tokens), "splits": (split,)}
            view = build_view(Path(folder) / "view", cache, load_tokenizer(tokenizer), **how)
            for line in view.lines():
                log.info("%s", line)
            yield build_source(AlignedSource(view, split), device, vocab_size, teacher)
        else:
            yield build_source(CachedSource(cache[split]), device, vocab_size, teacher)
