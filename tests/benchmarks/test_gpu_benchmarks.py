"""The GPU benchmarks: sections run on small shapes, calls with a budget add up, and the page quotes the records."""

import importlib
import itertools
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import tables
from benchmarks.harness import CPU_SECTIONS, RESULTS, SECTIONS, machine, models, profiling, sections, timing
from benchmarks.harness import record as records
from benchmarks.harness.bench import Bench, Tokens
from benchmarks.harness.record import Goal, Options, Record, attempt
from benchmarks.performance import adaptive, fp8, objective, objective_sides
from kdtrain import faults
from kdtrain.objective.engine import kernels
from teachers import make_teacher as make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def options(tmp_path):
    return Options(device=torch.device("cpu"), out=tmp_path, tiny=True, compile=False)


@pytest.fixture(scope="module")
def tiny(server, tmp_path_factory):
    """Run all sections once, as `all --tiny --device cpu` does."""
    out = tmp_path_factory.mktemp("gpu")
    command = ("-m", "benchmarks.performance", "all", "--tiny", "--device", "cpu", "--profile", "--out", out)
    (done,) = server.run(*command, "--budget", "3000", TRACED="1")  # however busy the machine is
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in SECTIONS}


def test_every_section_ends_in_a_record_without_a_failure(tiny):
    for name, record in tiny.items():
        assert (record["section"], record["tiny"], record["finished"], record["left"]) == (name, True, True, [])
        assert record["figures"] and not any("failed" in figure for figure in record["figures"].values())
        assert record["commits"].keys() == record["figures"].keys()
        assert record["machine"]["libraries"]["torch"] == version("torch")
        assert {"date", "settings"} <= record.keys()


def test_small_steps_say_what_large_ones_will(tiny):
    figures = tiny["step"]["figures"]
    for side in ("cross-entropy", "sparse-4", "sparse-12", "samples-50", "dense", "online"):
        assert all(figures[f"32 {side}"][name] > 0 for name in ("tokens_a_second", "tflops"))
    assert figures["32 cross-entropy"]["rate"] == 1 and figures["32 sparse-12"]["rate"] > 0
    # a forward of a teacher that is as large as the student, beside three of the student's
    online = figures["32 online"]
    assert online["speed_up"] / online["of_flops"] == pytest.approx(4 / 3)
    profile = figures["32 cross-entropy profile"]
    assert profile["kernels"] and profile["busy_ms"] <= profile["span_ms"]


def test_a_side_of_the_objective_is_compared_with_cross_entropy_or_says_what_it_lacks(tiny):
    figures = tiny["objective"]["figures"]
    for name in ("products", "kdtrain-sparse-12", "kdtrain-samples-50", "kdtrain-jsd-online"):
        assert figures[f"64 32 {name}"]["over_cross_entropy"] > 0
    for name in objective.OURS:
        figure = figures[f"64 32 {name}"]
        assert re.search("is not installed|needs a GPU", figure.get("missing", "")) or figure["ours_over_it"] > 0
        if name in objective_sides.ON_GPU and not torch.cuda.is_available():
            assert f"{name} needs a GPU" in figure["missing"]


def test_a_small_run_switches_four_times_and_compiles_nothing_behind_its_warm_up(tiny):
    found = tiny["adaptive"]["figures"]["adaptive"]
    assert found["switches"] >= 4 and set(found["modes"]) == {"fp8", "bf16"}
    assert tiny["adaptive"]["settings"]["compile"] and found["compiled_after_warm_up"] == 0
    assert found["warm_up_graphs"] >= 2


