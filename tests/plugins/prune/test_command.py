"""`kdtrain prune` by the real command: a model that is distilled from, scores that are kept, kills, and refusals."""

import json

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

SMALL = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 48}
WORDS = ("--cache", "cache", "--precision", "fp32", "--num-sequences", 20, "--batch-size", 4)


def prune(forks, like, out, *more, fault=None):
    return forks.run("prune", "teacher", "--like", like, "--out", out, *WORDS, *more, fault=fault)


@pytest.fixture(scope="module")
def pruned(forks):
    """Prune to `models/small`, narrower than the teacher; return the command's JSON.

    The scores stay in `models/scores-....safetensors`.
    """
    forks.student("small", **SMALL)
    return prune(forks, "small.toml", "models/small", "--json").ok().json


def test_the_pruned_model_opens_in_transformers_and_says_where_it_comes_from(forks, pruned):
    folder = forks.root / "models/small"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (24, 2, 300)
    assert sum(each.numel() for each in model.parameters()) == pruned["parameters"]
    assert pruned["removed"] == pytest.approx(1 - pruned["parameters"] / pruned["teacher_parameters"])
    assert len(AutoTokenizer.from_pretrained(folder)) == 300
    origin = json.loads((folder / "kdtrain.json").read_text())
    manifest = json.loads((forks.root / "cache/manifest.json").read_text())
    assert origin["cache"] == manifest["digest"] and origin["pruned"]["of"] == "teacher"
    assert origin["pruned"]["sequences"] == 20 and len(origin["pruned"]["scores"]) == 64
    losses = pruned["validation_loss"]
    shown = forks.run("evaluate", "--student", "models/small", "--cache", "cache", "--json").json
    assert shown["loss"] == pytest.approx(losses["pruned"], rel=1e-4)
    assert "pruned" in forks.run("inspect", "models/small", "--json").ok().stdout


def test_distillation_begins_from_the_pruned_model(forks, pruned):
    argv = ("distill", "--cache", "cache", "--student", "models/small", "--out", "runs/small", "--steps", 2)
    result = forks.run(*argv, *forks.eager, *forks.fast, "--eval-freq", 1, "--json").ok().json
    assert result["first_validation_loss"] == pytest.approx(pruned["validation_loss"]["pruned"], rel=1e-4)
    assert AutoModelForCausalLM.from_pretrained(forks.root / "runs/small/student").config.hidden_size == 24


def test_load_gives_a_spec_the_weights_of_a_model_folder_and_the_run_resumes(forks, pruned):
    def distill(out, student, *more):
        words = ("--student", student, "--out", out, "--eval-freq", 1, *forks.eager, *forks.fast)
        return forks.run("distill", "--cache", "cache", *words, *more)

    loaded = distill("runs/loaded", "small.toml", "--load", "models/small", "--steps", 2, "--json").ok().json
    assert loaded["first_validation_loss"] == pytest.approx(pruned["validation_loss"]["pruned"], rel=1e-4)
    resumed = distill("runs/loaded", "small.toml", "--load", "models/small", "--steps", 3).ok()
    assert "at step 2" in resumed.stderr and forks.newest("runs/loaded").name == "step-00000003"
    for student, more, words in (
        ("student.toml", (), "--load models/small has hidden_size = 24, and student 32; give --student models/small"),
        (
            "small.toml",
            ("--override-opt-param-scheduler",),
            "--override-opt-param-scheduler has no effect with the model",
        ),
    ):
        refused = distill("runs/refused", student, "--load", "models/small", "--steps", 2, *more)
        assert refused.code == 2 and words in refused.refusal()


def test_another_shape_reuses_the_scores_and_adds_those_of_layers(forks, pruned):
    path = forks.root / pruned["scores"]
    before = path.stat().st_mtime_ns
    forks.student("smaller", **SMALL | {"intermediate_size": 40})
    done = prune(forks, "smaller.toml", "models/smaller").ok()
    assert "has the scores" in done.stderr and path.stat().st_mtime_ns == before
    assert "Next: kdtrain distill --cache cache --student models/smaller --out runs/smaller" in done.stdout
    forks.student("shallow", num_hidden_layers=1)
    shallow = prune(forks, "shallow.toml", "models/shallow", "--json").ok().json
    assert path.stat().st_mtime_ns > before and shallow["scores"] == pruned["scores"]
    losses = shallow["loss_without_layer"]
    assert shallow["layers"] == [losses.index(max(losses))] and len(losses) == 2


def test_a_killed_command_resumes_to_the_same_bits(forks, pruned):
    forks.student("less", **SMALL, num_hidden_layers=1)
    more = ("--allow-high-pruning-ratio",)
    whole = prune(forks, "less.toml", "whole/less", *more, "--json").ok().json
    killed = prune(forks, "less.toml", "killed/less", *more, fault="prune.scores.before-fsync:kill:2")
    assert killed.code == -9 and not (forks.root / "killed/less").exists()
    (scores,) = (forks.root / "killed").glob("scores-*.safetensors")
    with safe_open(scores, framework="pt") as file:
        record = json.loads(file.metadata()["kdtrain"])
    assert (record["width"], record["depth"]) == (4, 0)
    prune(forks, "less.toml", "killed/less", *more).ok()
    assert scores.read_bytes() == (forks.root / whole["scores"]).read_bytes()
    one, other = (forks.root / name / "less/model.safetensors" for name in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()
    assert not [path for path in (forks.root / "killed").iterdir() if path.name.startswith(".")]


def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_lost(forks, pruned):
    forks.student("deep", num_hidden_layers=3)
    forks.student("tiny", **SMALL | {"hidden_size": 8, "intermediate_size": 8})
    before = (forks.root / "models/small/model.safetensors").read_bytes()
    cases = {
        ("deep.toml", "models/x"): "num_hidden_layers = 3 is more than 2",
        ("gpt2.toml", "models/x"): "is a gpt2 and teacher a llama",
        ("tiny.toml", "models/x"): "--allow-high-pruning-ratio",
        ("small.toml", "models/small"): "add --overwrite",
        ("small.toml", "cache"): "cache holds other files than an export",
        ("small.toml", "models/x", "--scores", "small.toml"): "small.toml holds no scores",
        ("small.toml", "models/x", "--scores", pruned["scores"], "--num-sequences", 8): "another number of sequences",
    }
    for argv, words in cases.items():
        done = prune(forks, *argv)
        assert done.code == 2 and words in done.refusal(), argv
    assert not (forks.root / "models/x").exists()
    assert (forks.root / "models/small/model.safetensors").read_bytes() == before
    prune(forks, "small.toml", "models/small", "--overwrite").ok()
    assert (forks.root / "models/small/model.safetensors").read_bytes() == before
