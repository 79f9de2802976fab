"""The plan of a run in rounds: its prompts, its fixed text, who scores, and the rounds of another run for a replay.

In the folder of a run: `prompts`, a cache of bare tokens whose rows are the prompts of both splits;
`rollouts/rollouts.json`, the shape of the stream and the attempt of each round that was read last; and a cache a round.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.write.answers import ShardRows
from kdtrain.cache.write.writer import write_cache
from kdtrain.config.choices import DIVERGENCES
from kdtrain.data.order import Order
from kdtrain.data.packed import PackedRow
from kdtrain.errors import RunError, UsageError, log
from kdtrain.files import json_digest, read_sealed, typed
from kdtrain.models.loading import model_digest
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer, tokenizer_digest
from kdtrain.outputs import OutFolder
from kdtrain.plugins.rounds.answers import PromptReader, bare
from kdtrain.plugins.rounds.command import write_elsewhere
from kdtrain.plugins.rounds.figures import Score, load_score, mean_score, show_texts, texts
from kdtrain.plugins.rounds.source import Attempts, Fixed, Rounds, StreamShape
from kdtrain.plugins.rounds.writing import (
    SCORED,
    Interrupted,
    RolloutAnswers,
    common_ends,
    continued,
    inserted,
    own_rows,
    prompts_digest,
    round_settings,
)
from kdtrain.ranks import on_main, raise_on_all_ranks
from kdtrain.tables import duration
from kdtrain.teaching.teacher import Teacher, Writing
from kdtrain.training.sources.plan import CachedData, DataPlan, PlanRequest
from kdtrain.training.sources.source import Facts, Source

ROLLOUTS, SHAPE = "rollouts", "rollouts.json"
_TEXT = "data"
"""The folder in a run of the text that it packed."""
_SHARDS = 8
"""Shards of a round, at least, where it has so many batches: what a kill loses, and what ranks share."""
_STREAM = 7
"""Of the order of the prompts, apart from those of the training."""


def rounds(request: PlanRequest) -> DataPlan:
    """Plan a run on text that the student writes, or that another run's student wrote."""
    config, given = request.config, request.config.plugins["rounds"]
    if not given.on_policy:
        return ReplayedData(request)
    if given.rollout_share:
        return RoundsData(request)
    with raise_on_all_ranks():
        return FixedData(config, config.cache)


class FixedData(CachedData):
    """The plan of a run of which no share is rollouts: a cache keeps its own targets beside the teacher."""

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        return {split: Fixed(each) for split, each in self.sources.items()}, self.sources["validation"]


class ReplayedData(DataPlan):
    """The plan of a run on the rounds of another run, validated on its fixed text."""

    def __init__(self, request: PlanRequest) -> None:
        self.config, self.run = request.config, request.config.plugins["rounds"].rollouts
        with raise_on_all_ranks():
            self.known, self.shape, self.attempts, self.fixed = self._read()
        self.facts = self.known

    def _read(self) -> tuple[Facts, StreamShape, dict[int, int], dict[str, Source] | None]:
        path = self.run / ROLLOUTS / SHAPE
        try:
            record = read_sealed(path)
            shape, identity = typed(record["shape"], StreamShape), typed(record["identity"], str)
            attempts = dict[int, int](typed(record["attempts"], Attempts))  # type: ignore[arg-type]
            first = next(iter(sorted((self.run / ROLLOUTS).glob("round-*/manifest.json")))).parent
        except (OSError, StopIteration):
            raise UsageError(
                f"--rollouts {self.run}: no run that wrote rounds is there; give one of --on-policy"
            ) from None
        except (KeyError, ValueError) as error:
            raise UsageError(f"{path} is not what a run writes ({error}); give another --rollouts") from None
        drawn = LocalCache(first).manifest.settings.data["generated"]
        how = " ".join(f"--gen-{name} {drawn[name.replace('-', '_')]:g}" for name in ("temperature", "top-p"))
        loss = self.config.objective.divergence
        sampled = DIVERGENCES.get(loss.partition(":")[0]).of_label is not None
        if sampled and how != "--gen-temperature 1 --gen-top-p 1":
            raise UsageError(f"--rollouts {self.run} was drawn at {how}; --divergence {loss} needs both at 1")
        known = CachedData(self.config, [LocalCache(first)])
        facts = replace(known.facts, name=str(self.run), identity=identity)
        fixed = CachedData(self.config, self.config.cache).sources if self.config.cache else None
        if Fraction(shape.share) < 1 and fixed is None:
            raise UsageError(f"--rollouts {self.run} mixes its rounds with fixed text; give its --cache too")
        return facts, shape, attempts, fixed

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        own = CachedData(self.config, [LocalCache(self.run / _TEXT)]).sources
        folder, fixed = self.run / ROLLOUTS, self.fixed
        sources = split_sources(self.config, self.known, self.shape, folder, None, own, fixed, self.attempts)
        return sources, own["validation"]


