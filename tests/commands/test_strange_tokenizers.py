"""A student whose tokenizer was made by a stranger: `distill --cross-tokenizer` ends in one line, or takes no harm."""

import json
from pathlib import Path

import pytest

from tests.token_kinds import train

RUN = ("distill", "--cache", "cache", "--student", "strange.toml", "--cross-tokenizer", "--steps", 6)


@pytest.fixture
def bench(workbench):
    """Add to the workbench a student whose tokenizer is in `strange`."""
    train("gpt2", 400, Path("text.txt").read_text()).save_pretrained("strange")
    Path("strange.toml").write_text(Path("student.toml").read_text().replace("'teacher'", "'strange'"))
    return workbench


def edit(name, change):
    path = Path("strange") / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def word_piece(content):
    pieces = {"[UNK]": 0, "a": 1, "##b": 2, "</s>": 3}
    content["model"] = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": pieces}
    content["model"]["max_input_chars_per_word"] = 100
    content["pre_tokenizer"] = {"type": "BertPreTokenizer"}


TOKENIZERS = {
    "WordPiece": (word_piece, "is a WordPiece vocabulary, which drops the spaces"),
    "lower case": (lambda content: content.update(normalizer={"type": "Lowercase"}), "'A b C' comes back as 'a b c'"),
    "a huge id": (lambda content: content["model"]["vocab"].update(xx=2**32 - 1), "has ids above 4,194,304"),
    "a number for a model": (lambda content: content.update(model=5), "strange: "),
    "endless": (
        lambda content: content.update(
            normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u001b" * 50}] * 40}
        ),
        "characters of one",
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used_ends_in_one_line(bench, kind):
    change, message = TOKENIZERS[kind]
    edit("tokenizer.json", change)
    code, out, err = bench.call(*RUN, "--out", f"of-{kind}".replace(" ", "-"), *bench.plain)
    assert code == 2 and message in err, err
    assert out == "" and "Traceback" not in err and err.count("\n") - err.count("INFO") <= 8, err
    assert "\x1b" not in err


def test_a_file_nested_deep_ends_in_one_line(bench):
    text = Path("strange/tokenizer.json").read_text()
    assert text.count('"normalizer": null') == 1
    deep = '{"type":"Sequence","normalizers":[' * 20_000 + "]}" * 20_000
    Path("strange/tokenizer.json").write_text(text.replace('"normalizer": null', f'"normalizer": {deep}'))
    code, _, err = bench.call(*RUN, "--out", "of-depth", *bench.plain)
    assert code == 2 and "strange" in err and "Traceback" not in err


def test_a_chat_template_is_never_run_and_names_are_escaped(bench):
    edit(
        "tokenizer_config.json",
        lambda content: content.update(chat_template="{% for a in range(10**9) %}{% for b in range(10**9) %}x"),
    )
    edit("tokenizer.json", lambda content: content["added_tokens"].append(hostile_name(content)))
    code, _, err = bench.call(*RUN, "--out", "of-a-template", *bench.plain, "--alpha", 0.1, "--lr", 3e-3)
    assert code == 0, err
    assert "\x1b" not in err and (Path("of-a-template") / "data" / "view.json").is_file()


def hostile_name(content):
    number = max(content["model"]["vocab"].values()) + 1
    return {**content["added_tokens"][0], "id": number, "content": "<\x1b[2J>"}
