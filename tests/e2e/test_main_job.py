"""The main job, from text to a trained student, by the command that a user types."""

import json
import math
import re

import numpy as np
import pytest

from kdtrain.tables import number
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder


def assert_trained(bench, done, run, steps):
    assert done.json["step"] == steps
    losses = [line["loss"] for line in bench.metrics(run)]
    assert len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)
    assert not all(loss == losses[0] for loss in losses)
    assert (bench.root / run / "student" / "model.safetensors").exists()


def test_a_teacher_is_cached_as_the_options_say(bench, cached):
    result = cached.json
    assert result["sequences"] == {"train": 40, "validation": 8}
    assert result["tokens"]["train"] == 40 * 32
    shown = bench.run("inspect", "cache", "--json").json
    assert shown["digest"] == result["digest"]
    assert shown["codec"]["top_k"] == 12
    assert shown["vocabulary"] == 300
    sizes = shown["bytes per token"]
    assert {"tokens", "ids", "numbers", "dictionary", "overhead", "total"} <= sizes.keys()
    assert sum(sizes.values()) == pytest.approx(2 * sizes["total"])
    table = " ".join(bench.run("inspect", "cache").ok().stdout.split())
    assert f"bytes per token {number(sizes.pop('total'))} of these" in table
    assert [name for name, size in sizes.items() if f"{name} {number(size)}" not in table] == []


def test_a_student_learns_from_the_cache(bench, distilled):
    assert_trained(bench, distilled, "run", 8)
    validation = [line["validation/kl"] for line in bench.lines("run") if "validation/kl" in line]
    assert len(validation) == 3
    assert validation[-1] < validation[0]
    assert distilled.json["best_step"] in (4, 8)


def test_a_run_leaves_on_disk_what_the_design_names(bench, distilled):
    there = {path.name for path in (bench.root / "run").iterdir()}
    files = {"config.toml", "environment.json", "train.log", "metrics.jsonl", "events.jsonl", "result.json"}
    assert there == files | {"checkpoints", "tensorboard", "tokenizer", "student"}
    assert "step 8/8" in (bench.root / "run/train.log").read_text()
    assert (bench.root / "run/checkpoints/latest").resolve() == bench.newest("run")


