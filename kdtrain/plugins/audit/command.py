"""`kdtrain audit CACHE --teacher T`: the teacher scores rows of a cache again, in two number formats."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kdtrain as kd
from kdtrain.cache.format.codec import draw_points
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.tools.self_check import other_row
from kdtrain.errors import UsageError, log
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import tokenizer_digest
from kdtrain.monitor.progress import bar, setup_logging
from kdtrain.objective.batch import Batch
from kdtrain.plugins.audit import AuditConfig
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
from kdtrain.plugins.audit.evidence import NOISE, NOISE_UNKNOWN, Evidence, judge, score, worst_first
from kdtrain.precision.modes import MODES
from kdtrain.ranks import pick_device
from kdtrain.tables import Table, number, short
from kdtrain.teaching.teacher import OnlineTeacher

DIAGNOSED = 16
"""Rows in which the fault is looked for: those that are furthest off."""
NEIGHBOURS = 256
"""Rows whose labels are compared with the targets of one among them."""
_LOGITS = 2**27  # of one forward


def _few(value: float) -> str:
    """Format a figure in a few characters, so that the table fits a narrow terminal: 26.9, 1,414, 331 M, 2.1e+15."""
    if not 1e4 <= abs(value) < math.inf:
        return number(value)
    return short(value) if abs(value) < 1e12 else f"{value:.2g}"


def main(config: AuditConfig) -> int:
    """Show what the audit finds; return 1 if a test fails.

    UsageError: the cache is damaged, or the teacher cannot score it. RunError: a shard cannot be read.
    """
    setup_logging()
    found = audit(config, kd.Cache(config.cache))
    wrong = finding(found)
    record = {"path": config.cache, "ok": not wrong, "findings": [wrong] if wrong else [], "audit": found}
    config.show(page(found), record, wrapped=True)
    return 1 if wrong else 0


def audit(config: AuditConfig, cache: LocalCache) -> dict[str, Any]:
    """Score rows of the cache again; return a plain record of the verdict, and the best explanation where a test fails.

    UsageError: the teacher cannot score this cache. RunError: a shard cannot be read.
    """
    settings = cache.manifest.settings
    if not settings.codec.taught:
        raise UsageError(f"{cache.folder} holds tokens without targets, which verify checks")
    if settings.is_mixed:
        raise UsageError(f"{cache.folder} mixes several teachers; audit the caches that it was merged from")
    stated = settings.teacher or {}
    in_known_format = stated.get("precision") in MODES
    teacher, reference = _teachers(config, settings)
    every = [(split, row) for split in cache for row in range(cache.manifest.splits[split]["sequences"])]
    order = np.random.RandomState(config.seed).permutation(len(every))
    rows = [every[place] for place in order[: config.rows]]
    scored = list[tuple[tuple[str, int], Evidence]]()
    with bar("audit", len(rows)) as shown:
        for split, indices in _batches(rows, max(1, min(8, _LOGITS // (settings.seq_len * settings.vocab_size)))):
            scored += _scored(cache, teacher, reference, split, indices)
            shown.update(shown.done + len(indices))
    if len(scored) < 2:
        raise UsageError(f"{len(scored)} of the rows of {cache.folder} count in a loss; an audit needs two")
    found = [evidence for _, evidence in scored]
    verdict = judge(found, noise=NOISE if in_known_format else NOISE_UNKNOWN)
    known = stated.get("weights_digest") if in_known_format else None
    worst = [scored[at][0] for at in worst_first(found)[:DIAGNOSED]]
    return {
        "teacher": str(teacher),
        "same_weights": None if known is None else teacher.digest == known,
        **asdict(verdict),
        "failed": [test.name for test in verdict.failed],
        "diagnosis": asdict(_diagnosis(cache, teacher, worst)) if verdict.failed else None,
    }


def finding(found: Mapping[str, Any]) -> str | None:
    """Describe in one line what is wrong; return None if nothing is. found: as `audit` returns it."""
    if (best := found["diagnosis"]) is None:
        return None
    fit = f"best fit: {best['fault']}"
    share = best["share"]
    if share >= MOST:
        fit += f" explains {share:.0%} of the difference"
    elif share:
        fit = f"best fit: partly {best['fault']} ({share:.0%} of the difference), or {OTHER_WEIGHTS}"
    return (
        f"{', '.join(found['failed'])}: not what {found['teacher']} predicts; {fit} "
        f"({number(max(best['divergence'], 0.0))} nats per token from the teacher)"
    )


def page(found: Mapping[str, Any]) -> list[Any]:
    """Build the lines and the table that a terminal shows."""
    rows = []
    tests = found["tests"]
    level = found["level"]
    for test in tests:
        figure = test["figure"]
        of = {"z": f"log p {figure:+.4f} nats off", "c": f"{_few(figure)} a degree of freedom"}
        what = of.get(test["kind"][0], f"{_few(figure)} of what is allowed")
        fails = test["name"] in found["failed"]
        mark = "fails" if fails else ""
        rows.append((test["name"], what, _few(test["statistic"]), test["kind"], f"{test['p']:.2g}", mark))
    weights = {True: "the same weights", False: "OTHER weights by their digest", None: "digest unknown"}
    against = f"{found['teacher']} ({weights[found['same_weights']]})"
    wrong = finding(found)
    return [
        f"{found['rows']} rows, {found['positions']:,} positions, against {against}",
        Table.of(("test", "found", "statistic", "kind", "p", ""), rows, left=("test", "found", "kind")),
        f"a test fails below p = {level / max(1, len(tests)):.2g}, {level:.0%} for all of them",
        f"finding: {wrong}" if wrong else "the cache holds what the teacher predicts",
    ]


def _teachers(config: AuditConfig, settings: CacheSettings) -> tuple[OnlineTeacher, OnlineTeacher]:
    """Load the teacher in the number format of the cache, bf16 where that is unknown, and in fp32.

    UsageError: it has another vocabulary or tokenizer than the cache.
    """
    device = pick_device(config.device)
    stated = settings.teacher or {}
    spec = ModelSpec.read(config.teacher, "teachers").as_recorded(stated)
    mode = stated["precision"] if stated.get("precision") in MODES else "bf16"
    teacher = OnlineTeacher.open(spec, device, mode)
    wrong = "give the teacher of the cache"
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
    return teacher, teacher if mode == "fp32" else loaded(OnlineTeacher.open(spec, device, "fp32"))


def _batches(rows: list[tuple[str, int]], size: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each split with its rows in batches, in the order of the file, so that each shard is opened once."""
    for split in sorted({split for split, _ in rows}):
        indices = sorted(row for own, row in rows if own == split)
        yield from ((split, indices[start : start + size]) for start in range(0, len(indices), size))


