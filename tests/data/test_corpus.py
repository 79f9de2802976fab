import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from kdtrain.data.corpus import documents
from kdtrain.data.formats import Columns
from kdtrain.errors import RunError, UsageError

_TEXTS = [f"text {n}\nits second line é" for n in range(40)]
_SPLITS = ("train", "validation", "test")
pytestmark = pytest.mark.usefixtures("own_cache")


def _txt(folder, texts):
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")


def _jsonl(folder, texts):
    lines = [json.dumps({"text": text, "number": n}) + "\n" for n, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(lines[:20]))
    (folder / "b.jsonl").write_text("".join(lines[20:]))


def _parquet(folder, texts):
    Dataset.from_dict({"text": texts}).to_parquet(folder / "a.parquet")


def _arrow(folder, texts):
    Dataset.from_dict({"text": texts}).save_to_disk(folder)


def _read(source, split, **options):
    streaming = bool(options.pop("streaming", False))
    found = documents(str(source), split, Columns(**options), streaming=streaming)  # type: ignore[arg-type]
    return [document.text or "" for document in found]


def _write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_standard_library_is_code_without_tests_and_packages_in_three_splits_of_a_fixed_shuffled_order():
    keys = {split: [document.key for document in documents("stdlib", split)] for split in _SPLITS}
    together = [key for split in _SPLITS for key in keys[split]]
    assert len(set(together)) == len(together)
    for split in _SPLITS:
        assert keys[split] == [document.key for document in documents("stdlib", split)]
        assert keys[split] != sorted(keys[split])
    assert 0.85 < len(keys["train"]) / len(together) < 0.95 and len(keys["train"]) > 300
    parts = {part for key in keys["train"] for part in key.split("/")[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


@pytest.mark.parametrize("write", [_txt, _jsonl, _parquet, _arrow])
def test_every_format_gives_every_text_to_exactly_one_split(write: Callable[[Path, list[str]], None], tmp_path):
    write(tmp_path, _TEXTS)
    found = {split: _read(tmp_path, split) for split in _SPLITS}
    assert all(found.values())
    assert sorted(found["train"] + found["validation"] + found["test"]) == sorted(_TEXTS)


def test_equal_rows_are_in_one_split(tmp_path):
    path = _write_rows(tmp_path / "a.jsonl", [{"text": text} for text in _TEXTS * 3])
    found = {split: _read(path, split) for split in _SPLITS}
    assert all(found[split].count(text) in (0, 3) for split in _SPLITS for text in _TEXTS)


def test_rows_keep_their_split_when_others_are_added(tmp_path):
    rows = [{"text": f"text {n}"} for n in range(4000)]
    few = _read(_write_rows(tmp_path / "few.jsonl", rows[:3000]), "validation")
    many = _read(_write_rows(tmp_path / "many.jsonl", rows), "validation")
    assert 100 < len(few) < len(many)
    assert few == many[: len(few)]


def test_streaming_reads_the_same_documents(tmp_path):
    path = _write_rows(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(2500)])
    assert _read(path, "test", streaming=True) == _read(path, "test")


@pytest.mark.parametrize(
    "names",
    [("train-00000-of-00002", "train-00001-of-00002", "val", "test"), ("train/a", "train/b", "valid/a", "test/a")],
    ids=["files", "folders"],
)
def test_a_folder_whose_files_or_folders_all_name_their_split_keeps_its_own_splits(names, tmp_path):
    for name in names:
        _write_rows(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert [sorted(_read(tmp_path, split)) for split in _SPLITS] == [[*names[:2]], [names[2]], [names[3]]]


def test_a_split_that_the_source_lacks_is_withheld_from_its_train(tmp_path):
    _write_rows(tmp_path / "train.jsonl", [{"text": text} for text in _TEXTS])
    _write_rows(tmp_path / "test.jsonl", [{"text": "own test"}])
    assert _read(tmp_path, "test") == ["own test"]
    validation = _read(tmp_path, "validation")
    assert 0 < len(validation) < 10
    assert sorted(validation + _read(tmp_path, "train")) == sorted(_TEXTS)


def test_a_file_that_happens_to_be_called_test_is_not_a_split(tmp_path):
    names = ["test", "dev", "how-to-train", *(f"essay on {n} things" for n in range(60))]
    for name in names:
        (tmp_path / f"{name}.txt").write_text(name)
    found = [_read(tmp_path, split) for split in _SPLITS]
    assert sorted(found[0] + found[1] + found[2]) == sorted(names)
    assert found[1] != ["dev"] and found[2] != ["test"]


def test_a_folder_that_names_splits_but_not_train_is_split_by_hash(tmp_path):
    for name in ("test", "dev", "val"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert [len(_read(tmp_path, split)) for split in _SPLITS] == [1, 1, 1]


def test_a_single_text_is_cut_at_line_ends_into_all_three_splits(tmp_path):
    text = "".join(f"line {n}\n" for n in range(50)) + "no newline at the end"
    (tmp_path / "a.txt").write_text(text)
    found = ["".join(_read(tmp_path / "a.txt", split)) for split in _SPLITS]
    assert "".join(found) == text
    assert found[1].count("\n") == 3


def test_two_texts_are_each_cut_into_all_three_splits(tmp_path):
    path = _write_rows(tmp_path / "a.jsonl", [{"text": "a\nb\nc"}, {"text": "d\ne\nf"}])
    assert [_read(path, split) for split in _SPLITS] == [["a\n", "d\n"], ["b\n", "e\n"], ["c", "f"]]


@pytest.mark.parametrize("count", [3, 19])
def test_a_few_texts_are_each_cut_so_that_train_has_nine_tenths_of_the_lines(count, tmp_path):
    texts = ["".join(f"line {line} of text {n}\n" for line in range(100)) for n in range(count)]
    _txt(tmp_path, texts)
    lines = {split: "".join(_read(tmp_path, split)).splitlines() for split in _SPLITS}
    assert [len(lines[split]) for split in _SPLITS] == [90 * count, 5 * count, 5 * count]
    assert sorted(lines["train"] + lines["validation"] + lines["test"]) == sorted("".join(texts).splitlines())


def test_files_of_another_kind_beside_texts_are_left_out_and_named_once(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("kdtrain"), "warning", lambda text, *words: told.append(text % words))
    _txt(tmp_path, _TEXTS)
    for name in ("notes.pdf", "data.csv", ".hidden.txt"):
        (tmp_path / name).write_text("left out")
    for split in _SPLITS:
        assert "left out" not in _read(tmp_path, split)
    (said,) = told
    assert said.startswith(f"{tmp_path}: data.csv and 1 more files are left out; a folder is read as text (.txt, .md, ")


@pytest.mark.parametrize("names", [["a.md"], ["a.py"], ["a.rst"], ["a.TXT"], ["b.txt", "a.md", "c/d.py", "a.rst"]])
def test_prose_and_source_code_are_text_alone_and_in_one_folder(names, tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.py").write_text("hidden\n" * 9)
    texts = {name: "".join(f"{name} line {n}\n" for n in range(20)) for name in names}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = [line for split in _SPLITS for text in _read(tmp_path, split) for line in text.splitlines()]
    assert sorted(lines) == sorted("".join(texts.values()).splitlines())
    assert "".join("".join(_read(tmp_path / names[0], split)) for split in _SPLITS) == texts[names[0]]


def test_text_files_of_several_kinds_come_in_one_order_wherever_the_folder_is(tmp_path):
    names = [f"{n}{suffix}" for n in range(8) for suffix in (".txt", ".md", ".py")]
    for folder, order in (("one", names), ("two", names[::-1])):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / name).write_text(f"{name}\n")
    assert _read(tmp_path / "one", "train") == _read(tmp_path / "two", "train")


def test_a_folder_of_txt_files_keeps_its_documents_and_their_order(tmp_path):
    _txt(tmp_path, _TEXTS)
    found = "\0".join("\0".join(_read(tmp_path, split)) for split in _SPLITS)
    assert hashlib.sha256(found.encode()).hexdigest().startswith("45317a8e2a96999f")


def test_a_readme_beside_rows_is_left_out_and_other_text_beside_rows_refused(tmp_path):
    _jsonl(tmp_path, _TEXTS)
    for name in ("README.md", "LICENSE.txt"):
        (tmp_path / name).write_text("about the rows")
    assert sorted(text for split in _SPLITS for text in _read(tmp_path, split)) == sorted(_TEXTS)
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(UsageError, match=r"holds rows \(a\.jsonl\) and text \(notes\.md\); name one of the files, or"):
        _read(tmp_path, "train")


@pytest.mark.parametrize("name", ["a.py", "a.ts"])
def test_a_binary_file_that_is_named_like_text_is_refused_by_name(name, tmp_path):
    (tmp_path / "b.md").write_text("text")
    (tmp_path / name).write_bytes(b"\x47\xff\xfe" * 99)
    with pytest.raises(UsageError, match=rf"{name}: byte 1 is not UTF-8; convert the file to UTF-8, or move it away"):
        _read(tmp_path, "train")


def test_blank_documents_are_skipped(tmp_path):
    rows = [{"text": text} for text in ("a", None, "", " \n", "b", "c")]
    found = [_read(_write_rows(tmp_path / "a.jsonl", rows), split) for split in _SPLITS]
    assert sorted(text for texts in found for text in texts) == ["a", "b", "c"]


def test_another_column_can_be_read(tmp_path):
    path = _write_rows(tmp_path / "a.jsonl", [{"body": text, "other": [1]} for text in _TEXTS])
    assert len(_read(path, "train", text="body")) >= 30


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("none.txt", None, {}, r"none\.txt: there is no such file or folder"),
        ("a.pdf", "x", {}, r"a\.pdf: holds \.pdf files; give text \(\.txt, \.md, \.rst"),
        ("a", "x", {}, r"a: holds no text; give text \(\.txt, \.md, \.rst"),
        ("a.txt", "", {}, r"a\.txt: is empty"),
        ("a.txt", " \n\n\n\n", {}, r"a\.txt: holds no text for the train split"),
        ("a.txt", b"caf\xe9", {}, r"a\.txt: byte 3 is not UTF-8"),
        ("a.txt", "x", {"messages": "m"}, r"a\.txt: text has no columns; leave out --messages-column, or give jsonl"),
        ("a.jsonl", '{"body": "x"}\n', {}, "has no column 'text'; give --text-column body"),
        ("a.jsonl", '{"body": "x"}\n', {"streaming": True}, "has no column 'text'; give --text-column body"),
        ("a.jsonl", '{"text": 5}\n', {}, "row 0: holds int, not text"),
        ("a.jsonl", '{"text": ""}\n', {}, "holds no text for the train split"),
        ("a.jsonl", '{"text": "x"\n', {}, r"a\.jsonl, line 1: not JSON: "),
        ("a.jsonl", '{"text": "x"\n', {"streaming": True}, r"a\.jsonl, line 1: not JSON: "),
        ("a.parquet", "not parquet", {}, r"a\.parquet: cannot be read: "),
        ("a.jsonl", '{"m": "x"}\n', {"messages": "m"}, "row 0: is not a conversation"),
        ("a.jsonl", '{"m": [{"from": "x"}]}\n', {"messages": "m"}, "row 0: is not a conversation"),
        (
            "a.jsonl",
            '{"m": [{"role": "user", "content": "x"}]}\n',
            {"messages": "m"},
            "holds no conversation in which the assistant speaks",
        ),
    ],
)
def test_unreadable_text_is_one_line_that_names_the_cause(name, content, options, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message) as caught:
        _read(tmp_path / name, "train", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_path_that_a_file_names_is_never_opened(nested, streaming, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    image = datasets.Image()
    feature, value = image, {"bytes": None, "path": str(tmp_path / "pipe")}
    if nested:
        feature, value = datasets.List({"role": image, "content": image}), [dict.fromkeys(("role", "content"), value)]
    table = pa.table({"text": [value] * 3}, schema=datasets.Features({"text": feature}).arrow_schema)
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {"messages": "text"} if nested else {}
    with pytest.raises(UsageError, match="row 0: is not a conversation" if nested else "row 0: holds dict, not text"):
        _read(tmp_path / "a.parquet", "train", streaming=streaming, **columns)


def test_an_unknown_split_and_a_folder_of_two_kinds_are_refused(tmp_path):
    with pytest.raises(UsageError, match="split 'dev' is unknown"):
        documents("stdlib", "dev")
    with pytest.raises(UsageError, match="hf:: names no data set; write hf:NAME"):
        documents("hf:", "train")
    (tmp_path / "a.parquet").write_text("x")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"holds \.jsonl, \.parquet files; give text .* one kind at a time"):
        documents(str(tmp_path), "train")


def test_too_little_text_for_a_validation_split_is_an_error_at_the_call(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    assert _read(tmp_path / "a.txt", "train") == ["one\ntwo"]
    with pytest.raises(UsageError, match="no text for the validation split; give at least 3 documents"):
        documents(str(tmp_path / "a.txt"), "validation")


def _fake_hub(monkeypatch, splits):
    asked: list[tuple[object, ...]] = []

    def load_dataset(name, subset, *, split, streaming):
        asked.append((name, subset, split))
        rows = Dataset.from_dict({"text": splits[split]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, subset: list(splits))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_hub_data_set_keeps_its_own_splits(monkeypatch):
    asked = _fake_hub(monkeypatch, {"train": _TEXTS, "valid": ["own"], "unsupervised": ["x"]})
    assert _read("hf:org/name:subset", "validation") == ["own"]
    assert ("org/name", "subset", "train") in asked
    train, test = (_read("hf:org/name:subset", split, streaming=True) for split in ("train", "test"))
    assert sorted(train + test) == sorted(_TEXTS)


def test_a_hub_data_set_without_train_is_refused_with_the_splits_it_has(monkeypatch):
    _fake_hub(monkeypatch, {"train_sft": _TEXTS, "test_sft": _TEXTS})
    with pytest.raises(UsageError, match="none of its splits is called train; it has: train_sft, test_sft"):
        documents("hf:org/name", "train")


def test_a_hub_that_cannot_be_reached_is_a_failed_run(monkeypatch):
    def unreachable(name, subset):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    with pytest.raises(RunError, match="hf:org/name: the hub cannot be reached: no route to host"):
        documents("hf:org/name", "train")
