"""An exported student besides its weights: generation settings, end of text, chat template; and where it is put."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kdtrain import faults, files
from kdtrain.errors import UsageError
from kdtrain.models.export import export_lock
from kdtrain.run import saved_student
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder
from kdtrain.training.state import load_saved

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
SAMPLING = {"eos_token_id": [299, 256], "do_sample": True, "temperature": 0.7, "top_k": 20}


@pytest.fixture
def chat_run(workbench):
    """Train from a cache without a chat template a pretrained chat student that ends its texts with two tokens."""
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
    card = (out / "README.md").read_text()
    assert '([{"role": "user", "content": "Say hello."}])' in card and "Once upon a time" not in card


@pytest.fixture(scope="module")
def chat_teacher(made):
    """Make a teacher like Qwen's chat models: two end tokens, sampling, padding that is not the end, and no start."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"pad_token": "<|unused-270|>"})
    for name, settings in (("plain-chat", None), ("qwen", SAMPLING | {"pad_token_id": 270, "bos_token_id": 270})):
        model = tiny_model("qwen3", 300)
        if settings is not None:
            model.generation_config = GenerationConfig(**settings)
        write_model_folder(made / name, model, tokenizer)
    entries = "".join(f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["qwen3"].items())
    (made / "bare.toml").write_text(f"[config]\n{entries}")
    (made / "named.toml").write_text(f"tokenizer = 'qwen'\n[config]\n{entries}")
    (made / "own-end.toml").write_text(f"tokenizer = 'qwen'\n[config]\neos_token_id = 260\n{entries}")
    (made / "layers.toml").write_text("init = 'teacher-layers'\nteacher = 'qwen'\nlayers = [0]\n")
    return "qwen"


@pytest.mark.parametrize("student", ["bare", "named", "layers", "online"])
def test_fresh_weights_get_the_teachers_end_tokens_and_sampling_and_its_padding(workbench, chat_teacher, student):
    cache = ("--teacher", chat_teacher, *workbench.text, "--num-sequences", 16)
    if student != "online" and not (workbench.root / "chat-cache").exists():
        workbench.json("cache-teacher", *cache, "--out", "chat-cache", "--precision", "fp32")
    source = cache if student == "online" else ("--cache", "chat-cache")
    spec, run = f"{'bare' if student == 'online' else student}.toml", f"fresh-{student}"
    workbench.json("distill", *source, "--student", spec, "--out", run, "--steps", 1, *workbench.plain)
    workbench.json("export", run, "--out", f"{run}-exported")
    for out in (f"{run}/student", f"{run}-exported"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        found, config = model.generation_config.to_dict(), model.config
        assert {name: found[name] for name in SAMPLING} == SAMPLING and found["pad_token_id"] == 270
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 299, 270)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (299, 270)
        assert tokenizer.chat_template == TEMPLATE


def test_an_end_token_that_the_specs_configuration_states_stays(workbench, chat_teacher):
    argv = ("distill", "--student", "own-end.toml", "--out", "own-end", "--steps", 1, "--num-sequences", 16)
    workbench.json(*argv, *workbench.text, *workbench.plain)
    found = json.loads((workbench.root / "own-end" / "student" / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["pad_token_id"], found["temperature"]) == (260, 270, 0.7)


def test_a_cache_holds_generation_settings_only_of_a_teacher_whose_author_wrote_some(workbench, chat_teacher):
    assert (workbench.root / "plain-chat" / "generation_config.json").exists()
    argv = ("cache-teacher", *workbench.text, "--num-sequences", 8, "--precision", "fp32")
    for name in ("plain-chat", "qwen"):
        workbench.json(*argv, "--teacher", name, "--out", f"of-{name}")
        files = json.loads((workbench.root / f"of-{name}" / "manifest.json").read_text())["tokenizer_files"]
        assert ("generation_config.json" in files) == (name == "qwen")


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


def test_what_a_run_trains_is_what_it_exports_and_evaluates_where_a_head_is_called_tied_and_is_not(workbench, tmp_path):
    model = tiny_model("llama", 300, seed=9)
    model.lm_head.weight = torch.nn.Parameter(0.05 * torch.randn(300, 32))
    model.save_pretrained(tmp_path / "own")
    tiny_tokenizer(300).save_pretrained(tmp_path / "own")
    argv = ("distill", "--cache", "cache", "--student", tmp_path / "own", "--out", "own-head", "--steps", 2)
    best = workbench.json(*argv, *workbench.plain)["best_validation_loss"]
    exported = workbench.json("export", "own-head", "--out", tmp_path / "out")
    assert exported["parameters"] == sum(each.numel() for each in model.parameters())
    (path,) = (workbench.root / "own-head" / "checkpoints").glob(exported["checkpoint"])
    saved = load_saved(path)  # a checkpoint of before, whose configuration says tied
    saved.state["student"]["architecture"]["tie_word_embeddings"] = True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saved_student, "load_saved", lambda folder: saved)
        earlier = saved_student.student_at(path, torch.device("cpu"))
    assert torch.equal(earlier.head.weight, saved.tensors["student.model.lm_head.weight"])
    for student in ("own-head", "own-head/student", tmp_path / "out"):
        found = workbench.json("evaluate", "--student", student, "--cache", "cache")
        assert found["loss"] == pytest.approx(best, rel=1e-5)


