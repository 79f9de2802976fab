"""A packed row, and the cut of a stream of tokens into rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# One token of the stream: the token, whether it may be a label, and whether a document, or a turn behind an answer,
# starts with it.
_FIELDS = {"token": np.int32, "label": np.bool_, "start": np.bool_, "turn": np.bool_}
STREAM = np.dtype([*_FIELDS.items()])
_Array = np.ndarray[Any, np.dtype[Any]]

WHOLE = "whole"
"""The packing of a text whose documents are not cut at the end of a row (`whole_rows`)."""
_OPEN = 32
"""Rows that are filled at once."""


@dataclass(frozen=True)
class PackedRow:
    """One sequence of T positions.

    `tokens`: int32 [T+1]. `loss_mask`: bool [T], at t about the label tokens[t+1]. `segments`: int32 [T], the
    number within this row of the document of tokens[t], from 0. `kept`: the kept entries of the teacher's
    distributions, if they are known without running it (`cache.codec.keep`).
    """

    tokens: _Array
    loss_mask: _Array
    segments: _Array
    kept: dict[str, _Array] = field(default_factory=dict)

    @classmethod
    def prompt(cls, prompt: list[int], *, seq_len: int, max_new_tokens: int | None, filler: int) -> "PackedRow":
        """Make a row that begins with a prompt, for text of at most `max_new_tokens` behind it.

        `loss_mask` is true for the labels that may be written; their tokens, like all behind them, are `filler`.
        """
        tokens = np.full(seq_len + 1, filler, dtype=np.int32)
        mask = np.zeros(seq_len, dtype=np.bool_)
        tokens[: len(prompt)] = prompt
        mask[len(prompt) - 1 :][:max_new_tokens] = True
        return cls(tokens, mask, np.zeros(seq_len, dtype=np.int32))


def rows_of(stream: Iterable[_Array], seq_len: int, document_mask: bool) -> Iterator[PackedRow]:
    """Cut parts of a stream of tokens, arrays with the fields of `STREAM`, into rows.

    Other fields are in `PackedRow.kept`, [T] each: at t the field of the label tokens[t+1].
    """
    left: _Array | None = None
    for part in stream:
        left = part if left is None else np.concatenate([left, part])
        end = (len(left) - 1) // seq_len * seq_len if len(left) else 0
        for at in range(0, end, seq_len):
            yield _row(left[at : at + seq_len + 1], document_mask)
        left = left[end:]


def whole_rows(stream: Iterable[_Array], seq_len: int, filler: int) -> Iterator[PackedRow]:
    """Put whole documents of a stream, as in `rows_of`, into rows, and fill the rows with the token `filler`.

    A document goes into the fullest of the open rows that have room for it; where none has, another row is opened, and
    the fullest of too many is yielded. A document longer than a row is cut before a turn, or where one turn is longer,
    behind its last token that fits, which both parts then have. A part of which no token counts is left out. No row
    counts the first token of a document, or what fills it, which is a document of its own.
    """
    rows: list[list[_Array]] = []

    def size(row: list[_Array]) -> int:
        return sum(map(len, row))

    def filled(parts: list[_Array]) -> PackedRow:
        row = np.zeros(seq_len + 2, parts[0].dtype)
        text = np.concatenate(parts)
        row["token"], row[: len(text)] = filler, text
        row["start"][np.cumsum([0, *map(len, parts)])] = True
        return _row(row[:-1], document_mask=True)

    for part in _parts(stream, seq_len + 1):
        room = [row for row in rows if size(row) + len(part) <= seq_len + 1]
        if room:
            max(room, key=size).append(part)
        else:
            rows.append([part])
        if len(rows) > _OPEN:
            rows.sort(key=size)
            yield filled(rows.pop())
    yield from map(filled, rows)


def _parts(stream: Iterable[_Array], most: int) -> Iterator[_Array]:
    """Yield the documents of a stream in which a token counts, documents of more than `most` tokens in parts."""
    for document in _documents(stream):
        while len(document):
            stop = rest = min(len(document), most)
            if stop < len(document):
                turns = np.flatnonzero(document["turn"][1 : most + 1]) + 1
                stop, rest = (turns[-1], turns[-1]) if len(turns) else (most, most - 1)
            if document["label"][1:stop].any():
                yield document[:stop]
            document = document[rest:]


def _documents(stream: Iterable[_Array]) -> Iterator[_Array]:
    left = np.empty(0, STREAM)
    for part in stream:
        left = np.concatenate([left, part])
        *whole, left = np.split(left, np.flatnonzero(left["start"]))
        yield from whole
    yield left


def _row(row: _Array, document_mask: bool) -> PackedRow:
    """Make a row of T + 1 tokens of a stream."""
    label = row["label"][1:]
    start = row["start"]
    mask = label & ~start[1:] if document_mask else label.copy()
    segments = np.cumsum(start[:-1], dtype=np.int32) - np.int32(start[0])
    kept = {name: row[name][1:].copy() for name in row.dtype.names or () if name not in _FIELDS}
    return PackedRow(row["token"].copy(), mask, segments, kept)
