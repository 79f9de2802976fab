"""The layouts of others' caches: DistillKit's data as its own decoder reads them, and what does not fit."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.data import rows as data_rows
from kdtrain.errors import UsageError
from kdtrain.plugins.layouts import distillkit
from kdtrain.plugins.layouts.distillkit import DistillKit, coded_bytes, fit, read_compressor, unpack_bits
from kdtrain.plugins.layouts.layout import Lists
from kdtrain.plugins.layouts.options import ImportConfig
from kdtrain.plugins.layouts.rows import Cutter, distributions
from kdtrain.plugins.layouts.source import open_source
from kdtrain.plugins.layouts.topk import TopK

GOLDEN = Path(__file__).parents[2] / "golden" / "import"


def options(compressor: Path | None = None, **columns: str) -> ImportConfig:
    layout = "topk-parquet" if compressor is None else "distillkit"
    given: dict[str, Any] = {"source": "a", "layout": layout, "teacher": "t", "tokenizer": "t", "out": Path("o")}
    return ImportConfig(**given, compressor=compressor, **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plain", "delta", "bins", "legacy"])
def test_a_set_of_distillkit_decodes_as_distillkit_decodes_it(name: str) -> None:
    layout = DistillKit(options(compressor=GOLDEN / f"{name}.yaml"))
    (file,) = open_source(str(GOLDEN / f"{name}.parquet"), layout)
    wanted = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
    assert len(file) == len(wanted["ids"]) > 5
    for row, (where, record) in enumerate(file.records()):
        ids, logprobs = layout.decode(record, where)
        assert (ids == wanted["ids"][row]).all()
        assert np.abs(logprobs - wanted["logprobs"][row]).max() < 1e-6


def test_a_curve_is_fitted_some_positions_at_a_time_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    curve, coefficients = torch.randn(120, 5), torch.randn(50, 5)
    whole = (curve * coefficients[:, None]).sum(-1)
    monkeypatch.setattr(distillkit, "_FIT", 7 * 600)
    assert torch.equal(fit(curve, coefficients), whole)
    assert fit(curve, coefficients[:0]).shape == (0, 120)


def test_a_row_of_too_many_entries_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{d: 65536, k: 65536, exact_k: 0, polynomial_terms: [0, 1]}")
    layout = DistillKit(options(compressor=path))
    many = Lists(np.zeros(0, np.int64), np.zeros(1025, np.int64))
    with pytest.raises(UsageError, match="a row: 1,025 positions of 65,536 entries are too many for a row"):
        layout.decode({"bytepacked_indices": many, "compressed_logprobs": many}, "a row")


@pytest.mark.parametrize("name", ["plain", "delta", "bins"])
def test_the_yaml_of_another_set_is_refused_by_the_length_of_a_position(name: str) -> None:
    others = {"plain": "delta", "delta": "bins", "bins": "plain"}
    layout = DistillKit(options(compressor=GOLDEN / f"{others[name]}.yaml"))
    (file,) = open_source(str(GOLDEN / f"{name}.parquet"), layout)
    where, record = next(iter(file.records()))
    with pytest.raises(UsageError, match=r"a position has \d+ numbers in .*, the compressor's settings stand for"):
        layout.decode(record, where)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "k: 4", "{d: 100, k: 4, exact_k: 9, residual_bins: []}", "!!python/object/apply:os.system [true]",
        "{d: 100, k: 4, exact_k: 4, polynomial_terms: [tan], residual_bins: []}", "\x00",
        "{d: 1e400, k: 4, exact_k: 4}",
        "{d: 100, k: 9999999999, exact_k: 4}", "a: &a [1]\nb: *a", "- " * 100_000,
        "{d: 100, k: 4, exact_k: 4, colour: red}",
        "{d: 100, k: 4, exact_k: 2, residual_bins: [{scale_dtype: float32, element_bits: 99, num_elements: 2}]}",
        "{d: 100, k: 4, exact_k: 2, residual_bins: [{scale_dtype: float32, element_bits: 9, num_elements: 3}]}",
        "{vocab_size: 100, k: 4, exact_k: 2, polynomial_degree: -1}",
    ],
)  # fmt: skip
def test_what_is_no_compressor_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_compressor(path)
    assert str(error.value).startswith(f"--compressor {path}") and "\n" not in str(error.value)


def test_a_run_file_of_distillkit_serves_as_the_compressor_and_bits_are_read_from_the_left(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("teacher: {kind: dataset, logprob_compressor: {d: 300, k: 3, exact_k: 3, residual_bins: []}}")
    settings = read_compressor(path)
    assert settings.k == 3 and coded_bytes(settings) == 12  # type: ignore[arg-type]
    assert unpack_bits(np.array([[0b10100000, 0b01000000]], np.uint8), 5, 2).tolist() == [[20, 1]]


def entries(*positions: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    ids, logprobs = ([[pair[k] for pair in each] for each in positions] for k in (0, 1))
    return np.array(ids), np.log(np.maximum(np.array(logprobs), 0))


def test_entries_that_are_no_distribution_are_told_apart_and_a_little_more_than_one_is_scaled() -> None:
    with np.errstate(divide="ignore"):
        given = entries(
            [(1, 0.1), (2, 0.6)], [(1, 0.1), (1, 0.6)], [(1, 0.1), (9, 0.6)], [(1, 0.5), (2, 0.52)],
            [(1, 0.9), (2, 0.9)],
            [(1, 0.0), (2, 0.0)], [(1, 0.7), (77, 0.0)],
        )  # fmt: skip
    given[1][5, 0] = np.nan
    ids, logprobs, states = distributions(*given, 9, 1)
    assert states.tolist() == [3, 1, 1, 4, 1, 0, 3]
    assert ids[[0, 3, 6], 0].tolist() == [2, 2, 1]
    np.testing.assert_allclose(np.exp(logprobs[[0, 3, 6], 0]), [0.6, 0.52 / 1.02, 0.7])
    assert distributions(*given, 9, 2)[2].tolist() == [3, 1, 1, 4, 1, 0, 2]  # the last one has one entry
    ids, logprobs, states = distributions(np.zeros((2, 0), int), np.zeros((2, 0)), 9, 2)
    assert ids.shape == logprobs.shape == (2, 2) and states.tolist() == [0, 0]


LISTS = TopK(options(tokens_column="t", ids_column="i", logprobs_column="l"))


def lists(*parts: list[float]) -> Lists:
    return Lists(np.array([x for part in parts for x in part]), np.array([*map(len, parts)]))


def cutter(shift: int = 0, seq_len: int = 3, document_mask: bool = False, **columns: str) -> Cutter:
    layout = TopK(options(**columns))  # type: ignore[arg-type]
    spec = CodecSpec(kind="sparse", vocab_size=50, top_k=1)
    return Cutter(layout, spec, seq_len, shift, document_mask, pad_id=49)


RECORD = {
    "input_ids": np.array([10, 11, 12, 13, 14]),
    "target_token_ids": lists([11], [12], [], [14], [15]),
    "target_logprobs": lists([-0.1], [-0.2], [], [-0.4], [-0.5]),
}


def test_a_row_is_cut_into_whole_sequences_and_the_last_one_filled_up_outside_of_the_loss() -> None:
    tally = defaultdict[str, Any](int)
    first, second = cutter().sequences(RECORD, "a row", tally)
    assert first.tokens.tolist() == [10, 11, 12, 13] and second.tokens.tolist() == [13, 14, 49, 49]
    assert first.loss_mask.tolist() == [True, True, False] and second.loss_mask.tolist() == [True, False, False]
    assert first.kept["ids"][:, 0].tolist() == [11, 12, 0] and second.kept["ids"][0, 0] == 14
    np.testing.assert_allclose(first.kept["label_logprob"][:2], [-0.1, -0.2], rtol=1e-6)
    counts = {"rows": 1, "positions": 4, "filled_up": 2, "no_entries": 1, "counted": 3, "labels_kept": 3}
    assert {name: tally[name] for name in counts} == counts and tally["label_loss"] == pytest.approx(0.7)


@pytest.mark.parametrize(("shift", "wanted"), [(-1, [12, 0, 14, 15]), (0, [11, 12, 0, 14]), (1, [0, 11, 12, 0])])
def test_a_shift_moves_the_entries(shift: int, wanted: list[int]) -> None:
    (row,) = cutter(shift, seq_len=4).sequences(RECORD, "a row", defaultdict(int))
    assert row.kept["ids"][:, 0].tolist() == wanted
    assert row.loss_mask.tolist() == [each > 0 for each in wanted]


def test_masks_and_documents_take_labels_out_of_the_loss() -> None:
    full = {**RECORD, "target_token_ids": lists(*[[1]] * 5), "target_logprobs": lists(*[[-1.0]] * 5)}
    both = {**full, "kept": np.array([1, 1, 0, 1, 1]), "document": np.array([1, 1, 2, 2, 0])}
    (row,) = cutter(seq_len=4, mask_column="kept").sequences(both, "a row", defaultdict(int))
    assert row.loss_mask.tolist() == [True, False, True, True]
    (row,) = cutter(seq_len=4, document_mask=True, segments_column="document").sequences(
        both, "a row", defaultdict(int)
    )
    # The label tokens[2] begins another document, and tokens[4] is padding.
    assert row.loss_mask.tolist() == [True, False, True, False] and row.segments.tolist() == [0, 0, 1, 1]
    found = cutter(document_mask=True, segments_column="document").sequences(
        both | {"document": np.array([1, 1, 2, 2, 2])}, "a row", defaultdict(int)
    )
    assert [each.segments.tolist() for each in found] == [[0, 0, 1], [0, 0, 0]], "the last one filled up"


def test_jsonl_and_parquet_read_alike(tmp_path: Path) -> None:
    rows = [{"t": [1, 2, 3], "i": [[4, 5], None, [6]], "l": [[-0.5, -1.5], None, [-1.0]]}, {"t": [7], "i": [], "l": []}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [[record for _, record in open_source(str(tmp_path / f"a.{kind}"), LISTS)[0].records()] for kind in
             ("jsonl", "parquet")]  # fmt: skip
    for plain, columnar in zip(*found, strict=True):
        assert plain["t"].tolist() == columnar["t"].tolist()
        for name in ("i", "l"):
            assert plain[name].values.tolist() == columnar[name].values.tolist()
            assert plain[name].lengths.tolist() == columnar[name].lengths.tolist()
    assert found[0][0]["i"].lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"t": [1, 2], "i": [[1], [2]], "l": [[-1.0]]}, None),
        ({"t": [1, 2], "i": [["x"], [2]], "l": [[-1.0], [-1.0]]}, "not a number"),
        ({"t": [1, 2], "i": [[[1]], [2]], "l": [[-1.0], [-1.0]]}, "not a number"),
        ({"t": 5, "i": [[1]], "l": [[-1.0]]}, "needs a list in 't'"),
        ({"t": [1, 2], "i": [1, 2], "l": [[-1.0]]}, "a position that is not a list"),
        ({"t": [1, 2], "l": [[-1.0]]}, "needs a list in 'i'"),
        ({"t": [1, 2], "i": [[2**80]], "l": [[-1.0]]}, "at most 64 bits"),
        ([1], "needs a list in 't'"),
    ],
)
def test_a_strange_line_of_jsonl_is_named(tmp_path: Path, row: object, message: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    (file,) = open_source(str(path), LISTS)
    if message is None:
        assert len(list(file.records())) == 1
        return
    with pytest.raises(UsageError, match=f"a.jsonl, line 1: .*{message}"):
        list(file.records())


@pytest.mark.parametrize(("depth", "rows"), [(1, 1), (1, 1000), (2, 1), (2, 1000)])
def test_a_small_parquet_of_very_many_numbers_is_refused_before_they_are_read(
    tmp_path: Path, depth: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 5_000_000
    values = pyarrow.array(np.zeros(number, np.int64))
    few = [[1, 2, 3]] * rows
    starts = pyarrow.array(np.concatenate([[0], np.full(rows, number)]).astype(np.int32))
    column = pyarrow.ListArray.from_arrays(starts, values)
    nested = pyarrow.ListArray.from_arrays(pyarrow.array(np.arange(rows + 1, dtype=np.int32)), column)
    nested = nested if depth == 2 else [[[1]]] * rows
    columns = {"t": column if depth == 1 else few, "i": nested, "l": nested}
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.delattr(pyarrow.parquet.ParquetFile, "iter_batches")
    with pytest.raises(UsageError, match=r"a.parquet: 5,000,\d+ values in a row group of [\d,]+ bytes are not read"):
        open_source(str(path), LISTS)


def test_rows_of_very_many_numbers_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"t": np.random.RandomState(row).randint(0, 9, 100), "i": [[1]], "l": [[-1.0]]} for row in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    asked = []
    monkeypatch.setattr(data_rows, "_MOST_AT_ONCE", 250)
    plain = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda self, size, **more: asked.append(size) or plain(self, size, **more),
    )
    (file,) = open_source(str(tmp_path / "a.parquet"), LISTS)
    assert [record["t"].tolist() for _, record in file.records()] == [row["t"].tolist() for row in rows]
    assert {*asked} == {2}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=2)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row | {"t": row["t"].tolist()}) for row in rows))
    for kind, place in (("parquet", "row 3"), ("jsonl", "line 3")):
        (file,) = open_source(str(tmp_path / f"b.{kind}"), LISTS)
        where, record = next(file.records(["t"], begin=0.5))
        assert where.endswith(place) and record["t"].tolist() == rows[2]["t"].tolist() and len(file) == 5


def test_a_damaged_or_foreign_parquet_is_one_line(tmp_path: Path) -> None:
    whole = (GOLDEN / "plain.parquet").read_bytes()
    layout = DistillKit(options(compressor=GOLDEN / "plain.yaml"))
    random = np.random.RandomState(0)
    for number in range(60):
        damaged = bytearray(whole)
        for place in random.randint(0, len(whole), 20):
            damaged[place] = random.randint(256)
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(bytes(damaged[: len(whole) if number % 3 else random.randint(len(whole))]))
        said = ""
        try:
            list(open_source(str(path), layout)[0].records())
        except UsageError as error:
            said = str(error)
        assert said.startswith(str(path)) or not said
        assert "\n" not in said
    table = pyarrow.table({"input_ids": [["a"]], "compressed_logprobs": [[[1]]], "bytepacked_indices": [[[1]]]})
    pyarrow.parquet.write_table(table, tmp_path / "text.parquet")
    with pytest.raises(UsageError, match=r"text.parquet, row 1: input_ids holds something that is not a number"):
        list(open_source(str(tmp_path / "text.parquet"), layout)[0].records())
    pyarrow.parquet.write_table(table.drop_columns(["input_ids"]), tmp_path / "less.parquet")
    with pytest.raises(UsageError, match="has no column 'input_ids'; it has compressed_logprobs"):
        open_source(str(tmp_path / "less.parquet"), layout)