def test_evaluate_reports_what_the_best_validation_measured(bench, distilled):
    result = bench.run("evaluate", "--student", "run", "--cache", "cache", "--json").json
    assert result["sequences"] == 8
    assert result["loss"] == pytest.approx(distilled.json["best_validation_loss"], rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert 0 <= result["acceptance"] <= 1
    assert result["kl"] > 0


def test_inspect_finds_a_run_and_a_checkpoint_whole(bench, distilled):
    shown = bench.run("inspect", "run", "--json").json
    # 40 sequences in steps of 8: an epoch ends with step 5
    assert list(shown["checkpoints"]) == ["step-00000000", "step-00000004", "epoch-0001", "step-00000008"]
    assert all(row["verdict"] == "ok" for row in shown["checkpoints"].values())
    assert "step-00000004" in bench.run("inspect", "run/checkpoints/step-00000004").ok().stdout


@pytest.mark.parametrize("path, kind", [("cache", "cache"), ("run", "run"), ("run/checkpoints/best", "checkpoint")])
def test_verify_finds_a_cache_a_run_and_a_checkpoint_whole(bench, distilled, path, kind):
    result = bench.run("verify", "--json", path).json
    seen = {"findings": [], "look": result["look"]} if kind == "cache" else {}
    assert result == {"path": path, "kind": kind, "ok": True, "problems": [], **seen}


def test_json_is_one_object_on_stdout_and_everything_else_is_on_stderr(cached, distilled):
    for done in (cached, distilled):
        assert len(done.stdout.splitlines()) == 1
        assert done.json
        assert done.stderr


@pytest.mark.parametrize(
    "codec, student, options",
    [
        (("--num-samples", 50, "--top-k", 0), "gpt2", ()),
        (("--dense",), "qwen", ("--temperature-mode", "adversarial")),
        (("--top-k", 8, "--document-mask"), "student", ("--temperature-mode", "minimize", "--tail", "renormalize")),
    ],
    ids=["num_samples", "dense", "document-mask"],
)
def test_each_kind_of_cache_trains_a_student(bench, codec, student, options):
    cache, run = f"{student}-cache", f"{student}-run"
    bench.run("cache-teacher", "--teacher", "teacher", "--out", cache, *bench.small, *codec).ok()
    argv = ("distill", "--cache", cache, "--student", f"{student}.toml", "--out", run, "--steps", 6)
    # the teacher has random weights, of which no text confirms anything
    done = bench.run(*argv, *bench.eager, *bench.fast, "--json", "--alpha", 0.9, *options)
    assert_trained(bench, done, run, 6)
    temperatures = {line["T"] for line in bench.metrics(run)}
    assert len(temperatures) == (6 if options else 1)
    if student == "gpt2":  # samples alone serve one T, one divergence and one tail rule
        for other, advice in (
            (("--temperature", 2), "leave the cache's range of 1 to 1; choose .*, or build a cache with --top-k"),
            (("--temperature-mode", "likelihood"), "use --temperature-mode fixed, or build a cache with --top-k"),
            (("--divergence", "jsd"), "use forward-kl, or a cache built with --top-k and without --num-samples"),
            (("--tail", "control-variate"), "leave --tail out, or use a cache built with --top-k and --num-samples"),
            (("--tail", "drop"), "leave --tail out, or use a cache built with --top-k and without --num-samples"),
        ):
            refused = bench.run(*argv[:-4], "--out", "refused", "--steps", 6, *bench.eager, *bench.fast, *other)
            assert refused.code == 2 and re.search(advice, refused.refusal()), refused.refusal()


def test_a_document_mask_changes_what_teacher_and_student_see(bench):
    text = "".join(json.dumps({"text": f"{number} is a number"}) + "\n" for number in range(100))
    (bench.root / "short.jsonl").write_text(text)
    argv = ("--teacher", "teacher", "--student", "student.toml", "--data", "short.jsonl", "--seq-len", 32)
    for run, option in (("unmasked", "--no-document-mask"), ("masked", "--document-mask")):
        bench.run("distill", *argv, "--out", run, "--steps", 1, *bench.eager, *bench.fast, option).ok()
    plain, masked = (bench.metrics(run)[0] for run in ("unmasked", "masked"))
    assert masked["tokens"] < plain["tokens"] == 6 * 32
    assert masked["kd"] != pytest.approx(plain["kd"], rel=1e-3)


def test_a_vocabulary_of_151936_is_cached_and_distilled(bench):
    size = 151_936
    narrow = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    tokenizer = tiny_tokenizer(size)
    write_model_folder(bench.root / "wide", tiny_model("llama", size, seed=1, **narrow), tokenizer)
    bench.student("narrow", tokenizer="wide", **narrow)
    argv = ("--seq-len", 16, "--num-sequences", 2, "--validation-sequences", 1, "--num-workers", 0)
    bench.run("cache-teacher", "--teacher", "wide", "--data", "corpus", "--out", "wide-cache", *argv).ok()
    argv = ("--cache", "wide-cache", "--student", "narrow.toml", "--out", "wide-run", "--steps", 2, "--batch-size", 2)
    done = bench.run("distill", *argv, *bench.eager, "--json", "--lr", 1e-2, "--warmup-steps", 0)
    assert_trained(bench, done, "wide-run", 2)
    assert bench.tensors("wide-run")["student.model.model.embed_tokens.weight"].shape[0] == size


def test_text_alone_trains_by_cross_entropy_and_goes_into_the_run(bench):
    lines = (f'{{"words": "one two three four five six seven eight nine ten {n}"}}\n' for n in range(60))
    (bench.root / "lines.jsonl").write_text("".join(lines))
    argv = ("--data", "lines.jsonl", "--text-column", "words", "--seq-len", 16, "--student", "student.toml")
    done = bench.run("distill", *argv, "--out", "plain", "--steps", 30, *bench.eager, *bench.fast, "--json")
    assert_trained(bench, done, "plain", 30)
    first, *_, last = bench.metrics("plain")
    assert last["loss"] < 0.5 * first["loss"]
    assert "kd" not in first
    evaluated = bench.run("evaluate", "--student", "plain", *argv[:6], "--json").json
    assert evaluated["loss"] == pytest.approx(done.json["best_validation_loss"], rel=1e-4)
    assert evaluated["kl"] is None


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(bench, cached):
    (bench.root / "options.toml").write_text(
        "[run]\ncache = 'cache'\nstudent = 'student.toml'\nsteps = 3\nbatch_size = 4\n"
        "[objective]\nalpha = 0.5\nalpha_schedule = 'cosine'\nalpha_end = 0.1\n"
        "temperature = 3.0\ntemperature_mode = 'schedule'\n"
        "[optimizer]\nbetas = [0.8, 0.9]\nlr = 1e-2\n[precision]\ncompile = false\nprecision = 'fp32'\n"
        "[monitor]\nlog_to = 'tensorboard'\n"
    )
    bench.run("distill", "--config", "options.toml", "--out", "from-file", "--lr", 5e-3, "--log-to", "none").ok()
    assert not (bench.root / "from-file" / "tensorboard").exists()
    shown = bench.run("inspect", bench.newest("from-file"), "--json").json
    assert shown["step"] == 3
    assert shown["options"]["optimizer"]["lr"] == 5e-3
    assert shown["options"]["optimizer"]["betas"] == [0.8, 0.9]
    assert shown["options"]["optimizer"]["weight_decay"] == 0.1
    assert [round(line["T"], 4) for line in bench.metrics("from-file")] == [3.0, 2.0, 1.0]
    assert [round(line["alpha"], 4) for line in bench.metrics("from-file")] == [0.5, 0.3, 0.1]
    for line in bench.metrics("from-file"):
        weighted = (1 - line["alpha"]) * line["ce"] + line["alpha"] * line["T"] ** 2 * line["kd"]
        assert line["loss"] == pytest.approx(weighted, rel=1e-6)


@pytest.mark.parametrize("source", ["online", "dense", "ghost"])
def test_a_student_that_is_its_teacher_has_no_divergence_at_any_temperature(bench, cached, source):
    if source == "dense":
        bench.run("cache-teacher", "--teacher", "teacher", "--out", "dense-cache", *bench.small, "--dense").ok()
    where = {
        "online": ("--teacher", "teacher", *bench.data),
        "dense": ("--cache", "dense-cache"),
        "ghost": ("--cache", "cache"),
    }
    still = ("--lr", 1e-12, "--min-lr", 0, "--weight-decay", 0, "--batch-size", 4, "--steps", 4)
    mode = ("--temperature-mode", "schedule", "--temperature", 4, "--temperature-end", 1)
    done = bench.run(
        "distill", *where[source], "--student", "teacher", "--out", f"same-{source}", *bench.eager, *still, *mode
    )
    assert "the student never got better" in done.refusal()  # which it could not, at this rate
    lines = bench.metrics(f"same-{source}")
    assert [line["T"] for line in lines] == [4.0, 3.0, 2.0, 1.0]
    # A cache keeps log p in half precision; its square is what is left of a divergence between equals.
    bound = 1e-6 if source == "online" else 2e-5
    for line in lines:
        assert abs(line["kd"]) < bound
        assert abs(line["kd_T1"]) < bound
        assert line["ce"] > 1


def test_without_its_teachers_weights_the_divergence_is_not_zero(bench, distilled):
    assert all(line["kd"] > 1e-3 for line in bench.metrics("run"))


@pytest.mark.parametrize("source", ["online", "cache"])
def test_a_teachers_padded_output_head_is_handled(bench, source):
    tokenizer = tiny_tokenizer(300)
    write_model_folder(bench.root / "padded", tiny_model("llama", 320, seed=1), tokenizer)
    bench.student("exact", vocab_size=300, num_hidden_layers=1)
    where = ("--teacher", "padded", *bench.data)
    if source == "cache":
        bench.run("cache-teacher", "--teacher", "padded", "--out", "padded-cache", *bench.small, "--dense").ok()
        where = ("--cache", "padded-cache")
    run = f"from-padded-{source}"
    done = bench.run(
        "distill", *where, "--student", "exact.toml", "--out", run, "--steps", 3, *bench.eager, *bench.fast, "--json"
    )
    assert_trained(bench, done, run, 3)


@pytest.mark.slow
def test_a_compiled_run_agrees_with_an_eager_one(bench, cached):
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--steps", 6, "--precision", "fp32")
    argv += bench.fast
    compiled = bench.run(*argv, "--out", "compiled", "--compile", "--log-to", "none").ok()
    assert "not compiled" not in compiled.stderr
    bench.run(*argv, "--out", "eager", "--no-compile", "--log-to", "none").ok()
    for name in ("loss", "ce", "kd", "grad_norm"):
        runs = ([line[name] for line in bench.metrics(run)] for run in ("compiled", "eager"))
        np.testing.assert_allclose(*runs, rtol=1e-4, err_msg=name)
    assert '"compiled": true' in (bench.root / "compiled/environment.json").read_text()
