"""The demo: what its commands, its table, its pictures and its record promise, and one small run of all of it."""

import ast
import importlib.util
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import figures, tables
from benchmarks.harness import FIGURES, RESULTS, command
from benchmarks.science import demo as published
from kdtrain.commands import demo, demo_pictures, demo_table
from kdtrain.config import CodecConfig, ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.files import sealed, temporary_name
from kdtrain.objective.metrics import Metrics
from kdtrain.training.validate import calibration

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "teachers" / "stdlib-5m"


def run_of(kind: str, seed: int, loss: float, kl: float) -> dict:
    return {
        "student": kind,
        "seed": seed,
        "step": 100,
        "tokens": 409_600,
        "seconds": 20.0,
        "tokens_per_second": 25_000.0,
        "validation": {
            "step": [0, 50, 100],
            "loss": [7.5, loss + 0.5, loss],
            "kl": [5.0, kl + 0.5, kl],
            "teacher_loss": [2.5, 2.5, 2.5],
        },
        "test": {
            "loss": loss,
            "perplexity": 30.0,
            "accuracy": 0.4,
            "ece": 0.02,
            "kl": kl,
            "agreement": 0.6,
            "acceptance": 0.7,
            "teacher_loss": 2.5,
            "tokens": 1000.0,
        },
        "calibration": [{"tokens": 10.0 * i, "confidence": (i + 0.5) / 15, "accuracy": i / 15} for i in range(15)],
    }


def result_of(seeds: int = 1) -> dict:
    runs = [run_of("cross-entropy", seed, 3.5 + seed / 10, 1.0) for seed in range(seeds)]
    runs += [run_of("distilled", seed, 3.3 + seed / 10, 0.7) for seed in range(seeds)]
    environment = {"date": "2026-01-01", "python": "3.11.7", "torch": "2.13.0", "cpu": "a processor", "threads": 2}
    return {
        "settings": {"student": "students/stdlib-1m.toml", "steps": 100},
        "environment": {**environment, "device": "cpu", "precision": "bf16"},
        "cache": {"bytes_per_token": 45.9, "sequences": {"train": 100}, "tokens": {"train": 25_600}},
        "runs": runs,
    }


def cells(result: dict) -> dict[str, list[str]]:
    return {name: rest for name, *rest in demo_table.rows(result)}


def test_the_two_students_differ_in_the_objective_and_in_nothing_else():
    kinds = {kind: demo.distill_config(Path("demo/a"), kind, 3, demo.Settings()) for kind in demo_table.KINDS}
    assert {kind: each.objective.alpha for kind, each in kinds.items()} == {"cross-entropy": 0.0, "distilled": 0.9}
    assert replace(kinds["cross-entropy"], objective=ObjectiveConfig()) == kinds["distilled"], "the demo shows defaults"
    assert kinds["distilled"].seed == 3


def test_the_demo_caches_with_the_defaults_and_measures_on_text_that_nobody_learned_from():
    cache = demo.cache_config(Path("demo"), demo.Settings())
    assert (cache.codec, cache.data.num_sequences) == (CodecConfig(), demo.Settings().sequences)
    assert demo.evaluate_config(Path("demo/a"), demo.Settings()).data.split == "test"


def test_one_seed_is_shown_as_it_is_and_several_as_mean_and_deviation():
    assert cells(result_of(1))["test loss"] == ["3.5000", "3.3000", "2.5000"]
    assert cells(result_of(3))["test loss"] == ["3.6000 ± 0.1000", "3.4000 ± 0.1000", "2.5000"]


def test_the_table_shows_the_cache_of_the_distilled_student_alone():
    shown = cells(result_of())
    assert shown["bytes a token of the cache"][:2] == ["-", "45.9"]


def test_validation_figures_are_those_of_the_step_with_the_lowest_loss():
    result = result_of()
    result["runs"][0]["validation"] |= {"loss": [7.5, 3.1, 3.4], "kl": [5.0, 0.9, 0.8]}
    shown = cells(result)
    assert shown["validation loss (nats a token)"][0] == "3.1000"
    assert shown["validation KL to the teacher (estimated from samples)"][0] == "0.9000"


def test_the_verdict_counts_a_seed_only_if_loss_and_kl_are_both_better():
    result = result_of(3)
    assert "better in both at 3 of 3 seeds" in demo_table.verdict(result)
    assert "validation loss -0.2000, estimate of the KL to the teacher -0.3000" in demo_table.verdict(result)
    result["runs"][-1]["validation"]["kl"][-1] = 1.2
    assert "better in both at 2 of 3 seeds" in demo_table.verdict(result)