def _scored(
    cache: LocalCache, teacher: OnlineTeacher, reference: OnlineTeacher, split: str, indices: list[int]
) -> Iterator[tuple[tuple[str, int], Evidence]]:
    """Yield the evidence of each row; leave out rows that do not count in a loss."""
    settings, manifest, span = cache.manifest.settings, cache.manifest, cache.manifest.temperature_range
    # a top-k from elsewhere has a tail of one bucket, which shows in its range
    bucket = span is not None and span["min"] == span["max"]
    codec = settings.codec
    # rows are numbered as they were when they were captured
    as_captured = codec.num_samples and manifest.origin is None and manifest.parents is None
    offset = settings.grid_offset if as_captured else None
    batch = cache[split].read(indices)
    own, right = (logprobs(each, batch, settings.document_mask) for each in (teacher, reference))
    for b, row in enumerate(indices):
        mask_T = batch.loss_mask[b]
        points = None
        if not mask_T.any():
            continue
        if offset is not None:
            points = draw_points(settings.seed, split, row, settings.seq_len, codec.num_samples, offset)
        evidence = score(
            _targets(batch, b).map(lambda _, each, kept=mask_T: each[kept]).to(own.device),
            batch.tokens[b, 1:][mask_T].to(own.device),
            *(each[b][mask_T.to(own.device)] for each in (own, right)),
            whole_tail=manifest.origin is None if codec.counts_only else not bucket,
            independent=settings.sampling is None,
            points_TD=None if points is None else points[mask_T.numpy()],
        )
        yield (split, row), evidence


def _diagnosis(cache: LocalCache, teacher: OnlineTeacher, rows: list[tuple[str, int]]) -> Diagnosis:
    """Diagnose some rows: find the fault that explains them best."""
    settings = cache.manifest.settings
    found = list[Gains]()
    matched = []
    forwards = other_forwards(teacher, settings.seq_len, settings.document_mask)
    for split, (row,) in _batches(rows, 1):
        reader = cache[split]
        batch = reader.read([row])
        own = logprobs(teacher, batch, settings.document_mask)[0]
        targets = _targets(batch, 0)
        others = {name: forward(batch)[0] for name, forward in forwards.items()}
        found.append(gains(targets.to(own.device), batch.tokens[0, 1:].to(own.device), own, others))
        start = max(0, min(row - NEIGHBOURS // 2, len(reader) - NEIGHBOURS))
        tokens = reader.text(range(start, min(start + NEIGHBOURS, len(reader))))["tokens"]
        labels = torch.from_numpy(tokens[:, 1:].astype(np.int64))
        matched.append(other_row(targets, row - start, labels, batch.loss_mask[0]))
    return diagnose(found, matched)


def logprobs(teacher: OnlineTeacher, batch: Batch, document_mask: bool) -> Tensor:
    """Compute log p [B, T, V] by a fresh forward, in fp32 on the teacher's device."""
    with torch.no_grad():
        logits_BTV = teacher.logits(batch.tokens[:, :-1], batch.segments if document_mask else None)
    return logits_BTV.float().log_softmax(-1)


def other_forwards(teacher: OnlineTeacher, seq_len: int, document_mask: bool) -> dict[str, Callable[[Batch], Tensor]]:
    """Return the forwards that a faulty capture may have made, by the name of the fault."""
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
    """Copy a loaded teacher and round its linear layers to 255 levels a row; return None if it holds no layers."""
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
