"""What an export hands over: the number format and files asked for, a card, a recipe, and the folder on the hub."""

import json
import tomllib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kdtrain.config.commands import DistillConfig, ExportConfig
from kdtrain.config.values import options_of, written
from kdtrain.errors import UsageError
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ENDS = {"eos_token_id": [299, 256, 260], "pad_token_id": 261, "do_sample": True, "temperature": 0.7, "top_k": 20}
KINDS = {
    "gpt2": SHAPES["gpt2"],
    "gemma3": SHAPES["gemma2"] | {"model_type": "gemma3_text"},
    "qwen3-moe": SHAPES["qwen3"]
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture
def run(workbench):
    """Train a tiny student of the tiny teacher."""
    if not (workbench.root / "run").exists():
        argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", 2)
        workbench.json(*argv, *workbench.plain)
    return workbench


@pytest.mark.parametrize(
    "dtype, wanted", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("float32", torch.float32)]
)
def test_weights_are_written_in_the_format_and_in_files_of_the_size_asked_for(run, tmp_path, dtype, wanted):
    found = run.json("export", "run", "--out", tmp_path / "out", "--dtype", dtype, "--shard-size", 2e-5)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {each.dtype for each in model.parameters()} == {wanted}
    whole = AutoModelForCausalLM.from_pretrained(run.root / "run" / "student")
    for name, each in model.state_dict().items():
        assert torch.equal(each, whole.state_dict()[name].to(wanted))
    assert sum(each.numel() for each in model.parameters()) == found["parameters"]


def test_int8_weights_load_in_transformers_and_nearly_answer_as_the_whole_ones(run, tmp_path):
    pytest.importorskip("torchao")
    out = tmp_path / "out"
    run.json("export", "run", "--out", out, "--quantize", "int8")
    model, whole = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (out, run.root / "run" / "student"))
    layer = model.model.layers[0].mlp.up_proj.weight
    assert type(layer).__name__ == "Int8Tensor"
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        asked, exact = model(tokens).logits, whole(tokens).logits
    assert 0 < (asked - exact).abs().max() < 0.05 * exact.abs().max()
    assert sorted(path.name for path in out.glob("whole*")) == []
    code, _, said = run.call("evaluate", "--student", out, "--cache", "cache")
    assert code == 2 and "its weights are quantised" in said


def test_quantisation_without_torchao_is_refused_in_one_line_before_anything_is_written(run, tmp_path, monkeypatch):
    from kdtrain.models import frozen as int8

    def missing(package, extra, what):
        raise UsageError(f"{what} needs the package {package}; pip install 'kdtrain[{extra}]'")

    monkeypatch.setattr(int8, "optional", missing)
    code, _, said = run.call("export", "run", "--out", tmp_path / "out", "--quantize", "int8")
    assert code == 2 and "--quantize int8 needs the package torchao; pip install 'kdtrain[fp8]'" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", KINDS)
def test_generation_settings_every_end_token_and_the_chat_template_are_the_students_own(workbench, tmp_path, shape):
    model, tokenizer = tiny_model("llama", 300), tiny_tokenizer(300)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_config(_config(KINDS[shape]))
    model.generation_config = GenerationConfig(**ENDS)
    own = write_model_folder(tmp_path / "own", model, tokenizer)
    argv = ("distill", "--cache", "cache", "--student", own, "--out", tmp_path / "run", "--steps", 1)
    workbench.json(*argv, *workbench.plain)
    workbench.json("export", tmp_path / "run", "--out", tmp_path / "out", "--dtype", "bf16")
    for out in (tmp_path / "run" / "student", tmp_path / "out"):
        before, after = (GenerationConfig.from_pretrained(each).to_dict() for each in (own, out))
        assert {name: after[name] for name in ENDS} == ENDS
        assert after == before
        assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
        loaded, first = (AutoModelForCausalLM.from_pretrained(each).config for each in (out, own))
        assert {**loaded.to_dict(), "dtype": 0, "_name_or_path": 0} == {
            **first.to_dict(),
            "dtype": 0,
            "_name_or_path": 0,
        }


