"""`kdtrain generate` continues a text with the student of a run, an export or a spec."""

import json

import pytest
import torch

from kdtrain.models.generate import generate
from kdtrain.run import saved_student
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder


@pytest.fixture
def run(workbench):
    """A run of two steps and its export, made once."""
    if not (workbench.root / "spoken").exists():
        argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "spoken", "--steps", 2)
        workbench.json(*argv, "--lr", 3e-2, *workbench.plain)
    return workbench


@pytest.mark.parametrize("student", ["spoken", "spoken/student", "spoken/checkpoints/best", "teacher"])
def test_a_text_is_continued_and_the_same_seed_continues_it_alike(run, student):
    argv = ("generate", student, "7 squared is", "--max-tokens", 6)
    first, again = (run.json(*argv, "--seed", 3) for _ in range(2))
    assert first == again and first["prompt"] == "7 squared is" and 0 < first["tokens"] <= 6
    code, out, err = run.call(*argv, "--seed", 3)
    assert code == 0 and out.startswith("7 squared is") and "\x00" not in out, err
    assert "fresh weights" not in err
    other = [run.json(*argv, "--seed", seed)["text"] for seed in (4, 5)]
    assert other != [first["text"]] * 2


TURN = "<{{ messages[0]['role'] }}>{{ messages[0]['content'] }}{% if add_generation_prompt %}<answer>{% endif %}"


def test_a_student_with_a_chat_template_is_asked_in_it_and_raw_continues_the_text(run, tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = TURN
    chat = write_model_folder(tmp_path / "chat", tiny_model("llama", 300), tokenizer)
    more = ("--max-tokens", 4, "--temperature", 0)
    answered = run.json("generate", chat, "hello", *more)
    assert answered["prompt"] == "hello"
    assert answered["text"] == run.json("generate", chat, "<user>hello<answer>", "--raw", *more)["text"]
    assert answered["text"] != run.json("generate", chat, "hello", "--raw", *more)["text"]
    assert run.call("generate", chat, "hello", *more)[1] == f"hello\n{answered['text']}\n"
    assert run.call("generate", chat, "hello", "--raw", *more)[1].startswith("hello")
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    broken = write_model_folder(tmp_path / "broken", tiny_model("llama", 300), tokenizer)
    code, _, err = run.call("generate", broken, "hello", *more)
    assert code == 2 and "(see --raw)" in err and "no users here" in err
    tokenizer.chat_template = "{# nothing #}"
    silent = write_model_folder(tmp_path / "silent", tiny_model("llama", 300), tokenizer)
    code, _, err = run.call("generate", silent, "hello", *more)
    assert code == 2 and "its chat template renders nothing; use --raw" in err
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless = write_model_folder(tmp_path / "endless", tiny_model("llama", 300), tokenizer)
    monkeypatch.setattr("kdtrain.data.rendering.SECONDS", 0.2)
    code, _, err = run.call("generate", endless, "hello", *more)
    assert code == 2 and "the chat template takes more than" in err


def test_an_empty_prompt_without_a_token_to_begin_with_names_the_prompt(run):
    code, _, err = run.call("generate", "spoken", "")
    assert code == 2 and "no token to begin with; give a PROMPT" in err and "--prompt" not in err


def test_a_spec_that_nothing_has_trained_is_said_to_be_so(run):
    size = json.loads((run.root / "teacher" / "config.json").read_text())["vocab_size"]
    (run.root / "fresh.toml").write_text((run.root / "student.toml").read_text() + f"vocab_size = {size}\n")
    code, _, err = run.call("generate", "fresh.toml", "7", "--max-tokens", 2)
    assert code == 0 and "fresh.toml is a spec of fresh weights, which nothing has trained" in err, err


def test_a_shipped_name_is_the_shipped_student_and_its_path_the_folder_of_a_run(run, monkeypatch):
    (run.root / "stdlib-1m").symlink_to("spoken")
    try:
        asked = []
        monkeypatch.setattr(
            saved_student, "load_student", lambda spec, **_: asked.append(spec) or tiny_model("llama", 300)
        )
        assert saved_student.open_student("stdlib-1m", torch.device("cpu"))[1] == asked[0].tokenizer
        assert (
            asked[0].config and saved_student.open_student("./stdlib-1m", torch.device("cpu"))[1] != asked[0].tokenizer
        )
        assert len(asked) == 1
    finally:
        (run.root / "stdlib-1m").unlink()


def test_a_student_reads_no_more_than_its_positions(run):
    code, _, err = run.call("generate", "spoken", "7 squared is " * 2000)
    assert code == 2 and "shorten it" in err


def test_a_cache_is_no_student(run):
    code, _, err = run.call("generate", "cache", "7")
    assert code == 2 and len(err.splitlines()) == 1


def test_samples_follow_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 3.0]])

    def drawn(temperature):
        found = generate(lambda tokens_BT: logits, torch.tensor([[0]]), 2000, temperature, 0)
        return torch.bincount(torch.tensor(list(found)), minlength=3) / 2000

    assert drawn(0).tolist() == [0, 0, 1] and drawn(1e-30).tolist() == [0, 0, 1]
    for temperature in (1.0, 3.0):
        assert torch.allclose(drawn(temperature), torch.softmax(logits[0] / temperature, -1), atol=0.04)
