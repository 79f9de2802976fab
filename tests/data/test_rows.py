"""Local files are read as they are named and as they are now, in bounded memory, whatever they hold."""

import datetime
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdtrain.config.sections import DataConfig
from kdtrain.data import rows
from kdtrain.data.corpus import documents, has_prompts, stated_text
from kdtrain.data.formats import Columns
from kdtrain.errors import UsageError

pytestmark = pytest.mark.usefixtures("own_cache")


def _jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _json(path, texts):
    path.write_text(json.dumps([{"text": text} for text in texts], indent=2))


def _csv(path, texts):
    path.write_text("".join(f"{text}\n" for text in ["text", *texts]))


def _parquet(path, texts):
    pq.write_table(pa.table({"text": texts}), path)


def _arrow(path, texts):
    table, new = pa.table({"text": texts}), pa.ipc.new_stream if path.name == "a.arrow" else pa.ipc.new_file
    with new(path, table.schema) as file:
        file.write_table(table)


WRITE: dict[str, Callable[[Path, list[str]], None]] = {
    "a.jsonl": _jsonl,
    "a.json": _json,
    "a.csv": _csv,
    "a.parquet": _parquet,
    "a.arrow": _arrow,
    "b.arrow": _arrow,
}


def _read(source, **columns):
    return sorted(
        each.text or ""
        for split in ("train", "validation", "test")
        for each in documents(str(source), split, Columns(**columns))
    )


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize(
    "folder, other", [("run[1]", "run1"), ("a*b", "axb"), ("q?x", "qyx"), ("a::b", "b"), ("**", "c")]
)
def test_a_path_is_the_file_that_it_names_and_no_pattern(folder, other, name, tmp_path):
    for each, text in ((folder, "own"), (other, "other")):
        (tmp_path / each).mkdir()
        WRITE[name](tmp_path / each / name, [f"{text} {number}" for number in range(3)])
    assert _read(tmp_path / folder / name) == _read(tmp_path / folder) == ["own 0", "own 1", "own 2"]


