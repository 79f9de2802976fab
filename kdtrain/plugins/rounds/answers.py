"""Text behind prompts as rows of a cache: that another program wrote, and that whose teacher has prompts of its own.

A line of the file is a JSON object: `prompt`, a text, a list of messages or token ids, and `answer`, a text or token
ids; where they are known `logprobs`, log p of each token of the answer, `policy`, the name of what wrote it or the
digest of its weights, `finish_reason`, `split`, and `teacher_prompt`, what the teacher reads in place of the prompt.
Ids are taken as they are. A text is tokenized, and gets the token that ends a text unless `finish_reason` is another
than `stop`.

What it gives up: a text that is tokenized again may have other tokens than were drawn; the file is in memory whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.config.sections import DataConfig
from kdtrain.data.corpus import assign, documents_of, rank
from kdtrain.data.packed import PackedRow
from kdtrain.data.packing import Encoder
from kdtrain.data.rows import RowFile
from kdtrain.errors import UsageError, log, panics_refused
from kdtrain.files import typed
from kdtrain.models.tokenizer import filler_token

SEEN = "teacher_prompt"
"""The teacher's own prompt in `PackedRow.kept`: its tokens, and -1 behind them."""


class PromptReader:
    """Makes tokens of prompts and answers, and rows of `seq_len` of these.

    ends: the tokens that end a text. opening: conversations are rendered for an answer, and not whole.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], seq_len: int, opening: bool = True) -> None:
        self.tokenizer, self.seq_len, self.opening = tokenizer, seq_len, opening
        self.end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
        self.filler = filler_token(tokenizer, tuple(ends))
        self.encoder = Encoder(tokenizer, opening=opening)

    def close(self) -> None:
        """End the process that renders conversations."""
        self.encoder.close()

    def prompt(self, key: str, given: Any) -> list[int]:
        """Return the tokens of a prompt. UsageError, with the key: it has none, or is no text, messages or ids."""
        found = list(given) if isinstance(given, list) and all(type(each) is int for each in given) else []
        if not found:
            found = self.encoder.prompt_of(key, given)
            self.encoder.masks.refuse_none()
        return self._known(key, found)

    def answer(self, key: str, given: str | list[int], ended: bool) -> list[int]:
        """Return the tokens of an answer. UsageError, with the key: it has none."""
        if not isinstance(given, str):
            return self._known(key, given)
        with panics_refused(f"{key}: the tokenizer cannot take this text"):
            found = self.tokenizer.encode(given, add_special_tokens=False)
        return self._known(key, [*found, self.end] if ended else found)

    def _known(self, key: str, tokens: list[int]) -> list[int]:
        if not tokens or min(tokens) < 0 or max(tokens) >= len(self.tokenizer):
            raise UsageError(f"{key}: prompt and answer must be texts or ids of the tokenizer's {len(self.tokenizer)}")
        return tokens

    def row(
        self, prompt: list[int], answer: list[int], logprobs: list[float] | None = None, seen: list[int] | None = None
    ) -> PackedRow:
        """Make a row with the answer; where known, log p of each label and the teacher's own prompt, `seen`."""
        found = PackedRow.prompt(prompt, seq_len=self.seq_len, max_new_tokens=len(answer), filler=self.filler)
        found.tokens[1:][found.loss_mask] = answer
        if logprobs is not None:
            found.kept[CodecSpec.POLICY] = np.zeros(self.seq_len, np.float32)
            found.kept[CodecSpec.POLICY][found.loss_mask] = logprobs
        if seen is not None:
            found.kept[SEEN] = np.full(self.seq_len, -1, np.int32)
            found.kept[SEEN][: len(seen)] = seen
        return found


@dataclass
class _Line:
    answer: str | list[int]
    prompt: str | list[Any] | None = None
    logprobs: list[Annotated[float, Meta(le=0)]] | None = None
    policy: str | None = None
    finish_reason: str | None = None
    split: Literal["train", "validation"] | None = None
    teacher_prompt: str | list[Any] | None = None


@dataclass(frozen=True)
class GivenAnswers:
    """The rows of a file by split, what wrote them, and whether log p of their tokens is there.

    ids: whether a prompt is one of token ids.
    """

    rows: dict[str, list[PackedRow]]
    policy: str | None
    known: bool
    ids: bool


