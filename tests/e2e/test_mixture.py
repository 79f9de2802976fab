"""Several caches in one run: what a step draws and learns of each, and that a killed run ends with the same bits."""

import json
import shutil

import pytest

FULL, DRAWN, BARE = ("--cache", "cache"), ("--cache", "drawn"), ("--cache", "bare")
MIXED = (*FULL, *DRAWN, *BARE, "--cache-weights", "3,1,1")
SIZES = {"cache": 40, "drawn": 20, "bare": 16}


@pytest.fixture(scope="module")
def bench(bench, cached):
    """Add to the bench `drawn` (samples alone) and `bare` (tokens without a teacher), beside `cache` (a top-k)."""
    text = (*bench.data, "--precision", "fp32", "--validation-sequences", 8)
    words = ("cache-teacher", "--teacher", "teacher", "--out", "drawn", "--num-samples", 20, "--num-sequences", 20)
    bench.run(*words, *text).ok()
    student = ("--student", "student.toml", "--out", "plain", "--steps", 1, "--batch-size", 8)
    bench.run("distill", *text, "--num-sequences", 16, *student, "--no-compile", "--log-to", "none").ok()
    shutil.copytree(bench.root / "plain/data", bench.root / "bare")
    return bench


def words(out, *more, caches=MIXED, student="dropout.toml", steps=9):
    every = ("--checkpoint-freq", 2, "--eval-freq", 3, "--lr", 1e-2, "--warmup-steps", 0)
    every += () if "--alpha" in more else ("--alpha", 0.9)
    return ("distill", *caches, "--student", student, "--out", out, "--steps", steps, "--batch-size", 8, *every, *more)


def start(bench, out, *more, fault=None, **which):
    return bench.run(*words(out, *more, **which), *bench.eager, fault=fault)


@pytest.fixture(scope="module")
def whole(bench):
    """Train over all three without an interruption, and return the result."""
    return start(bench, "whole", "--micro-batch-size", 2, "--json").json


def test_the_result_and_the_export_name_each_cache_with_its_share_and_losses(bench, whole):
    caches = whole["caches"]
    assert [each["name"] for each in caches] == list(SIZES)
    assert [each["sequences"] for each in caches] == list(SIZES.values())
    assert [each["share"] for each in caches] == [round(quota / 76, 6) for quota in (46, 15, 15)]
    assert [each["targets"] for each in caches] == ["sparse", "sparse", "none"]
    # 9 steps of 8 in epochs of 76
    assert [each["passes"] for each in caches] == [
        round(quota * 72 / 76 / size, 3) for quota, size in zip((46, 15, 15), SIZES.values(), strict=True)
    ]
    digests = [json.loads((bench.root / name / "manifest.json").read_text())["digest"] for name in SIZES]
    assert [each["digest"] for each in caches] == digests
    origin = json.loads((bench.root / "whole/student/kdtrain.json").read_text())
    assert [each["digest"] for each in origin["caches"]] == digests
    bench.run("export", "whole", "--out", "exported").ok()
    assert json.loads((bench.root / "exported/kdtrain.json").read_text())["caches"] == origin["caches"]
    for card in ((bench.root / each / "README.md").read_text() for each in ("whole/student", "exported")):
        assert "distilled from teacher with kdtrain" in card and str(bench.root) not in card
        for each in caches:
            assert f"| cache of {each['name']} | {each['digest']} |" in card
            assert f"| share of the draws of {each['name']} | {100 * each['share']:.4g} % |" in card
            assert f"| text of {each['name']} | source corpus" in card
        assert "| teacher of drawn | teacher, float32 |" in card and "| teacher of bare |" not in card


def test_validation_is_by_cache_as_evaluate_measures_it_and_as_drawn(bench, whole):
    last = bench.lines("whole")[-1]
    best = bench.run("evaluate", "--student", "whole", "--cache", "cache", "--json").json
    at_best = next(line for line in bench.lines("whole") if line["step"] == whole["best_step"] and "loss" not in line)
    for name in ("loss", "kl", "teacher_loss", "accuracy"):
        assert at_best[f"validation/cache/{name}"] == pytest.approx(best[name], rel=1e-5)
    losses = [last[f"validation/{name}/loss"] for name in SIZES]
    shares = [each["share"] for each in whole["caches"]]
    assert last["validation/loss"] == pytest.approx(sum(a * b for a, b in zip(losses, shares, strict=True)), rel=1e-5)
    assert last["validation/tokens"] == sum(last[f"validation/{name}/tokens"] for name in SIZES)
    # what no teacher said about one cache is not known of the whole
    assert "validation/teacher_loss" not in last and "validation/bare/kl" not in last
    assert [each["last_validation_loss"] for each in whole["caches"]] == losses
    assert whole["caches"][0]["teacher_validation_loss"] == last["validation/cache/teacher_loss"]


