"""Rows as people have them: the columns decide the format, and what cannot be learned from is left out by reason."""

import csv
import json
import re

import pytest
from datasets import Dataset

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.config.sections import DataConfig
from kdtrain.data import packing
from kdtrain.data.corpus import documents
from kdtrain.data.formats import Columns, Document, row_format
from kdtrain.errors import UsageError

pytestmark = pytest.mark.usefixtures("own_cache")


def _read(source, **asked):
    """Read all documents of a source of which none is withheld."""
    return [document for split in ("train", "validation", "test") for document in _of(source, split, **asked)]


def _of(source, split, **asked):
    try:
        return list(documents(str(source), split, Columns(**asked)))  # type: ignore[arg-type]
    except UsageError as error:
        if split == "train" or "give at least 3 documents" not in str(error):
            raise
        return []


def _talk(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def _sharegpt(*turns):
    return [{"from": role, "value": content} for role, content in turns]


WANTED = _talk(("user", "why?"), ("assistant", "because"))
SYSTEM = _talk(("system", "be kind"))
UNLEARNED = [("weight", 0), ("train", False), ("training", False), ("loss", False), ("masked", True)]
SPELLED = {"name": "add", "arguments": '{"a": 1, "b": null}'}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLING = {"role": "assistant", "content": None}
CALLED = {**CALLING, "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROWS = {
    "messages": ({"messages": WANTED}, Document("", messages=WANTED)),
    "sharegpt": (
        {"conversations": _sharegpt(("human", "why?"), ("GPT", "because")), "id": "7"},
        Document("", messages=WANTED),
    ),
    "sharegpt with a system prompt": (
        {"conversations": _sharegpt(("human", "why?"), ("gpt", "because")), "system": "be kind"},
        Document("", messages=SYSTEM + WANTED),
    ),
    "alpaca": (
        {"instruction": "why?", "input": "it\nis", "output": "because"},
        Document("", messages=_talk(("user", "why?\n\nit\nis"), ("assistant", "because"))),
    ),
    "alpaca without input": ({"instruction": "why?", "input": "", "output": "because"}, Document("", messages=WANTED)),
    "alpaca with all": (
        {"instruction": "c", "output": "d", "system": "be kind", "history": [["a", "b"]]},
        Document("", messages=SYSTEM + _talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))),
    ),
    "prompt and completion": ({"prompt": "1 + 1 =", "completion": " 2"}, Document("", text="1 + 1 = 2", prompt=7)),
    "prompt and completion of messages": (
        {"prompt": SYSTEM + WANTED + _talk(("user", "so?")), "completion": _talk(("assistant", "so"))},
        Document("", messages=SYSTEM + WANTED + _talk(("user", "so?"), ("assistant", "so")), prompt=4),
    ),
    "content in parts": (
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
                for role, texts in (("user", ["why?"]), ("assistant", ["be", "c"]))
            ]
        },
        Document("", messages=[*WANTED[:1], {"role": "assistant", "content": "be\nc"}]),
    ),
    "tool calls without content": (
        {
            "messages": [*WANTED[:1], {**CALLING, "tool_calls": [{**CALL, "function": SPELLED}]}, *WANTED[1:]],
            "tools": [TOOL],
        },
        Document("", messages=[{**WANTED[0], "tools": [TOOL]}, CALLED, *WANTED[1:]]),
    ),
    "a function call of before tool calls, and tools as JSON": (
        {
            "messages": [*WANTED[:1], {"role": "assistant", "content": "", "function_call": SPELLED}],
            "tools": json.dumps([TOOL["function"]]),
        },
        Document("", messages=[{**WANTED[0], "tools": [TOOL]}, CALLED]),
    ),
    "turns that must not be learned": (
        {
            "messages": [{**turn, key: value} for key, value in UNLEARNED for turn in WANTED]
            + [{**WANTED[1], "weight": 1}]
        },
        Document("", messages=[*WANTED[:1], {**WANTED[1], "weight": 0}] * len(UNLEARNED) + WANTED[1:]),
    ),
    "a turn of ShareGPT with train": (
        {"conversations": [*_sharegpt(("gpt", "a")), {"from": "gpt", "value": "b", "train": False}]},
        Document("", messages=[{"role": "assistant", "content": "a"}, {**WANTED[1], "content": "b", "weight": 0}]),
    ),
    "text": ({"text": "plain"}, Document("", text="plain")),
    "text beside a conversation": ({"text": "plain", "messages": WANTED}, Document("", text="plain")),
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_is_follows_from_its_columns(name, suffix, tmp_path):
    row, wanted = ROWS[name]
    path, rows = tmp_path / f"a.{suffix}", [row] * 3
    if suffix == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif suffix == "arrow":
        Dataset.from_list(rows).save_to_disk(path := tmp_path / "saved")
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = _read(path)
    assert [(each.text, each.messages, each.prompt) for each in found] == [
        (wanted.text, wanted.messages, wanted.prompt)
    ] * 3