def split_sources(
    config: Any,
    facts: Facts,
    shape: StreamShape,
    folder: Path,
    writer: Any,
    text: dict[str, Source],
    fixed: dict[str, Source] | None,
    attempts: Mapping[int, int],
) -> dict[str, Source]:
    """Make the splits of a run; validation is of the fixed cache if there is one, else of the text of the prompts."""
    tokenizer = None if facts.tokenizer is None else load_tokenizer(facts.tokenizer)
    beside = fixed or (text if shape.cold else None)
    given = config.plugins["rounds"]
    score = None if given.score_with is None else load_score(given.score_with)
    divergence = DIVERGENCES.get(config.objective.divergence.partition(":")[0])
    train = Rounds(
        facts,
        shape,
        folder,
        seed=config.seed,
        writer=writer,
        attempts=attempts,
        fixed=None if beside is None else Fixed(beside["train"]),
        text=text["train"],
        sampled=divergence.of_label is not None,
        stops=given.on_collapse == "stop",
        shown=lambda cache, name: {} if tokenizer is None else show_texts(cache, tokenizer, name, score),
        score=None if given.best_by == "loss" else partial(on_main, partial(writer.score, score)),
    )
    return {"train": train, "validation": text["validation"] if fixed is None else Fixed(fixed["validation"])}