def test_filling_the_readme_changes_what_is_between_the_markers_and_nothing_else():
    begin, end = "<!-- demo-table -->", "<!-- /demo-table -->"
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    filled = tables.fill(page, tables.demo(result_of(3)), "demo-table")
    assert filled.startswith(f"before\n{begin}\n| |") and filled.endswith(f"{end}\nafter\n")
    assert "old" not in filled and "(../benchmarks/figures/demo-calibration.png)" in filled
    assert tables.fill(filled, "new", "demo-table") == page.replace("old", "new")
    with pytest.raises(ValueError, match="demo-table"):
        tables.fill("a page without markers", "new", "demo-table")


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_shows_the_published_records_and_no_others(name):
    page = filled = tables.PAGES[name].read_text()
    for marker, block in tables.current(name).items():
        filled = tables.fill(filled, block, marker)
    assert filled == page


def test_the_terminal_shows_table_and_verdict(capsys):
    demo_table.show(result_of())
    shown = capsys.readouterr().out
    assert "test KL to the teacher" in shown and "better in both at 1 of 1 seed." in shown


def test_the_pictures_are_drawn_from_the_record_alone(tmp_path):
    record = json.loads(json.dumps(result_of(3)))
    (tmp_path / "figures").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "figures" / "demo-calibration.png").symlink_to(tmp_path / "mine")
    pictures = demo_pictures.draw_demo(record, tmp_path / "figures")
    assert [picture.name for picture in pictures] == ["demo-learning-curves.png", "demo-calibration.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert (tmp_path / "mine").read_text() == "mine", "nothing is written through a link"


def test_the_learning_curve_is_the_mean_over_seeds_without_the_untrained_student():
    axes = demo_pictures.learning_curves(result_of(3)).axes[0]
    strong = {line.get_label(): line for line in axes.lines}
    assert list(strong["distilled"].get_xdata()) == [50, 100]
    assert strong["distilled"].get_ydata() == pytest.approx([3.9, 3.4])
    assert len(axes.lines) == 2 * (3 + 1) + 1


def test_calibration_over_seeds_is_weighted_by_tokens():
    one = [{"tokens": 1.0, "confidence": 0.0, "accuracy": 1.0}]
    three = [{"tokens": 3.0, "confidence": 0.4, "accuracy": 0.0}]
    assert demo_pictures.pooled([one, three]) == [{"tokens": 4.0, "confidence": pytest.approx(0.3), "accuracy": 0.25}]
    empty = [{"tokens": 0.0, "confidence": 0.0, "accuracy": 0.0}]
    assert demo_pictures.pooled([empty, empty]) == empty


def test_the_bins_of_an_evaluation_give_back_its_calibration_error():
    metrics = Metrics(
        tokens=10.0,
        bin_count=(4.0, 6.0, *[0.0] * 13),
        bin_confidence=(0.2, 0.6, *[0.0] * 13),
        bin_correct=(1.0, 0.0, *[0.0] * 13),
    )
    bins = calibration(metrics)
    gaps = sum(each["tokens"] * abs(each["accuracy"] - each["confidence"]) for each in bins) / metrics.tokens
    assert len(bins) == 15 and gaps == pytest.approx(metrics.ece())


def test_a_result_is_published_only_by_the_default_settings_at_three_seeds():
    def place(**changes):
        return published.places(published.Demo(out=Path("mine"), **changes))

    assert place(seeds=3) == place(seeds=4) == (RESULTS / "demo.json", FIGURES)
    assert place(seeds=1) == place(seeds=2) == (Path("mine/demo.json"), Path("mine"))
    assert place(seeds=3, settings=demo.Settings(steps=7)) == (Path("mine/demo.json"), Path("mine"))


def test_a_demo_goes_on_in_its_own_folder_and_in_no_other(tmp_path):
    demo.claim(tmp_path / "demo", demo.Settings())
    demo.claim(tmp_path / "demo", demo.Settings())
    with pytest.raises(UsageError, match=f"other settings \\(steps was {demo.Settings().steps}\\)"):
        demo.claim(tmp_path / "demo", demo.Settings(steps=7))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        demo.claim(tmp_path / "letters", demo.Settings())
    (tmp_path / "killed").mkdir()
    temporary_name(tmp_path / "killed" / "settings.json").write_text("{")
    demo.claim(tmp_path / "killed", demo.Settings())
    (tmp_path / "demo" / "settings.json").write_text("[1")
    with pytest.raises(UsageError, match="name another --out"):
        demo.claim(tmp_path / "demo", demo.Settings())


def test_a_damaged_record_of_a_student_is_refused_by_its_file(tmp_path):
    file, run = tmp_path / "cross-entropy-0.json", run_of("cross-entropy", 0, 3.0, 1.0)
    demo.publish(file, sealed(run))
    assert demo.recorded(file, "cross-entropy", 0) == run
    for text, line in (
        ("[1", "Expecting"),
        (file.read_text().replace("2.5", "2.4", 1), "does not match its own digest"),
        (json.dumps(sealed(run | {"seed": 1}), indent=1) + "\n", "it is of cross-entropy, seed 1"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=f"cross-entropy-0.json: .*({line}).*; remove it"):
            demo.recorded(file, "cross-entropy", 0)


def test_a_command_that_fails_ends_the_demo_with_its_exit_code():
    with command.Kdtrain() as kdtrain, pytest.raises(SystemExit) as ended:
        kdtrain("no-such-command")
    assert ended.value.code == 2


def test_a_record_names_no_place_on_this_machine(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "environment.json").write_text(
        '{"threads": 2, "device": "cpu", "mode": "bf16", "platform": "Linux-of-ours"}'
    )
    assert set(command.environment(run)) == {"date", "python", "torch", "cpu", "threads", "device", "precision"}


SMALL = """
import runpy, sys
from kdtrain.commands import demo
demo.QUICK = demo.Settings(
    teacher="stdlib-5m", sequences=48, validation_sequences=8, test_sequences=8, seq_len=64, steps=20, eval_freq=10,
    compile=False,
)
runpy.run_module("kdtrain", run_name="__main__", alter_sys=True)
"""


def test_a_demo_that_is_interrupted_goes_on_and_shows_its_table_and_pictures(server, tmp_path):
    words, said = ["demo", "--quick", "--out", "demo"], tmp_path / "said"
    (first,) = server.begin(Path("-c"), [SMALL, *words], tmp_path, said)
    begun = time.monotonic()
    while not (said := tmp_path / "said.0.err").exists() or "step 1/20" not in said.read_text():
        assert time.monotonic() - begun < 500
        time.sleep(0.02)
    os.kill(first, signal.SIGINT)
    codes, _ = server.end()
    after = (tmp_path / "said.0.err").read_text().partition("step 1/20")[2]
    assert codes == [1] and "stopped by SIGINT" in after and "the same command resumes" in after, after

    (done,) = server.run("-c", SMALL, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr and "test KL to the teacher" in done.stdout
    result = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert [(run["student"], run["step"]) for run in result["runs"]] == [("cross-entropy", 20), ("distilled", 20)]
    assert all(run["validation"]["step"] == [0, 10, 20] for run in result["runs"])
    assert all(sum(bin["tokens"] for bin in run["calibration"]) == run["test"]["tokens"] for run in result["runs"])
    pictures = {path.name for path in (tmp_path / "demo").glob("*.png")}
    assert pictures == {"demo-learning-curves.png", "demo-calibration.png"}

    (again,) = server.run("-c", SMALL, *words, "--json", folder=tmp_path)
    assert json.loads(again.stdout) == result and "step " not in again.stderr


def test_a_demo_without_matplotlib_says_how_to_get_pictures(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    said: list[str] = []
    monkeypatch.setattr(demo.log, "info", said.append)
    assert demo.draw(result_of(), tmp_path) == [] and "pip install 'kdtrain[plot]'" in said[0]


def test_the_published_temperatures_end_where_the_page_says_and_are_drawn_from_the_record_alone(tmp_path):
    record = json.loads((RESULTS / "temperature.json").read_text())
    for path in [*record["frozen"], *record["training"]]:
        assert (path["bound"] is not None) == (path["mode"] == "minimize")
    ends = {(path["mode"], path["start"]): path["T"][-1] for path in record["frozen"]}
    (top,) = [each["top"] for each in record["curves"][:6] if (each["step"], each["targets"]) == (100, "cache")]
    for (mode, _), end in ends.items():
        expected = {"adversarial": top, "likelihood": 1.08}.get(mode)
        assert expected is None or end == pytest.approx(expected, rel=0.02)
    (picture,) = figures.draw_temperature(record, tmp_path)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_takes_from_the_library_is_there(path):
    """Without running it: a script registers things, and many need a machine of their own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kdtrain":
            exec(ast.unparse(node), {})
