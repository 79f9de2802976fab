"""Loading and exporting: dtypes, ties, digests, round trips, and the line of each refusal."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from kdtrain import faults
from kdtrain.errors import RunError, UsageError
from kdtrain.models.export import export_model
from kdtrain.models.head import split
from kdtrain.models.loading import (
    architecture,
    load_student,
    load_teacher,
    max_positions,
    model_digest,
    model_of,
    with_weights_of,
)
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

TOKENS_BT = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(5))


def student(source, vocab_size=None):
    return load_student(ModelSpec.read(str(source)), vocab_size=vocab_size, seed=0, device="cpu")


def is_tied(model):
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2", "gemma2", "phi"])
def test_an_exported_student_is_loaded_by_transformers_and_gives_its_logits(tmp_path, shape):
    pieces = split(tiny_model(shape).eval())
    tiny_tokenizer(300).save_pretrained(tmp_path / "tokenizer")
    export_model(pieces, tmp_path / "tokenizer", tmp_path / "out")
    how = "eager" if shape == "gemma2" else None  # the default of 5.17 drops the soft cap
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=how)
    assert torch.equal(loaded.eval()(TOKENS_BT).logits, pieces.model(TOKENS_BT).logits)
    assert is_tied(loaded) == is_tied(pieces.model)
    assert loaded.config._attn_implementation in ("sdpa", "eager")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == tiny_tokenizer()("ab")["input_ids"]
    assert loaded.generation_config.eos_token_id == 299
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer"]


def with_a_head_of_its_own(folder, shape, **config):
    """Save a model with an output head of its own beside a configuration that says tied, as some trainers write it."""
    model = tiny_model(shape, tie_word_embeddings=True, **config)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_each_tensor_of_a_student_is_in_its_export_also_a_head_that_its_configuration_calls_tied(tmp_path, shape):
    for name, theirs in (("plain", tiny_model(shape)), ("own", with_a_head_of_its_own(tmp_path / "own-in", shape))):
        theirs.save_pretrained(tmp_path / f"{name}-in")
        made = student(tmp_path / f"{name}-in")
        assert model_digest(made) == model_digest(theirs)
        export_model(split(made), None, tmp_path / f"{name}-out")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-out")
        assert model_digest(loaded) == model_digest(theirs)
        rebuilt = model_of("it", architecture(made), "sdpa")
        yours = split(AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-in"), keep_attention=True).model
        yours.tie_weights()  # as Trainer and accelerate do
        teacher = load_teacher(ModelSpec.read(str(tmp_path / f"{name}-in")), "cpu")
        for each in (made, loaded, rebuilt, yours, teacher):
            assert is_tied(each) == each.config.tie_word_embeddings == is_tied(theirs)
        assert model_digest(yours) == model_digest(theirs)


def test_an_export_with_a_head_of_its_own_has_weights_of_a_folder_that_calls_it_tied_and_not_of_a_config(tmp_path):
    with_a_head_of_its_own(tmp_path / "in", "llama")
    export_model(student(tmp_path / "in"), None, tmp_path / "out")
    assert with_weights_of(tmp_path / "out", ModelSpec.read(str(tmp_path / "in"))).source == str(tmp_path / "out")
    stated = ModelSpec(name="small", config={**SHAPES["llama"], "tie_word_embeddings": True}, init="scratch")
    with pytest.raises(UsageError, match="has tie_word_embeddings = False, and small True; give --student"):
        with_weights_of(tmp_path / "out", stated)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tied_weights_stay_tied_after_load_and_export(tmp_path, dtype):
    model = tiny_model("llama")
    export_model(model, None, tmp_path / "a", dtype=dtype)
    assert model.dtype == torch.float32 and is_tied(model)
    again = student(tmp_path / "a")
    assert is_tied(again) and is_tied(split(again).model)
    assert len(list(again.parameters())) == len(list(model.parameters()))


def test_a_dtype_in_which_a_weight_would_overflow_is_refused_and_nothing_is_written(tmp_path):
    model = tiny_model("llama")
    model.model.embed_tokens.weight.data[3, 4] = -7e4
    with pytest.raises(
        UsageError, match=r"embed_tokens.weight has numbers up to 7e\+04, and float16 ends at 65504; take"
    ):
        export_model(model, None, tmp_path / "m", dtype="float16")
    assert not any(tmp_path.iterdir())
    export_model(model, None, tmp_path / "m", dtype="bfloat16")


def test_named_chat_templates_are_exported_and_replaced_with_the_model(tmp_path):
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "additional_chat_templates" / "notes.txt").write_text("mine")
    for seed in (1, 2):
        assert export_model(tiny_model(seed=seed), tmp_path / "tokenizer", tmp_path / "out") is None
        assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer"]
    assert not list(tmp_path.glob("out/**/notes.txt"))
    (tmp_path / "out" / "additional_chat_templates" / "mine.txt").write_text("mine")
    assert export_model(tiny_model(seed=3), None, tmp_path / "out") == tmp_path / "out.old-1"


def test_a_student_stored_in_bfloat16_trains_in_float32_and_a_teacher_runs_in_its_dtype(tmp_path):
    export_model(tiny_model(), None, tmp_path / "m", dtype="bfloat16")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    made = student(tmp_path / "m")
    assert made.training and {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    teacher = load_teacher(ModelSpec(name="t", source=str(tmp_path / "m"), dtype="bfloat16"), "cpu")
    assert not teacher.training and {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}
    assert torch.equal(teacher.lm_head.weight.float(), made.lm_head.weight)


def test_no_row_of_a_students_embedding_is_kept_from_learning(tmp_path):
    model = tiny_model("llama", pad_token_id=7, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "m")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").model.embed_tokens.padding_idx == 7
    made = student(tmp_path / "m")
    made(torch.tensor([[7, 8, 7]])).logits.sum().backward()
    assert made.model.embed_tokens.weight.grad[7].abs().max() > 0


def test_the_digest_depends_on_weights_dtypes_and_names():
    model = tiny_model("llama", seed=1)
    digest = model_digest(model)
    assert digest == model_digest(tiny_model("llama", seed=1)) and len(digest) == 64
    assert digest != model_digest(tiny_model("llama", seed=2))
    assert digest != model_digest(tiny_model("llama", seed=1).to(torch.bfloat16))
    zeros = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)]
    modules = [torch.nn.ParameterDict({"a": torch.nn.Parameter(each, False)}) for each in zeros]
    modules.append(torch.nn.ParameterDict({"b": zeros[0]}))
    assert len({model_digest(module) for module in modules}) == 4
    with torch.no_grad():
        model.model.norm.weight[0] += 2**-20
    assert digest != model_digest(model)


def test_max_positions_is_the_bound_of_the_configuration():
    assert [max_positions(tiny_model(shape)) for shape in ("llama", "gpt2")] == [128, 128]
    assert max_positions(split(tiny_model("gpt2"))) == 128
    assert max_positions(tiny_model("bloom")) is None


def test_a_student_smaller_than_the_vocabulary_is_refused_and_a_padded_one_is_not(tmp_path):
    write_model_folder(tmp_path / "m", tiny_model(vocab_size=300))
    assert student(tmp_path / "m", vocab_size=290).config.vocab_size == 300
    with pytest.raises(UsageError, match="student m has 300 tokens and needs 301"):
        student(tmp_path / "m", vocab_size=301)


def test_exporting_over_an_export_replaces_it_whole(tmp_path):
    assert export_model(tiny_model(seed=1), None, tmp_path / "m") is None
    assert export_model(tiny_model("gpt2", seed=2), None, tmp_path / "m") is None
    assert model_digest(student(tmp_path / "m")) == model_digest(tiny_model("gpt2", seed=2))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("change", ["another file", "a file that was edited", "a link"])
def test_an_export_that_holds_anything_else_is_moved_aside_whole(tmp_path, change):
    export_model(tiny_model(seed=1), None, tmp_path / "m")
    path = tmp_path / "m" / ("config.json" if change == "a file that was edited" else "card")
    path.symlink_to(tmp_path) if change == "a link" else path.write_text("mine")
    assert export_model(tiny_model(seed=2), None, tmp_path / "m") == tmp_path / "m.old-1"
    assert model_digest(student(tmp_path / "m")) == model_digest(tiny_model(seed=2))
    assert (tmp_path / "m.old-1" / path.name).is_symlink() or (tmp_path / "m.old-1" / path.name).read_text() == "mine"


def test_a_kill_while_an_export_is_swapped_in_leaves_each_of_the_two_whole(tmp_path):
    export_model(tiny_model(seed=1), None, tmp_path / "m")
    for point, name in (("export.before-rename", "m"), ("export.between-renames", "m.old-1")):
        if (child := os.fork()) == 0:
            os.environ["KDTRAIN_FAULT"] = f"{point}:kill"
            faults.read()
            export_model(tiny_model(seed=2), None, tmp_path / "m")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert model_digest(student(tmp_path / name)) == model_digest(tiny_model(seed=1))
    assert not (tmp_path / "m").exists()
    export_model(tiny_model(seed=2), None, tmp_path / "m")
    assert model_digest(student(tmp_path / "m")) == model_digest(tiny_model(seed=2))


def test_exporting_into_a_folder_of_something_else_is_refused_and_leaves_it_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files than an export"):
        export_model(tiny_model(), None, tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        export_model(tiny_model(), None, tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(UsageError, match="is a link"):
        export_model(tiny_model(), None, tmp_path / "link")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "link", "notes.txt"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        Exception("No space left on device (os error 28)"),  # as tokenizers and safetensors say it
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_failed_export_is_one_line_and_leaves_the_earlier_one_and_no_debris(tmp_path, monkeypatch, error):
    write_model_folder(tmp_path / "m", tiny_model(seed=1))
    broken = tiny_model(seed=2)

    def fail(folder, **options):
        (folder / "model.safetensors").write_text("half")
        raise error

    monkeypatch.setattr(broken, "save_pretrained", fail)
    with pytest.raises(RunError, match=r"^cannot write .*/m: No space left on device; .*free some space.*again$"):
        export_model(broken, None, tmp_path / "m")
    assert model_digest(student(tmp_path / "m")) == model_digest(tiny_model(seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_tokenizer_of_a_spec_is_its_own_or_its_sources_or_its_teachers(tmp_path):
    write_model_folder(tmp_path / "m", tiny_model(vocab_size=310), tiny_tokenizer(310))
    tiny_tokenizer(320).save_pretrained(tmp_path / "tokenizer")
    folder = str(tmp_path / "m")
    own = ModelSpec(name="s", source=folder, tokenizer=str(tmp_path / "tokenizer"))
    teachers = ModelSpec(name="s", init="teacher-layers", teacher=folder, layers=(0,))
    sizes = [len(load_tokenizer(each)) for each in (own, ModelSpec.read(folder), teachers, tmp_path / "tokenizer")]
    assert sizes == [320, 310, 310, 320]
    with pytest.raises(UsageError, match="s: this spec names no tokenizer"):
        load_tokenizer(ModelSpec(name="s", config={"model_type": "llama"}, init="scratch"))


def break_config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def pickle_the_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut_the_weights(folder):
    os.truncate(folder / "model.safetensors", 5000)


def drop_a_weight(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_the_width(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))


CUSTOM = json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}})


@pytest.mark.parametrize(
    "damage, line",
    [
        (break_config("{not json"), "its config.json is not valid JSON"),
        (break_config("{}"), "its config.json has no model_type"),
        (break_config('{"model_type": "lama"}'), "model type `lama`"),
        (break_config('{"model_type": "vit"}'), "it is not a causal language model"),
        (break_config(CUSTOM), "set trust_remote_code = true in a TOML"),
        (pickle_the_weights, "no weights in safetensors there; other formats are not read"),
        (cut_the_weights, "the weights are damaged"),
        (drop_a_weight, "the weights lack model.norm.weight and 0 more"),
        (change_the_width, "cannot be loaded"),
    ],
)
def test_a_model_folder_that_cannot_be_loaded_is_refused_in_one_line_that_names_it(tmp_path, damage, line):
    folder = write_model_folder(tmp_path / "m", tiny_model())
    damage(folder)
    with pytest.raises(UsageError) as caught:
        load_teacher(ModelSpec.read(str(folder)), "cpu")
    message = str(caught.value)
    assert message.startswith(f"{folder}: ") and line in message
    assert "\n" not in message and len(message) < 400


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    folder = write_model_folder(tmp_path / "m", tiny_model())
    with pytest.raises(UsageError, match=r"m: no tokenizer\.json there"):
        load_tokenizer(folder)


@pytest.mark.parametrize("load", [load_tokenizer, lambda source: load_teacher(ModelSpec.read(source), "cpu")])
def test_a_hub_id_that_cannot_be_reached_is_refused_in_one_line(load):
    with pytest.raises(UsageError) as caught:
        load("no-such-org/no-such-model")
    expected = "no-such-org/no-such-model: no such folder, and the hub cannot be reached"
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_without_a_network_the_hub_is_not_waited_for(monkeypatch):
    calls = []

    def unknown(*asked, **more):
        calls.append(asked)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds and pytest.fail("waited"))
    with pytest.raises(UsageError, match="no-such-org/no-such-model: no such folder, and the hub cannot be reached"):
        load_tokenizer("no-such-org/no-such-model")
    assert 0 < len(calls) <= 4 and not constants.HF_HUB_OFFLINE


def test_flash_attention_that_is_not_installed_is_refused_in_one_line(tmp_path):
    folder = write_model_folder(tmp_path / "m", tiny_model())
    with pytest.raises(UsageError, match="flash_attention_2 is not installed here; take attention = 'sdpa'"):
        load_teacher(ModelSpec(name="m", source=str(folder), attention="flash_attention_2"), "cpu")


def test_a_model_without_sdpa_takes_eager_attention(monkeypatch):
    assert tiny_model("gemma2").config._attn_implementation == "eager"
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # transformers 5.17, whose sdpa drops the cap
    assert tiny_model("gemma2").config._attn_implementation == "eager"
    assert tiny_model("llama").config._attn_implementation == "sdpa"


def test_out_of_memory_is_not_taken_for_a_wrong_spec(tmp_path, monkeypatch):
    folder = write_model_folder(tmp_path / "m", tiny_model())

    def fail(*args, **keywords):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        load_teacher(ModelSpec.read(str(folder)), "cpu")


def test_loading_prints_nothing_in_a_command(tmp_path):
    write_model_folder(tmp_path / "m", tiny_model(), tiny_tokenizer())
    code = (
        "import os, sys; from kdtrain import cli, imports; os.environ |= cli.QUIET; "
        "quiet = imports.quiet_libraries(); quiet.__enter__(); "
        "from kdtrain.models.loading import *; from kdtrain.models.tokenizer import *; "
        "from kdtrain.models.spec import ModelSpec; "
        "load_student(ModelSpec.read(sys.argv[1]), vocab_size=None, seed=0, device='cpu'); load_tokenizer(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