class RoundsData(DataPlan):
    """The plan of a run on text that the student writes behind the prompts of --data, alone or beside --cache."""

    def __init__(self, request: PlanRequest) -> None:
        config = request.config
        self.request, self.config, self.given = request, config, config.plugins["rounds"]
        with raise_on_all_ranks():
            self.teacher: Any = request.teacher or self._served()
            self.fixed = CachedData(config, config.cache).sources if config.cache else None
        # of the plans that are left the one of the text: what a server answers about that is not requested
        own = replace(config, data=replace(config.data, document_mask=False))  # a rollout is a row of its own
        self.text = replace(request, config=own, teacher=self.teacher, names=request.names[-1:]).next()
        with raise_on_all_ranks():
            self.codec = replace(CodecSpec.requested(self.given, self.teacher.vocab_size), written=True)
            self.facts = self._facts("", None)

    def refuse_no_rows(self) -> None:
        self.text.refuse_no_rows()

    def _served(self) -> Any:
        """Open the teacher that servers run."""
        config = self.config
        assert config.teacher is not None, "check has refused it"
        spec = replace(ModelSpec.read(config.teacher, "teachers"), kind=config.remote.teacher_kind)
        teacher = Teacher.open(spec, self.request.device, "fp32")
        config.remote.connect(teacher, self.given)
        return teacher

    def _facts(self, identity: str, tokenizer: Path | None) -> Facts:
        """Describe the rollouts. UsageError: fixed text does not fit beside them."""
        codec = self.codec
        span = codec.stated_range
        theirs = self.teacher.tokenizer
        found = Facts(
            name=str(self.config.out / ROLLOUTS),
            identity=identity,
            seq_len=self.config.data.seq_len,
            vocab_size=codec.vocab_size,
            tokenizer_size=len(theirs),
            tokenizer_digest=tokenizer_digest(theirs),
            tokenizer=tokenizer,
            targets=codec.kind,
            top_k=codec.top_k,
            num_samples=codec.num_samples,
            temperature_range=(span["min"], span["max"]),
            teacher={"spec": self.teacher.name},
            end_tokens=self.teacher.ends,
        )
        other = None if self.fixed is None else self.fixed["train"].facts
        if other is None:
            return found
        for name in ("seq_len", "vocab_size", "tokenizer_digest", "document_mask"):
            ours, there = getattr(found, name), getattr(other, name)
            if ours != there:
                raise UsageError(
                    f"--cache {other.name} has {name} {there} and the rollouts have {ours}; they cannot be mixed"
                )
        kinds = {(each.targets, each.top_k, each.num_samples) for each in (found, other)}
        return found if len(kinds) == 1 else replace(found, targets="mixed", num_samples=0)

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        config, given = self.config, self.given
        sources, rows = self.text.prepare(resumed)
        folder = config.out / ROLLOUTS
        if config.remote is not None:
            self.teacher.check(config.data.seq_len, False)
            known = on_main(
                lambda: [
                    CacheSettings.stored(each)["teacher"]
                    for each in sorted(folder.glob("round-*"))
                    if CacheSettings.begun(each)
                ]
            )
            self.teacher.begin(known[0] if known else None, False)
        rows_ = dict[str, list[PackedRow]]()
        seen: str | None = None

        def own() -> dict[str, list[PackedRow]]:
            """Read the rows again in which the teacher reads its own prompts, and return them with those stored."""
            nonlocal seen
            rows_.update(own_rows(config.data, self.teacher, True, True, None))
            seen = prompts_digest(rows_, config.data.seq_len, self.teacher)
            return {split: [*map(bare, each)] for split, each in rows_.items()}

        prompts = self.text.prompts(given.prompt_tokens, resumed, own if given.teacher_prompts else None)
        share = Fraction(str(given.rollout_share))
        steps = given.round_steps
        if steps is None:
            steps = max(1, round(Fraction(given.round_rows) / (share * config.batch_size)))
        shape = StreamShape(
            rows=given.round_rows,
            sequences=steps * config.batch_size,
            cold=given.cold_start * config.batch_size,
            stale=given.stale_rounds,
            share=str(share),
        )
        fixed = None if self.fixed is None else self.fixed["train"].facts.identity
        more = [] if given.write_with is None else ["write-with"]
        more += [] if seen is None else [seen]
        decides = [prompts.manifest.digest, asdict(shape), self.codec.to_json(), str(given.max_new_tokens), fixed]
        decides += [given.gen_temperature, given.gen_top_p, given.rollout_batch_size, config.teacher]
        decides += [given.teacher_system, *more]
        identity = hashlib.sha256(repr(decides).encode()).hexdigest()
        facts = self._facts(identity, prompts.tokenizer)
        writer = RoundWriter(self, prompts, shape, facts, seen, rows_)
        return split_sources(config, facts, shape, folder, writer, sources, self.fixed, {}), rows


