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

Shape suffixes: B rows, T positions, N tokens.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.names import POLICY
from kdtrain.cache.write.answers import Encode, ShardAnswers
from kdtrain.cache.write.shard_writer import ShardRows
from kdtrain.errors import UsageError
from kdtrain.models.generate import generate
from kdtrain.models.loading import check_fits, model_digest
from kdtrain.models.tokenizer import digest_of, end_tokens, named, tokenizer_digest
from kdtrain.monitor.progress import log
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.metrics import chunks
from kdtrain.objective.targets import Supervision
from kdtrain.precision.modes import autocast
from kdtrain.run.saved_student import open_student
from kdtrain.teaching.teacher import Writing
from kdtrain.training.state import read_saved
from kdtrain.training.student import Student

_SAMPLING = "temperature|top_|min_p|typical_p|epsilon|eta_|penalty|no_repeat|bad_words|num_beams|do_sample|guidance"
"""What names of settings that change which tokens are drawn contain."""


class Interrupted(Exception):
    """A stop request came between two decoding steps."""


@torch.no_grad()
def label_logprobs(student: Student, tokens_BT1: Tensor) -> Tensor:
    """Log p [B, T] at T = 1 of the labels, fp32, by the forward of training; the student is in evaluation mode."""
    tokens_BT1 = tokens_BT1.to(student.device)
    mask_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    hidden_ND = student.hidden_eager(Batch(tokens_BT1, mask_BT, torch.zeros_like(tokens_BT1[:, 1:]), None))
    rows, head = Supervision(tokens_BT1[:, 1:].flatten(), mask_BT.flatten(), None), student.model.head.gathered()
    found = [
        head.take(z_RV, own.labels[:, None])[:, 0] - head.log_sum_exp(z_RV)
        for _, z_RV, own in chunks(hidden_ND, head, rows, student.vocab_size)
    ]
    return torch.cat(found).float().view(mask_BT.shape)


class RolloutAnswers(ShardAnswers):
    """What a student writes behind the prompts of a batch, scored by its teacher's own answers.

    Args:
        student: as it is; its mode is left as it was.
        how: with its `policy`.
        inner: the teacher's answers about rows that have their text.
        scored: rows in one forward of either.
        stopped: whether to raise `Interrupted`; looked at after each decoding step.
    """

    writes = True

    def __init__(
        self,
        student: Student,
        how: Writing,
        inner: ShardAnswers,
        scored: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.logits, self.sharded, self.examine = inner.logits, inner.sharded, inner.examine
        self._student, self._how, self._inner = student, how, inner
        self._scored, self._stopped = scored, stopped
        self.seconds = {"writing": 0.0, "scoring": 0.0}
        self.apart = 0.0
        """The largest difference, nats, between log p at the draw and by the forward of training."""

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """As `ShardAnswers.rows`; `loss_mask` becomes true at the labels written."""
        with self._timed("writing"):
            found, drawn_BT = self._continued(rows)
        with self._timed("scoring"):
            kept = self._kept(found)
        difference_BT = np.abs(kept[POLICY] - drawn_BT)[found.loss_mask]
        self.apart = max(self.apart, float(np.nan_to_num(difference_BT).max(initial=0.0)))
        return found, lambda: kept

    def _kept(self, rows: ShardRows) -> Arrays:
        """What is kept of written rows, both sides; a row with a non-finite log p of the student's is broken."""
        student, parts = self._student, list[Arrays]()
        training = student.training
        student.eval()
        for start in range(0, len(rows), self._scored):
            part = rows[slice(start, min(start + self._scored, len(rows)))]
            with self._inner.session(part):
                arrays = dict(self._inner.rows(part)[1]())
            policy_BT = label_logprobs(student, torch.from_numpy(part.tokens.astype(np.int64))).cpu().numpy()
            policy_BT = np.where(part.loss_mask, policy_BT, np.float32(0.0))
            sound_B = np.isfinite(policy_BT).all(1)
            arrays["broken"] = arrays.get("broken", np.zeros(len(part), bool)) | ~sound_B
            parts.append(arrays | {POLICY: np.where(sound_B[:, None], policy_BT, np.float32(0.0)).clip(max=0)})
        student.train(training)
        return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}

    def _continued(self, rows: ShardRows) -> tuple[ShardRows, np.ndarray]:
        """The rows with what the student wrote, and its log p [B, T] at each draw."""
        how, student, ends = self._how, self._student, list(self._how.end_tokens)
        assert how.policy is not None
        name = f"{how.seed} {how.policy['round']} {how.policy['attempt']} {rows.split}"
        seed = int.from_bytes(hashlib.sha256(f"kdtrain rollouts {name}".encode()).digest()[:7])
        tokens_BT1, mask_BT = rows.tokens.copy(), np.zeros(rows.loss_mask.shape, bool)
        drawn_BT = np.zeros(mask_BT.shape, np.float32)
        lengths_B, room_B = rows.loss_mask.argmax(1) + 1, rows.loss_mask.sum(1)
        # the outer autocast keeps the weights that the inner ones cast
        with student.decoding() as next_logits, autocast(student.mode, student.device):
            for length in np.unique(lengths_B).tolist():
                own = np.flatnonzero(lengths_B == length)
                held = list[Tensor]()

                def seen(tokens_BT: Tensor, held: list[Tensor] = held) -> Tensor:
                    held[:] = [next_logits(tokens_BT)]
                    return held[0]

                prompts_BT = torch.from_numpy(rows.tokens[own, :length].astype(np.int64)).to(student.device)
                numbers, room = (rows.first + own).tolist(), int(room_B[own].max())
                steps = generate(seen, prompts_BT, room, how.temperature, seed, rows=numbers, top_p=how.top_p)
                open_B = np.ones(len(own), bool)
                for at, drawn_B in enumerate(steps, length - 1):
                    logprob_B = held[0].float().log_softmax(-1).gather(1, drawn_B[:, None])[:, 0]
                    tokens_B, going = drawn_B.cpu().numpy(), own[open_B]
                    tokens_BT1[going, at + 1], mask_BT[going, at] = tokens_B[open_B], True
                    drawn_BT[going, at] = logprob_B.cpu().numpy()[open_B]
                    open_B &= ~np.isin(tokens_B, ends) & (at + 2 - length < room_B[own])
                    if self._stopped():
                        raise Interrupted
                    if not open_B.any():
                        break
        return replace(rows, tokens=tokens_BT1, loss_mask=mask_BT), drawn_BT

    @contextmanager
    def _timed(self, what: str) -> Any:
        started = time.monotonic()
        yield
        self.seconds[what] += time.monotonic() - started