@pytest.mark.parametrize(
    "turn, reason",
    [
        ({"content": None}, "with a turn without content (first: row 0: 'assistant')"),
        ({}, "with a turn without content (first: row 0: 'assistant')"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "with content that is not text (first: row",
        ),
        ({"content": {"a": "b"}}, "with content that is not text (first: row 0: 'assistant')"),
        ({"content": "a", "tool_calls": [{"id": "x"}]}, "with tool calls that name no function (first: row 0)"),
        ({"content": "a", "weight": 0.5}, "with a turn that counts in part (first: row 0)"),
        ({"content": "a", "train": "no"}, "with a turn that counts in part (first: row 0)"),
        ({"content": "a", "weight": 0}, "without an answer (first: row 0)"),
        ({"content": "a", "tool_calls": "add"}, "with tool calls that name no function (first: row 0)"),
    ],
)
def test_a_turn_that_cannot_be_rendered_has_its_own_reason(turn, reason, tmp_path):
    rows = [{"messages": [*WANTED[:1], {"role": "assistant", **turn}]}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(UsageError, match=f"for the train split: 3 {re.escape(reason)}"):
        documents(str(tmp_path / "a.jsonl"), "train")


@pytest.mark.parametrize("value", ['"\\ud800"', *(f"{'[' * depth}1{']' * depth}" for depth in (70, 600, 100_000))])
@pytest.mark.parametrize("place", ["arguments", "tools"])
def test_json_inside_a_row_that_no_template_can_take_leaves_out_that_row_alone(place, value, tmp_path, caplog):
    row: dict[str, object] = {"messages": WANTED}
    if place == "tools":
        row["tools"] = f'[{{"name": "add", "parameters": {{"a": {value}}}}}]'
    else:
        call = {"name": "add", "arguments": f'{{"a": {value}}}'}
        row["messages"] = [*WANTED[:1], {**CALLING, "tool_calls": [{"type": "function", "function": call}]}]
    rows = [row, *({"messages": [*WANTED, *WANTED[:number]]} for number in range(3))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with caplog.at_level("INFO"):
        found = _read(tmp_path / "a.jsonl")
    assert [len(each.messages or ()) for each in sorted(found, key=lambda each: each.key)] == [2, 3, 4]
    assert "3 of 4 rows; left out 1 whose tools or calls are nested too deep or hold half of a surr" in caplog.text


@pytest.mark.parametrize("suffix, sep", [("csv", ","), ("tsv", "\t")])
def test_the_cells_of_csv_and_tsv_are_the_text_that_they_are(suffix, sep, tmp_path):
    pairs = [
        ("a, b\tc", "NA"),
        ("1", "2.50"),
        ('say "hi"\nnow', "null"),
        ("é", "true"),
        ("q", ""),
        ("long", "x" * 2**18),
    ]
    for name, encoding in (("a", "utf-8"), ("b", "utf-8-sig")):
        with (tmp_path / f"{name}.{suffix}").open("w", newline="", encoding=encoding) as file:
            csv.writer(file, delimiter=sep).writerows([("id", "prompt", "completion"), *((7, *pair) for pair in pairs)])
    wanted, limit = [(prompt + answer, len(prompt)) for prompt, answer in pairs if answer] * 2, csv.field_size_limit()
    assert sorted((each.text, each.prompt) for each in _read(tmp_path)) == sorted(wanted)
    next(documents(str(tmp_path), "train"))
    assert csv.field_size_limit() == limit, "of the process, for others"


@pytest.mark.parametrize(
    "files, message",
    [
        ({"a.csv": "prompt,prompt\nx,y\n"}, r"a\.csv: its first line does not name columns, each once"),
        ({"a.csv": "prompt,\nx,y\n"}, r"a\.csv: its first line does not name columns, each once"),
        (
            {"a.csv": "text\nx\n", "b.csv": "body\nx\n"},
            r"b\.csv: has no column 'text'; it has body; give files of equal columns",
        ),
        ({"a.csv": "text,n\nx,1,2,3\n"}, r"a\.csv: line 2 has 4 cells and the first line names 2 columns; put"),
        ({"a.csv": "text,n\nx\n"}, r"a\.csv: line 2 has 1 cells and the first line names 2 columns; put"),
        ({"a.csv": 'text\n"x\n'}, r"a\.csv: cannot be read: unexpected end of data"),
        ({"a.csv": b"text\ncaf\xe9\n"}, r"a\.csv: line 2 has a byte that is not UTF-8; convert"),
        ({"a.csv": "body\nx\n"}, r"has no column 'text'; give --text-column body"),
    ],
)
def test_a_csv_that_cannot_be_read_is_one_line(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message) as caught:
        list(documents(str(tmp_path if len(files) > 1 else tmp_path / "a.csv"), "train"))
    assert "\n" not in str(caught.value)


def test_json_and_csv_beside_rows_or_text_are_left_out_of_a_folder_as_before(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "row"}\n' * 3)
    (tmp_path / "info.json").write_text('[{"text": "about"}]')
    assert [each.text for each in _read(tmp_path)] == ["row"] * 3
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.txt").write_text("one\ntwo\nthree")
    assert "".join(each.text or "" for each in _read(tmp_path)) == "one\ntwo\nthree"


def test_what_is_left_out_is_counted_by_reason_with_its_first_row(tmp_path, caplog):
    good = {"conversations": _sharegpt(("human", "why?"), ("gpt", "because"))}
    rows = [
        *[{"conversations": [*good["conversations"], {"from": "human", "value": f"{n}?"}]} for n in range(30)],
        {"conversations": _sharegpt(("human", "why?"), ("gpt", " "))},
        {"conversations": []},
        {"conversations": None},
        {"conversations": _sharegpt(("human", "why?"), ("narra\x1btor", "x"))},
        {"conversations": [{"from": "human", "value": None}]},
        {"conversations": [{"value": "of nobody"}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("INFO"):
        assert len(_read(tmp_path / "a.jsonl")) == 30
    (said,) = (each.getMessage() for each in caplog.records)
    assert said == (
        f"{tmp_path}/a.jsonl: read as sharegpt (conversations): 30 of 36 rows; left out 3 without an answer "
        "(first: row 30), 1 with an unknown role (first: row 33: 'narra\\x1btor'), 1 with a turn without content "
        "(first: row 34: 'human'), 1 that are not conversations (first: row 35: is not a conversation; it needs lists "
        "of role and content)"
    )


def test_a_source_of_which_every_row_is_left_out_is_refused_with_the_reasons(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"instruction": "x", "output": ""}\n' * 3)
    with pytest.raises(UsageError, match=r"holds no instruction with output for the train split: 3 without an answer"):
        documents(str(tmp_path / "a.jsonl"), "train")


def test_few_rows_with_a_prompt_are_never_cut_at_line_ends(tmp_path):
    row = {"prompt": "a\nb\nc\nd\n", "completion": "e\nf\ng\nh"}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 2)
    assert {(each.text, each.prompt) for each in _of(tmp_path / "a.jsonl", "train")} == {("a\nb\nc\nd\ne\nf\ng\nh", 8)}


@pytest.mark.parametrize(
    "asked, names, message",
    [
        (Columns(format="sharegpt"), ["chat"], "has no column 'conversations'; give --messages-column chat"),
        (Columns(format="alpaca"), ["instruction", "response"], "has no column 'output'; --format alpaca needs it"),
        (Columns(format="prompt-completion"), ["prompt", "chosen"], "has no column 'completion'; --format prompt-comp"),
        (Columns(messages="chat"), ["text"], "has no column 'chat'; give --messages-column text"),
        (Columns(text="body"), ["messages"], "has no column 'body'; give --text-column messages"),
    ],
)
def test_a_format_without_its_columns_is_refused_with_those_that_there_are(asked, names, message):
    with pytest.raises(UsageError, match=message):
        row_format("rows", asked, names)


@pytest.mark.parametrize(
    "asked, names, wanted",
    [
        (Columns(format="messages"), ["conversations", "text"], ("messages", ("conversations",))),
        (Columns(format="sharegpt"), ["messages"], ("sharegpt", ("messages",))),
        (
            Columns(format="alpaca"),
            ["text", "output", "input", "instruction"],
            ("alpaca", ("instruction", "output", "input")),
        ),
        (Columns(messages="chat"), ["chat", "text", "system"], ("messages", ("chat",))),
        (Columns(), ["text", "instruction", "output"], ("text", ("text",))),
    ],
)
def test_an_option_goes_before_what_the_columns_say(asked, names, wanted):
    found = row_format("rows", asked, names)
    assert (found.name, found.columns) == wanted


def test_columns_that_a_format_does_not_read_and_formats_of_plain_text_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--messages-column has no effect with --format alpaca"):
        DataConfig(format="alpaca", messages_column="chat")
    with pytest.raises(UsageError, match="--text-column has no effect with --format sharegpt"):
        DataConfig(format="sharegpt", text_column="body")
    for source in ("stdlib", str(tmp_path)):
        (tmp_path / "a.txt").write_text("x")
        with pytest.raises(UsageError, match="text has no columns; leave out --format alpaca"):
            documents(source, "train", Columns(format="alpaca"))


def test_what_the_template_leaves_out_is_counted_in_the_manifest_for_any_number_of_workers(tmp_path, monkeypatch):
    from kdtrain.run.build_cache import build_tokens
    from kdtrain.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(packing, "_BATCH_PIECES", 16)
    asking = [{"role": "user", "content": f"{n}?"} for n in range(300)]
    rows = [{"messages": [asked, *[CALLED] * (n % 3 == 0), *WANTED[1:]]} for n, asked in enumerate(asking)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))

    def made(workers):
        data = DataConfig(data=str(tmp_path / "a.jsonl"), seq_len=16, num_sequences=9, num_workers=workers)
        return build_tokens(tmp_path / f"out{workers}", data, tokenizer, 300)

    alone, workers = made(0), made(3)
    (reason,) = alone.text_counts["train"]
    assert reason == "conversations left out that the chat template does not render as they are"
    assert 0 < alone.text_counts["train"][reason] < 80
    assert workers.digest == alone.digest
    assert read_manifest(tmp_path / "out3").text_counts == alone.text_counts


def test_an_invocation_of_before_formats_has_the_identity_that_it_had(tmp_path):
    from kdtrain.cache.format.spec import CodecSpec
    from kdtrain.run.build_cache import _settings
    from kdtrain.testing import tiny_tokenizer

    def identity(**options):
        data = DataConfig(data="chat.jsonl", **options)  # type: ignore[arg-type]
        return _settings(data, tiny_tokenizer(300), CodecSpec(kind="tokens", vocab_size=300), {}).data

    before = {"source": "chat.jsonl", "split": "train", "text_column": "text", "messages_column": "messages"}
    assert identity(messages_column="messages") == before
    assert identity() == before | {"messages_column": None}
    assert identity(parse_special_tokens=True) == before | {"messages_column": None, "parse_special_tokens": True}
    assert identity(format="alpaca") == before | {"messages_column": None, "format": "alpaca"}