def _config(table):
    from transformers import AutoConfig

    rest = {key: value for key, value in table.items() if key != "model_type"}
    return AutoConfig.for_model(table["model_type"], vocab_size=300, **rest)


def test_the_readme_names_what_the_student_comes_from_in_40_plain_lines_and_nothing_of_this_machine(run, tmp_path):
    out = tmp_path / "out"
    run.json("export", run.root / "run", "--out", out, "--license", "apache-2.0", "--dtype", "bf16")
    card, recipe = (out / "README.md").read_text(), (out / "recipe.toml").read_text()
    assert card.startswith("# out\n") and len(card.splitlines()) <= 40 and "licence is apache-2.0;" in card
    manifest = json.loads((run.root / "cache" / "manifest.json").read_text())
    result = json.loads((run.root / "run" / "result.json").read_text())
    assert json.loads((out / "kdtrain.json").read_text())["cache"] == result["cache"] and result["cache"] in card
    assert "| teacher | teacher, " in card and manifest["teacher"]["weights_digest"] in card
    assert f"{result['best_validation_loss']:.4f} nats per token" in card and "bfloat16" in card
    usual = {name: written(each.field, each.default) for name, each in options_of(DistillConfig).items()}
    whole = tomllib.loads(recipe)
    kept = {name: value for table in whole.values() for name, value in table.items()}
    # a version with other defaults repeats the run: what is not in the file has no value, or does not make the run
    assert kept["steps"] == 2 and not kept.keys() & {"out", "config", "json", "resume", "dry_run"}
    sections = {name: each.section for name, each in options_of(DistillConfig).items()}
    absent = {name for name in usual.keys() - kept.keys() if sections[name] in whole}
    assert {name for name in absent if usual[name] not in (None, False)} == {"out", "resume"}
    assert str(run.root) not in card + recipe


def test_a_card_gives_the_loss_of_its_checkpoint_by_its_step_and_not_as_the_last_one_of_the_run(run, tmp_path):
    best = json.loads((run.root / "run" / "result.json").read_text())["best_step"]
    run.json("export", "run", "--out", tmp_path / "out", "--checkpoint", "step-00000000")
    card = (tmp_path / "out" / "README.md").read_text()
    assert best == 2 and "| validation loss at step 0 |" in card and "last validation loss" not in card


@pytest.mark.parametrize("codec, tail", [(("--num-samples", 20), "sampled"), (("--dense",), None)])
def test_the_recipe_names_the_tail_rule_that_ran(run, codec, tail):
    cache, name = f"cache{codec[0]}", f"run{codec[0]}"
    run.json("cache-teacher", "--teacher", "teacher", "--out", cache, "--num-sequences", 8, *run.text, *codec)
    argv = ("distill", "--cache", cache, "--student", "student.toml", "--out", name, "--steps", 1)
    run.json(*argv, *run.plain)
    recipes = [tomllib.loads((run.root / each / "student/recipe.toml").read_text()) for each in ("run", name)]
    assert [each["objective"].get("tail") for each in recipes] == ["ghost", tail]


def test_a_card_of_a_changed_run_escapes_its_words_and_leaves_private_options_out(run, tmp_path):
    import shutil

    shutil.copytree(run.root / "run", tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "config.toml"
    text = path.read_text().replace('cache = "cache"', f'cache = "{tmp_path / "lovelace" / "cache"}"')
    text = text.replace("[monitor]", '[monitor]\non_event = "echo hf_secret"').replace(
        'student = "student.toml"', r'student = "a\u001b\n---\n<script>|x"'
    )
    assert "lovelace" in text and "hf_secret" in text and "script" in text
    path.write_text(text)
    run.json("export", tmp_path / "run", "--out", tmp_path / "out", "--license", "my: own")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "licence is my: own;" in card
    assert "lovelace" not in card and "hf_secret" not in card and "\x1b" not in card and "\n<script" not in card
    assert tomllib.loads((tmp_path / "out" / "recipe.toml").read_text())["run"]["cache"] == "cache"


def test_options_without_effect_are_refused():
    for whole in ({"quantize": "int8"}, {"shard_size": 1.0}):
        with pytest.raises(UsageError, match="is for whole models; leave it or --adapter out"):
            ExportConfig(run="run", out="out", adapter=True, **whole)
