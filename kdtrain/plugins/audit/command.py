"""`kdtrain audit CACHE --teacher T`: the teacher scores rows of a cache again, in two number formats."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from kdtrain.cache.format.codec import draw_points, grid_offset
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.read.reader import Cache
from kdtrain.cache.read.remote import open_cache
from kdtrain.cache.tools.merge_plan import MIXTURE
from kdtrain.cache.tools.self_check import other_row
from kdtrain.config import Weights
from kdtrain.errors import UsageError
from kdtrain.models.spec import ATTENTIONS, DTYPES, read_spec
from kdtrain.models.tokenizer import tokenizer_digest
from kdtrain.monitor.progress import bar, log, setup_logging
from kdtrain.objective.batch import Batch
from kdtrain.plugins.audit.diagnose import (
    ADDED,
    INT8,
    LOST,
    MASK,
    MOST,
    OTHER_WEIGHTS,
    Diagnosis,
    Gains,
    diagnose,
    gains,
)
from kdtrain.plugins.audit.evidence import NOISE, NOISE_UNKNOWN, Evidence, Verdict, judge, score, worst_first
from kdtrain.plugins.audit.options import AuditConfig
from kdtrain.precision.modes import MODES
from kdtrain.ranks import pick_device
from kdtrain.tables import columns, number, short, show, show_page
from kdtrain.teaching.online import OnlineTeacher, open_online_teacher

DIAGNOSED = 16
"""Rows in which the fault is looked for: those that are furthest off."""
NEIGHBOURS = 256
"""Rows whose labels are compared with the targets of one among them."""
_LOGITS = 2**27  # of one forward


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the teacher predicts for some rows of a cache."""

    teacher: str
    same_weights: bool | None
    """Whether the digest of its weights is the manifest's; None if that has none."""
    verdict: Verdict
    diagnosis: Diagnosis | None
    """Where a test fails: what explains it."""

    @property
    def finding(self) -> str | None:
        """One line that names what is wrong; None if nothing is."""
        if (found := self.diagnosis) is None:
            return None
        fit = f"best fit: {found.fault}"
        if found.share >= MOST:
            fit += f" explains {found.share:.0%} of the difference"
        elif found.share:
            fit = f"best fit: partly {found.fault} ({found.share:.0%} of the difference), or {OTHER_WEIGHTS}"
        return (
            f"{', '.join(test.name for test in self.verdict.failed)}: not what {self.teacher} predicts; {fit} "
            f"({number(max(found.divergence, 0.0))} nats a token from the teacher)"
        )

    def to_json(self) -> dict[str, Any]:
        """A plain record."""
        verdict = asdict(self.verdict) | {"failed": [test.name for test in self.verdict.failed]}
        diagnosis = None if self.diagnosis is None else asdict(self.diagnosis)
        return {"teacher": self.teacher, "same_weights": self.same_weights, **verdict, "diagnosis": diagnosis}

    def page(self) -> list[Any]:
        """Lines and a table for people."""
        verdict, rows = self.verdict, []
        for test in verdict.tests:
            allowed = f"{_few(test.figure)} of what is allowed"
            of = {"z": f"log p {test.figure:+.4f} nats off", "c": f"{_few(test.figure)} a degree of freedom"}
            found, fails = of.get(test.kind[0], allowed), "fails" * (test in verdict.failed)
            rows.append((test.name, found, _few(test.statistic), test.kind, f"{test.p:.2g}", fails))
        weights = {True: "the same weights", False: "OTHER weights by their digest", None: "digest unknown"}
        return [
            f"{verdict.rows} rows, {verdict.positions:,} positions, against {self.teacher} "
            f"({weights[self.same_weights]})",
            columns(("test", "found", "statistic", "kind", "p", ""), rows, left=("test", "found", "kind")),
            f"a test fails below p = {verdict.level / max(1, len(verdict.tests)):.2g}, {verdict.level:.0%} for all of "
            "them",
            f"finding: {self.finding}" if self.finding else "the cache holds what the teacher predicts",
        ]


def _few(value: float) -> str:
    """A figure in a few characters, so that the table fits a narrow terminal: 26.9, 1,414, 331 M, 2.1e+15."""
    return number(value) if not 1e4 <= abs(value) < math.inf else short(value) if abs(value) < 1e12 else f"{value:.2g}"


def main(config: AuditConfig) -> int:
    """Show what the audit finds; return 1 if a test fails.

    UsageError: the cache is damaged, or the teacher cannot score it. RunError: a shard cannot be read.
    """
    setup_logging()
    audited = audit(config, open_cache(config.cache))
    findings = [audited.finding] if audited.finding else []
    if config.json:
        show("", {"path": config.cache, "ok": not findings, "findings": findings, "audit": audited.to_json()}, True)
    else:
        show_page(audited.page(), wrapped=True)
    return 1 if findings else 0


