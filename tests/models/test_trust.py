"""A model folder, a checkpoint or a spec of somebody else runs nothing, fetches nothing and unpickles nothing."""

import ast
import builtins
import json
import math
import os
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from kdtrain.errors import UsageError
from kdtrain.models import hub, loading
from kdtrain.models.hub import ask_config, save_tokenizer
from kdtrain.models.loading import architecture, load_student, load_teacher, model_of
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

ROOT = Path(__file__).resolve().parents[2]
CODE = """
open({mark!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "mine"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(*args, **keywords): pass
"""
OWN_CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoModel": "code.Model"}


class Pickled:
    """An object that writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """Return a path that only foreign code creates; a question on stdin fails the test."""
    monkeypatch.setattr(builtins, "input", lambda prompt="": pytest.fail(f"asked: {prompt}"))
    return tmp_path / "executed"


@pytest.fixture
def folder(tmp_path, mark):
    """Make a model folder with Python beside it."""
    made = write_model_folder(tmp_path / "m", tiny_model(), tiny_tokenizer())
    for name in ("code.py", "custom_generate/generate.py"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(CODE.format(mark=str(mark)))
    return made


def entries(folder, file="config.json", **values):
    """Put entries into one of a folder's JSON files."""
    table = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(table | values))


def as_model(folder):
    return load_teacher(ModelSpec.read(str(folder)), "cpu")


@pytest.mark.parametrize(
    "values, line",
    [
        ({"model_type": "mine", "auto_map": OWN_CODE}, "it has its own code"),
        ({"model_type": "vit", "auto_map": OWN_CODE}, "it has its own code"),
        ({"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "a/b--code.Model"}}, "it has its own code"),
        ({"_attn_implementation": "kernels-community/flash-attn3"}, "_attn_implementation = 'kernels-community/flash"),
        ({"_attn_implementation_internal": "a/b"}, "_attn_implementation_internal = 'a/b'"),
        ({"per_layer_config": {"0": {"attn_implementation": "a/b"}}}, "attn_implementation = 'a/b'"),
        ({"experts_implementation": "sonicmoe"}, "experts_implementation = 'sonicmoe'"),
        ({"attribute_map": {"_attn_implementation_internal": "x"}, "x": "a/b"}, "attribute_map in its configuration"),
        ({"to_dict": 1}, "to_dict in its configuration would replace a part of transformers"),
        ({"__class__": "x"}, "__class__ in its configuration"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "its weights are quantised"),
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights = 'adapter_model.bin'"),
        ({"num_hidden_layers": 1001}, "num_hidden_layers = 1,001: at most 1,000 can be made"),
        ({"num_labels": 10**9}, "num_labels = 1,000,000,000: at most 1,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: a model needs at least 1"),
        ({"vocab_size": -1}, "vocab_size = -1: a model needs at least 1"),
        ({"attention_dropout": 5.0}, "attention_dropout = 5.0: a dropout is between 0 and 1"),
        ({"embd_pdrop": -1}, "embd_pdrop = -1: a dropout"),
        ({"text_config": {"hidden_dropout_prob": math.nan}}, "hidden_dropout_prob = nan: a dropout"),
        ({"head_dim": 0}, "head_dim = 0: a model needs at least 1"),
        ({"eos_token_id": [1] * 2**16}, "its configuration has more than 65,536 entries"),
        ({"id2label": {str(n): "x" for n in range(2**16)}}, "its configuration has more than 65,536 entries"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
    ],
)
def test_a_configuration_that_is_more_than_data_is_refused_in_one_line(folder, mark, values, line):
    entries(folder, **values)
    with pytest.raises(UsageError) as caught:
        as_model(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}: ") and line in message and "\n" not in message
    assert not mark.exists()


def test_code_beside_a_model_that_transformers_has_itself_is_not_run(folder, mark):
    entries(folder, auto_map=OWN_CODE)
    entries(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]})
    assert type(as_model(folder)).__module__.startswith("transformers.")
    assert type(load_tokenizer(folder)).__module__.startswith("transformers.")
    assert not mark.exists()


def test_code_runs_if_your_own_spec_allows_it(folder, mark, tmp_path):
    entries(folder, model_type="mine", auto_map=OWN_CODE)
    (tmp_path / "own.toml").write_text("source = 'm'\ntrust_remote_code = true\n")
    load_teacher(ModelSpec.read(str(tmp_path / "own.toml")), "cpu")
    assert mark.exists()


@pytest.mark.parametrize(
    "mark_of, place",
    [
        ("config.json", "."),
        ("config.json", "specs"),
        ("config.toml", "checkpoints"),
        ("environment.json", "data/tokenizer"),
        ("checkpoints/step-00000004/state.json", "specs"),
        ("manifest.json", "tokenizer"),
        ("settings.json", "tokenizer/specs"),
    ],
)
def test_a_spec_inside_a_folder_that_may_be_downloaded_cannot_trust_it(tmp_path, mark_of, place):
    spec = tmp_path / "downloaded" / place / "spec.toml"
    for path in (tmp_path / "downloaded" / mark_of, spec):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("source = '.'\ntrust_remote_code = true\n")
    (tmp_path / "link.toml").symlink_to(spec)
    (tmp_path / "student.toml").write_text(
        f"init = 'teacher-layers'\nteacher = '{spec}'\nlayers = [0]\ntrust_remote_code = true\n"
    )
    for path in (spec, tmp_path / "link.toml", tmp_path / "student.toml"):
        with pytest.raises(UsageError, match=f"spec of your own, and this one lies with .*/downloaded/{mark_of}"):
            ModelSpec.read(str(path))


def test_a_link_in_a_model_folder_to_a_spec_elsewhere_gives_no_trust(folder, tmp_path):
    (tmp_path / "own.toml").write_text("source = '.'\ntrust_remote_code = true\n")
    (folder / "spec.toml").symlink_to(tmp_path / "own.toml")
    with pytest.raises(UsageError, match="must be in a spec of your own"):
        ModelSpec.read(str(folder / "spec.toml"))


def test_the_trust_of_a_teachers_spec_does_not_extend_to_the_student(folder, tmp_path):
    (tmp_path / "teacher.toml").write_text("source = 'm'\ntrust_remote_code = true\n")
    text = "init = 'teacher-layers'\nteacher = 'teacher.toml'\nlayers = [0]\n"
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UsageError, match="its teacher teacher needs to run code; set trust_remote_code = true here"):
        ModelSpec.read(str(tmp_path / "s.toml"))
    (tmp_path / "s.toml").write_text(text + "trust_remote_code = true\n")
    assert ModelSpec.read(str(tmp_path / "s.toml")).trust_remote_code