def test_sequences_without_a_teacher_count_by_their_cross_entropy_alone(bench, whole):
    for line in bench.metrics("whole"):
        assert 0.05 * line["ce"] < line["ce_alone"] < 0.6 * line["ce"]
        assert line["loss"] == pytest.approx(0.1 * line["ce"] + 0.9 * line["kd"] + 0.9 * line["ce_alone"], rel=1e-6)


def test_alpha_by_withheld_text_is_that_of_each_member_and_an_interrupted_run_ends_with_the_same_bits(bench):
    # one teacher that knows nothing of the text, and one that does
    start(bench, "learned", "--alpha", 0, caches=FULL, student="student.toml", steps=5).ok()
    for copy in ("one", "two"):  # enough of it to withhold
        shutil.copytree(bench.root / "corpus", bench.root / "more" / copy)
    for name, teacher in (("cache", "teacher"), ("known", "learned/student")):
        words = ("cache-teacher", "--teacher", teacher, "--out", f"measured/{name}", "--num-sequences", 20)
        data = ("--data", "more", *bench.data[2:])
        bench.run(*words, *data, "--precision", "fp32", "--validation-sequences", 140).ok()
    caches = ("--cache", "measured/cache", "--cache", "measured/known", *BARE)
    run = {"caches": (*caches, "--cache-weights", "3,1,1")}
    auto = ("--alpha", "auto", "--micro-batch-size", 2)
    start(bench, "gaps", *auto, **run).ok()
    for line in bench.metrics("gaps"):
        assert line["alpha/cache"] < 0.1 and line["alpha/known"] > 0.8 and "alpha/bare" not in line
        assert 0 <= line["alpha"] <= 0.9
    assert len({line["alpha"] for line in bench.metrics("gaps")}) > 2  # as many tokens as a step has of each
    assert bench.tensors("gaps")["alpha.known"].shape == (3, 4)
    assert start(bench, "gaps-killed", *auto, **run, fault="train.after-step:kill:5").code == -9
    start(bench, "gaps-killed", *auto, **run).ok()
    bench.assert_same("gaps-killed", "gaps")


def test_an_interrupted_run_of_several_caches_ends_with_the_same_bits(bench, whole):
    assert start(bench, "resumed", "--micro-batch-size", 2, fault="train.after-step:kill:5").code == -9
    start(bench, "resumed", "--micro-batch-size", 2).ok()
    bench.assert_same("resumed", "whole")
    assert bench.state("resumed")["caches"] == bench.state("whole")["caches"]


def test_adapters_learn_from_several_caches_and_a_killed_run_ends_with_the_same_bits(bench):
    pytest.importorskip("peft")
    lora = ("--lora-rank", 2, "--lora-dropout", 0.1, "--micro-batch-size", 2)
    result = start(bench, "lora", *lora, "--json").json
    assert "LoRA of rank 2" in result["trained"] and [each["name"] for each in result["caches"]] == list(SIZES)
    assert all(".lora_" in name for name in bench.tensors("lora") if name.startswith("student."))
    assert start(bench, "lora-killed", *lora, fault="train.after-step:kill:5").code == -9
    start(bench, "lora-killed", *lora).ok()
    bench.assert_same("lora-killed", "lora")
    bench.run("export", "lora", "--out", "merged").ok()
    origin = json.loads((bench.root / "merged/kdtrain.json").read_text())
    assert [each["digest"] for each in origin["caches"]] == [each["digest"] for each in result["caches"]]
    page = bench.run("inspect", "lora").ok().stdout
    assert "LoRA of rank 2" in " ".join(page.split()) and all(name in page for name in SIZES)


def test_two_ranks_take_the_steps_of_one_and_resume_with_the_same_bits(bench, whole):
    # a learned temperature, over steps in which a rank may meet no teacher at all
    learned = ("--temperature-mode", "likelihood", "--micro-batch-size", 1)
    caches = (*FULL, *BARE, "--cache-weights", "1,2")
    which = {"caches": caches, "student": "student.toml"}
    start(bench, "one-rank", *learned, **which).ok()
    bench.ok(2, *words("two-ranks", *learned, **which), *bench.eager)
    bench.ok(2, *words("sharded", *learned, "--parallel", "fsdp", **which), *bench.eager)
    for run in ("two-ranks", "sharded"):
        for one, two in zip(bench.metrics("one-rank"), bench.metrics(run), strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-4) and two["T"] == pytest.approx(one["T"], rel=1e-3)
    killed = bench.launch(2, *words("two-killed", *learned, **which), *bench.eager, fault="train.after-step:kill:5@1")
    assert {each.code for each in killed} & {-9}
    bench.ok(2, *words("two-killed", *learned, **which), *bench.eager)
    bench.assert_same("two-killed", "two-ranks")