def test_small_caches_and_saves_are_measured(tiny):
    cache, saves = tiny["cache"]["figures"], tiny["checkpoint"]["figures"]
    sizes = [cache[name]["bytes_a_token"]["total"] for name in ("read-4", "read-samples-8", "read-dense")]
    assert 0 < 10 * sizes[0] < sizes[2] and 0 < 10 * sizes[1] < sizes[2]
    for codec in ("4", "samples-8"):
        assert cache[f"build-tiny-{codec}"]["built_over_bare"] > 0 and cache[f"encode-{codec}"]["tokens_a_second"] > 0
        assert {"read", "held"} == cache[f"step-{codec}"]["seconds"].keys()
    assert {"stall", "total", "taken"} <= saves["background"].keys() and saves["in_place"]["stall"] > 0
    assert tiny["teacher"]["figures"]["trained"]["steps"] == 2


def test_a_goal_is_met_or_missed_or_was_not_measured():
    fast, small = Goal("fast", "a.b", least=1.5), Goal("small", "c", most=2)
    assert [fast.verdict(value) for value in (1.5, 1.4, None)] == ["met", "missed", "not measured"]
    assert [small.verdict(value) for value in (2, 2.01, float("nan"))] == ["met", "missed", "missed"]
    assert [fast.verdict(1.48, doubt) for doubt in (0.01, 0.03)] == ["missed", "too close to tell"]


def test_a_goal_is_too_close_to_tell_within_two_standard_errors():
    times = {"cross-entropy": [1.0, 1.0, 1.0, 1.0], "sparse-12": [1.00, 1.02, 1.04, 1.06]}
    shown = tables.gpu({"step": record_of({"2048 sparse-12": {"rate": 0.975, "seconds": times}})})
    assert "| ≥ 0.97 | 0.975 ± 0.024 | too close to tell |" in shown
    assert "Of these goals: 0 met, 0 missed, 1 too close to tell." in shown


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="a script stands for nvidia-smi")
def test_a_figure_of_a_gpu_comes_with_clocks_and_power_and_one_of_a_cpu_without(options, tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\necho "$*" >> "$0.log"\necho "1980, 3201, 650.5, 60"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with machine.watched(torch.device("cuda")) as card:
        assert card == {}
    assert card == {"sm_mhz": [1980.0] * 3, "memory_mhz": [3201.0] * 3, "watts": [650.5] * 3, "celsius": [60.0] * 3}
    assert "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu" in Path(f"{script}.log").read_text()
    monkeypatch.setattr(records, "watched", lambda device: nullcontext({"watts": [1.0, 2.0, 3.0]}))
    monkeypatch.setattr(kernels, "choices", {"logits of 2048, torch.bfloat16": "triton"})
    made = Record("step", options, {})
    made.measure("a", lambda: {"value": 1})
    assert made.data["card"] == {"a": {"watts": [1.0, 2.0, 3.0]}}
    assert made.data["kernels"]["logits of 2048, torch.bfloat16"] == "triton"
    again = Record("step", replace(options, earlier=options.out), {})
    assert again.data["card"] == made.data["card"] and again.data["kernels"] == made.data["kernels"]
    with machine.watched(torch.device("cpu")) as card:
        pass
    assert card == {}


def test_ratios_are_medians_within_rounds_and_sides_take_turns():
    times = {"a": [2.0, 4.0, 9.0], "b": [1.0, 4.0, 3.0]}
    assert timing.over(times, "a", "b") == 2.0
    order = []
    timing.in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, torch.device("cpu"), warm=1)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    del order[:]
    timing.in_turn({"a": lambda: order.append("a")}, 2, torch.device("cpu"), warm=0, calls=3)
    assert "".join(order) == "aaa" + "aaa"


def ceilings(out, *more):
    return sections.main(["ceilings", "--tiny", "--device", "cpu", "--out", str(out), *map(str, more)])


def read(folder):
    return json.loads((folder / "ceilings.json").read_text())