@pytest.fixture
def downloaded(chat_run, tmp_path):
    """Copy a run that somebody else may have changed."""
    run = tmp_path / "run"
    shutil.copytree(chat_run.root / "chat-run", run, symlinks=True)
    return run


@pytest.mark.parametrize("cache", ["gone", "the user's own", "../elsewhere"])
def test_a_run_without_a_tokenizer_is_exported_without_that_of_the_folder_it_names_as_cache(
    chat_run, downloaded, tmp_path, cache
):
    for name in ("student", "tokenizer"):
        shutil.rmtree(downloaded / name)
    named = {
        "gone": "gone",
        "the user's own": str(tmp_path / "mine"),
        "../elsewhere": os.path.relpath(tmp_path / "mine"),
    }
    tiny_tokenizer(300).save_pretrained(tmp_path / "mine" / "tokenizer")
    text = (downloaded / "config.toml").read_text().replace('"cache"', f'"{named[cache]}"')
    (downloaded / "config.toml").write_text(text)
    code, _, said = chat_run.call("export", downloaded, "--out", tmp_path / "out")
    assert code == 0
    assert f"exported without a tokenizer: {downloaded} holds none; copy that of its student or teacher into" in said
    assert (tmp_path / "out" / "model.safetensors").exists() and not (tmp_path / "out" / "tokenizer.json").exists()


def test_no_file_but_a_tokenizers_own_is_exported_with_it(chat_run, downloaded, tmp_path):
    (tmp_path / "secret").write_text("hf_secret")
    for name in ("hf_token", "tokens.json", "vocab.zip", "chat_template_2", "mine.model"):
        (downloaded / "tokenizer" / name).symlink_to(tmp_path / "secret")
    (downloaded / "tokenizer" / "token.txt").write_text("hf_secret")
    chat_run.json("export", downloaded, "--out", tmp_path / "out")
    chat_run.json("export", chat_run.root / "chat-run", "--out", tmp_path / "sound")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "sound").iterdir()
    }
    assert not any(b"hf_secret" in path.read_bytes() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer/chat_template.jinja", "tokenizer/added_tokens.json", "tokenizer"),
        "tokenizer/additional_chat_templates",
    ],
)
@pytest.mark.parametrize("target", ["secret", "nowhere"])
def test_what_a_link_in_a_run_leads_to_is_not_exported(chat_run, downloaded, tmp_path, name, target):
    shutil.copytree(downloaded / "tokenizer", tmp_path / "secret")
    path = downloaded / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / target)
    code, _, said = chat_run.call("export", downloaded, "--out", tmp_path / "out")
    if path.name == "tokenizer" and target == "nowhere":
        assert code == 0  # there is the exported student's own
        return
    assert code == 2 and said.startswith(f"kdtrain: {path}") and " link, " in said and "put a copy there" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", [".", ".."])
def test_an_export_does_not_replace_the_folder_that_the_user_stands_in(chat_run, tmp_path, monkeypatch, out):
    whole = tmp_path / "out"
    chat_run.json("export", "chat-run", "--out", whole)
    (whole / "inner").mkdir()
    monkeypatch.chdir(whole if out == "." else whole / "inner")
    before = sorted(tmp_path.rglob("*"))
    code, _, said = chat_run.call("export", chat_run.root / "chat-run", "--out", out, "--overwrite")
    assert code == 2
    assert f"kdtrain: {out} would be moved away or replaced, and the current directory is in it; name another" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_does_not_move_the_run_that_it_reads(chat_run, tmp_path):
    out = tmp_path / "out"
    chat_run.json("export", "chat-run", "--out", out)
    shutil.copytree(chat_run.root / "chat-run", out / "run", symlinks=True)
    code, _, said = chat_run.call("export", out / "run", "--out", out, "--overwrite")
    assert code == 2 and f"and the run {out / 'run'} is in it; name another folder, or copy that elsewhere" in said
    assert (out / "run" / "config.toml").exists()


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_of_two_exports_to_one_folder_the_second_is_refused(chat_run, tmp_path, overwrite):
    out = tmp_path / "out"
    with export_lock(out):
        code, _, said = chat_run.call("export", "chat-run", "--out", tmp_path / "x" / ".." / "out", *overwrite)
    assert code == 2 and f"another process is exporting to {out}; wait for it, or name another folder" in said
    assert not out.exists()
    chat_run.json("export", "chat-run", "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_leaves_is_removed_by_the_next_and_what_others_left_stays(chat_run, tmp_path):
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        try:
            os.environ |= {"KDTRAIN_FAULT": "export.before-rename:kill", "KDTRAIN_FAULT_LOG": str(tmp_path / "fired")}
            faults.read()
            chat_run.call("export", "chat-run", "--out", out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "fired").read_text() == "export.before-rename\n"
    (left,) = tmp_path.glob(".out.*.tmp")
    assert (left / "model.safetensors").exists() and not out.exists()
    others = [tmp_path / ".out.0123456789ab.tmp", files.temporary_name(tmp_path / "other"), tmp_path / "fired"]
    for other in others[:2]:
        other.mkdir()
    chat_run.json("export", "chat-run", "--out", out)
    assert sorted(tmp_path.iterdir()) == sorted([*others, out])


@pytest.mark.parametrize("overwrite, code", [((), 2), (("--overwrite",), 0)])
def test_of_several_processes_one_exports_and_all_end_the_same(chat_run, tmp_path, run_ranks, overwrite, code):
    out = tmp_path / "exports" / "out"
    chat_run.json("export", "chat-run", "--out", out)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom kdtrain import cli\ntry:\n    cli.main(sys.argv[2:])\n"
        "except SystemExit as stop:\n    assert (stop.code or 0) == int(sys.argv[1]), stop.code\n"
    )
    said = run_ranks(script, 2, code, "export", chat_run.root / "chat-run", "--out", out, "--json", *overwrite)
    assert [bool(each) for each in said] == [code == 0, False]
    assert list(out.parent.iterdir()) == [out]


