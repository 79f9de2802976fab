"""Rows of a cache that a student writes and its teacher scores: behind each prompt what the student draws, token by
token, and beside what is kept of the teacher's distributions the student's own log p of each token.

A draw is a function of the logits and of (seed, round, attempt, split, row, position). The logits depend, in their last
bits, on the rows beside: batches are cut at fixed rows, those of one prompt length are continued together without
padding, a row that has ended stays in, and the batch size is part of the settings. So a capture that was killed ends in
the same bytes. The student's log p is that of the trainer's forward over whole rows, which a decoder's differs from by
rounding; the largest difference is logged.

The settings of sampling in a model's `generation_config` are not used.

What it gives up: the keys of rows that have ended are computed until all of their length have; prompts of many lengths
make many small batches; the answers of a batch are encoded before the next one is written.

StreamShape suffixes: B rows, T positions, N tokens.
"""

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.answers import ShardAnswers, ShardRows
from kdtrain.config.commands import CacheTeacherConfig
from kdtrain.config.sections import DataConfig
from kdtrain.data.corpus import documents_of, has_prompts
from kdtrain.data.packed import PackedRow
from kdtrain.data.packing import Encoder
from kdtrain.errors import UsageError, log
from kdtrain.models.generate import generate
from kdtrain.models.loading import check_fits, model_digest
from kdtrain.models.tokenizer import digest_of, end_tokens, named, tokenizer_digest
from kdtrain.objective.loss import DistillationLoss
from kdtrain.plugins.rounds.answers import SEEN, PromptReader, read_answers, rows_of
from kdtrain.teaching.teacher import Writing
from kdtrain.training.student import Student

SCORED = 16
"""Rows of a round in one forward of either model."""
_SAMPLING = "temperature|top_|min_p|typical_p|epsilon|eta_|penalty|no_repeat|bad_words|num_beams|do_sample|guidance"
"""What names of settings that change which tokens are drawn contain."""


class Interrupted(Exception):
    """A stop request came between two decoding steps."""


def round_settings(base: CacheSettings, how: Writing, prompts: Mapping[str, Any]) -> CacheSettings:
    """Return `base`, which has codec and teacher, for text that is written thus. prompts: what they are cut to."""
    assert how.policy is not None
    seed = hashlib.sha256(f"{how.seed} {how.policy['round']} {how.policy['attempt']}".encode())
    return base.written(
        data={**base.data, "generated": {**prompts, **how.to_json()}},
        seed=int.from_bytes(seed.digest()[:6]),
        sampling=base.codec.sampling,
    )


def continued(
    student: Student, how: Writing, rows: ShardRows, stopped: Callable[[], bool]
) -> tuple[ShardRows, np.ndarray]:
    """Return the rows with what the student wrote, and its log p [B, T] at each draw. Interrupted: a stop request."""
    assert how.policy is not None
    ends = list(how.end_tokens)
    name = f"{how.seed} {how.policy['round']} {how.policy['attempt']} {rows.split}"
    seed = int.from_bytes(hashlib.sha256(f"kdtrain rollouts {name}".encode()).digest()[:7])
    tokens_BT1 = rows.tokens.copy()
    mask_BT = np.zeros(rows.loss_mask.shape, bool)
    drawn_BT = np.zeros(mask_BT.shape, np.float32)
    lengths_B = rows.loss_mask.argmax(1) + 1
    room_B = rows.loss_mask.sum(1)
    # the outer autocast keeps the weights that the inner ones cast
    with student.decoding() as next_logits, student.autocast():
        for length in np.unique(lengths_B).tolist():
            own = np.flatnonzero(lengths_B == length)
            held = list[Tensor]()

            def seen(tokens_BT: Tensor, held: list[Tensor] = held) -> Tensor:
                held[:] = [next_logits(tokens_BT)]
                return held[0]

            prompts_BT = torch.from_numpy(rows.tokens[own, :length].astype(np.int64)).to(student.device)
            numbers = (rows.first + own).tolist()
            room = int(room_B[own].max())
            steps = generate(seen, prompts_BT, room, how.temperature, seed, rows=numbers, top_p=how.top_p)
            open_B = np.ones(len(own), bool)
            for at, drawn_B in enumerate(steps, length - 1):
                logprob_B = held[0].float().log_softmax(-1).gather(1, drawn_B[:, None])[:, 0]
                tokens_B = drawn_B.cpu().numpy()
                going = own[open_B]
                tokens_BT1[going, at + 1] = tokens_B[open_B]
                mask_BT[going, at] = True
                drawn_BT[going, at] = logprob_B.cpu().numpy()[open_B]
                open_B &= ~np.isin(tokens_B, ends) & (at + 2 - length < room_B[own])
                if stopped():
                    raise Interrupted
                if not open_B.any():
                    break
    return replace(rows, tokens=tokens_BT1, loss_mask=mask_BT), drawn_BT