class WrittenByStudent:
    """A teacher that scores what a student writes; in everything else it is the teacher itself."""

    def __init__(self, teacher: Any, student: Student, policy: Mapping[str, Any], scored: int) -> None:
        self.teacher, self.student, self.policy, self.scored = teacher, student, policy, scored
        self.writing: Writing | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.teacher, name)

    def __str__(self) -> str:
        return f"{self.teacher}, on what {self.policy['spec']} writes"

    def write(self, how: Writing) -> None:
        """Have the student continue prompts. UsageError: both end their texts by different tokens."""
        self.writing = replace(how, policy=self.policy, end_tokens=common_ends(self.student, how, self.tokenizer))

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """The teacher's own, on the student's text."""
        assert self.writing is not None
        return RolloutAnswers(self.student, self.writing, self.teacher.answers(settings), self.scored)


def common_ends(student: Student, how: Writing, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text of either, of which one must be of both; log what of `generation_config` is not used.

    UsageError: there is none: the teacher would give the student's end no probability, and end at another.
    """
    settings = getattr(student.model.model, "generation_config", None)
    own = end_tokens(settings)
    if own and not {*own} & {*how.end_tokens}:
        raise UsageError(
            f"the student's texts end with {named(own, tokenizer)} and the teacher's with "
            f"{named(how.end_tokens, tokenizer)}: train it first on texts that the teacher wrote (--generate)"
        )
    unused = {} if settings is None else settings.to_diff_dict()
    unused = {name: value for name, value in unused.items() if any(each in name for each in _SAMPLING.split("|"))}
    if unused:
        given = ", ".join(f"{name} {value}" for name, value in sorted(unused.items()))
        log.info("the student's generation_config (%s) is not used: --gen-temperature and --gen-top-p are", given)
    return tuple(sorted({*own, *how.end_tokens}))


def written_by(name: str, teacher: Any, device: torch.device, seq_len: int, scored: int) -> WrittenByStudent:
    """The teacher, with the student `name` (a run, a checkpoint, an export, a hub id) as the writer of its text.

    UsageError: the student has another tokenizer, or cannot read sequences of this length.
    """
    model, place, checkpoint = open_student(name, device)
    theirs = tokenizer_digest(teacher.tokenizer)
    if place is None or digest_of(place) != theirs:
        raise UsageError(
            f"--by {name}: it has another tokenizer than the teacher {teacher.name}, which cannot score its tokens; "
            "take a student of the teacher's tokenizer"
        )
    check_fits(model, name, seq_len, False)
    size = min(model.vocab_size, teacher.vocab_size)
    student = Student(model, DistillationLoss(alpha=0.0), vocab_size=size, mode=teacher.mode).eval()
    step = None if checkpoint is None else read_saved(checkpoint)["progress"]["step"]
    policy = {"spec": name, "weights_digest": model_digest(model), "step": step, "round": 0, "attempt": 1}
    return WrittenByStudent(teacher, student, policy, scored)
