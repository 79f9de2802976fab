"""What a request asks of each position, and how the answer becomes what a cache keeps: a top-k, or samples.

A request is a prompt of token ids, some tokens of a row. vLLM answers with `prompt_logprobs`: nothing for the first
token, and for each other one a table of the K most likely entries, to which the token itself is added where it is not
among them. Entry i is about token i, given the tokens before it: about position i - 1 of a cache.

Servers are not trusted. Each number is checked: as many positions as tokens, K entries each or K + 1 with the token,
every id inside the vocabulary, every number finite and at most 0, the sum of the probabilities at most 1, and at least
1 with the most that entries beyond the K can have. That the token itself is in its table shows that the answer is about
this prompt, at this place.

A server with kdtrain's plugin gives samples instead (`Sampled`), and a receipt at each position.

A server that writes text returns the ids that it drew (`return_token_ids`), the end token among them, and for each the
most likely entries of the model's own distribution, in the form of `prompt_logprobs`. Every setting that changes what
is drawn is sent, because a server takes others from the model's `generation_config.json`. Samples are given of prompts
only: there the text is scored by a second request.

What it gives up: entries with equal log p have no order of their own; the server's rank decides, then the id. A server
draws and rounds by what it has to do at the same time: text that is requested again may be another one.

Shapes: n positions of a prompt of n + 1 tokens, T positions of a row, K entries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from kdtrain.cache.format.codec import keep, uniforms
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.errors import RunError
from kdtrain.plugins.served.engine_samples import SampleRequest, read_samples
from kdtrain.teaching.teacher import Writing

Arrays = dict[str, np.ndarray]
"""What a cache keeps of positions, by data set."""
ABOVE_ZERO = 1e-3
"""Nats by which rounding may lift a log-probability above 0."""
SUM = 1.01
"""The largest sum of probabilities that rounding explains."""
LEAST_SUM = 0.9
"""The same below 1, with a vocabulary that a server pads."""
IMPOSSIBLE = -1000.0
"""Log p of an entry that was masked out: vLLM writes -9999 for minus infinity, and no softmax comes near it."""


class Wrong(Exception):
    """An answer that cannot be right, with the reason in words; the request is sent again, a few times."""


class Entry(msgspec.Struct, gc=False):
    """One entry of a table: a token's log p, rank and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Lists = Sequence[dict[int, Entry] | None]
"""`prompt_logprobs` of one prompt: a table for each token but the first."""


class WrittenEntries(msgspec.Struct):
    """Log-probabilities of the generated tokens, by `token_id:ID`."""

    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    """The answer to one prompt."""

    prompt_logprobs: list[dict[int, Entry] | None] | None = None
    token_ids: list[int] | None = None
    logprobs: WrittenEntries | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Span:
    """Tokens of a row that are sent as one prompt."""

    split: str
    row: int
    """The number of the sequence in its split."""
    start: int
    """The position of the row at which it begins."""
    tokens: list[int]
    """n + 1 ids; tokens[i + 1] is the label of the position start + i."""
    room: int = 0
    """Tokens that the server may write behind it."""
    written: int = 0
    """Of its tokens, how many the server wrote: only these are kept."""

    def __len__(self) -> int:
        """Return the number of positions, n."""
        return len(self.tokens) - 1

    def __str__(self) -> str:
        return f"{self.split} sequence {self.row}"


class Answers:
    """A request for the most likely entries of each position, which every server gives.

    A subclass requests something else.

    codec: of the cache. seed: of its samples.
    """

    def __init__(self, codec: CodecSpec, seed: int = 0) -> None:
        self.codec, self.seed = codec, seed

    def parameters(self, span: Span) -> dict[str, Any]:
        """Return the parameters of a request besides the model, the prompt and the temperature."""
        return {"prompt_logprobs": self.codec.top_k}

    def read(self, span: Span, lists: Lists) -> Arrays:
        """Read the arrays of n positions [n, ...] that a cache keeps, as `codec.encode` makes them.

        lists: as many as tokens, the first one None. Wrong: they cannot be the teacher's.
        """
        return keep(*read_top(span.tokens, lists, self.codec.top_k, self.codec.vocab_size), self.codec)

    def blank(self, number: int) -> Arrays:
        """Return the arrays [n, ...] of positions that were not requested: equal entries.

        No label of the loss is there.
        """
        entries = self.codec.top_k
        ids_nK = np.repeat(np.arange(entries)[None], number, 0)
        return keep(ids_nK, np.full(ids_nK.shape, np.nan), np.full(number, np.nan), self.codec)

    def distance(self, one: Arrays, other: Arrays) -> float:
        """Compute the distance of two answers about the same positions, in nats; see `apart`."""
        return apart(*((each["ids"], each["logprobs"]) for each in (one, other)))