def test_calls_with_a_budget_measure_a_section_piece_by_piece(tmp_path, monkeypatch, capsys):
    # every measurement takes 100 s by this clock, which is read when a call starts and before each of them
    ticks = itertools.count(step=100)
    monkeypatch.setattr(records, "monotonic", lambda: next(ticks))
    first, second, third = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    assert ceilings(first, "--budget", 250) == 0
    cut = read(first)
    assert list(cut["figures"]) == ["products in bf16", "products in fp32"] and not cut["finished"]
    assert cut["left"] == ["products in fp8", "memory", "from pinned memory", "from pageable memory"]
    assert "left, for the next call: products in fp8, memory" in capsys.readouterr().out
    assert ceilings(second, "--budget", 250, "--from", first) == 0
    assert ceilings(third, "--budget", 1000, "--from", second, "--commit", "later") == 0
    full = read(third)
    assert full["finished"] and not full["left"] and list(full["figures"]) == [*cut["figures"], *cut["left"]]
    assert full["figures"].items() > read(second)["figures"].items() > cut["figures"].items()
    assert full["commits"]["memory"] != "later" and full["commits"]["from pageable memory"] == "later"


@pytest.mark.parametrize(
    "changes, taken",
    [
        ({"date": "2001-01-01"}, True),
        ({"settings": {"n": 2}}, False),
        ({"tiny": False}, False),
        ({"machine": {"device": "another", "libraries": {"torch": torch.__version__}}}, False),
        ({"machine": {"device": None, "libraries": {"torch": "1.0"}}}, False),
    ],
)
def test_figures_are_taken_over_from_the_same_device_torch_and_settings_alone(options, tmp_path, changes, taken):
    made = Record("step", replace(options, commit="earlier"), {"n": 1})
    made.put("a", {"value": 1})
    made.put("b", {"missing": "a library"})
    made.put("c", {"failed": "an error"})
    made.put("d", {"does_not_fit": "too large"})
    made.put("e", {"wrong": "it was something else", "measured": {"value": 1}})
    write = {**made.data, **changes}
    if write["machine"]["device"] is None:
        write["machine"]["device"] = made.data["machine"]["device"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "step.json").write_text(json.dumps(write))
    again = Record("step", replace(options, earlier=tmp_path / "old", commit="now"), {"n": 1})
    assert list(again.figures) == (["a", "d"] if taken else [])
    measured = []
    for name in "abcde":
        again.measure(name, lambda name=name: measured.append(name) or {"value": 2})
    assert measured == (["b", "c", "e"] if taken else [*"abcde"])
    assert again.data["commits"]["a"] == ("earlier" if taken else "now") and again.data["commits"]["b"] == "now"


def test_a_measurement_of_minutes_does_not_begin_at_the_end_of_a_budget(options):
    record = Record("step", replace(options, budget=100.0), {})
    record.measure("long", lambda: {"value": 1}, needs=99.999)
    record.measure("short", lambda: {"value": 1})
    assert record.data["left"] == ["long"] and list(record.figures) == ["short"]


def test_sections_share_a_budget_and_run_in_processes_of_their_own(options, capsys):
    assert sections._apart(("ceilings", "step"), replace(options, budget=0.0)) == 0
    shown = capsys.readouterr().out
    assert "ceilings: all of it is left" in shown and "step: all of it is left" in shown
    assert not list(options.out.glob("*.json"))
    assert sections._apart(("ceilings",), options) == 0
    assert read(options.out)["finished"]


def test_the_side_of_samples_is_their_forward_kl_at_a_temperature_of_one_beside_cross_entropy():
    student = objective_sides.make_student(16, 8, 400, torch.float32, compile=False)
    targets = objective_sides.sampled_targets(student, 50)
    assert (targets.counts.sum(1) == 50).all() and targets.top_k == 0 and targets.num_samples == 50
    logits_NV, share_NK = student.logits().detach(), targets.counts / 50
    cross_entropy = torch.nn.functional.cross_entropy(logits_NV, student.labels_N)
    log_q_NK = logits_NV.log_softmax(-1).gather(1, targets.ids)
    kl = (torch.xlogy(share_NK, share_NK) - share_NK * log_q_NK).sum(1).mean()
    found = objective_sides.side("kdtrain-samples-50", student)()
    assert float(found) == pytest.approx(float(0.1 * cross_entropy + 0.9 * kl), rel=1e-5)