def test_a_part_of_a_composite_model_cannot_bring_code(folder, mark):
    text = tiny_model("gemma2").config.to_dict() | {"model_type": "gemma3_text"}
    vision = {"model_type": "encodec", "auto_map": OWN_CODE}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": vision})
    )
    with pytest.raises(UsageError):
        as_model(folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM", "pipeline"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_class_that_is_not_a_tokenizer_is_not_loaded(folder, mark, name, file):
    entries(folder, model_type="vit", auto_map=OWN_CODE)
    (folder / "model.safetensors").unlink()
    torch.save(Pickled(mark), folder / "pytorch_model.bin")
    if file == "config.json":
        (folder / "tokenizer_config.json").unlink()
    entries(folder, file, tokenizer_class=name)
    with pytest.raises(UsageError, match=f"tokenizer_class = '{name}' is not a tokenizer"):
        load_tokenizer(folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["weights.bin", "../other/model.safetensors", "/etc/model.safetensors", 1])
def test_an_index_may_name_only_safetensors_beside_it(folder, mark, name):
    (folder / "model.safetensors").unlink()
    torch.save(Pickled(mark), folder / "weights.bin")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"index\.json names .*, which is not a safetensors file beside it"):
        as_model(folder)
    assert not mark.exists()


def test_a_tokenizer_that_panics_when_it_is_loaded_is_refused_by_name(folder):
    entries(folder, "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AA=="})
    with pytest.raises(UsageError, match=f"{folder}: cannot be loaded .*precompiled_charsmap.*; use another tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "name, size",
    [
        ("config.json", 2**25),
        ("tokenizer.json", 2**28),
        ("chat_template.jinja", 2**25),
        ("additional_chat_templates/tools.jinja", 2**25),
    ],
)
def test_a_file_larger_than_any_model_has_is_not_read(folder, name, size):
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "a") as file:
        file.truncate(size + 1)  # takes no space
    with pytest.raises(UsageError, match=f"{name} has more than {size:,} bytes"):
        load_tokenizer(folder)


