"""A packed row, and the cut of a stream of tokens into rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# One token of the stream: the token, whether it may be a label, and whether it starts a document.
_FIELDS = {"token": np.int32, "label": np.bool_, "start": np.bool_}
STREAM = np.dtype([*_FIELDS.items()])
_Array = np.ndarray[Any, np.dtype[Any]]


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


def rows_of(stream: Iterable[_Array], seq_len: int, document_mask: bool) -> Iterator[PackedRow]:
    """Cut parts of a stream of tokens, arrays with the fields of `STREAM`, into rows.

    Other fields are in `PackedRow.kept`, [T] each: at t the field of the label tokens[t+1].
    """
    left: _Array | None = None
    for part in stream:
        left = part if left is None else np.concatenate([left, part])
        end = (len(left) - 1) // seq_len * seq_len if len(left) else 0
        others = [name for name in left.dtype.names or () if name not in _FIELDS]
        for at in range(0, end, seq_len):
            row = left[at : at + seq_len + 1]
            label, start = row["label"][1:], row["start"]
            mask = label & ~start[1:] if document_mask else label.copy()
            segments = np.cumsum(start[:-1], dtype=np.int32) - np.int32(start[0])
            kept = {name: row[name][1:].copy() for name in others}
            yield PackedRow(row["token"].copy(), mask, segments, kept)
        left = left[end:]
