"""Packed rows from the top-k log-probabilities of an inference server.

Each text is one record, in jsonl (or in parquet with the same columns):

    {"tokens": [5, 17, 9], "top_ids": [null, [17, 3], [9, 4]], "top_logprobs": [null, [-0.2, -2.1], [-0.7, -0.9]]}

Entry i of `top_ids` and `top_logprobs` is about token i given the tokens before it, natural logarithms at
temperature 1; it is null where the server gave none, as for the first token. vLLM returns this as `prompt_logprobs`,
an OpenAI-compatible server as the logprobs of an echoed prompt. Records are joined to one stream and cut into rows that
overlap by one token, as in `packing`; a label without log-probabilities is masked out. Of a position with more than K
entries, the most likely ones are used.

Every twentieth record is withheld for validation, or the last one if there are fewer. What it gives up: the teacher saw
each record alone, not the records that share its row here.

Shapes: T positions, K entries.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.data.packing import PackedRow
from kdtrain.data.rows import read_rows
from kdtrain.errors import UsageError

_WITHHELD = 20
_COLUMNS = ("tokens", "top_ids", "top_logprobs")


def logprob_rows(path: Path, split: str, seq_len: int, entries: int) -> Iterator[PackedRow]:
    """The rows of `split` (train or validation) with `entries` entries a position, as lists of the server in `kept`.

    These are top_ids int64 [T, K], most likely first (0 .. K-1 where the server gave none), top_logprobs float64 [T, K]
    (NaN where it gave none), and label_logprob float64 [T] (NaN where the label is in no list). The loss mask is false
    where the server gave none.

    UsageError: names the file, the line and the fault.
    """
    count = sum(1 for _ in _records(path))
    if count < 2:
        raise UsageError(f"{path} has {count} records; it needs two, one of them for validation")
    stream: list[tuple[Any, ...]] = []
    for number, record in enumerate(_records(path)):
        withheld = number % _WITHHELD == _WITHHELD - 1 or (count < _WITHHELD and number == count - 1)
        if withheld != (split == "validation"):
            continue
        stream += _positions(record, f"{path}, record {number + 1}", entries)
        while len(stream) > seq_len:
            yield _row(stream[: seq_len + 1], entries)
            del stream[:seq_len]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(f"--from-logprobs {path} does not exist")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise UsageError(f"--from-logprobs {path}: give a .jsonl or .parquet file")
    yield from read_rows(path, _COLUMNS)


def _positions(record: Any, where: str, entries: int) -> Iterator[tuple[Any, ...]]:
    """One (token, starts a record, ids, logprobs, log p of the token) for each token."""
    if not isinstance(record, dict) or any(not isinstance(record.get(name), list) for name in _COLUMNS):
        raise UsageError(f"{where}: needs the lists {', '.join(_COLUMNS)}")
    tokens, ids, logprobs = (record[name] for name in _COLUMNS)
    if not len(tokens) == len(ids) == len(logprobs):
        raise UsageError(f"{where}: {len(tokens)} tokens, {len(ids)} top_ids, {len(logprobs)} top_logprobs")
    for i, token in enumerate(tokens):
        at = f"{where}, position {i}"
        if not _is_id(token):
            raise UsageError(f"{at}: '{token}' is not a token id")
        yield (token, i == 0, *_top(ids[i], logprobs[i], token, at, entries))


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31  # not a bool, nor a float to be rounded


def _top(ids: Any, logprobs: Any, token: int, at: str, entries: int) -> tuple[Any, Any, float]:
    if ids is None or logprobs is None:
        return None, None, np.nan
    strange = [each for each in ids if not _is_id(each)] if isinstance(ids, list) else []
    if strange:
        raise UsageError(f"{at}: '{strange[0]}' in top_ids is not a token id")
    try:
        ids_K, logprobs_K = np.asarray(ids, np.int64), np.asarray(logprobs, np.float64)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{at}: top_logprobs must be numbers, and top_ids a list") from None
    if ids_K.ndim != 1 or ids_K.shape != logprobs_K.shape or len(ids_K) != len(np.unique(ids_K)):
        raise UsageError(f"{at}: needs as many top_logprobs as top_ids, and each id once")
    if len(ids_K) < entries:
        raise UsageError(f"{at}: has {len(ids_K)} entries; use --top-k {len(ids_K)}, or ask the server for more")
    if np.isnan(logprobs_K).any() or (logprobs_K > 1e-3).any() or np.exp(logprobs_K).sum() > 1.01:
        raise UsageError(f"{at}: top_logprobs are not natural logarithms of probabilities")
    own = logprobs_K[ids_K == token]
    order = np.argsort(-logprobs_K, kind="stable")[:entries]
    return ids_K[order], logprobs_K[order], float(own[0]) if len(own) else np.nan


def _row(stream: list[tuple[Any, ...]], entries: int) -> PackedRow:
    labels = stream[1:]
    return PackedRow(
        np.array([each[0] for each in stream], np.int32),
        np.array([each[2] is not None for each in labels]),
        np.cumsum([False, *(each[1] for each in stream[1:-1])], dtype=np.int32),
        {
            "top_ids": np.stack([np.arange(entries) if each[2] is None else each[2] for each in labels]),
            "top_logprobs": np.stack([np.full(entries, np.nan) if each[3] is None else each[3] for each in labels]),
            "label_logprob": np.array([each[4] for each in labels]),
        },
    )
