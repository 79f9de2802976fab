import hashlib
import json
import logging
import os
from itertools import chain

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.config.sections import DataConfig
from kdtrain.data.corpus import SPLITS, assign, by_hash, cut, documents, rank, stated_text
from kdtrain.data.formats import Columns
from kdtrain.errors import RunError, UsageError

_TEXTS = [f"text {n}\nits second line é" for n in range(40)]
_WITHHELD = st.sampled_from([("validation", "test"), ("validation",), ("test",)])
pytestmark = pytest.mark.usefixtures("own_cache")


def _read(source, split, **options):
    streaming = bool(options.pop("streaming", False))
    return [document.text or "" for document in documents(str(source), split, Columns(**options), streaming=streaming)]


def _splits(source):
    """Read the texts of train, validation and test."""
    return [_read(source, split) for split in SPLITS]


def _files(folder, files):
    """Write files by name: of bytes, of a text, or of rows, a text or an object each."""
    for name, content in files.items():
        if isinstance(content, list):
            rows = [each if isinstance(each, dict) else {"text": each} for each in content]
            content = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder if len(files) > 1 else folder / name


@pytest.fixture
def warned(monkeypatch):
    """Collect the lines that a source logs."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("kdtrain"), "log", lambda _, text, *words: lines.append(text % words))
    return lines


def test_the_split_of_a_document_never_changes_between_releases():
    assert [by_hash(rank(key), SPLITS[1:]) for key in ("0", "5", "20")] == list(SPLITS)


def test_a_twentieth_each_is_withheld():
    found = [by_hash(rank(str(n)), ("validation", "test")) for n in range(20000)]
    assert abs(found.count("validation") - 1000) < 150
    assert abs(found.count("test") - 1000) < 150


@given(st.lists(st.sampled_from([n / 9 for n in range(9)]), min_size=3, max_size=200), _WITHHELD)
def test_equal_documents_share_a_split(ranks, withheld):
    found = set(zip(ranks, assign(ranks, withheld), strict=True))
    assert len(found) == len(set(ranks))
    assert "train" in {split for _, split in found} and len({split for _, split in found}) >= min(2, len(found))


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=200, unique=True), _WITHHELD)
def test_three_documents_or_more_leave_no_split_empty(ranks, withheld):
    assert set(assign(ranks, withheld)) == {"train", *withheld}


@given(st.integers(0, 200), _WITHHELD)
def test_cutting_gives_every_line_to_exactly_one_split(lines, withheld):
    parts = [cut(["x\n"] * lines, withheld, split) for split in ("train", *withheld)]
    assert [line for part in parts for line in part] == list(range(lines))
    if lines >= 3:
        assert all(parts)


def test_the_standard_library_is_code_without_tests_and_packages_in_three_splits_of_a_fixed_shuffled_order():
    keys = {split: [document.key for document in documents("stdlib", split)] for split in SPLITS}
    together = [key for split in SPLITS for key in keys[split]]
    assert len(set(together)) == len(together)
    for split in SPLITS:
        assert keys[split] == [document.key for document in documents("stdlib", split)]
        assert keys[split] != sorted(keys[split])
    assert 0.85 < len(keys["train"]) / len(together) < 0.95 and len(keys["train"]) > 300
    parts = {part for key in keys["train"] for part in key.split("/")[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "arrow"])
def test_every_format_gives_every_text_to_exactly_one_split(kind, tmp_path):
    if kind == "txt":
        _files(tmp_path, {f"{number}.txt": text for number, text in enumerate(_TEXTS)})
    elif kind == "jsonl":
        _files(tmp_path, {"a.jsonl": _TEXTS[:20], "b.jsonl": _TEXTS[20:]})
    elif kind == "parquet":
        Dataset.from_dict({"text": _TEXTS}).to_parquet(tmp_path / "a.parquet")
    else:
        Dataset.from_dict({"text": _TEXTS}).save_to_disk(tmp_path)
    found = _splits(tmp_path)
    assert all(found) and sorted(chain(*found)) == sorted(_TEXTS)
    if kind == "txt":  # in an order that does not change between releases
        whole = "\0".join("\0".join(each) for each in found)
        assert hashlib.sha256(whole.encode()).hexdigest().startswith("45317a8e2a96999f")


def test_rows_keep_their_split_when_others_are_added_also_streamed_and_equal_ones_share_it(tmp_path):
    rows = [f"text {n}" for n in range(4000)]
    few, many = (_files(tmp_path, {f"{len(each)}.jsonl": each}) for each in (rows[:3000], rows))
    found = [_read(few, "validation"), _read(many, "validation")]
    assert 100 < len(found[0]) < len(found[1]) and found[0] == found[1][: len(found[0])]
    assert _read(few, "test", streaming=True) == _read(few, "test")
    found = _splits(_files(tmp_path, {"equal.jsonl": _TEXTS * 3}))
    assert all(each.count(text) in (0, 3) for each in found for text in _TEXTS)


_ESSAYS = {f"{name}.txt": name for name in ("test", "dev", "how-to-train", *(f"on {n} things" for n in range(60)))}
_LINES = [f"line {n}\n" for n in range(50)]


@pytest.mark.parametrize(
    "files, wanted",
    [
        (
            {f"{each}.jsonl": [each] for each in ("train-00000-of-00002", "train-00001-of-00002", "val", "test")},
            [["train-00000-of-00002", "train-00001-of-00002"], ["val"], ["test"]],
        ),
        (
            {f"{each}.jsonl": [each] for each in ("train/a", "train/b", "valid/a", "test/a")},
            [["train/a", "train/b"], ["valid/a"], ["test/a"]],
        ),
        ({f"{name}.txt": name for name in ("test", "dev", "val")}, [1, 1, 1]),  # without train they name none
        (_ESSAYS, None),  # nor beside others
        ({"train.jsonl": _TEXTS, "test.jsonl": ["own test"]}, [None, None, ["own test"]]),
        ({"a.txt": "".join(_LINES)}, [["".join(_LINES[:46])], ["".join(_LINES[46:48])], ["".join(_LINES[48:])]]),
        ({"a.jsonl": ["a\nb\nc", "d\ne\nf"]}, [["a\n", "d\n"], ["b\n", "e\n"], ["c", "f"]]),
        ({"a.jsonl": ["a", {"text": None}, "", " \n", "b", "c"]}, [1, 1, 1]),  # blank ones are left out
        ({"a.jsonl": _TEXTS, "README.md": "about", "LICENSE.txt": "about"}, None),
    ],
)
def test_the_splits_of_a_source_are_its_own_or_withheld_by_hash_or_cut_at_line_ends(files, wanted, tmp_path):
    found = _splits(_files(tmp_path, files))
    for each, own in zip(found, wanted or [None] * 3, strict=True):
        assert len(each) == own if isinstance(own, int) else each and (own is None or sorted(each) == own)
    if not wanted:
        texts = files.get("a.jsonl", [*files.values()])
        assert sorted(chain(*found)) == sorted(texts) and len(found[0]) > 0.8 * len(texts)
        assert found[1] != ["dev"] and found[2] != ["test"]


@pytest.mark.parametrize("count", [3, 19])
def test_a_few_texts_are_each_cut_so_that_train_has_nine_tenths_of_the_lines(count, tmp_path):
    texts = ["".join(f"line {line} of text {n}\n" for line in range(100)) for n in range(count)]
    lines = [
        "".join(each).splitlines() for each in _splits(_files(tmp_path, {f"{n}.txt": t for n, t in enumerate(texts)}))
    ]
    assert [*map(len, lines)] == [90 * count, 5 * count, 5 * count]
    assert sorted(chain(*lines)) == sorted("".join(texts).splitlines())


def test_files_of_another_kind_beside_texts_are_left_out_and_named_once(tmp_path, warned):
    _files(tmp_path, dict.fromkeys(("notes.pdf", "data.csv", ".hidden.txt"), "left out"))
    _files(tmp_path, {f"{number}.txt": text for number, text in enumerate(_TEXTS)})
    assert "left out" not in [*chain(*_splits(tmp_path))]
    (line,) = warned
    assert line.startswith(f"{tmp_path}: data.csv and 1 more files are left out; a folder is read as text (.txt, .md, ")


def test_links_in_a_folder_are_followed_and_what_is_there_twice_or_not_at_all_is_named_once(tmp_path, warned):
    _files(tmp_path / "data", {f"{number}.txt": text for number, text in enumerate(_TEXTS[:30])})
    _files(tmp_path / "disk", {f"in/{number}.txt": text for number, text in enumerate(_TEXTS[30:])})
    for link, target in {
        "data/more": "../disk",
        "data/again": "../disk/in",
        "data/0-same.txt": "3.txt",
        "data/around": "..",
        "data/self": ".",
        "data/none.txt": "nowhere",
        "data/turns": "turns",
        "data/.hidden": "nowhere",
        "disk/in/back": "../..",
        "disk/in/up": "..",
    }.items():
        (tmp_path / link).symlink_to(target)
    assert sorted(chain(*_splits(tmp_path / "data"))) == sorted(_TEXTS)
    names = stated_text(DataConfig(data=str(tmp_path / "data")))["files"]
    assert {*names} == {*(f"{n}.txt" for n in range(30)), *(f"again/{n}.txt" for n in range(10))}
    (line,) = warned
    left = "turns (leads nowhere), none.txt (leads nowhere), 0-same.txt (read already, or a loop), around (read alr"
    assert line.startswith(f"{tmp_path}/data: left out 8 behind links: {left}")


def test_a_folder_of_links_alone_is_read_or_refused_where_all_lead_nowhere(tmp_path):
    _files(tmp_path / "disk", {"train.jsonl": _TEXTS, "test.jsonl": ["own test"]})
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / "data" / name).symlink_to(f"../disk/{name}")
    assert _splits(tmp_path / "data") == _splits(tmp_path / "disk")
    for path in (tmp_path / "disk").iterdir():
        path.unlink()
    with pytest.raises(
        UsageError, match=r"left out 2 behind links: train.jsonl \(leads nowhere\), test.jsonl \(leads now"
    ):
        documents(str(tmp_path / "data"), "train")


@pytest.mark.parametrize(
    "names, line",
    [
        (["train", "test", "extra"], "test.jsonl is read like the others, not as a split: extra.jsonl names none"),
        (["train/a", "test/a", "dev/b", "c"], "dev/b.jsonl and 1 more files are read like the others, not as a spl"),
        (["test"], "test.jsonl is read like the others, not as a split: no file names train; name one in each"),
        (["train", "test"], ""),
        (["train", "extra"], ""),
        (["extra", "other"], ""),
    ],
)
def test_files_that_name_a_split_and_are_not_used_as_one_are_named_in_one_line(names, line, tmp_path, warned):
    _files(tmp_path / "data", {f"{name}.jsonl": [f"{name} {text}" for text in _TEXTS] for name in names})
    _splits(tmp_path / "data")
    assert [each[: len(f"{tmp_path}/data: {line}")] for each in warned] == [f"{tmp_path}/data: {line}"][: len(line)]
    _splits(tmp_path / "data" / f"{names[0]}.jsonl")
    assert len(warned) == bool(line)


@pytest.mark.parametrize("names", [["a.md"], ["a.py"], ["a.rst"], ["a.TXT"], ["b.txt", "a.md", "c/d.py", "a.rst"]])
def test_prose_and_source_code_are_text_alone_and_in_one_folder_in_an_order_of_their_names(names, tmp_path):
    texts = {name: "".join(f"{name} line {n}\n" for n in range(20)) for name in names}
    _files(tmp_path / "one", {**texts, ".git/hook.py": "hidden\n" * 9})
    found = _splits(tmp_path / "one")
    assert sorted("".join(chain(*found)).splitlines()) == sorted("".join(texts.values()).splitlines())
    assert "".join([*chain(*_splits(tmp_path / "one" / names[0]))]) == texts[names[0]]
    _files(tmp_path / "two", {**dict(reversed(texts.items())), ".hidden": ""})
    assert _splits(tmp_path / "two") == found


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("none.txt", None, {}, r"none\.txt: there is no such file or folder"),
        ("a.pdf", "x", {}, r"a\.pdf: holds \.pdf files; give text \(\.txt, \.md, \.rst"),
        ("a", "x", {}, r"a: holds no text; give text \(\.txt, \.md, \.rst"),
        ("a.txt", "", {}, r"a\.txt: is empty"),
        ("a.txt", " \n\n\n\n", {}, r"a\.txt: holds no text for the train split"),
        ("a.txt", b"caf\xe9", {}, r"a\.txt: byte 3 is not UTF-8"),
        ("a.ts", b"\x47\xff\xfe" * 99, {}, r"a\.ts: byte 1 is not UTF-8; convert the file to UTF-8, or move it away"),
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
        _files(tmp_path, {name: content})
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


def test_an_unknown_split_a_folder_of_two_kinds_and_too_little_text_are_refused_at_the_call(tmp_path):
    rows = _files(tmp_path / "rows", {"a.jsonl": _TEXTS, "notes.md": "text"})
    kinds = _files(tmp_path / "kinds", {"a.parquet": "x", "b.jsonl": "{}"})
    little = _files(tmp_path, {"a.txt": "one\ntwo"})
    assert _read(little, "train") == ["one\ntwo"]
    for source, split, message in (
        ("stdlib", "dev", "split 'dev' is unknown"),
        ("hf:", "train", "hf:: names no data set; write hf:NAME"),
        (kinds, "train", r"holds \.jsonl, \.parquet files; give text .* one kind at a time"),
        (rows, "train", r"holds rows \(a\.jsonl\) and text \(notes\.md\); name one of the files, or"),
        (little, "validation", "no text for the validation split; give at least 3 documents"),
    ):
        with pytest.raises(UsageError, match=message):
            documents(str(source), split)


def test_a_hub_data_set_keeps_its_own_splits_and_one_without_train_is_refused(monkeypatch):
    splits, requested = {"train": _TEXTS, "valid": ["own"], "unsupervised": ["x"]}, []

    def load_dataset(name, subset, *, split, streaming):
        requested.append((name, subset, split))
        rows = Dataset.from_dict({"text": splits[split]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, subset: list(splits))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert _read("hf:org/name:subset", "validation") == ["own"]
    assert ("org/name", "subset", "train") in requested
    train, test = (_read("hf:org/name:subset", split, streaming=True) for split in ("train", "test"))
    assert sorted(train + test) == sorted(_TEXTS)
    splits = {"train_sft": _TEXTS, "test_sft": _TEXTS}
    with pytest.raises(UsageError, match="none of its splits is called train; it has: train_sft, test_sft"):
        documents("hf:org/name", "train")


def test_a_hub_that_cannot_be_reached_is_a_failed_run(monkeypatch):
    def unreachable(name, subset):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    with pytest.raises(RunError, match="hf:org/name: the hub cannot be reached: no route to host"):
        documents("hf:org/name", "train")