class Sampled(Answers):
    """A request for samples, drawn by the engine from its own logits with `kdtrain.plugins.served.vllm_plugin`."""

    def parameters(self, span: Span) -> dict[str, Any]:
        """Return the parameters of a request for samples: their grid."""
        return {"prompt_logprobs": 0, "vllm_xargs": self._request(span).to_args()}

    def read(self, span: Span, lists: Lists) -> Arrays:
        """Read the samples that a cache keeps. Wrong: a receipt is missing, or the samples cannot be."""
        try:
            return read_samples(lists, span.tokens, self._request(span), self.codec)
        except ValueError as problem:
            raise Wrong(str(problem)) from None

    def blank(self, number: int) -> Arrays:
        """Return the arrays of positions that were not requested: entry 0 alone."""
        ids_nD = np.full((number, self.codec.num_samples), self.codec.absent, self.codec.id_dtype)
        counts_nD = np.zeros(ids_nD.shape, np.uint8)
        ids_nD[:, 0], counts_nD[:, 0] = 0, self.codec.num_samples
        numbers = {name: np.zeros(number, np.float32) for name in ("label_logprob", "logit_mean", "logit_std")}
        logprobs_nD = np.where(counts_nD > 0, 0.0, np.nan).astype(np.float32)
        numbers |= {"tail": np.zeros((number, 2), np.float32), "logprobs": logprobs_nD}
        return {**numbers, "ids": ids_nD, "counts": counts_nD}

    def distance(self, one: Arrays, other: Arrays) -> float:
        """Compute the root mean square of the differences of the labels' log p, and of E[log p], in nats."""
        pairs = ((each["label_logprob"], each["tail"][:, 1]) for each in (one, other))
        return float(np.sqrt(np.square(np.subtract(*map(np.stack, pairs))).mean()))

    def _request(self, span: Span) -> SampleRequest:
        return SampleRequest(
            number=self.codec.num_samples, seed=self.seed, split=span.split, row=span.row, first=span.start
        )


def answers_of(codec: CodecSpec, seed: int = 0) -> Answers:
    """Choose how to request the distributions of a cache."""
    return (Sampled if codec.num_samples else Answers)(codec, seed)


