"""The GPU benchmarks: each section runs on small shapes, goals follow from figures, and the page quotes the records."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import figures, tables
from benchmarks.harness import SECTIONS, models, profiling, sections, timing
from benchmarks.harness.record import Goal, Options, Record, failures, judged
from benchmarks.performance import adaptive, fp8
from benchmarks.performance import teacher as teacher_section
from teachers import make_teacher as make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def options(tmp_path):
    return Options(device=torch.device("cpu"), out=tmp_path, tiny=True, compile=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """All sections once, as `all --tiny --device cpu` runs them."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.performance", "all", "--tiny", "--device", "cpu", "--profile"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in SECTIONS}


def test_every_section_ends_in_a_record_without_a_failure(tiny):
    for name, record in tiny.items():
        assert (record["section"], record["tiny"], record["finished"]) == (name, True, True)
        assert failures(record["figures"]) == [] and record["figures"]
        assert record["machine"]["libraries"]["torch"] == torch.__version__
        assert {"date", "commit", "settings", "seconds"} <= record.keys()


def test_no_goal_is_judged_on_a_cpu_although_it_stands_in_the_record(tiny):
    goals = [goal for record in tiny.values() for goal in record["goals"]]
    assert len(goals) > 20 and all(goal["met"] is None for goal in goals)


def test_small_steps_say_what_large_ones_will(tiny):
    found = tiny["step"]["figures"]["32"]
    sides = {"cross-entropy", "sparse-4", "sparse-12", "dense", "online"}
    for figure in ("tokens_a_second", "tflops", "ratio", "seconds_a_step"):
        assert set(found[figure]) == sides and all(value > 0 for value in found[figure].values())
    assert found["ratio"]["cross-entropy"] == 1
    # a forward of a teacher that is as large as the student, beside three of the student's
    assert found["speed_up_of_the_flops"] == pytest.approx(4 / 3)
    profile = tiny["step"]["figures"]["32-profile"]["cross-entropy"]
    assert profile["kernels"] and profile["busy_ms"] <= profile["span_ms"]


def test_a_small_run_switches_four_times_and_compiles_nothing_behind_its_warm_up(tiny):
    found = tiny["adaptive"]["figures"]["adaptive"]
    assert found["switches"] >= 4 and set(found["modes"]) == {"fp8", "bf16"}
    assert tiny["adaptive"]["settings"]["compile"] and found["compiled_after_warm_up"] == 0
    assert found["warm_up_graphs"] >= 2


def test_small_caches_and_saves_are_measured(tiny):
    cache, saves = tiny["cache"]["figures"], tiny["checkpoint"]["figures"]
    sizes = [cache[name]["bytes_a_token"]["total"] for name in ("read-4", "read-dense")]
    assert cache["build-tiny"]["built_over_bare"] > 0 and 0 < 10 * sizes[0] < sizes[1]
    assert {"stall", "total", "taken"} <= saves["background"].keys() and saves["in_place"]["stall"] > 0
    assert tiny["teacher"]["figures"]["trained"]["steps"] == 2


def test_a_goal_is_met_or_missed_by_its_figure_and_by_nothing_else():
    goals = (
        Goal("fast", "a.b", least=1.5),
        Goal("small", "c", most=2),
        Goal("none", "a.x", most=1),
    )
    met = [goal["met"] for goal in judged(goals, {"a": {"b": 1.5}, "c": 2.01}, True)]
    assert met == [True, False, None]
    assert [goal["met"] for goal in judged(goals, {"a": {"b": 1.4}, "c": 2}, True)] == [False, True, None]
    assert [goal["met"] for goal in judged(goals, {"a": {"b": 1.4}, "c": 2}, False)] == [None] * 3


def test_ratios_are_medians_within_rounds_and_sides_take_turns():
    times = {"a": [2.0, 4.0, 9.0], "b": [1.0, 4.0, 3.0]}
    assert timing.over(times, "a", "b") == 2.0
    order = []
    timing.in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, torch.device("cpu"), warm=1)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"


def test_a_section_that_was_cut_short_goes_on_and_one_of_another_setting_begins_anew(options):
    calls = []

    def figure(name):
        return lambda: calls.append(name) or {"value": len(calls)}

    first = Record("step", options, {"n": 1})
    first.measure("a", figure("a"))
    late = Options(**{**vars(options), "budget": -1.0})
    cut = Record("step", late, {"n": 1})
    assert "left_out" in cut.measure("b", figure("b"))
    cut.finish()
    assert not json.loads(cut.path.read_text())["finished"]
    again = Record("step", options, {"n": 1})
    again.measure("a", figure("a"))
    again.measure("b", figure("b"))
    assert calls == ["a", "b"] and again.finish() == 0
    other = Record("step", options, {"n": 2})
    assert other.figures == {}


def test_what_there_is_of_a_figure_is_kept_until_the_figure_comes(options):
    record, seen = Record("step", options, {}), []

    def measured():
        sides = {"a": lambda: None, "b": lambda: None}
        timing.in_turn(sides, 2, options.device, keep=lambda times: record.so_far("x", times))
        seen.append(json.loads(record.path.read_text())["figures"]["so_far"]["x"])
        return 1.0

    record.measure("x", measured)
    assert [len(times) for times in seen[0].values()] == [2, 2]
    assert json.loads(record.path.read_text())["figures"] == {"x": 1.0}


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
    record.measure("d", lambda: 1.0)
    assert record.finish() == 1
    found = json.loads(record.path.read_text())["figures"]
    assert {name: list(value) for name, value in found.items() if isinstance(value, dict)} == {
        "a": ["missing"],
        "b": ["does_not_fit"],
        "c": ["failed"],
    }
    assert found["c"]["failed"] == "ValueError: two lines" and found["d"] == 1.0


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