def audit(config: AuditConfig, cache: Cache) -> Audit:
    """Score rows of the cache again.

    UsageError: the teacher cannot score this cache. RunError: a shard cannot be read.
    """
    settings = cache.manifest.settings
    if not settings.codec.taught:
        raise UsageError(f"{cache.folder} holds tokens without targets, which verify checks")
    if settings.sampling == MIXTURE:
        raise UsageError(f"{cache.folder} mixes several teachers; audit the caches that it was merged from")
    stated = (settings.teacher or {}).get("precision") in MODES
    teacher, reference = _teachers(config, settings)
    every = [(split, row) for split in cache for row in range(cache.manifest.splits[split]["sequences"])]
    order = np.random.RandomState(config.seed).permutation(len(every))
    rows = [every[place] for place in order[: config.rows]]
    compare = _Comparison(cache, teacher, reference)
    scored: list[tuple[tuple[str, int], Evidence]] = []
    with bar("audit", len(rows)) as shown:
        for split, indices in _batches(rows, max(1, min(8, _LOGITS // (settings.seq_len * settings.vocab_size)))):
            scored += compare.rows(split, indices)
            shown.update(shown.done + len(indices))
    if len(scored) < 2:
        raise UsageError(f"{len(scored)} of the rows of {cache.folder} count in a loss; an audit needs two")
    found = [evidence for _, evidence in scored]
    verdict = judge(found, noise=NOISE if stated else NOISE_UNKNOWN)
    known = (settings.teacher or {}).get("weights_digest") if stated else None
    return Audit(
        teacher=str(teacher),
        same_weights=None if known is None else teacher.digest == known,
        verdict=verdict,
        diagnosis=compare.diagnosis([scored[at][0] for at in worst_first(found)[:DIAGNOSED]])
        if verdict.failed
        else None,
    )


def _teachers(config: AuditConfig, settings: CacheSettings) -> tuple[OnlineTeacher, OnlineTeacher]:
    """The teacher in the number format of the cache, bf16 where that is unknown, and in fp32."""
    device, stated = pick_device(config.device), settings.teacher or {}
    allowed = {"dtype": DTYPES, "attention": ATTENTIONS, "weights": get_args(Weights)}
    given = {key: stated[key] for key, values in allowed.items() if stated.get(key) in values}
    spec = replace(read_spec(config.teacher, "teachers"), **given)
    mode = stated["precision"] if stated.get("precision") in MODES else "bf16"
    teacher, wrong = open_online_teacher(spec, device, mode), "give the teacher of the cache"
    if teacher.vocab_size != settings.vocab_size:
        sizes = f"{teacher.vocab_size:,} logits and the cache {settings.vocab_size:,}"
        raise UsageError(f"--teacher {config.teacher} has {sizes}; {wrong}")
    if settings.tokenizer_digest not in (None, tokenizer_digest(teacher.tokenizer)):
        raise UsageError(f"--teacher {config.teacher} has another tokenizer than the cache; {wrong}")

    def loaded(teacher: OnlineTeacher) -> OnlineTeacher:
        teacher.load()
        teacher.check(settings.seq_len, settings.document_mask)
        teacher.pack(())
        return teacher

    loaded(teacher)
    _ = teacher.digest  # before anything is compiled
    teacher.prepare(compile=stated.get("compiled") is True)
    log.info("auditing with %s, and with fp32 as the reference", teacher)
    return teacher, teacher if mode == "fp32" else loaded(open_online_teacher(spec, device, "fp32"))


def _batches(rows: list[tuple[str, int]], size: int) -> Iterator[tuple[str, list[int]]]:
    """In the order of the file, so that each shard is opened once."""
    for split in sorted({split for split, _ in rows}):
        indices = sorted(row for own, row in rows if own == split)
        yield from ((split, indices[start : start + size]) for start in range(0, len(indices), size))


class _Comparison:
    """Rows of a cache against fresh forwards."""

    def __init__(self, cache: Cache, teacher: OnlineTeacher, reference: OnlineTeacher) -> None:
        self.cache, self.teacher, self.reference = cache, teacher, reference
        self.settings, span = cache.manifest.settings, cache.manifest.temperature_range
        captured = getattr(cache.manifest, "origin", None) is None
        self.whole = captured and cache.manifest.parents is None
        """Whether its rows are numbered as they were when they were captured."""
        # a top-k from elsewhere has a tail of one bucket, which shows in its range
        at_one = span is not None and span["min"] == span["max"]
        self.whole_tail = captured if self.settings.codec.counts_only else not at_one

    def rows(self, split: str, indices: list[int]) -> list[tuple[tuple[str, int], Evidence]]:
        """The evidence of each row; rows that do not count in a loss are left out."""
        batch = self.cache[split].read(indices)
        own, right = (logprobs(each, batch, self.settings.document_mask) for each in (self.teacher, self.reference))
        number, offset = self.settings.codec.num_samples, grid_offset(self.settings.sampling)
        found = []
        for b, row in enumerate(indices):
            mask_T = batch.loss_mask[b]
            if not mask_T.any():
                continue
            points = None
            if number and offset is not None and self.whole:
                points = draw_points(self.settings.seed, split, row, self.settings.seq_len, number, offset)
            evidence = score(
                _targets(batch, b).map(lambda _, each, kept=mask_T: each[kept]).to(own.device),
                batch.tokens[b, 1:][mask_T].to(own.device),
                own[b][mask_T.to(own.device)],
                right[b][mask_T.to(own.device)],
                whole_tail=self.whole_tail,
                independent=self.settings.sampling is None,
                points_TD=None if points is None else points[mask_T.numpy()],
            )
            found.append(((split, row), evidence))
        return found

    def diagnosis(self, rows: list[tuple[str, int]]) -> Diagnosis:
        """The fault that explains some rows best."""
        found: list[Gains] = []
        matched = []
        forwards = other_forwards(self.teacher, self.settings.seq_len, self.settings.document_mask)
        for split, (row,) in _batches(rows, 1):
            reader = self.cache[split]
            batch = reader.read([row])
            if not batch.loss_mask.any():
                continue
            others = {name: forward(batch)[0] for name, forward in forwards.items()}
            own = logprobs(self.teacher, batch, self.settings.document_mask)[0]
            targets = _targets(batch, 0)
            found.append(gains(targets.to(own.device), batch.tokens[0, 1:].to(own.device), own, others))
            start = max(0, min(row - NEIGHBOURS // 2, len(reader) - NEIGHBOURS))
            tokens = reader.text(range(start, min(start + NEIGHBOURS, len(reader))))["tokens"]
            labels = torch.from_numpy(tokens[:, 1:].astype(np.int64))
            matched.append(other_row(targets, row - start, labels, batch.loss_mask[0]))
        return diagnose(found, matched)


def logprobs(teacher: OnlineTeacher, batch: Batch, document_mask: bool) -> Tensor:
    """log p [B, T, V] of fresh forwards, in fp32 on the teacher's device."""
    with torch.no_grad():
        logits_BTV = teacher.logits(batch.tokens[:, :-1], batch.segments if document_mask else None)
    return logits_BTV.float().log_softmax(-1)


def other_forwards(teacher: OnlineTeacher, seq_len: int, document_mask: bool) -> dict[str, Callable[[Batch], Tensor]]:
    """Forwards that a faulty capture may have made, by the fault's name."""
    ids = (teacher.tokenizer.bos_token_id, teacher.tokenizer.eos_token_id)
    first = next((each for each in ids if each is not None), 0)

    def without_first(batch: Batch) -> Tensor:
        shorter = replace(batch, tokens=batch.tokens[:, 1:], segments=batch.segments[:, 1:])
        return nn.functional.pad(logprobs(teacher, shorter, document_mask), (0, 0, 1, 0))

    def with_one(batch: Batch) -> Tensor:
        tokens = nn.functional.pad(batch.tokens, (1, 0), value=first)
        longer = replace(batch, tokens=tokens, segments=nn.functional.pad(batch.segments, (1, 0)))
        return logprobs(teacher, longer, document_mask)[:, 1:]

    found: dict[str, Callable[[Batch], Tensor]] = {LOST: without_first, ADDED: with_one}
    try:
        teacher.check(seq_len, True)
        found[MASK] = partial(logprobs, teacher, document_mask=not document_mask)
    except UsageError:
        log.info("%s cannot apply a document mask: that fault is not looked for", teacher)
    if (rounded := rounded_to_int8(teacher)) is not None:
        found[INT8] = partial(logprobs, rounded, document_mask=document_mask)
    return found


def _targets(batch: Batch, row: int) -> Any:
    assert batch.targets is not None
    length = batch.loss_mask.shape[1]
    return batch.targets[row * length : (row + 1) * length]


def rounded_to_int8(teacher: OnlineTeacher) -> OnlineTeacher | None:
    """A copy of a loaded teacher whose linear layers are rounded to 255 levels a row; None if it holds no layers."""
    model = getattr(teacher, "model", None)
    if not isinstance(model, nn.Module):
        return None
    rounded = copy.copy(teacher)
    rounded.model = copy.deepcopy(model)  # type: ignore[attr-defined]
    rounded._compiled = None  # type: ignore[attr-defined]
    for name, layer in rounded.model.named_modules():  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            with torch.no_grad():
                step = layer.weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                layer.weight.copy_((layer.weight.float() / step).round() * step)
    return rounded