def test_a_pipe_in_place_of_a_chat_template_does_not_block(folder):
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "tools.jinja")
    with pytest.raises(UsageError, match=r"tools\.jinja is not a regular file"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"])
def test_what_a_link_out_of_a_model_folder_leads_to_is_not_read(folder, name, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "key.jinja").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "mine" if name.startswith("add") else tmp_path / "mine" / "key.jinja")
    with pytest.raises(
        UsageError, match=rf"{name}.* leads to {tmp_path}/mine/key.jinja by a link, which is not read; put"
    ):
        load_tokenizer(folder)
    with pytest.raises(UsageError, match="by a link, which is not read"):
        ask_config(ModelSpec(name="m", source=str(folder)))


def test_the_links_of_the_hubs_own_cache_and_a_link_to_a_model_folder_are_read(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123abcd", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(each for each in folder.iterdir() if each.suffix == ".json"):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "link"):
        assert len(load_tokenizer(place)) == len(tiny_tokenizer())
        assert ask_config(ModelSpec(name="m", source=str(place))).model_type == "llama"


@pytest.mark.parametrize("name", ["../../../evil", "/evil", "a/b", "..", "", "a\0b", "x" * 300, "a\nb", 5])
def test_a_chat_template_whose_name_leads_out_of_its_folder_is_refused_before_it_is_written(folder, tmp_path, name):
    entries(folder, "tokenizer_config.json", chat_template=[{"name": "default", "template": "a"}])
    assert load_tokenizer(folder).chat_template == {"default": "a"}
    templates = [{"name": "default", "template": "a"}, {"name": name, "template": "evil"}]
    entries(folder, "tokenizer_config.json", chat_template=templates)
    with pytest.raises(UsageError, match=r"m: its chat template .* is not a name and a text; take it out"):
        load_tokenizer(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "a", name: "evil"}
    tokenizer.save_pretrained = lambda folder: pytest.fail("transformers was asked to write it")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="the tokenizer: its chat template"):
        save_tokenizer(tokenizer, tmp_path / "out")


@pytest.mark.parametrize("name", ["tool_use", "rag", "v1.0 (no)", "français", "a-b+c"])
def test_a_chat_template_of_an_ordinary_name_is_saved(tmp_path, name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "a", name: "b"}
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).chat_template == {"default": "a", name: "b"}