@pytest.mark.parametrize("name", WRITE)
def test_an_edited_file_with_an_unchanged_time_stamp_gives_its_new_rows(name, tmp_path):
    for word in ("old", "new and longer"):
        WRITE[name](tmp_path / name, [f"{word} {number}" for number in range(3)])
        os.utime(tmp_path / name, (315532800, 315532800))
        assert _read(tmp_path / name) == [f"{word} {number}" for number in range(3)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_local_rows_of_text_need_no_other_package_and_no_writable_home(name, tmp_path, monkeypatch):
    for package in ("datasets", "pyarrow", "pandas"):
        monkeypatch.setitem(sys.modules, package, None)
    WRITE[name](tmp_path / name, ["a", "b", "c"])
    assert _read(tmp_path / name) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.md"])
def test_a_byte_order_mark_belongs_to_no_text(name, tmp_path):
    path = tmp_path / name
    WRITE.get(name, lambda path, texts: path.write_text("\n".join(texts)))(path, ["a", "b", "c"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert "".join(_read(path)).replace("\n", "") == "abc"


@pytest.mark.parametrize(
    "name, where", [("a.jsonl", "line 60"), ("a.json", "row 59"), ("a.csv", "line 61")], ids=["jsonl", "json", "csv"]
)
def test_a_byte_that_is_not_utf8_is_named_with_its_row(name, where, tmp_path):
    WRITE[name](tmp_path / name, [f"text {number}{'Ö' * (number == 59)}" for number in range(100)])
    content = (tmp_path / name).read_text().replace("\\u00d6", "Ö")
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(
        UsageError, match=rf"{name}[,:] {where}:? has a byte that is not UTF-8; convert the file to UTF-8"
    ):
        _read(tmp_path / name)


@pytest.mark.parametrize("piece", [1, 7, 2**20])
@pytest.mark.parametrize("indent, lines", [(None, False), (1, False), (None, True), (3, True)])
def test_json_is_a_list_or_objects_on_any_lines_however_it_is_cut(indent, lines, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_PIECE", piece)
    wanted = [{"text": f'"é]}},[{{ {number}', "more": [{"a": "𝄞"}]} for number in range(9)]
    spelled = [json.dumps(each, indent=indent, ensure_ascii=False) for each in wanted]
    (tmp_path / "a.json").write_text("\n".join(spelled) if lines else f" [{', '.join(spelled)}]\n")
    assert list(rows.read_rows(tmp_path / "a.json")) == wanted


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"a\.jsonl, line 2: is list, not an object with a key for each column"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\uD83D"}\n', r"a\.jsonl, line 2: has half of a surrogate pair"),
        (
            "a.json",
            '[{"text": "\\ud83d\\ude00"}, {"text": "\\udfff"}]',
            r"a\.json, row 1: has half of a surrogate pair",
        ),
        ("a.json", '[{"text": "a"}, {"text": "b"', r"a\.json, row 1: not JSON"),
        ("a.json", '[{"text": "a"}, {"text": "b"}', r"a\.json: after row 1 its list does not end as JSON does"),
        ("a.json", '[{"text": "a"}] and more', r"a\.json: after row 0 its list does not end as JSON does"),
        ("a.json", '[["text"]]', r"a\.json, row 0: is list, not an object"),
        ("a.json", "[]", r"a\.json: holds no rows"),
        ("a.json", '[{"text": ' + "[" * 5000, r"a\.json, row 0: not JSON"),
        (
            "a.json",
            '{"version": 1, "data": [{"text": "a"}]}',
            r"its rows are below the key 'data'; write that list alone",
        ),
        ("a.csv", "text\n", r"a\.csv: holds no rows"),
    ],
)
def test_json_that_is_not_rows_is_one_line_that_says_where(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        _read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("piece", [1, 7, 2**20])
@pytest.mark.parametrize("before, between, row", [("[", ",,", 1), ("[", " ,\n, ", 1), ("[ ,", ",", 0), ("", ",,", 1)])
def test_objects_of_json_have_one_separator_however_they_are_cut(before, between, row, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_PIECE", piece)
    (tmp_path / "a.json").write_text(f'{before}{{"text": "a"}}{between}{{"text": "b"}}{"]" * len(before[:1])}')
    with pytest.raises(UsageError, match=rf"a\.json, row {row}: not JSON"):
        list(rows.read_rows(tmp_path / "a.json"))


def test_rows_below_a_key_are_named_wherever_the_text_is_opened_first(tmp_path):
    (tmp_path / "a.json").write_text('{"version": 1, "data": [{"text": "a"}]}')
    for read in (has_prompts, stated_text):
        with pytest.raises(UsageError, match="its rows are below the key 'data'; write that list alone"):
            read(DataConfig(data=str(tmp_path / "a.json")))


def test_an_object_of_json_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_PIECE", 64)
    monkeypatch.setattr(rows, "_MOST_OBJECT", 1000)
    for content in ('[{"text": "' + "a" * 10_000, '[{"text": "a"}]' + " " * 10_000):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(UsageError, match=r"at most 1,000 characters|does not end"):
            list(rows.read_rows(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "name, bounds, words",
    [
        ("a.json", {"_ENTRIES": 50}, "row 0: has 102 entries; at most 50 are read"),
        ("a.jsonl", {"_ENTRIES": 50}, "line 1: not JSON: it has more than 50 entries"),
        ("a.csv", {"LARGE": 100}, "line 2 has more than 100 characters"),
        ("a.jsonl", {"LARGE": 100}, "line 1: has more than 100 bytes"),
        ("a.parquet", {"_UNPACKED": 100, "_RATIO": 0}, r"a row group of [\d,]+ bytes unpacks to [\d,]+"),
    ],
)
def test_what_would_take_too_much_memory_is_refused(name, bounds, words, tmp_path, monkeypatch):
    for each, bound in bounds.items():
        monkeypatch.setattr(rows, each, bound)
    text = "".join(f"{number} " for number in range(200))
    if "json" in name:
        (tmp_path / name).write_text(json.dumps({"text": text, "more": [0] * 100}))
    else:
        WRITE[name](tmp_path / name, [text])
    with pytest.raises(UsageError, match=words):
        list(rows.read_rows(tmp_path / name, ["text"]))


def test_texts_that_look_like_dates_stay_texts_and_late_keys_are_read(tmp_path):
    _jsonl(tmp_path / "a.jsonl", ["2024-01-01", "2024-01-02T00:00:00", "2024-01-03"])
    assert _read(tmp_path / "a.jsonl") == ["2024-01-01", "2024-01-02T00:00:00", "2024-01-03"]
    talks = [
        {"conversations": [{"from": "human", "value": f"{number}?"}, {"from": "gpt", "value": "a"}]}
        | ({"system": "be kind"} if number == 2500 else {})
        for number in range(2501)
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    found = [each for split in ("train", "validation", "test") for each in documents(str(tmp_path / "b.jsonl"), split)]
    assert len(found) == 2501 and sum(each.messages[0]["role"] == "system" for each in found if each.messages) == 1


def test_a_column_that_is_not_text_is_named(tmp_path):
    pq.write_table(pa.table({"text": [datetime.date(2024, 1, 1)] * 3}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="row 0: holds date, not text"):
        _read(tmp_path / "a.parquet")


def test_lists_of_parquet_that_take_no_bytes_are_refused_before_they_are_read(tmp_path):
    turn = {"role": "assistant", "content": "a"}
    table = pa.table({"messages": [[turn] * 3_000_000]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    with pytest.raises(UsageError, match=r"a\.parquet: 3,000,000 values in a row group of [\d,]+ bytes are not read"):
        list(documents(str(tmp_path / "a.parquet"), "train"))


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow"])
def test_offsets_of_arrow_beyond_its_buffers_are_refused(name, tmp_path):
    WRITE[name](tmp_path / name, ["a" * 7, "b" * 11, "c" * 13])
    content, offsets = (tmp_path / name).read_bytes(), struct.pack("<4i", 0, 7, 18, 31)
    assert content.count(offsets) == 1
    (tmp_path / name).write_bytes(content.replace(offsets, struct.pack("<4i", 0, 7, 2**30, 2**30 + 13)))
    with pytest.raises(UsageError, match=rf"{name}: cannot be read"):
        list(documents(str(tmp_path / name), "train"))