def test_a_side_without_memory_does_not_fit_and_leaves_the_next_side_as_it_was(options, monkeypatch):
    tokens = Tokens(torch.arange(34).view(2, 17), options.device)

    def losses(oom):
        student = models.make_student("tiny", options.device)
        bench = Bench(student, replace(options, out=options.out / str(oom)), vocab_size=2048, seq_len=16, batch=2)
        monkeypatch.setenv("KDTRAIN_FAULT", "train.after-micro-batch:oom:1" if oom else "")
        faults.read()
        first = attempt(bench.steps(tokens)) if oom else {}
        assert not oom or faults._fired == {"train.after-micro-batch"}
        side = bench.steps(tokens)
        return first, bench.trainer.stepper.micros, [side()["loss"] for _ in range(2)]

    (failed, micros, after), (_, _, alone) = losses(oom=True), losses(oom=False)
    monkeypatch.undo()
    faults.read()
    assert list(failed) == ["does_not_fit"] and "micro-batches of 2 sequences" in failed["does_not_fit"]
    assert micros == 1 and after == alone


def test_a_section_that_lacks_a_library_says_so_and_fails_nobody(options, monkeypatch):

    def without(name):
        raise ModuleNotFoundError("No module named 'hdf5plugin'")

    monkeypatch.setattr(sections.importlib, "import_module", without)
    assert sections._run("step", options) == 0
    monkeypatch.undo()
    found = json.loads((options.out / "step.json").read_text())
    assert found["figures"] == {"section": {"missing": "ModuleNotFoundError: No module named 'hdf5plugin'"}}


def test_what_fails_is_written_down_and_does_not_end_the_section(options):
    record = Record("step", options, {})

    def fail(error):
        raise error

    record.measure("a", lambda: fail(ImportError("No module named 'x'")))
    record.measure("b", lambda: fail(torch.OutOfMemoryError("CUDA out of memory")))
    assert record.finish() == 0
    record.measure("c", lambda: fail(ValueError("two\nlines")))
    record.measure("d", lambda: {"value": 1.0})
    assert record.finish() == 1
    found = json.loads(record.path.read_text())["figures"]
    assert [list(value) for value in found.values()] == [["missing"], ["does_not_fit"], ["failed"], ["value"]]
    assert found["c"]["failed"] == "ValueError: two lines"


def test_a_trace_gives_kernels_gaps_and_copies():
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "kernel", "name": "add", "ts": 50, "dur": 100},
        {"ph": "X", "cat": "gpu_memcpy", "name": "HtoD", "ts": 250, "dur": 50},
        {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 0, "dur": 1000},
        {"ph": "M", "name": "process_name"},
    ]
    found = profiling.table(events, ("kernel", "gpu_memcpy", "gpu_memset"), 1, 2)
    assert (found["span_ms"], found["busy_ms"], found["gap_share"]) == (0.3, 0.2, pytest.approx(1 / 3))
    assert found["longest_gaps_ms"] == [0.1] and found["copies_ms"] == {"HtoD": 0.05}
    assert [(each["name"], each["share"]) for each in found["kernels"]] == [("gemm", 0.4), ("add", 0.4)]
    assert "why" in profiling.table([], ("kernel",), 1, 2)


def test_the_cost_of_a_switch_is_that_of_the_first_step_behind_it():
    modes = ["fp8"] * 5 + ["bf16"] * 5 + ["fp8"] * 5
    times = [1.0] * 5 + [2.5] + [2.0] * 4 + [1.25] + [1.0] * 4
    assert adaptive.switch_ms(times, modes) == pytest.approx(375)
    assert adaptive.switch_ms([1.0] * 4, ["fp8"] * 4) is None


