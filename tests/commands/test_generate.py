"""`kdtrain generate` continues a text with the student of a run, an export or a spec; `kdtrain chat` takes turns."""

import fcntl
import io
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, suppress
from functools import partial

import pytest
import torch

from kdtrain.commands.generate import _Talker, _Writer
from kdtrain.config.commands import ChatConfig
from kdtrain.errors import UsageError
from kdtrain.models.attention import CAUSAL
from kdtrain.models.generate import decoding, generate
from kdtrain.models.head import split
from kdtrain.run import saved_student
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder
from tests.e2e.conftest import opinionated


@pytest.fixture
def run(workbench):
    """Make a run of two steps and its export, once."""
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


def test_a_teacher_that_ships_writes_by_its_name(run):
    code, out, err = run.call("generate", "stdlib-5m", "def ", "--max-tokens", 3)
    assert code == 0 and len(out) > len("def ") and "nothing has trained" not in err, err


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


def written(next_logits, tokens_BT, tokens=20, **options):
    return torch.stack([*generate(next_logits, tokens_BT, tokens, 1.0, 3, **options)], 1)


@torch.no_grad()
def whole(model, tokens_BT):
    return model.logits(tokens_BT)[:, -1]


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2", "mistral", "gemma2", "bloom"])
def test_steps_with_a_kv_cache_write_what_whole_forwards_write_and_read_only_what_is_new(shape):
    model, read = split(opinionated(tiny_model(shape)).eval()), []
    before, causal = model.model.config._attn_implementation, shape not in ("gemma2", "bloom")
    first_BT = torch.randint(300, (2, 30), generator=torch.Generator().manual_seed(0))
    other_BT = torch.cat([first_BT[:, :24], first_BT[:, :6]], 1)  # another turn, of which 24 tokens are known
    wholes = [written(partial(whole, model), first_BT[:, :5]), whole(model, first_BT), whole(model, other_BT)]
    with decoding(model, 300) as decoder:
        assert model.keeps_keys
        with model.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1])):
            assert torch.equal(written(decoder, first_BT[:, :5]), wholes[0])
            for tokens_BT, logits_BV in ((first_BT, wholes[1]), (other_BT, wholes[2]), (first_BT, wholes[1])):
                torch.testing.assert_close(decoder(tokens_BT), logits_BV, rtol=0, atol=1e-4 * float(logits_BV.std()))
    assert read == [5, *[1] * 19, 25, 6, 6]
    assert model.model.config._attn_implementation == before and (before == CAUSAL) == causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_model_that_ignores_its_cache_is_read_whole_which_is_logged_once(shape, dtype, monkeypatch):
    model, said = split(tiny_model(shape).eval().to(dtype)), []
    monkeypatch.setattr(logging.getLogger("kdtrain"), "info", lambda text, *values: said.append(text % values))

    def forgets(_, given, named):
        return given, {**named, "past_key_values": None}

    tokens_BT = torch.randint(300, (2, 7), generator=torch.Generator().manual_seed(0))
    with decoding(model, 300):
        assert model.keeps_keys
    model.keeps_keys = None
    with model.model.base_model.register_forward_pre_hook(forgets, with_kwargs=True):
        for _ in range(2):
            with decoding(model, 300) as decoder:
                assert not model.keeps_keys and model.model.config._attn_implementation == CAUSAL
                assert torch.equal(written(decoder, tokens_BT, 5), written(partial(whole, model), tokens_BT, 5))
    assert said == [f"{type(model.model).__name__}: no KV cache gives its logits; each token takes a whole forward"]


def test_a_draw_depends_on_seed_and_row_and_not_on_the_rows_beside_it():
    both, second = (
        written(lambda tokens_BT: torch.zeros(len(tokens_BT), 300), torch.zeros(rows, 1, dtype=torch.int64), **first)
        for rows, first in ((2, {}), (1, {"first_row": 1}))
    )
    assert torch.equal(both[1:], second) and not torch.equal(both[:1], second)