def test_fp8s_three_figures_are_of_one_kind():
    best = fp8.best
    found = best({"a": {"time": 0.8, "rate": 1.25, "memory": 0.7}, "b": {"time": 0.7, "rate": 1.43, "memory": 0.9}})
    assert found == {"kind": "b", "time": 0.7, "rate": 1.43, "memory": 0.9} and best({}) == {}


def test_flops_are_the_products_that_pytorch_counts_and_half_of_the_attentions_square():
    from torch.utils.flop_counter import FlopCounterMode

    student = models.make_student("tiny", torch.device("cpu"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        student.logits(torch.zeros(1, 64, dtype=torch.int64))
    of = models.SHAPES["tiny"]
    attention = of["num_hidden_layers"] * 4 * of["num_attention_heads"] * of["head_dim"] * 64
    # of attention PyTorch counts all on a GPU and nothing on a CPU
    assert models.forward_flops("tiny", 64) * 64 == counter.get_total_flops() + 64 * attention / 2


def test_the_known_shapes_have_as_many_parameters_as_their_names_say():
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, billions in (("1b", 1.236), ("3b", 3.213), ("8b", 8.030)):
        table = dict(models.SHAPES[name])
        config = AutoConfig.for_model(table.pop("model_type"), **table)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


def record_of(figures, goals=(), **changes):
    machine = {"device": "a card", "driver": "1.2", "cuda": "13.0", "libraries": {"torch": "2.11"}}
    return {
        "section": "step", "tiny": False, "date": "2026-01-01", "commit": "abc", "machine": machine,
        "settings": {}, "uncompiled": None, "figures": figures, "goals": list(goals), "finished": True, "seconds": 1.0,
        **changes,
    }  # fmt: skip


def test_the_page_names_misses_what_was_not_run_and_why():
    figures = {"2048": {"tokens_a_second": {"sparse-12": 12_345.6}}, "8192": {"does_not_fit": "OutOfMemoryError: 1"}}
    goals = (Goal("rate", "2048.tokens_a_second.sparse-12", least=20_000), Goal("other", "x", most=1))
    shown = tables.gpu({"step": record_of(figures, judged(goals, figures, True))})
    assert "| step | rate | ≥ 20,000 | 12,346 | **missed** |" in shown
    assert "| step | other | ≤ 1 | - | not judged |" in shown
    assert "1 of 2 goals missed, 1 not judged." in shown and "Not run on a GPU: ceilings, objective" in shown
    assert "- 8192: OutOfMemoryError: 1" in shown and "| 2048.tokens_a_second.sparse-12 | 12,346 |" in shown
    uncompiled = tables.gpu({"step": record_of({}, uncompiled="no gcc")})
    assert "- nothing was compiled: no gcc" in uncompiled and "nothing was compiled" not in shown
    assert "a card, driver 1.2, torch 2.11, commit abc, 2026-01-01" in shown


def test_the_goals_of_the_page_of_performance_are_judged_as_its_records_say():
    found = tables.gpu_records()
    assert found or tables.NOTHING in tables.PAGES["gpu"].read_text()
    for name, record in found.items():
        section = importlib.import_module(f"benchmarks.performance.{name}")
        assert record["goals"] == judged(section.GOALS, record["figures"], True)


@pytest.mark.parametrize("changes", [{"tiny": True}, {"machine": {"device": "x86_64", "driver": None}}])
def test_a_record_of_small_shapes_or_of_a_cpu_never_gets_onto_the_page(tmp_path, changes):
    (tmp_path / "step.json").write_text(json.dumps(record_of({}, **changes)))
    with pytest.raises(ValueError, match="no result"):
        tables.gpu_records(tmp_path)


def test_the_picture_is_drawn_from_the_records_and_without_any_a_line_says_so(tmp_path, capsys):
    pictures = str(tmp_path / "figures")
    assert figures.main(["gpu", str(tmp_path / "none"), pictures]) == 0
    assert "holds no record of a GPU: nothing is drawn" in capsys.readouterr().out
    assert not (tmp_path / "figures").exists()
    (tmp_path / "step.json").write_text(json.dumps(record_of({"2048": {"tokens_a_second": {"a": 2.0, "b": 3.0}}})))
    assert figures.main(["gpu", str(tmp_path), pictures]) == 0
    assert (tmp_path / "figures" / "gpu.png").read_bytes()[:4] == b"\x89PNG"


def test_full_shapes_are_refused_on_a_cpu_and_a_device_that_is_not_there_is_named(capsys):
    assert sections.main(["step", "--device", "cpu"]) == 2 and "add --tiny" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert sections.main(["all", "--device", "cuda"]) == 2 and "no CUDA device" in capsys.readouterr().err


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
    assert teacher_section.last_pace('{"tok/s": 1.0}\n{"tok/s": 2.5}\n{"validation/loss": 3}\n') == 2.5
