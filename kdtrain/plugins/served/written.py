"""Text that a server writes: what a request asks, and how the answer is checked and becomes what a cache keeps.

vLLM returns the ids that it drew (`return_token_ids`), the end token among them, and for each the most likely entries
of the model's own distribution, to which the drawn token is added: the form of `prompt_logprobs`, of the text that was
written. Every setting that changes what is drawn is sent, because a server takes others from the model's
`generation_config.json` where a request names none.

A server that gives samples (kdtrain's plugin) gives them of prompts only: there the text is scored by a second request.

What it gives up: a server draws in its own way and rounds by what it has to do at the same time, so that text that is
requested again may be another one, whatever its seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdtrain.cache.build.shard_writer import ShardRows
from kdtrain.cache.format.codec import uniforms
from kdtrain.cache.format.compression import Arrays
from kdtrain.errors import RunError
from kdtrain.plugins.served.answers import Answers, Entry, Span, Wrong
from kdtrain.plugins.served.client import Choice, quoted
from kdtrain.teaching.teacher import Writing

_NAME = "token_id:"


@dataclass(frozen=True)
class Text:
    """A prompt with what was written behind it."""

    span: Span
    """All of it, from the beginning of its row."""
    written: int
    """How many of its last tokens."""
    arrays: Arrays | None
    """What a cache keeps of these, [written, ...]; None: the server must score them."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of a row, and how many tokens may follow it."""

    split: str
    row: int
    tokens: list[int]
    room: int

    def __str__(self) -> str:
        return f"{self.split} sequence {self.row}"

    @classmethod
    def of(cls, part: ShardRows, i: int) -> "Prompt":
        """That of row i of a shard, as `prompts.prompt_rows` makes it."""
        length = int(part.loss_mask[i].argmax()) + 1
        return cls(part.split, part.first + i, part.tokens[i, :length].tolist(), int(part.loss_mask[i].sum()))

    def parameters(self, answers: Answers, how: Writing) -> dict[str, Any]:
        """What the request has besides the model and the prompt."""
        seed = int(uniforms("text", how.seed, self.split, self.row, 1)[0]) >> 1
        entries = {} if answers.codec.num_samples else {"logprobs": answers.codec.top_k}
        return {
            **entries,
            "max_tokens": self.room,
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "stop_token_ids": list(how.end_tokens),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def read(self, answers: Answers, how: Writing, found: Choice) -> Text:
        """The text of an answer.

        Wrong: it cannot be what was requested. RunError: it ends with an end token that is not known here.
        """
        ids = found.token_ids or []
        if not ids:
            raise Wrong("no token_ids: it is not vLLM, or a version that does not return them")
        if min(ids) < 0 or max(ids) >= answers.codec.vocab_size:
            raise Wrong(f"a text with the id {max(ids)}, beyond the teacher's vocabulary of {answers.codec.vocab_size}")
        ended = ids[-1] in how.end_tokens
        if found.finish_reason != ("stop" if ended else "length"):
            if found.finish_reason == "stop":  # it would write the same again
                raise RunError(
                    f"{self}: the server ends a text at {ids[-1]}, and the local files of the teacher say "
                    f"{how.end_tokens}; add it to eos_token_id in generation_config.json beside the tokenizer, or name "
                    "a tokenizer that has it"
                )
            reason = quoted(str(found.finish_reason), 40)
            raise Wrong(
                f"finish_reason {reason} of a text whose last token is {ids[-1]}, where {how.end_tokens} end it"
            )
        if len(ids) > self.room or (not ended and len(ids) < self.room) or set(ids[:-1]) & set(how.end_tokens):
            raise Wrong(f"a text of {len(ids)} tokens, where {self.room} or an end token were asked for")
        whole = Span(self.split, self.row, 0, [*self.tokens, *ids])
        if answers.codec.num_samples:
            return Text(whole, len(ids), None)
        tables = (None if found.logprobs is None else found.logprobs.top_logprobs) or []
        if len(tables) != len(ids):
            raise Wrong(f"logprobs of {len(tables)} tokens, {len(ids)} were written")
        last = Span(self.split, self.row, len(self.tokens) - 1, [self.tokens[-1], *ids])
        return Text(whole, len(ids), answers.read(last, [None, *map(_table, tables)]))


def _table(found: Mapping[str, float] | None) -> dict[int, Entry] | None:
    if found is None:
        return None
    ids = [each.removeprefix(_NAME) for each in found]
    if any(not each.isascii() or not each.isdecimal() or len(each) > 10 for each in ids):
        raise Wrong("entries that are not named by their ids")
    return {int(each): Entry(value) for each, value in zip(ids, found.values(), strict=True)}
