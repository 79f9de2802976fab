"""`compare`, `plot` and `report`: what they show of runs, of anyone's, and what they refuse in one line."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from kdtrain.commands import report
from kdtrain.monitor import figures
from kdtrain.monitor.record import RunRecord
from kdtrain.monitor.runs import grouped, read_runs
from tests.logged_runs import write_lines, write_run


@pytest.fixture
def folders(tmp_path):
    """Two seeds of one setup, and a run of another that was resumed, rolled back and switched."""
    found = [write_run(tmp_path / f"a{seed}", 2 + seed / 100, seed) for seed in range(2)]
    found.append(write_run(tmp_path / "b", 2.9, alpha=0.5))
    events = [
        {"event": "resume", "level": "info", "step": 10},
        {"event": "rollback", "level": "warning", "step": 20, "message": "rolled back to step-00000020"},
        {"event": "switch", "level": "info", "step": 30, "mode": "bf16"},
    ]
    write_lines(found[-1] / "events.jsonl", events)
    for folder in (found[0], found[-1]):
        texts = [{"step": step, "prompt": "def f(", "greedy": f"{folder.name} at {step}"} for step in (20, 40)]
        write_lines(folder / "samples.jsonl", texts)
    return found


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


def test_a_real_run_is_compared_plotted_and_reported(workbench, tmp_path):
    words = ("--student", "student.toml", "--cache", "cache", "--steps", 4, "--eval-freq", 2, *workbench.plain)
    code, _, err = workbench.call("distill", *words, "--out", tmp_path / "run", "--sample-freq", 2)
    assert code == 0, err
    terms = ("--divergence", "jsd:0.3", "--alpha-schedule", "linear", "--alpha-end", 0.5)
    _, _, said = workbench.call("distill", *words, "--out", tmp_path / "other", *terms)
    assert "loss = .9 jsd:0.3 + .1 ce, alpha to 0.5 (linear); val = ce" in " ".join(said.split())
    assert workbench.json("compare", tmp_path / "run")["groups"][0]["numbers"]["kl"]["mean"] > 0
    workbench.json("plot", tmp_path / "run", "--out", tmp_path / "f.pdf", "--y", "validation/loss,lr")
    workbench.json("report", tmp_path / "run", "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "kept</th><td>the 12 most likely entries" in page and "fidelity, of " in page
    assert "KL(full || cache), the tail&#x27;s mass spread evenly: " in page and "<th>1</th><td>ghost</td>" in page
    assert "def " not in page or "<pre>" in page
    assert "greedy" in page and "done 4/4" in page and "fp32 on cpu, 1 rank<" in page
    record = RunRecord.read(tmp_path / "run")
    bins, last = record.calibration, record.validations[-1]
    assert len(bins) == 15 and sum(each["tokens"] for each in bins) == last["validation/tokens"] > 0
    gaps = sum(each["tokens"] * abs(each["accuracy"] - each["confidence"]) for each in bins)
    assert gaps / last["validation/tokens"] == pytest.approx(last["validation/ece"], abs=1e-5)
    assert 'aria-label="reliability"' in page


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


class Parser(HTMLParser):
    """The tags of a page, and everything that a browser would fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.foreign = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name.startswith("on") or (
                name in ("src", "href", "xlink:href", "action") and not value.startswith(("#", "data:"))
            ):
                self.foreign.append((tag, name, value))


def test_a_report_has_every_section_and_loads_nothing(workbench, folders, tmp_path):
    workbench.json("report", *folders, "--out", tmp_path / "r.html", "--title", "A & B")
    page = (tmp_path / "r.html").read_text()
    found = Parser(page)
    assert found.foreign == [] and not found.tags & {"script", "iframe", "object", "embed", "img", "form", "base"}
    assert "<h1>A &amp; B</h1>" in page and "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        *(
            "What was run",
            "From which cache",
            "What differs",
            "Result",
            "Curves",
            "Calibration",
            "Samples side by side",
        ),
        *("Cost", "Interventions and warnings", "What this page does not show"),
    ]
    assert "b at 40" in page and "a0 at 40" in page and "at 20<" not in page
    assert "rolled back to step-00000020" in page and "mode bf16" in page
    assert "no longer there" in page  # the cache that the runs name
    assert not re.search(r"#[0-9a-f]{6}[;\"]", page.partition("</style></head>")[2])  # colours follow the scheme