class RolloutAnswers(ShardAnswers):
    """Answers with text that a student writes behind the prompts of a batch, scored by the teacher's own answers.

    Args:
        student: as it is; its mode is left as it was. None: the rows bring log p of their tokens.
        how: with its `policy`; None: the rows have their text, which another program wrote.
        inner: the teacher's answers about rows that have their text.
        scored: rows in one forward of either.
        stopped: whether to raise `Interrupted`; looked at after each decoding step.
        more: what the teacher reads besides.
    """

    writes = True

    def __init__(
        self,
        student: Student | None,
        how: Writing | None,
        inner: ShardAnswers,
        scored: int,
        stopped: Callable[[], bool] = lambda: False,
        more: "Inserted | None" = None,
    ) -> None:
        self.logits, self.sharded, self.examine = inner.logits, inner.sharded, inner.examine
        self._student, self._how, self._inner = student, how, inner
        self._scored, self._stopped, self._more = scored, stopped, more
        self.seconds = {"writing": 0.0, "scoring": 0.0}
        self.apart = 0.0
        """The largest difference, nats, between log p at the draw and by the forward of training."""

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Callable[[], dict[str, np.ndarray]]]:
        """As `ShardAnswers.rows`; `loss_mask` becomes true at the labels written."""
        found = rows
        drawn_BT = rows.kept.get(CodecSpec.POLICY)
        if self._how is not None:
            assert self._student is not None
            with self._timed("writing"):
                found, drawn_BT = continued(self._student, self._how, rows, self._stopped)
        with self._timed("scoring"):
            kept = self._kept(found)
        if drawn_BT is not None:
            difference_BT = np.abs(kept[CodecSpec.POLICY] - drawn_BT)[found.loss_mask]
            self.apart = max(self.apart, float(np.nan_to_num(difference_BT).max(initial=0.0)))
        return found, lambda: kept

    def _kept(self, rows: ShardRows) -> dict[str, np.ndarray]:
        """Return what is kept of written rows, both sides; a row with a non-finite log p of the student's is broken."""
        parts = list[dict[str, np.ndarray]]()
        for start in range(0, len(rows), self._scored):
            part = rows[slice(start, min(start + self._scored, len(rows)))]
            read = part
            back_BT = None
            if SEEN in part.kept or self._more is not None:
                read, back_BT = seen_rows(part, self._more)
            with self._inner.session(read):
                arrays = dict(self._inner.rows(read)[1]())
            if back_BT is not None:  # at t what the teacher knew of the same token
                each_B1 = np.arange(len(part))[:, None]
                arrays = {name: each if name == "broken" else each[each_B1, back_BT] for name, each in arrays.items()}
            policy_BT = part.kept.get(CodecSpec.POLICY)
            if self._student is not None:
                policy_BT = self._student.label_logprobs(torch.from_numpy(part.tokens.astype(np.int64))).cpu().numpy()
            if policy_BT is None:
                parts.append(arrays)
                continue
            policy_BT = np.where(part.loss_mask, policy_BT, np.float32(0.0))
            sound_B = np.isfinite(policy_BT).all(1)
            arrays["broken"] = arrays.get("broken", np.zeros(len(part), bool)) | ~sound_B
            parts.append(
                arrays | {CodecSpec.POLICY: np.where(sound_B[:, None], policy_BT, np.float32(0.0)).clip(max=0)}
            )
        return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}

    @contextmanager
    def _timed(self, what: str) -> Any:
        started = time.monotonic()
        yield
        self.seconds[what] += time.monotonic() - started


@dataclass(frozen=True)
class Inserted:
    """Tokens that the teacher reads within each prompt, and the student does not."""

    at: int
    """Tokens of the row before them: what a chat template begins with."""
    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def seen_rows(rows: ShardRows, more: Inserted | None) -> tuple[ShardRows, np.ndarray]:
    """Return the teacher's rows, its own prompts before the same text, and the place of each label [B, T] there.

    more: is put into each prompt; None: the rows bring their prompts (`answers.SEEN`).
    """
    (size, length) = rows.loss_mask.shape
    starts_B = rows.loss_mask.argmax(1) + 1
    if more is None:
        prompts = [row[row >= 0] for row in rows.kept[SEEN]]
    else:
        ours = [row[:start] for row, start in zip(rows.tokens, starts_B, strict=True)]
        prompts = [np.concatenate([each[: more.at], more.tokens, each[more.at :]]) for each in ours]
    shift_B = np.array([*map(len, prompts)]) - starts_B
    width = length + max(0, int(shift_B.max()))
    tokens_BW1 = np.repeat(rows.tokens[:, -1:], width + 1, 1)  # what fills a row
    mask_BW = np.zeros((size, width), rows.loss_mask.dtype)
    for row, (prompt, start, shift) in enumerate(zip(prompts, starts_B, shift_B, strict=True)):
        tokens_BW1[row, : len(prompt)] = prompt
        tokens_BW1[row, len(prompt) : length + 1 + shift] = rows.tokens[row, start:]
        mask_BW[row, len(prompt) - 1 : length + shift] = rows.loss_mask[row, start - 1 :]
    back_BT = (np.arange(length) + shift_B[:, None]).clip(0, width - 1)
    segments_BW = np.zeros(mask_BW.shape, rows.segments.dtype)
    return replace(rows, tokens=tokens_BW1, loss_mask=mask_BW, segments=segments_BW, kept={}), back_BT