def text_parameters(prompt: Span, answers: Answers, how: Writing) -> dict[str, Any]:
    """Return the parameters of a request to continue a prompt, besides the model and the prompt."""
    return {
        **({} if answers.codec.num_samples else {"logprobs": answers.codec.top_k}),
        "max_tokens": prompt.room,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": int(uniforms("text", how.seed, prompt.split, prompt.row, 1)[0]) >> 1,
        "stop_token_ids": list(how.end_tokens),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_text(prompt: Span, answers: Answers, how: Writing, choice: Choice) -> tuple[Span, Arrays | None]:
    """Read the text of an answer; return the prompt with it, and its arrays for the cache, None if it must be scored.

    It is scored by another request. Wrong: it cannot be what was requested. RunError: it ends with an end token that is
    not known here.
    """
    ids = choice.token_ids or []
    ends = how.end_tokens
    if not ids:
        raise Wrong("no token_ids: it is not vLLM, or a version that does not return them")
    if min(ids) < 0 or max(ids) >= answers.codec.vocab_size:
        raise Wrong(f"a text with the id {max(ids)}, beyond the teacher's vocabulary of {answers.codec.vocab_size}")
    ended = ids[-1] in ends
    if choice.finish_reason == "stop" and not ended:  # it would write the same again
        raise RunError(
            f"{prompt}: the server ends a text at {ids[-1]}, and the local files of the teacher say {ends}; add it to "
            "eos_token_id in generation_config.json beside the tokenizer, or name a tokenizer that has it"
        )
    if choice.finish_reason != ("stop" if ended else "length"):
        reason = str(choice.finish_reason)[:40]
        raise Wrong(f"finish_reason {reason} of a text whose last token is {ids[-1]}, where {ends} end it")
    if len(ids) > prompt.room or (not ended and len(ids) < prompt.room) or set(ids[:-1]) & set(ends):
        raise Wrong(f"a text of {len(ids)} tokens, where {prompt.room} or an end token were requested")
    whole = replace(prompt, tokens=[*prompt.tokens, *ids], room=0, written=len(ids))
    if answers.codec.num_samples:
        return whole, None
    tables = (None if choice.logprobs is None else choice.logprobs.top_logprobs) or []
    if len(tables) != len(ids):
        raise Wrong(f"logprobs of {len(tables)} tokens, {len(ids)} were written")
    last = replace(whole, tokens=[prompt.tokens[-1], *ids])
    return whole, answers.read(last, [None, *map(_table, tables)])


def _table(found: Mapping[str, float] | None) -> dict[int, Entry] | None:
    if found is None:
        return None
    ids = [each.removeprefix("token_id:") for each in found]
    if any(not each.isascii() or not each.isdecimal() or len(each) > 10 for each in ids):
        raise Wrong("entries that are not named by their ids")
    return {int(each): Entry(value) for each, value in zip(ids, found.values(), strict=True)}


def read_top(
    tokens: Sequence[int], lists: Lists, entries: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a prompt's tables: ids and log p [n, K], most likely first, and log p [n] of the labels.

    Wrong: they cannot be a teacher's.
    """
    number = len(tokens) - 1
    ids_nK, logprobs_nK = np.empty((number, entries), np.int64), np.empty((number, entries))
    label_n = np.empty(number)
    for i, (label, found) in enumerate(zip(tokens[1:], lists[1:], strict=True)):
        if found is None:
            raise Wrong(f"nothing for token {i + 1}")
        if label not in found:
            raise Wrong(f"the table of token {i + 1} is about another one: the answer is shifted, or of another prompt")
        if min(found) < 0 or max(found) >= vocab_size:  # before numpy, which takes no larger ones
            raise Wrong(
                f"the id {max(found)}, beyond the teacher's vocabulary of {vocab_size}: another model, or another "
                "vocab_size than that of its spec"
            )
        table = {each: entry for each, entry in found.items() if len(found) != entries + 1 or each != label}
        if len(table) != entries:
            raise Wrong(f"{len(found)} entries for token {i + 1} instead of {entries}")
        order = sorted(table, key=lambda each: (-table[each].logprob, table[each].rank or 0, each))
        ids_nK[i], logprobs_nK[i], label_n[i] = order, [table[each].logprob for each in order], found[label].logprob
    every = np.concatenate([logprobs_nK, label_n[:, None]], 1)
    if not np.isfinite(every).all():
        raise Wrong("a log-probability that is not finite")
    if (every > ABOVE_ZERO).any() or (np.exp(logprobs_nK).sum(1) > SUM).any():
        raise Wrong(
            "numbers that are not log-probabilities: their sum is above 1; start the server with --logprobs-mode "
            "raw_logprobs"
        )
    if (logprobs_nK < IMPOSSIBLE).any():
        raise Wrong(
            f"processed log-probabilities: an entry of log p {logprobs_nK.min():g} among the most likely ones was "
            "masked out; start the server with --logprobs-mode raw_logprobs"
        )
    # Logits may all be negative: no other entry is more likely than the last one of a table.
    most_n = np.exp(logprobs_nK).sum(1) + (vocab_size - entries) * np.exp(logprobs_nK[:, -1])
    if len(short := np.flatnonzero(most_n < LEAST_SUM)):
        raise Wrong(
            f"numbers that are not log-probabilities: those of token {short[0] + 1} leave more probability than "
            f"{vocab_size:,} entries can have; start the server with --logprobs-mode raw_logprobs"
        )
    listed_n = (ids_nK == np.array(tokens[1:])[:, None]).any(1)
    if len(over := np.flatnonzero(~listed_n & (label_n > logprobs_nK[:, -1] + ABOVE_ZERO))):
        raise Wrong(f"token {over[0] + 1} is more likely than entry {entries}, and is not among them")
    return ids_nK, logprobs_nK.clip(max=0), label_n.clip(max=0)


def apart(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float:
    """Compute the root mean square of the differences of log p between two lists of entries [n, K] each, in nats.

    An entry that the other list lacks is at most as likely as its last one, and differs by at least that.
    """
    (ids_nK, one_nK), (others_nK, other_nK) = one, other
    if ids_nK.shape != others_nK.shape:
        return math.inf
    total = 0.0
    number = 0
    for mine, mine_p, theirs, theirs_p in zip(ids_nK, one_nK, others_nK, other_nK, strict=True):
        known = dict(zip(theirs.tolist(), theirs_p.tolist(), strict=True))
        least = min(known.values())
        for each, value in zip(mine.tolist(), mine_p.tolist(), strict=True):
            difference = value - known[each] if each in known else max(0.0, value - least)
            total, number = total + difference**2, number + 1
    return math.sqrt(total / max(1, number))


def spans_of(split: str, row: int, tokens: np.ndarray, counted: np.ndarray, segments: np.ndarray | None) -> list[Span]:
    """Cut a row [T+1] into prompts: one, or one a document, each up to its last label of the loss.

    counted: bool [T], labels of the loss. segments: [T], number of the document; None: all see each other.
    """
    length = len(counted)
    spans = []
    borders = [] if segments is None else (np.flatnonzero(np.diff(segments)) + 1).tolist()
    for start, stop in zip([0, *borders], [*borders, length], strict=True):
        labels = np.flatnonzero(counted[start:stop])
        if len(labels):
            spans.append(Span(split, row, start, tokens[start : start + int(labels[-1]) + 2].tolist()))
    return spans