CHAT = (
    "{% for each in messages %}<{{ each['role'] }}>{{ each['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat(run, tmp_path):
    """Make a chat model whose answers end with a token that neither model nor tokenizer calls an end."""
    tokenizer = tiny_tokenizer(299)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = CHAT
    model = tiny_model("llama", 300, max_position_embeddings=100_000)
    return write_model_folder(tmp_path / "chat", model, tokenizer), tokenizer


def test_two_turns_through_a_pipe_are_answered_as_the_conversation_that_they_are(chat, run, monkeypatch):
    argv = (sys.executable, "-m", "kdtrain", "chat", chat[0], "--temperature", "0", "--max-new-tokens", "6")
    argv += ("--system", "be short", "--beside", chat[0])
    shown = subprocess.run(argv, input="one\n\ntwo", capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo"))
    turns = run.json(*argv[3:])["turns"]
    conversation, lines = "<system>be short<|end|>", ""
    for turn, asked in zip(turns, ("one", "two"), strict=True):
        conversation += f"<user>{asked}<|end|><assistant>"
        ids = chat[1](conversation, add_special_tokens=False)["input_ids"]
        text = chat[1].decode(run_greedily(chat[0], ids))
        assert turn["user"] == asked and [each["text"] for each in turn["answers"]] == [text, text]
        conversation += f"{text}<|end|>"
        lines += f"{chat[0]}: {text}\n" * 2
    assert [each for each in shown if each.isprintable()] == [each for each in lines if each.isprintable()]


def run_greedily(folder, ids, tokens=6):
    model = saved_student.open_student(str(folder), torch.device("cpu"))[0].eval()
    return [int(each) for each in generate(partial(whole, model), torch.tensor([ids]), tokens, 0.0, 0)]


def test_an_answer_ends_with_the_token_that_the_template_writes_behind_one(chat, run, monkeypatch):
    end = chat[1].convert_tokens_to_ids("<|end|>")
    tokens = [*chat[1]("yes")["input_ids"], end, *chat[1]("no")["input_ids"]]
    monkeypatch.setattr("kdtrain.commands.generate.generate", lambda *_: iter(torch.tensor(tokens)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run.json("chat", chat[0])["turns"] == [
        {"user": "hello", "answers": [{"by": str(chat[0]), "text": "yes", "tokens": 3}]}
    ]


def test_text_is_streamed_as_it_is_whole_and_never_half_a_character(chat, run, monkeypatch, capsys):
    text, said = "né 🙂 ok", []
    tokens = chat[1](text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(_Writer, "_say", lambda self, text: said.append(text))
    for number, whole in ((len(tokens), text), (5, "né \ufffd")):  # and the first byte of four
        drawn = torch.tensor(tokens[:number])
        monkeypatch.setattr("kdtrain.commands.generate.generate", lambda *_, drawn=drawn: iter(drawn))
        assert run.call("generate", chat[0], "--raw", "x")[0] == 0
        assert said.pop(0) == "x" and "".join(said) == f"{whole}\n" and "\ufffd" not in "".join(said[:-1])
        assert len(said) > len(whole) - 1
        said.clear()


@pytest.fixture
def short(tmp_path, monkeypatch):
    """Make a chat model of 128 positions, and a list of the conversations that it will have rendered."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = CHAT
    short = write_model_folder(tmp_path / "short", tiny_model("llama", 300), tokenizer)
    asked, rendered = [], _Writer.rendered
    monkeypatch.setattr(_Writer, "rendered", lambda self, each, *_: asked.append([*each]) or rendered(self, each))
    return short, asked


def test_the_oldest_turns_of_a_conversation_beyond_the_models_positions_are_left_out(run, short, monkeypatch):
    short, asked = short
    text = "".join(f"turn {number} of four\n" for number in range(4))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, out, err = run.call("chat", short, "--max-new-tokens", 8, "--system", "s", "--json")
    assert code == 0 and len(json.loads(out)["turns"]) == 4
    assert [each["content"] for each in asked[-1] if each["role"] != "assistant"] == [
        "s",
        "turn 2 of four",
        "turn 3 of four",
    ]
    assert err.count("reads 128 tokens: the oldest turns are left out") == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("long " * 40))
    code, _, err = run.call("chat", short)
    assert code == 2 and "reads 128; shorten it" in err


def test_a_turn_that_is_too_long_leaves_the_conversation_as_it_was(short):
    short, asked = short
    with ExitStack() as held:
        talker = _Talker(str(short), ChatConfig(student=str(short), max_new_tokens=4), held)
        talker.answer("first", 0, "")
        with pytest.raises(UsageError, match="reads 128; shorten it"):
            talker.answer("long " * 40, 1, "")
        talker.answer("last", 2, "")
    assert [each["content"] for each in asked[-1] if each["role"] == "user"] == ["first", "last"]
    assert [each["role"] for each in asked[-1]] == ["user", "assistant", "user"]


def test_a_model_without_a_chat_template_is_refused_and_generate_named(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    code, _, err = run.call("chat", "teacher")
    assert code == 2 and "teacher has no chat template; kdtrain generate teacher 'TEXT' continues a text" in err


def test_an_interrupt_stops_the_answer_and_a_second_one_ends_well(chat):
    ours, theirs = pty.openpty()

    def owns():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which is ignored below a job in the background
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)  # makes Ctrl-C a signal

    argv = [sys.executable, "-m", "kdtrain", "chat", chat[0], "--temperature", "0", "--max-new-tokens", "1000000"]
    done = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=owns)
    os.close(theirs)
    try:
        assert b"> " in until(ours, b"> ", 200)
        os.write(ours, b"hello\n")
        assert b"hello\r\n" in until(ours, b"hello\r\n", 200)
        assert select.select([ours], [], [], 200)[0], "the answer has begun"
        assert b"> " not in until(ours, b"> ", 1), "and has not ended"
        os.write(ours, b"\x03")
        assert b"> " in until(ours, b"> ", 200)
        for _ in range(10):  # readline sees one that comes between its prompt and its wait with the next key only
            os.write(ours, b"\x03")
            assert b"Traceback" not in until(ours, b"Traceback", 20)
            with suppress(subprocess.TimeoutExpired):
                assert done.wait(2) == 0
                break
        assert done.returncode == 0
    finally:
        done.kill()
        os.close(ours)


def until(terminal, wanted, seconds):
    """Read a terminal until it has shown `wanted`, ends, or time is over."""
    found, stop = b"", time.monotonic() + seconds
    while wanted not in found and time.monotonic() < stop:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                found += os.read(terminal, 4096)
            except OSError:
                break
    return found
