"""An exported student besides its weights: generation settings, end of text, chat template."""

import json
import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
SAMPLING = {"eos_token_id": [299, 256], "do_sample": True, "temperature": 0.7, "top_k": 20}


@pytest.fixture
def chat_run(workbench):
    """A run from a cache without a chat template, of a pretrained chat student that ends its texts with two tokens."""
    root = workbench.root
    if not (root / "chat-run").exists():
        model, tokenizer = tiny_model("llama", 300), tiny_tokenizer(300)
        model.generation_config = GenerationConfig(**SAMPLING)
        tokenizer.chat_template = TEMPLATE
        write_model_folder(root / "chat", model, tokenizer)
        argv = ("distill", "--cache", "cache", "--student", "chat", "--out", "chat-run", "--steps", 2)
        workbench.json(*argv, *workbench.plain)
    return workbench


@pytest.mark.parametrize("how", ["the run's own", "export", "export of a run that was moved"])
def test_a_chat_student_keeps_its_second_end_token_its_sampling_and_its_template(chat_run, tmp_path, how):
    out = chat_run.root / "chat-run" / "student"
    if how == "export":
        out = tmp_path / "out"
        chat_run.json("export", "chat-run", "--out", out)
    if how == "export of a run that was moved":
        shutil.copytree(chat_run.root / "chat-run", tmp_path / "run", symlinks=True)
        shutil.rmtree(tmp_path / "run" / "student")
        text = (tmp_path / "run" / "config.toml").read_text().replace('"cache"', '"gone"').replace('"chat"', '"gone"')
        (tmp_path / "run" / "config.toml").write_text(text)
        out = tmp_path / "out"
        chat_run.json("export", tmp_path / "run", "--out", out)
    found = json.loads((out / "generation_config.json").read_text())
    assert {name: found[name] for name in SAMPLING} == SAMPLING
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE


def test_a_student_without_a_chat_template_gets_the_teachers(workbench, tmp_path):
    root = workbench.root
    shutil.copytree(root / "cache", tmp_path / "cache")
    shutil.copytree(root / "teacher", tmp_path / "student")
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "cache" / "tokenizer")
    argv = ("distill", "--cache", tmp_path / "cache", "--student", tmp_path / "student", "--out", tmp_path / "run")
    workbench.json(*argv, "--steps", 1, *workbench.plain)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "student").chat_template == TEMPLATE


def test_a_run_that_has_lost_its_tokenizer_is_exported_with_a_line_that_says_so(chat_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(chat_run.root / "chat-run", run, symlinks=True)
    for name in ("student", "tokenizer"):
        shutil.rmtree(run / name)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('"cache"', '"gone"'))
    code, _, said = chat_run.call("export", run, "--out", tmp_path / "out")
    assert code == 0
    assert f"exported without a tokenizer: {run} holds none, and its cache is gone; copy" in said
    assert (tmp_path / "out" / "model.safetensors").exists() and not (tmp_path / "out" / "tokenizer.json").exists()