def test_a_step_is_the_same_for_any_micro_batch(bench):
    for micro in (8, 1):
        start(bench, f"micro-{micro}", "--micro-batch-size", micro, student="student.toml", steps=5).ok()
    rows = zip(*(bench.metrics(f"micro-{micro}") for micro in (8, 1)), strict=True)
    for first, *others in rows:
        for each in others:
            assert each["loss"] == pytest.approx(first["loss"], rel=1e-5)
            assert each["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


def test_a_run_of_one_cache_saves_nothing_about_mixtures(bench):
    start(bench, "alone", caches=FULL, steps=1).ok()
    state = bench.state("alone")
    assert state["options"]["run"]["cache"] == "cache" and "cache_weights" not in state["options"]["run"]
    assert "caches" not in state and "members" not in state["progress"]
    assert 'cache = "cache"\n' in (bench.root / "alone/config.toml").read_text()


def test_a_run_resumes_with_the_same_caches_order_and_weights_only(bench, whole):
    same = (*FULL, *DRAWN, *BARE, "--cache-weights", "6,2,2")
    start(bench, "whole", "--micro-batch-size", 2, caches=same).ok()
    swapped = (*DRAWN, *FULL, *BARE, "--cache-weights", "1,3,1")
    for caches in (swapped, (*FULL, *DRAWN, *BARE), (*FULL, *DRAWN, *BARE, "--cache-weights", "2,1,1"), FULL):
        refusal = start(bench, "whole", "--micro-batch-size", 2, caches=caches).refusal()
        assert "--cache" in refusal and "name another --out" in refusal


def test_what_cannot_be_mixed_is_refused_by_name_in_one_line(bench):
    text = ("--data", "corpus", "--num-workers", 0, "--precision", "fp32", "--num-sequences", 8)
    made = ("cache-teacher", "--teacher", "teacher", *text, "--validation-sequences", 4, "--top-k", 4)
    bench.run(*made, "--out", "longer", "--seq-len", 48).ok()
    bench.run(*made, "--out", "masked", "--seq-len", 32, "--document-mask").ok()
    cases = {
        (*FULL, "--cache", "longer"): "cache and longer cannot be mixed: one has sequences of 32 tokens, the other",
        (*FULL, "--cache", "masked"): "one has a document mask: no, the other a document mask: yes",
        (*FULL, "--cache", "./cache"): "cache and cache are the same; name it once",
        (*FULL, *DRAWN, "--cache-weights", "3"): "has 1 number for 2 caches; give one each",
        (*FULL, "--cache-weights", "3"): "is for several --cache; leave it out",
        (*FULL, *DRAWN, "--cache-weights", "3,0"): "--cache-weights 0.0 must be above 0",
        (*FULL, *DRAWN, "--cache-weights", "3;1"): "--cache-weights 3;1: a number is wanted",
        (*FULL, *DRAWN, "--cache-weights", "1000,1"): "weight 1 of member 2 gives it no sequence in an epoch of 60",
        (*FULL, "--cache", "nowhere"): "--cache nowhere: no cache is there",
        (*FULL, *DRAWN, "--temperature", "2"): "leave the cache's range of 1 to 1",
        (*FULL, *DRAWN, "--divergence", "reverse-kl"): "--divergence reverse-kl",
    }
    for caches, said in cases.items():
        done = start(bench, "refused", caches=caches)
        assert done.code == 2 and said in done.refusal(), (caches, done.stderr)
    assert not (bench.root / "refused").exists()


def test_a_mixture_is_tried_out_and_checked_like_a_run(bench):
    plan = start(bench, "tried", "--dry-run", "--json").json
    assert [each["name"] for each in plan["caches"]] == list(SIZES) and plan["sequences"]["train"] == 76
    checks = {each["check"]: each["verdict"] for each in start(bench, "tried", "--sanity", "--json").json["checks"]}
    assert checks["gradients"] == checks["resume"] == "ok"
    assert not (bench.root / "tried").exists()


def test_inspect_compare_and_the_report_show_each_cache(bench, whole):
    page = bench.run("inspect", "whole").ok().stdout
    assert all(f"\n{name} " in page for name in SIZES) and "share of the draws" in page
    assert bench.run("inspect", "whole", "--json").json["caches"] == [
        {name: value for name, value in each.items() if name not in OF_A_RESULT} for each in whole["caches"]
    ]
    bench.run("compare", "whole", "plain").ok()
    bench.run("report", "whole", "--out", "report.html").ok()
    report = (bench.root / "report.html").read_text()
    assert all(each["digest"][:8] in report or each["name"] in report for each in whole["caches"])


OF_A_RESULT = ("passes", "first_validation_loss", "last_validation_loss", "teacher_validation_loss")
