"""A tokenizer that would keep the process busy without end is refused by its files; the known kinds are not."""

import base64
import json
import time

import pytest

from kdtrain import sandbox
from kdtrain.data.formats import Document
from kdtrain.data.packing import pack
from kdtrain.errors import UsageError
from kdtrain.models import hub, tokenizer_limits
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.testing import tiny_tokenizer

LONG_MAP = base64.b64encode(b"\0\0\0\0" + b"a" * 100).decode()
CHARSMAP = base64.b64encode(b"\0\0\0\0" + b"a\0" + "صلى الله عليه وسلم".encode() + b"\0").decode()


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def steps(*each, kind="normalizers"):
    return {"type": "Sequence", kind: list(each)}


def special(number, content="<x{}>"):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 300 + number, "content": content.format(number), "special": True} | flags


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\d{1,3}"}, "behavior": "Isolated", "invert": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "x", "ids": [299], "tokens": ["<|endoftext|>"]}},
}


@pytest.fixture
def changed(tmp_path):
    """Write the tiny tokenizer with other entries in a JSON file of it; return the folder."""

    def write(name="tokenizer.json", **entries):
        tiny_tokenizer().save_pretrained(tmp_path)
        path = tmp_path / name
        table = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(table | entries))
        return tmp_path

    return write


@pytest.mark.parametrize(
    "entries, line",
    [
        ({"normalizer": steps(*[replace("a", "aa")] * 40)}, "its normalizer may make more than 64 characters of one"),
        ({"normalizer": steps(steps(*[replace("a", "aa")] * 4), *[replace("a", "aa")] * 3)}, "its normalizer may"),
        ({"normalizer": steps(*[{"pattern": {"String": "a"}, "content": "aa"}] * 7)}, "its normalizer may make"),
        ({"normalizer": replace("a", "a" * 10_000)}, "its normalizer may make"),
        ({"normalizer": steps(*[replace("(?=a)", "a", "Regex")] * 7)}, "its normalizer may make"),
        ({"normalizer": steps(*[replace("a*", "a", "Regex")] * 7)}, "its normalizer may make"),
        ({"normalizer": steps(*[replace("a", "\ufdfa"), {"type": "NFKD"}] * 2)}, "its normalizer may make"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 100}}, "its normalizer may make"),
        ({"normalizer": steps(*[{"type": "ByteLevel"}] * 7)}, "its normalizer may make"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_MAP}}, "its normalizer may"),
        ({"pre_tokenizer": steps(*[BYTES] * 7, kind="pretokenizers")}, "its normalizer may make"),
        ({"normalizer": steps(*[{"type": "NFC"}] * 65)}, "its normalizer has 66 steps; at most 64"),
        ({"decoder": steps(*[replace("a", "aa")] * 40, kind="decoders")}, "its decoder may make more than 64"),
        ({"post_processor": TEMPLATE | {"single": TEMPLATE["single"] * 5_000}}, "its post_processor has"),
        ({"added_tokens": [{"id": 1}] * 100_001}, "100,001 added tokens; at most 100,000 are supported"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**6}}, "max_input_chars_per_word is above 1,00"),
        ({"model": {"type": "BPE", "continuing_subword_prefix": "#" * 10**6}}, "a prefix or suffix has 1,000,000"),
    ],
)
def test_a_tokenizer_that_would_not_end_is_refused_in_one_line(changed, entries, line):
    folder, started = changed(**entries), time.monotonic()
    with pytest.raises(UsageError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / 'tokenizer.json'}: ") and line in str(caught.value)
    assert "\n" not in str(caught.value) and time.monotonic() - started < 5


def test_a_tokenizer_that_takes_long_to_load_is_refused_by_a_child_with_limits(changed, monkeypatch):
    monkeypatch.setattr(hub, "_LOAD_SECONDS", 1.0)
    folder = changed("tokenizer_config.json", extra_special_tokens=[f"<{n}>" for n in range(100_000)])
    with pytest.raises(UsageError, match=rf"{folder}: its tokenizer takes more than 1 s or 4 GiB to load; use another"):
        load_tokenizer(folder)


def test_a_tokenizer_that_was_loaded_once_is_not_tried_again(changed, monkeypatch, tmp_path):
    monkeypatch.setenv("KDTRAIN_HOME", str(home := tmp_path / "home"))
    load_tokenizer(folder := changed())
    (note,) = (home / "sound").iterdir()
    monkeypatch.setattr(sandbox, "Sandbox", None)
    assert len(load_tokenizer(folder)) == 300 and note.name != "" and note.stat().st_size == 0


@pytest.mark.parametrize("home", [None, "/dev/null/x"])
def test_where_no_note_can_be_written_a_tokenizer_is_tried_each_time(changed, monkeypatch, home):
    monkeypatch.setattr(sandbox.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    monkeypatch.delenv("KDTRAIN_HOME", raising=False) if home is None else monkeypatch.setenv("KDTRAIN_HOME", home)
    assert len(load_tokenizer(changed())) == 300


@pytest.mark.parametrize("names", [["more/tokenizer.1.0.0.json"], ["../tokenizer.1.0.0.json"], "x", [5]])
def test_another_tokenizer_file_must_lie_beside_the_first(changed, names):
    with pytest.raises(UsageError, match=r"fast_tokenizer_files = .* is not a list of names"):
        load_tokenizer(changed("tokenizer_config.json", fast_tokenizer_files=names))


def test_another_tokenizer_file_is_checked_as_well(changed):
    folder = changed("tokenizer.1.0.0.json", normalizer=replace("a", "a" * 10_000))
    changed("tokenizer_config.json", fast_tokenizer_files=["tokenizer.1.0.0.json"])
    with pytest.raises(UsageError, match=r"tokenizer\.1\.0\.0\.json: its normalizer may make"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"normalizer": steps({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))},  # Llama
        {"normalizer": steps({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"})},  # CLIP
        {  # ALBERT, without its map
            "normalizer": steps(
                *(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}),
                *({"type": "Lowercase"}, replace(" {2,}", " ", "Regex")),
            ),
            "pre_tokenizer": SPACES,
        },
        {
            "pre_tokenizer": steps(
                *[SPLIT] * 12, {"type": "Digits", "individual_digits": True}, BYTES, kind="pretokenizers"
            )
        },
        {"decoder": steps(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, kind="decoders")},
        {"post_processor": TEMPLATE},
        {"added_tokens": [special(number) for number in range(1_000)]},
    ],
)
def test_tokenizers_of_known_kinds_are_loaded(changed, entries):
    load_tokenizer(changed(**entries))


def test_the_map_of_a_sentencepiece_normalizer_counts_with_its_longest_text():
    step = {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
    assert tokenizer_limits._growth(step) == 18


def test_wordpiece_without_its_unknown_token_is_refused_by_name(changed):
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    vocabulary = {"<|endoftext|>": 299, "a": 0}
    folder = changed(model=model | {"max_input_chars_per_word": 100, "vocab": vocabulary}, pre_tokenizer=None)
    with pytest.raises(UsageError, match=rf"the tokenizer {folder} cannot take this text .*Missing \[UNK\] token"):
        list(pack([Document("a", text="abc")], load_tokenizer(folder), 2))