def inserted(text: str, data: DataConfig, teacher: Any) -> Inserted:
    """Encode a system prompt as the teacher's chat template has it, or a plain text that begins each row.

    UsageError: the template does not put a system prompt before the same turns, or rows become too long.
    """
    tokenizer = teacher.tokenizer
    if not has_prompts(data) or next(documents_of(data, data.split, prompts=True)).messages is None:
        found = Inserted(0, tuple(tokenizer.encode(text, add_special_tokens=False)))
    else:
        turns = [{"role": "user", "content": "?"}]
        encoder = Encoder(tokenizer, opening=True)
        try:
            longer = [{"role": "system", "content": text}, *turns]
            whole, own = (encoder.prompt_of("--teacher-system", each) for each in (longer, turns))
        finally:
            encoder.close()
        at = next((place for place, (a, b) in enumerate(zip(whole, own, strict=False)) if a != b), len(own))
        size = len(whole) - len(own)
        found = Inserted(at, tuple(whole[at : at + size]))
        if size <= 0 or whole != [*own[:at], *found.tokens, *own[at:]]:
            raise UsageError(
                "--teacher-system: the chat template does not put a system prompt before the same turns (it may have "
                "one of its own where none is given); write it into the data instead"
            )
    if not found.tokens:
        raise UsageError("--teacher-system is empty; give a text, or leave it out")
    teacher.check(data.seq_len + len(found), False)
    return found


@dataclass(eq=False)
class WrittenByStudent:
    """A teacher that scores what a student writes, or text behind prompts of its own; in all else it is the teacher.

    policy: who writes; None: it is text as any other. texts: see `Teacher`. seen: digest of the teacher's own prompts.
    given: whether the rows have their text.
    """

    teacher: Any
    student: Student | None
    policy: Mapping[str, Any] | None
    scored: int
    more: Inserted | None
    texts: Any
    seen: str | None
    given: bool
    writing: Writing | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.teacher, name)

    def __str__(self) -> str:
        own = "behind prompts of its own" if self.policy is None else f"on what {self.policy['spec']} writes"
        return f"{self.teacher}, {own}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """As the teacher's, with its own prompts."""
        return {**self.teacher.identity, **({} if self.seen is None else {"prompts": self.seen})}

    def write(self, how: Writing) -> None:
        """Have the student continue prompts. UsageError: both end their texts by different tokens."""
        ends = how.end_tokens
        if self.student is not None:
            ends = common_ends(self.student, ends, self.tokenizer)
        self.writing = replace(how, policy=self.policy, end_tokens=ends)

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """Return the teacher's answers on the student's text. UsageError: it is sharded, and has prompts of its own."""
        if getattr(self.teacher, "sharded", False):
            raise UsageError("a teacher with prompts of its own is not sharded; use --teacher-parallel replicate")
        how = None if self.given else self.writing
        inner = self.teacher.answers(settings)
        answers = RolloutAnswers(self.student, how, inner, self.scored, more=self.more)
        if self.more is not None or self.seen is not None:
            answers.logits = answers.examine = None  # which would see the student's rows
        return answers


