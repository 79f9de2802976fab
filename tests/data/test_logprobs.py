"""Records of a server become rows; a bad one is refused by file, record and position."""

import json
import math
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdtrain.data.logprobs import logprob_rows
from kdtrain.errors import UsageError


def _record(start: int, length: int) -> dict:
    tokens = [start + i for i in range(length)]
    ids = [None, *([token, 90, 91] for token in tokens[1:])]
    return {"tokens": tokens, "top_ids": ids, "top_logprobs": [None] + [[-1.2, -0.5, -3.0]] * (length - 1)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "said.jsonl"
    path.write_text("\n".join(json.dumps(_record(20 * i, 9)) for i in range(4)) + "\n\n")
    return path


def test_rows_overlap_by_one_and_labels_without_logprobs_are_masked(file: Path) -> None:
    rows = list(logprob_rows(file, "train", 5, 2))
    assert [row.tokens.tolist() for row in rows[:2]] == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 20, 21]]
    assert len(rows) == 5
    assert [row.loss_mask.tolist() for row in rows[:2]] == [[True] * 5, [True, True, True, False, True]]
    assert rows[1].segments.tolist() == [0, 0, 0, 0, 1]
    assert rows[0].kept["top_ids"].tolist() == [[90, token] for token in (1, 2, 3, 4, 5)]
    assert rows[0].kept["top_logprobs"].tolist() == [[-0.5, -1.2]] * 5
    assert rows[0].kept["label_logprob"].tolist() == [-1.2] * 5
    assert np.isnan(rows[1].kept["top_logprobs"][3]).all()
    assert math.isnan(rows[1].kept["label_logprob"][3])
    assert [row.tokens.tolist() for row in logprob_rows(file, "validation", 5, 2)] == [[60, 61, 62, 63, 64, 65]]


def test_parquet_reads_as_jsonl(file: Path) -> None:
    records = [json.loads(line) for line in file.read_text().splitlines() if line]
    datasets.Dataset.from_list(records).to_parquet(file.with_suffix(".parquet"))
    one, other = (list(logprob_rows(path, "train", 5, 3)) for path in (file, file.with_suffix(".parquet")))
    for mine, theirs in zip(one, other, strict=True):
        mine, theirs = ({**vars(row), **row.kept} for row in (mine, theirs))
        assert all(np.array_equal(mine[n], theirs[n], equal_nan=True) for n in mine.keys() - {"kept"})


def test_a_path_that_a_parquet_file_names_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    image = [{"bytes": None, "path": str(tmp_path / "pipe")}] * 2
    names = ("tokens", "top_ids", "top_logprobs")
    features = datasets.Features(dict.fromkeys(names, datasets.Image()))
    table = pa.table(dict.fromkeys(names, image), schema=features.arrow_schema)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"record 1: needs the lists tokens, top_ids"):
        list(logprob_rows(tmp_path / "a.parquet", "train", 5, 2))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_ids": [None] * 8}, "9 tokens, 8 top_ids, 9 top_logprobs"),
        ({"tokens": ["a"] * 9}, "position 0: 'a' is not a token id"),
        ({"tokens": [True] * 9}, "position 0: 'True' is not a token id"),
        ({"top_ids": [None] + [[1, 5.7, 3]] * 8}, "position 1: '5.7' in top_ids is not a token id"),
        ({"top_ids": [None] + [[-1, 5, 3]] * 8}, "position 1: '-1' in top_ids is not a token id"),
        ({"top_ids": [None] + [[1, 2**70, 3]] * 8}, "position 1: '1180591620717411303424' in top_ids is not a token"),
        ({"top_ids": [None] + [3] * 8}, "position 1: .* as many top_logprobs as top_ids"),
        ({"top_logprobs": [None] + [["a", 1, 2]] * 8}, "position 1: top_logprobs must be numbers"),
        ({"top_ids": [None] + [[1, 1, 2]] * 8}, "position 1: .* each id once"),
        ({"top_ids": [None] + [[1]] * 8, "top_logprobs": [None] + [[-1.0]] * 8}, "1 entries; use --top-k 1"),
        ({"top_logprobs": [None] + [[0.0, 0.0, 0.0]] * 8}, "not natural logarithms"),
        ({"top_logprobs": [None] + [[0.5, 0.2, 0.1]] * 8}, "not natural logarithms"),
        ({"top_logprobs": 3}, "needs the lists"),
    ],
)
def test_a_bad_record_is_named(file: Path, change: dict, message: str) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], json.dumps({**_record(20, 9), **change}), *lines[2:]]))
    with pytest.raises(UsageError, match=f"record 2.*{message}"):
        list(logprob_rows(file, "train", 5, 2))


def test_a_bad_file_is_named(tmp_path: Path, file: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        list(logprob_rows(tmp_path / "nowhere.jsonl", "train", 5, 2))
    (tmp_path / "x.csv").write_text("")
    with pytest.raises(UsageError, match=r"give a .jsonl or .parquet"):
        list(logprob_rows(tmp_path / "x.csv", "train", 5, 2))
    (tmp_path / "one.jsonl").write_text(json.dumps(_record(0, 9)))
    with pytest.raises(UsageError, match="has 1 records; it needs two"):
        list(logprob_rows(tmp_path / "one.jsonl", "train", 5, 2))
    file.write_text("{")
    with pytest.raises(UsageError, match="line 1: not JSON"):
        list(logprob_rows(file, "train", 5, 2))