def test_numbers_that_no_run_writes_leave_the_curves_of_the_others(workbench, tmp_path, folders):
    odd = write_run(tmp_path / "odd", seed=9)
    write_lines(odd / "metrics.jsonl", [{"step": 41, "loss": 1e308, "tokens": 1e308, "tok/s_last": 1e-300}])
    write_lines(odd / "metrics.jsonl", [{"step": step, "loss": 2.0, "tokens": None} for step in (42, 43)])
    code, _, err = workbench.call("report", odd, *folders, "--out", tmp_path / "r.html")
    assert code == 0, err
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
    axes = figures.draw_panel([group], "steps", "loss").axes[0]
    bars = [[float(x) for x in line.get_xdata()] for line in axes.get_lines() if line.get_linewidth() == 3]
    assert bars == [[0, 10], [60, 61]]


def test_a_reliability_diagram_is_the_last_valid_one_and_pools_seeds(workbench, tmp_path, folders):
    first, second = folders[:2]
    for folder, bins in ((first, [[10, 0.2, 0.3], [0, 0, 0]]), (second, [[30, 0.4, 0.7], [0, 0, 0]])):
        write_lines(folder / "metrics.jsonl", [{"step": 40, "validation/loss": 2.0, "validation/calibration": bins}])
    for odd in ([[1e400, 0.5, 0.5]], [[1, 0.5]], [[1, 2.0, 0.5]], [["x", 0, 0]], [[1, 0, 0]] * 1000, {"a": 1}, "x"):
        write_lines(first / "metrics.jsonl", [{"step": 40, "validation/calibration": odd}])
    (group, _) = grouped(read_runs(folders))
    (line,) = [each for each in figures.draw_reliability([group]).axes[0].get_lines() if each.get_marker() == "o"]
    assert list(line.get_xdata()) == [pytest.approx(0.35)] and list(line.get_ydata()) == [pytest.approx(0.6)]
    assert figures.draw_reliability(grouped(read_runs(folders[2:]))) is None
    workbench.json("report", *folders[2:], "--out", tmp_path / "r.html")
    assert "reliability" not in (tmp_path / "r.html").read_text(), "no run has it"


def test_a_hostile_run_reaches_the_page_escaped_and_cut(workbench, tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=y>\x1b[31m\u202e"
    folder = write_run(tmp_path / "<b onclick=x>$\\frac{", tail=bad, cache=bad)
    write_lines(
        folder / "events.jsonl", [{"event": bad, "level": bad, "step": 4, "message": bad * 50, bad: bad}] * 3000
    )
    write_lines(folder / "samples.jsonl", [{"step": 4, "prompt": bad, "greedy": bad * 10_000, "sampled": [bad]}] * 50)
    for name in ("environment.json", "result.json"):
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps(record | {"device": bad, "stop_reason": bad, "objective": bad, "mode": bad})
        )
    other = write_run(tmp_path / "other")
    workbench.json("report", folder, other, "--out", tmp_path / "r.html", "--title", bad)
    page = (tmp_path / "r.html").read_text()
    found = Parser(page)
    assert found.foreign == [] and not found.tags & {"script", "img"} and "\x1b" not in page and "\u202e" not in page
    assert len(page) < 400_000
    code, out, _ = workbench.call("compare", folder, other)
    assert code == 0 and "\x1b" not in out and "\u202e" not in out


def test_a_page_that_would_be_too_large_is_refused_and_not_written(workbench, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_BYTES", 1000)
    code, _, err = workbench.call("report", *folders, "--out", tmp_path / "r.html")
    assert code == 2 and "more than 2 MB" in err and not (tmp_path / "r.html").exists()


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
        (("report", "{run}", "--out", "r.txt"), "must end in .html"),
        (("report", "cache", "--out", "r.html"), "cache is not a run"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(workbench, folders, words, says):
    code, _, err = workbench.call(*(word.format(run=folders[0]) for word in words))
    assert code == 2 and says in err and err.count("\n") == 1


@pytest.mark.parametrize("command, out", [("plot", "f.png"), ("report", "r.html")])
def test_without_matplotlib_the_extra_is_named(workbench, folders, monkeypatch, tmp_path, command, out):
    monkeypatch.delitem(sys.modules, "kdtrain.monitor.figures")
    monkeypatch.delattr("kdtrain.monitor.figures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = workbench.call(command, folders[0], "--out", tmp_path / out)
    assert code == 2 and "pip install 'kdtrain[plot]'" in err