@pytest.fixture
def frozen(workbench):
    """Make `held`: a run of which only a part is in its checkpoints, beside the weights of `own.toml`."""
    if not (workbench.root / "held").exists():
        (workbench.root / "own.toml").write_text((workbench.root / "student.toml").read_text())
        argv = ("distill", "--cache", "cache", "--student", "own.toml", "--freeze-head", "--steps", 1)
        workbench.json(*argv, "--out", "held", *workbench.plain)
    return workbench


def test_a_run_whose_student_would_run_code_is_read_only_by_a_spec_that_the_user_names(frozen, tmp_path):
    own = frozen.root / "own.toml"
    text = own.read_text()
    try:
        own.write_text(f"trust_remote_code = true\n{text}")
        for argv in (("export", "held", "--out", tmp_path / "out"), ("generate", "held", "x")):
            code, _, said = frozen.call(*argv)
            assert code == 2 and "own has trust_remote_code = true" in said and "kdtrain export --base" in said
        assert frozen.call("export", "held", "--base", "own.toml", "--out", tmp_path / "out")[0] == 0
    finally:
        own.write_text(text)


@pytest.mark.parametrize("more", [(), ("--base", "begin.toml")])
def test_an_export_does_not_replace_the_base_that_it_reads(workbench, tmp_path, monkeypatch, more):
    folder = write_model_folder(tmp_path / "base", tiny_model("llama", 300, seed=9), tiny_tokenizer(300))
    (tmp_path / "begin.toml").write_text("source = 'base'\n")
    argv = ("distill", "--cache", "cache", "--student", folder, "--freeze-head", "--steps", 1)
    workbench.json(*argv, "--out", tmp_path / "run", *workbench.plain)
    monkeypatch.chdir(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    code, _, said = workbench.call("export", "run", "--out", "base", "--overwrite", *more)
    assert code == 2 and "base would be moved away or replaced, and its base " in said
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("packed", [(), ("--lora-rank", 2, "--base-weights", "bf16")], ids=["frozen head", "packed"])
def test_a_run_that_holds_a_part_of_a_loaded_model_is_exported_and_read_again(workbench, tmp_path, packed):
    if packed:
        pytest.importorskip("peft")
    write_model_folder(tmp_path / "start", tiny_model("llama", 300, seed=9), tiny_tokenizer(300))
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--load", tmp_path / "start", "--steps", 1)
    workbench.json(*argv, *(packed or ["--freeze-head"]), "--out", tmp_path / "run", *workbench.plain)
    exported = workbench.json("export", tmp_path / "run", "--out", tmp_path / "out")["student"]
    assert (tmp_path / "run/student/model.safetensors").read_bytes() == Path(exported, "model.safetensors").read_bytes()
    assert workbench.call("generate", tmp_path / "run", "x", "--max-tokens", 2)[0] == 0


@pytest.mark.parametrize(
    "student, said",
    [("student.toml", "and student is made by its spec; leave --adapter out for the merged model"), ("teacher", "")],
)
def test_adapters_are_written_only_beside_a_base_that_their_reader_finds(workbench, tmp_path, student, said):
    pytest.importorskip("peft")
    run, out = workbench.root / f"lora-{student}", tmp_path / "out"
    if not run.exists():
        argv = ("distill", "--cache", "cache", "--student", student, "--lora-rank", 2, "--steps", 1)
        workbench.json(*argv, "--out", run, *workbench.plain)
    code, _, told = workbench.call("export", run, "--adapter", "--out", out)
    assert said in told and code == (2 if said else 0) and out.exists() == (not said)


@pytest.mark.parametrize("options", [{}, {"run": {}}, {"run": {"student": "own.toml", "seed": 2**80}}])
def test_options_that_no_run_writes_are_refused_in_one_line(frozen, options):
    state = {"options": options, "student": {"architecture": {}, "attention": "sdpa", "base": ""}}
    with pytest.raises(UsageError):
        saved_student._on_its_base(state, {}, None)