def test_fp8s_figures_are_quoted_of_the_fastest_kind():
    slow = {"time": 0.8, "memory": 0.7, "tokens_a_second": 1, "tflops": 2, "peak_gib": 3}
    fast = {**slow, "time": 0.7, "memory": 0.9}
    found = fp8.best({"bf16": {"tflops": 9}, "a": slow, "b": fast, "c": {"missing": "a library"}})
    assert found == {"kind": "b", "time": 0.7, "memory": 0.9, "tokens_a_second": 1, "tflops": 2}
    assert fp8.best({"bf16": {}}) == {}


def test_flops_are_the_products_that_pytorch_counts_and_half_of_the_attentions_square():
    from torch.utils.flop_counter import FlopCounterMode

    student = models.make_student("tiny", torch.device("cpu"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        student.logits(torch.zeros(1, 64, dtype=torch.int64))
    of = models.SHAPES["tiny"]
    attention = of["num_hidden_layers"] * 4 * of["num_attention_heads"] * of["head_dim"] * 64
    # of attention PyTorch counts all on a GPU and nothing on a CPU
    found = models.forward_flops("tiny", 64) * 64 - 64 * attention / 2
    angles = 64 * of["head_dim"]  # of the rotary embedding, which transformers 5.17 makes by a product
    assert counter.get_total_flops() - found in (0, angles)


def test_the_known_shapes_have_as_many_parameters_as_their_names_say():
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, billions in (("1b", 1.236), ("3b", 3.213), ("8b", 8.030)):
        table = dict(models.SHAPES[name])
        config = AutoConfig.for_model(table.pop("model_type"), **table)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


def record_of(figures, **changes):
    machine = {"device": "a card", "driver": "1.2", "cuda": "13.0", "libraries": {"torch": "2.11"}}
    return {
        "section": "step", "tiny": False, "date": "2026-01-01", "machine": machine, "settings": {}, "uncompiled": None,
        "figures": figures, "commits": dict.fromkeys(figures, "abc"), "left": [], "finished": True, **changes,
    }  # fmt: skip


def test_the_page_judges_the_goals_by_the_records():
    sparse = {"tflops": 412.34, "rate": 0.98, "peak_gib": 30.0}
    figures = {
        "2048 sparse-12": sparse,
        "2048 sparse-50": {**sparse, "rate": 0.96},
        "2048 dense": {"does_not_fit": "OutOfMemoryError: 1"},
        "8192 dense": {"wrong": "it was something else", "measured": {"rate": 1.5}},
    }
    fast, slow = ({"3b best": {"kind": "a", "time": time}} for time in (0.85, 0.86))
    shown = tables.gpu({"step": record_of(figures, left=["8192 sparse-12"]), "fp8": record_of(fast)})
    assert "| step | cached, sparse-12: of cross-entropy's rate, T = 2,048 | ≥ 0.97 | 0.98 | met |" in shown
    assert "| step | cached, sparse-50: of cross-entropy's rate, T = 2,048 | ≥ 0.97 | 0.96 | **missed** |" in shown
    assert "cached, dense" not in shown and "Not measured: ceilings, step (9), objective (21), " in shown
    assert "| step | TFLOP/s of the 1 B shape, sparse-12, T = 2,048 | ≥ 400 | 412.3 | met |" in shown
    assert "| fp8 | step time over bf16's, best kind, 3 B | ≤ 0.85 | 0.85 | met |" in shown
    assert "≤ 0.85 | 0.86 | **missed** |" in tables.gpu({"fp8": record_of(slow)})
    assert "Of these goals: 3 met, 1 missed, 0 too close to tell." in shown
    assert (
        "| | TFLOP/s | of cross-entropy's rate | peak GiB |" in shown
        and "| 2048 sparse-12 | 412.3 | 0.98 | 30 |" in shown
    )
    assert "- 8192 dense: withdrawn, it was something else" in shown and "1.5" not in shown
    assert "- 2048 dense: OutOfMemoryError: 1" in shown and "- 8192 sparse-12: not measured yet" in shown
    assert "a card, driver 1.2, torch 2.11, commit abc, 2026-01-01: [step.json](" in shown
    uncompiled = tables.gpu({"step": record_of({}, uncompiled="no gcc")})
    assert "- nothing was compiled: no gcc" in uncompiled and "nothing was compiled" not in shown


def test_a_goal_names_a_figure_of_its_section_and_a_spent_budget_names_them_all(options, tiny, monkeypatch):
    full = replace(options, tiny=False, budget=0.0)
    monkeypatch.setattr(Options, "scratch", property(lambda self: pytest.fail("something is made")))
    for name in CPU_SECTIONS:
        assert importlib.import_module(f"benchmarks.performance.{name}").run(full) == 0
        published = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
        left = json.loads((options.out / f"{name}.json").read_text())["left"]
        assert {each for each in published if not each.startswith("teacher") and "phases" not in each} == {*left}
    monkeypatch.setattr(Options, "on_cpu", False)
    for name in SECTIONS:
        section = importlib.import_module(f"benchmarks.performance.{name}")
        assert section.run(full) == 0
        written = json.loads((options.out / f"{name}.json").read_text())
        assert written["figures"] == {} and written["left"] and not written["finished"]
        numbers = {number for figure in tiny[name]["figures"].values() for number in figure}
        for goal in section.GOALS:
            figure, _, number = goal.figure.partition(".")
            assert figure in (*written["left"], "3b best")
            assert number in numbers | {"gain", "ours_over_it"}  # a teacher is compared, and Liger runs, elsewhere


@pytest.mark.parametrize("changes", [{"tiny": True}, {"machine": {"device": "x86_64", "driver": None}}])
def test_a_record_of_small_shapes_or_of_a_cpu_never_gets_onto_the_page(tmp_path, changes):
    (tmp_path / "step.json").write_text(json.dumps(record_of({}, **changes)))
    with pytest.raises(ValueError, match="no result"):
        tables.gpu_records(tmp_path)


def test_full_shapes_are_refused_on_a_cpu_and_a_device_or_records_that_are_not_there_are_named(tmp_path, capsys):
    assert ceilings(tmp_path, "--from", tmp_path / "nowhere") == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert sections.main(["step", "fp8", "--device", "cpu"]) == 2 and "add --tiny" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert sections.main(["step", "fp8", "--device", "cuda"]) == 2 and "no CUDA device" in capsys.readouterr().err


def test_a_teacher_is_published_only_if_it_is_better(tmp_path, monkeypatch):
    run = tmp_path / "run"
    losses = {str(make.TEACHER.with_suffix(".toml")): 2.2}
    monkeypatch.setattr(make, "kdtrain", lambda *words: {})
    monkeypatch.setattr(
        make, "evaluate", lambda spec, split: {"loss": losses.get(spec, losses["made"]), "perplexity": 1}
    )
    monkeypatch.setattr(make.shutil, "copytree", lambda *_, **__: pytest.fail("published"))
    for losses["made"] in (2.2, 2.3, float("nan")):
        verdict = make.main(["--publish", str(run), "--if-better"])
        assert verdict["published"] is False and verdict["shipped_loss"] == 2.2
    losses["made"] = 2.1
    with pytest.raises(pytest.fail.Exception, match="published"):
        make.main(["--publish", str(run), "--if-better"])


def test_a_longer_recipe_keeps_its_proportions():
    assert make.recipe(4200, 8) == make.RECIPE
    longer = make.recipe(42_000, 64)
    assert (longer["--warmup-steps"], longer["--decay-steps"], longer["--lr"]) == ("2000", "15000", make.RECIPE["--lr"])