def read_answers(
    path: Path, reader: PromptReader, most: int | None = None, prompts: Sequence[dict[str, Any]] = ()
) -> GivenAnswers:
    """Read a file of answers.

    most: tokens of one, which is cut behind them. prompts: the lines of prompts that it answers, in order; else it has
    its own.

    UsageError: a line cannot be read, answers another prompt, or does not go with the lines before.
    """
    rows = list[PackedRow]()
    splits = list[str]()
    wide = 0
    ids = False
    policies, known = set[str | None](), set[tuple[bool, bool]]()
    with closing(reader):
        for key, value in RowFile(path).values():
            try:
                line = typed(value, _Line)
            except ValueError as error:
                raise UsageError(f"{key} is not a prompt with its answer: {error}") from None
            if not prompts:
                prompt = reader.prompt(key, line.prompt)
                room = reader.seq_len
                split = str(line.split or "")
            elif len(rows) < len(prompts) and line.prompt in (None, *map(prompts[len(rows)].get, ("prompt", "tokens"))):
                prompt, room, split = (prompts[len(rows)][name] for name in ("tokens", "max_tokens", "split"))
            else:
                raise UsageError(f"{key} answers another prompt than line {len(rows) + 1} of the prompts has")
            answer = reader.answer(key, line.answer, line.finish_reason in (None, "stop"))
            if line.logprobs is not None and len(line.logprobs) != len(answer):
                raise UsageError(f"{key} has {len(line.logprobs)} logprobs for the {len(answer)} tokens of its answer")
            own = prompts[len(rows)].get("teacher_prompt") if prompts else line.teacher_prompt
            seen = None if own is None else reader.prompt(key, own)
            room = min(room, most or room, reader.seq_len + 1 - len(prompt))
            ids |= isinstance(line.prompt, list) and not isinstance(line.prompt[0], dict)
            policies.add(line.policy)
            known.add((line.logprobs is not None, seen is not None))
            if len(policies) + len(known) > 2:
                raise UsageError(
                    f"{key} is of another policy than the lines before, or has logprobs or a teacher_prompt where they "
                    "do not"
                )
            if room < 1 or len(seen or ()) > reader.seq_len:
                wide += 1
                continue
            rows.append(reader.row(prompt, answer[:room], line.logprobs and line.logprobs[:room], seen))
            splits.append(split)
    if wide:
        log.warning("%s: left out %s answers whose prompt fills --seq-len %s", path, wide, reader.seq_len)
    if len(rows) < (len(prompts) or 3):
        raise UsageError(f"{path} has {len(rows)} answers that can be used, and {len(prompts) or 3} are needed")
    ranks = [rank(each.tokens.tobytes().hex()) for each in rows]
    found: dict[str, list[PackedRow]] = {"train": [], "validation": []}
    for row, split, usual in zip(rows, splits, assign(ranks, ("validation",)), strict=True):
        found[split or usual].append(row)
    if empty := [split for split, each in found.items() if not each]:
        raise UsageError(f"{path} has no answer for {empty[0]}; give some that split, or leave it out of all lines")
    return GivenAnswers(found, policies.pop(), known.pop()[0], ids)


def rows_of(data: DataConfig, source: str, reader: PromptReader, own: bool, most: int | None) -> Iterator[PackedRow]:
    """Return the rows of a split of `data`: prompts with their answers, or, by a reader that is opening, prompts alone.

    own: whether the teacher has prompts of its own; of answers that have other tokens behind these none is kept. most:
    tokens of an answer.
    """
    opening, length = reader.opening, reader.seq_len
    differ = wide = 0
    try:
        for document in documents_of(data, source, prompts=opening, teacher=own):
            both = [document := document.before_answer()]
            both += [document.for_teacher()] if own else []
            if opening:
                found = [(reader.encoder.prompt(each), [reader.filler] * length) for each in both]
            else:
                found = [reader.encoder.answer(each) for each in both]
            (prompt, answer), (seen, same) = found[0], found[-1]
            if not answer or answer != same:
                differ += 1
            elif not prompt or not seen or max(len(prompt), len(seen)) > length:
                wide += 1
            else:
                room = min(most or length, length + 1 - len(prompt))
                yield reader.row(prompt, answer[:room], seen=seen if own else None)
    finally:
        reader.close()
        why = f"that have no prompt, or one that fills --seq-len {length}"
        for number, what in (differ, "whose answer has other tokens behind the teacher's prompt, or none"), (wide, why):
            if number:
                log.warning("%s: left out %s rows of the %s data %s", data.data, f"{number:,}", source, what)


def bare(row: PackedRow) -> PackedRow:
    """Make a row without what it brings."""
    return replace(row, kept={})