def test_an_adapter_is_refused_and_not_silently_ignored(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    with pytest.raises(UsageError, match=r"it holds an adapter \(adapter_config.json\), which is not read"):
        as_model(folder)


@pytest.mark.parametrize(
    "values, attention, line",
    [
        ({"model_type": "vit", "auto_map": OWN_CODE}, "sdpa", "model_type 'vit' is not a causal LM"),
        ({"model_type": ["llama"]}, "sdpa", "is not a causal LM"),
        ({"_attn_implementation": "a/b"}, "sdpa", "_attn_implementation = 'a/b'"),
        ({}, "kernels-community/flash-attn3", "attention = 'kernels-community/flash-attn3' is unknown; use auto"),
        ({}, None, "attention = None is unknown"),
        ({}, "flash_attention_2", "flash_attention_2 is not installed here"),
        ({"hidden_size": 10**9}, "sdpa", "c: its weights take"),
        ({"num_hidden_layers": 10**9}, "sdpa", "at most 1,000 can be made"),
    ],
)
def test_an_architecture_from_a_checkpoint_is_data(folder, mark, values, attention, line):
    kept = architecture(tiny_model()) | {"name_or_path": str(folder), "auto_map": OWN_CODE} | values
    with pytest.raises(UsageError) as caught:
        model_of("c", kept, attention)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()


def test_an_architecture_of_a_known_kind_is_built_by_transformers_whatever_else_it_names(folder, mark):
    kept = architecture(tiny_model()) | {"auto_map": OWN_CODE}
    assert architecture(model_of("c", kept | {"name_or_path": str(folder)}, "sdpa")) == kept
    assert not mark.exists()


def test_a_model_larger_than_the_machine_is_refused_before_its_memory_is_taken(monkeypatch):
    spec = ModelSpec(name="s", config=SHAPES["llama"] | {"hidden_size": 4 * 10**8}, init="scratch")
    made = loading.AutoModelForCausalLM.from_config

    def counted(*args, **keywords):
        assert torch.empty(0).device.type == "meta", "memory was taken"
        return made(*args, **keywords)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_config", counted)
    with pytest.raises(UsageError, match=r"s: its weights take [0-9,]+ GiB, and this machine has"):
        load_student(spec, vocab_size=300, seed=0, device="cpu")


def test_a_non_finite_weight_of_a_teacher_is_reported_as_the_teachers(folder):
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[299, 3] = float("nan")
    write_model_folder(folder, model)
    with pytest.raises(UsageError, match=r"teacher m: model\.embed_tokens\.weight is non-finite in float32; fetch or"):
        as_model(folder)


def test_sampling_settings_that_transformers_would_not_write_do_not_stop_an_export(folder, tmp_path):
    settings = {"do_sample": False, "temperature": 0.3, "eos_token_id": 299}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    student = load_student(ModelSpec.read(str(folder)), vocab_size=None, seed=0, device="cpu")
    assert student.generation_config.eos_token_id == 299
    write_model_folder(tmp_path / "out", student)


def test_generation_settings_of_a_checkpoint_cannot_replace_what_transformers_calls(folder, tmp_path):
    kept = architecture(tiny_model())
    model = model_of("c", kept, "sdpa", {"eos_token_id": [7, 8], "to_json_string": 1, "temperature": 0.3})
    write_model_folder(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [7, 8]
    with pytest.raises(UsageError, match=r"^c: "):
        model_of("c", kept, "sdpa", {"watermarking_config": {"a": 1}})
    with pytest.raises(UsageError, match=r"^c: its configuration has more than 65,536 entries"):
        model_of("c", kept, "sdpa", {"bad_words_ids": [[1]] * 2**16})


def test_a_generation_config_with_more_entries_than_any_has_is_refused(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1] * 2**16}))
    with pytest.raises(UsageError, match=f"{folder}: its configuration has more than 65,536 entries"):
        as_model(folder)


def calls_without_consent(tree):
    """List the lines that load a model, or make one of a configuration, without stating whether code may run."""
    asked = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(each.arg == "trust_remote_code" and ast.unparse(each.value) != "True" for each in node.keywords)
    }
    loaders = ("from_pretrained", "from_config")
    return [
        n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in loaders and id(n) not in asked
    ]


@pytest.mark.parametrize("folder", ["kdtrain", "benchmarks", "teachers"])
def test_every_call_that_loads_states_whether_code_may_run(folder):
    found = {str(path): calls_without_consent(ast.parse(path.read_text())) for path in (ROOT / folder).rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code, found",
    [
        ("AutoConfig.from_pretrained(x, trust_remote_code=spec.trust)", False),
        ("AutoConfig.from_pretrained(x)", True),
        ("AutoConfig.from_pretrained(x, **options)", True),
        ("AutoModel.from_config(x, trust_remote_code=True)", True),
        ("make = AutoModel.from_config", True),
    ],
)
def test_a_call_that_does_not_state_it_is_found(code, found):
    assert bool(calls_without_consent(ast.parse(code))) is found


def test_transformers_never_asks_on_stdin_and_fetches_no_kernels():
    from transformers.integrations import hub_kernels

    def resolve():
        return dynamic_module_utils.resolve_trust_remote_code(None, "m", has_local_code=False, has_remote_code=True)

    assert not hub_kernels._kernels_enabled
    with pytest.raises(UsageError, match="m: it has its own code"):
        hub.ask("m", resolve)
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE == 15  # the default of transformers, for the user's own calls


def test_two_threads_that_load_side_by_side_leave_what_they_found():
    first, second = hub.never_asking(), hub.never_asking()
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE == 0 < before  # the second one is still inside
    second.__exit__(None, None, None)
    assert before == dynamic_module_utils.TIME_OUT_REMOTE_CODE


def test_a_hub_id_is_loaded_at_the_revision_of_its_spec(monkeypatch):
    asked = []

    def answer(source, *, revision):
        asked.append((source, revision))
        return {"model_type": "llama", "to_dict": 1}, {}

    monkeypatch.setattr(hub.PreTrainedConfig, "get_config_dict", answer)
    with pytest.raises(UsageError, match="to_dict"):
        ask_config(ModelSpec(name="s", source="a/b", revision="v2"))
    assert asked == [("a/b", "v2")]