@dataclass(eq=False)
class RoundWriter:
    """Writes the rounds of a run: `source.Writer`.

    own: rows of each split, in the order of `prompts`, with the teacher's own prompts. seen: the digest of these.
    """

    data: RoundsData
    prompts: LocalCache
    shape: StreamShape
    facts: Facts
    seen: str | None
    own: Mapping[str, list[PackedRow]]

    def __post_init__(self) -> None:
        self.config, self.given, self.teacher = self.data.config, self.data.given, self.data.teacher

    def meet(self, student: Any, teacher: Any) -> None:
        """Take the student. UsageError: one of both is sharded, or they end their texts by different tokens."""
        if any(isinstance(each, DTensor) for each in student.parameters()):
            raise UsageError("--on-policy needs the whole student on each rank; use --parallel ddp")
        self.student = student
        self.teacher = teacher or self.teacher
        if getattr(self.teacher, "sharded", False):  # ranks write other numbers of batches
            whole = "use --teacher-parallel replicate, and leave --teacher-tensor-parallel out"
            raise UsageError(f"--on-policy needs the whole teacher on each rank; {whole}")
        given = self.given
        self.how = Writing(
            temperature=given.gen_temperature,
            top_p=given.gen_top_p,
            end_tokens=common_ends(student, self.facts.end_tokens, self.teacher.tokenizer),
            seed=self.config.seed,
            batch_size=given.rollout_batch_size,
        )
        system = given.teacher_system
        self.more = None if system is None else inserted(system, self.config.data, self.teacher)

    def begun(self, number: int, attempt: int, folder: Path) -> bool:
        """Return True if this attempt may be written, as `source.Writer` has it.

        The folder of a round by other weights stays, and the next attempt begins.
        """
        return self._settings(number, attempt)[0].fits(folder)

    def write(self, number: int, attempt: int, folder: Path) -> Mapping[str, float]:
        """Write the round, as `source.Writer` has it."""
        started = time.monotonic()
        settings, how = self._settings(number, attempt)
        stopped = self.data.request.stopping if self.data.request.alone else lambda: False
        drawn = how if self.given.write_with is None else None
        inner = self.teacher.answers(settings)
        # what a server answers is checked with each part that is scored
        scored = SCORED if self.config.remote is None else self.given.rollout_batch_size
        answers = RolloutAnswers(self.student, drawn, inner, scored, stopped, self.more)
        answers.logits = None  # whose fidelity is not measured each round
        log.info("round %d: the student writes %s rows into %s", number, f"{self.shape.rows:,}", folder)
        tokenizer = self.prompts.tokenizer
        each, size = self.shape.rows, len(self.prompts["train"])
        order = Order.shuffled(self.config.seed, size, _STREAM)
        rows = {
            "train": order.batch((number - 1) * each, each),
            "validation": np.arange(len(self.prompts["validation"])),
        }
        splits: Any = {split: self._rows(split, own, self._length(number)) for split, own in rows.items()}
        if self.given.write_with is not None:
            path = folder.parent / "answers" / f"{folder.name}-{json_digest(settings.to_json())[:12]}.jsonl"
            reader = PromptReader(self.teacher.tokenizer, how.end_tokens, settings.seq_len)
            model, stopping = self.student.model, self.data.request.stopping
            splits = write_elsewhere(self.given.write_with, path, model, tokenizer, reader, splits, how, stopping)
            if splits is None:
                raise Interrupted
            answers.seconds["writing"] += time.monotonic() - started
        write_cache(
            folder,
            settings,
            splits,
            teacher=answers,
            tokenizer=tokenizer,
            batch_size=self.given.rollout_batch_size,
            progress=self._stop_together,
            all_ranks=True,
        )
        on_main(lambda: self._record(folder.parent, number, attempt))
        seconds = answers.seconds
        whole = time.monotonic() - started
        spent = {f"rollouts/{name}_s": each for name, each in seconds.items()}
        text = "round %d took %s, writing %s and scoring %s%s; log p of training and of decoding differ by %.1e at most"
        more = " (writing costs more than scoring)" if seconds["writing"] > seconds["scoring"] else ""
        writing, scoring = (duration(seconds[each]) for each in ("writing", "scoring"))
        log.info(text, number, duration(whole), writing, scoring, more, answers.apart)
        return spent | {"rollouts/logprob_difference": answers.apart}

    def score(self, score: Score) -> float | None:
        """Score what the present student writes behind the held-out prompts; None where a stop was requested.

        The draws and the room are the same each time.
        """
        how = replace(self.how, policy={"round": 0, "attempt": 1})
        rows = [*self._rows("validation", np.arange(len(self.prompts["validation"])), self.given.lengths[1])]
        found = list[tuple[str, str]]()
        for start in range(0, len(rows), size := self.given.rollout_batch_size):
            part = ShardRows.of("validation", 0, start, rows[start : start + size])
            try:
                part, _ = continued(self.student, how, part, self.data.request.stopping)
            except Interrupted:
                return None
            found += texts(part.tokens, part.loss_mask, self.teacher.tokenizer)
        return mean_score(found, score)

    def _record(self, folder: Path, number: int, attempt: int) -> None:
        """Record what a replay needs besides the rounds: the shape, and which attempt of each was read last."""
        path, attempts = folder / SHAPE, dict[int, int]()
        try:
            attempts.update(read_sealed(path).get("attempts", []) if path.exists() else [])
        except ValueError as error:
            raise RunError(f"{path}: {error}; move it away, and resume") from None
        found = sorted((attempts | {number: attempt}).items())
        record = {"identity": self.facts.identity, "shape": asdict(self.shape), "attempts": [*map(list, found)]}
        OutFolder(folder).publish(SHAPE, record, "rounds.shape")

    def _settings(self, number: int, attempt: int) -> tuple[CacheSettings, Writing]:
        """Return the settings of a round by the student with its present weights."""
        place = self.shape.cold + (number - 1) * self.shape.sequences
        base = self.prompts.manifest.settings
        policy = {
            "spec": str(self.config.student),
            "weights_digest": model_digest(self.student.model),
            "step": place // self.config.batch_size,
            "round": number,
            "attempt": attempt,
        }
        if self.given.teacher_system is not None:
            policy["teacher_system"] = self.given.teacher_system
        if self.seen is not None:
            policy["teacher_prompts"] = self.seen
        how = replace(self.how, policy=policy)
        size = self.given.rollout_batch_size
        batches = max(1, -(-self.shape.rows // size) // _SHARDS)
        data = dict(base.data)
        prompts = data.pop("prompts")
        base = replace(
            base,
            codec=self.data.codec,
            teacher=dict(self.teacher.identity),
            data=data,
            sequences_per_shard=batches * size,
            sequences={"train": self.shape.rows, "validation": len(self.prompts["validation"])},
        )
        return round_settings(base, how, {**prompts, "max_new_tokens": self._length(number)}), how

    def _length(self, number: int) -> int:
        """Return the most tokens that the student writes in a round; they grow evenly to the last round."""
        first, last = self.given.lengths
        epoch = self.shape.epoch(self.data.fixed and self.data.fixed["train"])
        sequences = self.config.total_steps(epoch) * self.config.batch_size - self.shape.cold
        rounds = max(1, -(-sequences // self.shape.sequences))
        return round(first + (last - first) * min(1.0, (number - 1) / max(1, rounds - 1)))

    def _rows(self, split: str, rows: np.ndarray, most: int) -> Iterator[PackedRow]:
        """Yield prompts, those of one length together, with room for so many tokens."""
        text = self.prompts[split].text(rows)
        masks = text["loss_mask"] == 1
        lengths = masks.argmax(1)
        for at in np.argsort(lengths, kind="stable").tolist():
            mask = masks[at].copy()
            mask[lengths[at] + most :] = False
            kept = self.own[split][rows[at]].kept if self.own else {}
            yield PackedRow(text["tokens"][at].astype(np.int32), mask, np.zeros(len(mask), np.int32), kept)

    def _stop_together(self, done: int, total: int | None) -> None:
        """Raise Interrupted on every rank if a stop was requested on one; called before each batch."""
        if self.data.request.stopping_on_any():
            raise Interrupted