def common_ends(student: Student, ends: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text of either side; log the settings of `generation_config` that are not used.

    ends: the teacher's. One of them must end the texts of both. UsageError: none does: the teacher would give the
    student's end no probability, and end at another.
    """
    settings = getattr(student.model.model, "generation_config", None)
    own = end_tokens(settings)
    if own and not {*own} & {*ends}:
        raise UsageError(
            f"the student's texts end with {named(own, tokenizer)} and the teacher's with "
            f"{named(ends, tokenizer)}: train it first on texts that the teacher wrote (--generate)"
        )
    unused = {} if settings is None else settings.to_diff_dict()
    unused = {name: value for name, value in unused.items() if any(each in name for each in _SAMPLING.split("|"))}
    if unused:
        given = ", ".join(f"{name} {value}" for name, value in sorted(unused.items()))
        log.info("the student's generation_config (%s) is not used: --gen-temperature and --gen-top-p are", given)
    return tuple(sorted({*own, *ends}))


def written_by(given: Any, teacher: Any, opened: Callable[[str], Any], config: CacheTeacherConfig) -> WrittenByStudent:
    """Combine the teacher with a student (a run, a checkpoint, an export, a hub id) or a file as what wrote its text.

    given: the `WriterConfig`. opened: loads a student by its name.

    UsageError: the student has another tokenizer, or cannot read sequences of this length; the file cannot be read.
    """
    name = given.by
    data = config.data
    ends = teacher.ends
    most = config.text.max_new_tokens
    known = True
    student = None
    more = None
    policy: dict[str, Any] = {"spec": name, "weights_digest": None, "step": None, "round": 0, "attempt": 1}
    found: dict[str, list[PackedRow]] | None = None
    if given.answers is not None:
        read = read_answers(given.answers, PromptReader(teacher.tokenizer, ends, data.seq_len), most)
        found, known = read.rows, read.known
        if given.teacher_system is not None and (read.ids or SEEN in found["train"][0].kept):
            what = "a teacher_prompt on each line" if not read.ids else "prompts of token ids"
            raise UsageError(
                f"{given.answers} has {what}, which --teacher-system cannot change; leave it out, and give each line "
                "the whole teacher_prompt"
            )
        is_digest = re.fullmatch("[0-9a-f]{64}", read.policy or "") is not None
        policy["weights_digest"] = read.policy if is_digest else None
        policy["spec"] = str(given.answers) if is_digest or read.policy is None else read.policy
    elif name is None or given.teacher_prompts:
        found = own_rows(data, teacher, given.teacher_prompts, name is not None, most)
    if name is not None:
        found_student = opened(name)
        model = found_student.student
        theirs = tokenizer_digest(teacher.tokenizer)
        if found_student.tokenizer is None or digest_of(found_student.tokenizer) != theirs:
            raise UsageError(
                f"--by {name}: it has another tokenizer than the teacher {teacher.name}, which cannot score its "
                "tokens; take a student of the teacher's tokenizer"
            )
        check_fits(model, name, data.seq_len, False)
        size = min(model.vocab_size, teacher.vocab_size)
        student = Student(model, DistillationLoss(alpha=0.0), vocab_size=size, mode=teacher.mode).eval()
        own = model_digest(model)
        if policy["weights_digest"] not in (None, own):
            raise UsageError(f"{given.answers} is of other weights than --by {name}; name the student that wrote it")
        policy |= {"spec": name, "weights_digest": own, "step": found_student.step}
    elif not known:
        raise UsageError(
            f"{given.answers} has no logprobs; name the student that wrote it with --by, which computes them, or if no "
            "student did, read it by --data with the columns prompt and completion"
        )
    if given.teacher_system is not None:
        more = inserted(given.teacher_system, data, teacher)
        policy["teacher_system"] = given.teacher_system
    texts, seen = None, None
    if found is not None:
        texts = {"prompt_tokens": None, "max_new_tokens": most}, {split: iter(rows) for split, rows in found.items()}
        seen = prompts_digest(found, data.seq_len, teacher)
    if name is None and given.answers is None:
        return WrittenByStudent(teacher, None, None, config.batch_size, more, texts, given.teacher_system or seen, True)
    told = given.answers is not None
    return WrittenByStudent(teacher, student, policy, config.batch_size, more, texts, seen, told)


def own_rows(data: DataConfig, teacher: Any, own: bool, opening: bool, most: int | None) -> dict[str, list[PackedRow]]:
    """Return the rows of each split for a teacher that reads more than the student: see `answers.rows_of`.

    UsageError: the data are plain text, which has no prompts.
    """
    if not has_prompts(data):
        raise UsageError(f"{data.data} is plain text; prompts of the teacher's own need conversations, or completions")
    found = dict[str, list[PackedRow]]()
    for split, source in data.sources(data.limits).items():
        reader = PromptReader(teacher.tokenizer, teacher.ends, data.seq_len, opening)
        found[split] = [*islice(rows_of(data, source, reader, own, most), data.limits[split])]
    return found


def prompts_digest(rows: Mapping[str, list[PackedRow]], seq_len: int, teacher: Any) -> str | None:
    """SHA-256 of the prompts that a teacher reads in place of the student's; None: there are none.

    UsageError: they are too long for the teacher.
    """
    prompts = [row.kept[SEEN] for each in rows.values() for row in each if SEEN in row.kept]
    if not prompts:
        return None
    teacher.check(seq_len + int((np.stack(prompts) >= 0).sum(1).max()) - 1, False)
    return hashlib.sha256(np.stack(prompts).astype("<i4").tobytes()).hexdigest()
