"""What of conversations and completions counts in the loss: checked, counted, and shown at one example."""

import itertools
import json
import logging
import re
import threading
from collections import Counter
from typing import Any

import numpy as np

from kdtrain.data.formats import REASONING, Document
from kdtrain.errors import UsageError, log

Counts = dict[str, dict[str, int]]
_Array = np.ndarray[Any, np.dtype[Any]]

SPELLED = "special tokens spelled in the text and read as text"
OPENS, CLOSES = "⟦", "⟧"
"""Around what counts in the loss, in an example."""
_LONG, _SHOWN = 240, 40
"""Characters of a piece from which on its middle is left out, and most lines of an example."""
_BEYOND = 64
"""Characters beyond a text of a turn that a template may count: the end of the turn, what is around its reasoning."""
_THINK = re.compile("</?think>")
_REFUSED = 1000
"""Conversations of which a template may refuse each before it is an error."""


class Masks:
    """Counts the loss masks, one call a document; thread-safe.

    split: what the log calls it; empty: nothing is logged. seq_len: positions of a sequence. example: log the first
    document, with what counts marked. counts: gets by split what the manifest states of the text.
    """

    def __init__(self, split: str, seq_len: int, example: bool = False, counts: Counts | None = None) -> None:
        self._split = split
        self._seq_len = seq_len
        self._example = example and bool(split)
        self.counts: Counts = {} if counts is None else counts
        self._lock = threading.Lock()
        self.documents = self.tokens = self.learned = self.long = self.refused = self.short = self.wide = 0
        self.begun = self.read = 0
        """Documents and tokens of the stream."""
        self._first: dict[str, str] = {}

    def counted(self, stream: _Array, found: Counter[str]) -> _Array:
        """Count the documents and tokens of a batch's stream, and `found`; return the stream."""
        self.begun += int(stream["start"].sum())
        self.read += len(stream)
        if +found:
            self.counts[self._split] = Counter(self.counts.get(self._split, {})) + found
        return stream

    def leave_out(self, error: UsageError) -> None:
        """Count a conversation that the template refuses. UsageError: it refuses all."""
        with self._lock:
            self.refused += 1
            self._first.setdefault("refused", str(error.args[0]))
            if self.refused >= _REFUSED:
                self.refuse_none()

    def refuse_none(self) -> None:
        """Raise the template's first refusal if it rendered no conversation."""
        if self.refused and not self.documents:
            raise UsageError(self._first["refused"])

    def add(
        self, document: Document, text: str, starts: _Array, stops: _Array, label: _Array, quoted: dict[str, str]
    ) -> None:
        """Count a document that was tokenized.

        text: as the tokenizer read it. starts, stops: in it, of the tokens that count. label: of all tokens, also of
        those without text. quoted: the special token behind a character of `text`.
        """
        counts = np.zeros(len(text) + 1, dtype=np.int8)
        np.add.at(counts, starts, 1)
        np.add.at(counts, stops, -1)
        inside = np.cumsum(counts[:-1]) > 0
        edges = [0, *np.flatnonzero(inside[1:] != inside[:-1]) + 1, len(text)]
        runs = [(bool(inside[start]), text[start:stop]) for start, stop in itertools.pairwise(edges) if start < stop]
        together = "\0".join(run for kept, run in runs if kept)
        turns = [each for each in (document.messages or [])[document.prompt :] if each.get("weight") != 0]
        turns = [each for each in turns if each["role"] == "assistant"]
        wanted = [each["content"] for each in turns]
        reasoning = [text for each in turns for text in {each[name].strip() for name in REASONING if name in each}]
        parts = [part.strip() for text in wanted for part in _THINK.split(text)]
        with self._lock:
            self.documents += 1
            self.tokens += len(label)
            self.learned += int(label.sum())
            self.long += len(label) > self._seq_len + 1
            if any(part not in together for part in parts + reasoning):
                self.short += 1
                self._first.setdefault("short", document.key)
            calls = sum(len(json.dumps(each.get("tool_calls", ""))) for each in document.messages or [])
            written = wanted + [text for text in reasoning if text in together]
            if wanted and len(together) > sum(map(len, written)) + calls + _BEYOND * len(written):
                self.wide += 1
                self._first.setdefault("wide", document.key)
            example = self._example
            self._example = False
        if example:
            counted = "an example, %s: %d of %d tokens count, between %s %s"
            log.info(counted, document.key, label.sum(), len(label), OPENS, CLOSES)
            shown = (f"{OPENS}{_short(run, quoted)}{CLOSES}" if kept else _short(run, quoted) for kept, run in runs)
            lines = "".join(shown).splitlines()
            for line in lines[:_SHOWN]:
                log.info("  | %s", line)
            if len(lines) > _SHOWN:
                log.info("  | ... and %d lines more", len(lines) - _SHOWN)

    def report(self) -> None:
        """Log how many tokens count, the conversations left out, and masks that look wrong."""
        if self._split and (number := self.counts.get(self._split, {}).get(SPELLED)):
            log.warning("%s: %s %s; --parse-special-tokens makes them tokens", self._split, f"{number:,}", SPELLED)
        if not self._split or not self.documents:
            return
        line = f"{self._split}: {self.learned:,} of {self.tokens:,} tokens in {self.documents:,} documents count"
        if self.long:
            line += f"; {self.long:,} are longer than --seq-len {self._seq_len} and are cut"
        if self.refused:
            line += f"; left out {self.refused:,} conversations (first: {self._first['refused']})"
        few = self.learned * 10 < self.tokens
        line += "; less than a tenth: the teacher, and the student, work for prompts" if few else ""
        log.log(logging.WARNING if few else logging.INFO, "%s", line)
        if self.short:
            text = "%s: in %s conversations the chat template leaves out text or reasoning of the assistant (first: %s)"
            log.warning(text, self._split, f"{self.short:,}", self._first["short"])
        if self.wide:
            text = "%s: in %s conversations the chat template counts more than the assistant's text (first: %s)"
            log.warning(text, self._split, f"{self.wide:,}", self._first["wide"])


def _short(run: str, quoted: dict[str, str]) -> str:
    if len(run) > _LONG:
        run = f"{run[: _LONG // 2]} ... {run[-_LONG // 2 :]}"
    return "".join(quoted.get(each, each) for each in run)
