"""`compare` and `plot`: what they show of runs, of anyone's, and what they refuse in one line."""

import json
import sys

import pytest

from kdtrain.monitor import figures
from kdtrain.monitor.runs import grouped, read_runs
from tests.logged_runs import write_lines, write_run, write_three


@pytest.fixture
def folders(tmp_path):
    return write_three(tmp_path)


def test_compare_shows_what_differs_and_marks_what_seeds_do_not_explain(workbench, folders):
    code, out, err = workbench.call("compare", *folders)
    assert (code, err) == (0, "")
    row = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 3}
    assert "0.9" in row["--alpha"] and "0.5" in row["--alpha"] and "--seed" not in out
    assert "2.0050 ± 0.0071" in row["last validation loss, nats"] and "2.9000" in row["last validation loss, nats"]
    assert "+0.8950 *" in out and "* beyond what the seeds explain" in out
    numbers = workbench.json("compare", *folders)["groups"][1]["numbers"]
    assert numbers["last_validation_loss"]["beyond_seeds"] is True and numbers["tokens"]["beyond_seeds"] is None


def test_compare_of_one_seed_says_so_and_marks_nothing(workbench, folders):
    code, out, _ = workbench.call("compare", *folders[1:])
    assert code == 0 and "one seed only" in out and " *" not in out


@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_writes_the_same_bytes_again_and_never_over_a_file_unasked(workbench, folders, tmp_path, ending, begins):
    words = (
        "plot",
        *folders,
        "--out",
        tmp_path / f"f.{ending}",
        "--x",
        "minutes",
        "--y",
        "validation/loss,temperature",
    )
    assert workbench.json(*words)["curves"] == ["a0: 2 runs, seeds 0, 1", "b: seed 0"]
    first = (tmp_path / f"f.{ending}").read_bytes()
    code, _, err = workbench.call(*words)
    assert code == 2 and "add --overwrite" in err
    workbench.json(*words, "--overwrite")
    assert first.startswith(begins) and (tmp_path / f"f.{ending}").read_bytes() == first


def test_a_plot_has_units_distinct_looks_interventions_and_precision(folders):
    groups = grouped(read_runs(folders))
    figure = figures.draw(groups, "tokens", ["validation/loss", "temperature"])
    loss, temperature = figure.axes
    assert (loss.get_ylabel(), temperature.get_xlabel()) == ("nats a token", "tokens")
    labels = [each.get_text() for each in figure.legends[0].get_texts()]
    assert labels == ["a0 (2 seeds)", "b", "rollback", "switch", "resume", "quantised (foot)"]
    marks = {line.get_marker(): line.get_xdata()[0] for line in temperature.get_lines() if len(line.get_xdata()) == 1}
    assert (marks["v"], marks["D"], marks[">"]) == (2000, 3000, 1000)
    bars = [list(line.get_xdata()) for line in loss.get_lines() if line.get_linewidth() == 3]
    assert bars == [[0, 1000]] * 3
    looks = figures.looks(groups * 4)
    assert len({each[0] for each in looks}) == len({each[1] for each in looks}) == 8
    assert figure.get_size_inches()[0] == 3.5


def test_a_name_is_no_formula_and_a_long_curve_is_thinned():
    assert (
        figures.literal("a$x$") == r"a\$x\$" and figures.literal("_b") == " _b" and len(figures.literal("x" * 99)) == 48
    )
    points = [(step, 2.0 * step) for step in range(10_001)]
    thin = figures.thinned(points)
    assert len(thin) <= figures.MOST_POINTS and thin[-1][0] == 10_000 and figures.thinned(points[:9]) == points[:9]


def test_numbers_that_no_run_writes_leave_the_curves_of_the_others(workbench, tmp_path, folders):
    odd = write_run(tmp_path / "odd", seed=9)
    write_lines(odd / "metrics.jsonl", [{"step": 41, "loss": 1e308, "tokens": 1e308, "tok/s_last": 1e-300}])
    write_lines(odd / "metrics.jsonl", [{"step": step, "loss": 2.0, "tokens": None} for step in (42, 43)])
    places = read_runs([odd])[0].record.places("tokens")
    assert places[40] == 4000 and max(places.values()) == 4000 and 43 in places
    for axis in ("steps", "tokens", "minutes"):
        workbench.json("plot", odd, "--out", tmp_path / f"{axis}.png", "--y", "loss,quantized", "--x", axis)


def test_a_quantised_stretch_is_drawn_at_its_own_steps_where_others_are_missing(tmp_path):
    run = write_run(tmp_path / "run")  # quantised up to step 10
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [each for each in logged if not 3 <= each["step"] <= 6]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))
    write_lines(run / "metrics.jsonl", [{"step": step, "loss": 2.0, "quantized": 1.0} for step in (60, 61)])
    (group,) = grouped(read_runs([run]))
    axes = figures.draw([group], "steps", ["loss"]).axes[0]
    bars = [[float(x) for x in line.get_xdata()] for line in axes.get_lines() if line.get_linewidth() == 3]
    assert bars == [[0, 10], [60, 61]]


@pytest.mark.parametrize(
    "words, says",
    [
        (("compare",), "no run to compare"),
        (("compare", "nowhere"), "nowhere: it does not exist"),
        (("compare", "text.txt"), "text.txt is a file; name the folder of a run"),
        (("compare", "cache"), "cache is not a run"),
        (("plot", "{run}", "--out", "f.gif"), "ends in none of .png, .svg and .pdf"),
        (("plot", "{run}", "--out", "f.png", "--y", "validation/los"), "perhaps you meant 'validation/loss'"),
        (("plot", "{run}", "--out", "none/f.png"), "the folder none does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(workbench, folders, words, says):
    code, _, err = workbench.call(*(word.format(run=folders[0]) for word in words))
    assert code == 2 and says in err and err.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(workbench, folders, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = workbench.call("plot", folders[0], "--out", tmp_path / "f.png")
    assert code == 2 and "pip install 'kdtrain[plot]'" in err
