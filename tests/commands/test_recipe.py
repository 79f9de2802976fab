"""A run is resolved once from its options, and resumed by what they mean, not by how they are spelt."""

import dataclasses
import json
import shutil
from contextlib import ExitStack

import pytest
import torch

from kdtrain import cli
from kdtrain.cache.format import manifest
from kdtrain.files import temporary_name
from kdtrain.models import spec
from kdtrain.run.build import build
from kdtrain.run.recipe import resolve
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

STUDENT = ("--student", "student.toml")


def test_each_spec_and_the_manifest_are_read_once_in_a_run(workbench, monkeypatch):
    read, toml, sealed = [], spec.read_toml, manifest.read_sealed
    monkeypatch.setattr(spec, "read_toml", lambda path: read.append(path.name) or toml(path))
    monkeypatch.setattr(manifest, "read_sealed", lambda path, *limit: read.append(path.name) or sealed(path, *limit))
    monkeypatch.setattr(cli.paths, "problem", lambda *given: None)  # looks at the spec before anything is imported
    workbench.json("distill", "--cache", "cache", *STUDENT, *workbench.plain, "--steps", 1, "--out", "once")
    assert read.pop() == "manifest.json"  # the card's, which is used only with the digest of the run's
    assert sorted(read) == ["manifest.json", "student.toml"]


def test_a_recipe_cannot_be_changed_and_its_options_are_those_of_the_trainer(workbench):
    config = cli.parse("distill", ["--cache", "cache", *STUDENT, "--out", "x", "--batch-size", "8"])
    with ExitStack() as held:
        recipe = resolve(config, torch.device("cpu"), held)
    assert recipe.given is config and not recipe.resumed
    assert config.objective.temperature_min is None and recipe.config.objective.temperature_min is not None
    assert build(recipe).trainer.config is recipe.config
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.config = config


def test_what_a_cache_cannot_do_is_refused_before_an_earlier_run_is_moved_aside(workbench):
    options = ("distill", "--cache", "cache", *STUDENT, *workbench.plain, "--steps", 1, "--out", "precious")
    workbench.json(*options)
    before = workbench.everything()
    code, _, err = workbench.call(*options, "--temperature", 500, "--resume", "never", "--overwrite")
    assert code == 2 and "leave the cache's range" in err
    assert workbench.everything() == before


def test_another_spelling_of_the_same_cache_and_student_resumes(workbench):
    options = ("distill", *workbench.plain, "--out", "spelt")
    workbench.json(*options, "--cache", "cache", *STUDENT, "--steps", 1)
    (workbench.root / "linked").symlink_to("cache")
    for steps, cache in enumerate(("./cache", workbench.root / "cache", "linked"), 2):
        student = ("--student", workbench.root / "student.toml")
        assert workbench.json(*options, "--cache", cache, *student, "--steps", steps)["step"] == steps
    events = [json.loads(line) for line in (workbench.root / "spelt/events.jsonl").read_text().splitlines()]
    assert sum(each["event"] == "resume" for each in events) == 3


def test_another_cache_is_refused_by_its_name_alone_and_allowed_under_any_name(workbench):
    build = ("cache-teacher", "--teacher", "teacher", "--num-sequences", 40, *workbench.text, "--precision", "fp32")
    workbench.json(*build, "--out", "other", "--top-k", 12, "--num-samples", 4, "--seed", 3)
    workbench.json(*build, "--out", "narrow", "--num-samples", 4)  # good at T = 1 only, so it has other bounds
    run = ("distill", *STUDENT, *workbench.plain, "--out", "begun")
    workbench.json(*run, "--cache", "other", "--steps", 1)
    for more in ((), ("--dry-run",)):
        code, _, err = workbench.call(*run, "--cache", "narrow", "--steps", 2, *more)
        line = err.splitlines()[-1]
        assert code == 2 and "--cache (was other, now narrow) (in step-00000001)" in line
        assert "--temperature-m" not in line
    code, _, err = workbench.call(*run, "--cache", "narrow", "--steps", 2, "--allow-mismatch", "cache")
    assert code == 0 and "was trained with another cache" in err


def test_a_build_that_was_refused_is_not_called_unfinished(workbench):
    (workbench.root / "few.txt").write_text("".join(f"{n}\n" for n in range(9)))
    build = ("cache-teacher", "--teacher", "teacher", "--data", "few.txt", "--seq-len", 100, "--out", "refused")
    assert "give no whole sequence" in workbench.call(*build)[2]
    assert not (workbench.root / "refused").exists()
    (workbench.root / "refused").mkdir()
    shutil.copy(workbench.root / "cache" / "settings.json", workbench.root / "refused")  # a build that stopped early
    use = ("distill", "--cache", "refused", *STUDENT, "--out", "x")
    code, _, err = workbench.call(*use)
    assert code == 2 and "was refused or stopped before its first one" in err and "finish it" not in err
    (workbench.root / "refused" / "shards").mkdir(exist_ok=True)
    temporary_name(workbench.root / "refused" / "shards" / "train-00000.h5").write_text("")  # as a kill leaves it
    code, _, err = workbench.call(*use)
    assert code == 2 and "is unfinished; run the same cache-teacher command again to finish it" in err


def test_a_teacher_that_cannot_take_the_text_is_refused_before_the_text_is_packed(workbench):
    run = ("distill", "--teacher", "teacher", "--data", "text.txt", "--seq-len", 256, *STUDENT, "--out", "long")
    code, _, err = workbench.call(*run)
    assert code == 2 and "positions of teacher" in err
    assert not (workbench.root / "long").exists()


def test_a_short_text_and_another_tokenizer_are_refused_before_any_model_is_loaded(workbench, monkeypatch):
    (workbench.root / "short.txt").write_text("".join(f"{n}\n" for n in range(9)))
    tiny_tokenizer(301).save_pretrained(workbench.root / "other")
    (workbench.root / "stranger.toml").write_text(
        (workbench.root / "student.toml").read_text().replace("'teacher'", "'other'")
    )
    write_model_folder(workbench.root / "strange", tiny_model("llama", 301), tiny_tokenizer(301))
    for module in ("teaching.local", "run.build", "run.saved_student"):
        name = "load_teacher" if module == "teaching.local" else "load_student"
        monkeypatch.setattr(f"kdtrain.{module}.{name}", lambda *_, **__: pytest.fail("a model is loaded"))
    short, whole = ("--data", "short.txt", "--seq-len", 100), workbench.text
    taught, few = ("--teacher", "teacher"), "give no whole sequence of 100 tokens"
    for argv, reason in (
        (("distill", *taught, *short, *STUDENT, "--out", "x"), few),
        (("distill", *taught, *whole, "--student", "stranger.toml", "--out", "x"), "add --allow-mismatch tokenizer"),
        (("distill", "--cache", "cache", "--student", "stranger.toml", "--out", "x"), "add --allow-mismatch tokenizer"),
        (("evaluate", *taught, *short, "--student", "teacher"), few),
        (("evaluate", *short, "--student", "teacher"), few),
        (("evaluate", *taught, *whole[:4], "--student", "strange"), "different tokenizers; add --cross-tokenizer"),
        (("evaluate", "--cache", "cache", "--student", "strange"), "another tokenizer"),
    ):
        code, _, err = workbench.call(*argv)
        assert code == 2 and reason in err.splitlines()[-1], (argv, err)
    assert not (workbench.root / "x").exists()
