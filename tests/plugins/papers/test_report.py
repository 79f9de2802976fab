"""The page of `kdtrain report`: its sections, that it loads nothing, runs of anyone, and what is refused."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from kdtrain.monitor.record import RunRecord
from kdtrain.plugins.papers import figures
from kdtrain.plugins.papers import page as report
from kdtrain.plugins.papers.groups import read_groups
from kdtrain.plugins.papers.page import draw_reliability
from tests.logged_runs import write_lines, write_run, write_three


@pytest.fixture
def folders(tmp_path):
    return write_three(tmp_path)


def test_a_real_run_is_compared_plotted_and_reported(workbench, tmp_path):
    words = ("--student", "student.toml", "--cache", "cache", "--steps", 4, "--eval-freq", 2, *workbench.plain)
    code, _, err = workbench.call("distill", *words, "--out", tmp_path / "run", "--sample-freq", 2)
    assert code == 0, err
    terms = ("--divergence", "jsd:0.3", "--alpha-schedule", "linear", "--alpha-end", 0.5)
    _, _, said = workbench.call("distill", *words, "--out", tmp_path / "other", *terms)
    assert "loss = .9 jsd:0.3 + .1 ce, alpha to 0.5 (linear); val = ce" in " ".join(said.split())
    found = workbench.json("compare", tmp_path / "run")["groups"][0]
    assert found["numbers"]["kl"]["mean"] > 0 and found["kl_estimator"] == "12 entries and a bucket, a lower bound"
    workbench.json("plot", tmp_path / "run", "--out", tmp_path / "f.pdf", "--y", "validation/loss,lr")
    workbench.json("report", tmp_path / "run", "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "kept</th><td>the 12 most likely entries" in page and "fidelity, of " in page
    assert "KL(full || cache), the tail&#39;s mass spread evenly: " in page and "<th>1</th><td>ghost</td>" in page
    assert "def " not in page or "<pre>" in page
    assert "greedy" in page and "done 4/4" in page and "fp32 on cpu, 1 rank<" in page
    record = RunRecord.read(tmp_path / "run")
    bins, last = record.calibration, record.validations[-1]
    assert len(bins) == 15 and sum(each["tokens"] for each in bins) == last["validation/tokens"] > 0
    gaps = sum(each["tokens"] * abs(each["accuracy"] - each["confidence"]) for each in bins)
    assert gaps / last["validation/tokens"] == pytest.approx(last["validation/ece"], abs=1e-5)
    assert 'aria-label="reliability"' in page


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
    measured = {"step": 40, "checkpoint": "step-00000040", "split": "validation", "cache": "cd" * 32, "ece": 0.07}
    write_lines(folders[0] / "evaluations.jsonl", [measured | {"ece": 0.9}, measured])
    workbench.json("report", *folders, "--out", tmp_path / "r.html", "--title", "A & B")
    page = (tmp_path / "r.html").read_text()
    found = Parser(page)
    assert found.foreign == [] and not found.tags & {"script", "iframe", "object", "embed", "img", "form", "base"}
    assert "<h1>A &amp; B</h1>" in page and "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        *("Result", "Evaluations", "Curves", "Calibration", "Samples side by side", "What was run"),
        *("From which cache", "Interventions and warnings", "What this page does not show"),
    ]
    top = page[page.index("<h2>Result") : page.index("<h2>Curves")]
    assert top.index("by best validation loss, nats: b is worse than a0") < top.index("last validation: ECE")
    evaluated = dict(re.findall("<tr><th>(.*?)</th><td[^>]*>(.*?)</td>", top.partition("<h2>Evaluations")[2]))
    assert evaluated["ECE (15 bins), %"] == "7.00" and evaluated["checkpoint"] == "step-00000040"
    assert (evaluated["split"], evaluated["cache"]) == ("validation", "cdcdcdcdcdcd")
    assert "b at 40" in page and "a0 at 40" in page and "at 20<" not in page
    assert "rolled back to step-00000020" in page and "mode bf16" in page
    assert "no longer there" in page  # the cache that the runs name
    assert not re.search(r"#[0-9a-f]{6}[;\"]", page.partition("</style></head>")[2])  # colours follow the scheme


def test_a_reliability_diagram_is_the_last_valid_one_and_pools_seeds(workbench, tmp_path, folders):
    first, second = folders[:2]
    for folder, bins in ((first, [[10, 0.2, 0.3], [0, 0, 0]]), (second, [[30, 0.4, 0.7], [0, 0, 0]])):
        write_lines(folder / "metrics.jsonl", [{"step": 40, "validation/loss": 2.0, "validation/calibration": bins}])
    for odd in ([[1e400, 0.5, 0.5]], [[1, 0.5]], [[1, 2.0, 0.5]], [["x", 0, 0]], [[1, 0, 0]] * 1000, {"a": 1}, "x"):
        write_lines(first / "metrics.jsonl", [{"step": 40, "validation/calibration": odd}])
    (group, _) = read_groups(folders)
    (line,) = [each for each in draw_reliability([group]).axes[0].get_lines() if each.get_marker() == "o"]
    assert list(line.get_xdata()) == [pytest.approx(0.35)] and list(line.get_ydata()) == [pytest.approx(0.6)]
    assert draw_reliability(read_groups(folders[2:])) is None
    workbench.json("report", *folders[2:], "--out", tmp_path / "r.html")
    assert "reliability" not in (tmp_path / "r.html").read_text(), "no run has it"


def test_a_bar_shows_how_a_run_in_rounds_divided_its_time(workbench, tmp_path, folders):
    for step, seconds in (20, (30, 15, 60)), (40, (30, 15, 60)):
        spent = dict(zip(("writing", "scoring", "learning"), seconds, strict=True))
        write_lines(folders[0] / "metrics.jsonl", [{"step": step} | {f"rollouts/{k}_s": v for k, v in spent.items()}])
    runs = [run for group in read_groups(folders) for run in group.runs]
    bars = figures.rounds(runs).axes[0].patches
    assert [(each.get_x(), each.get_width()) for each in bars] == [(0, 1), (1, 0.5), (1.5, 2)]
    assert figures.rounds(runs[1:]) is None
    for kept, shown in (folders, True), (folders[1:], False):
        workbench.json("report", *kept, "--out", tmp_path / "r.html", "--overwrite")
        assert ("Time of the rounds" in (tmp_path / "r.html").read_text()) == shown


def test_a_hostile_run_reaches_the_page_escaped_and_cut(workbench, tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=y>\x1b[31m\u202e"
    folder = write_run(tmp_path / "<b onclick=x>$\\frac{", tail=bad, cache=bad)
    write_lines(
        folder / "events.jsonl", [{"event": bad, "level": bad, "step": 4, "message": bad * 50, bad: bad}] * 3000
    )
    write_lines(folder / "samples.jsonl", [{"step": 4, "prompt": bad, "greedy": bad * 10_000, "sampled": [bad]}] * 50)
    odd = {"step": 4, "student": [bad], "checkpoint": {bad: 1}, "split": "test", "loss": bad, "kl": 1e300, bad: bad}
    write_lines(
        folder / "evaluations.jsonl", [odd | {"cache": bad * place, "sequences": [place]} for place in range(9)]
    )
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
        (("{run}", "--out", "r.txt"), "must end in .html"),
        (("cache", "--out", "r.html"), "cache is not a run"),
        (("{run}", "--out", "none/r.html"), "the folder none does not exist"),
        (("{run}", "--out", "text.txt.html"), "pip install 'kdtrain[plot]'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(workbench, folders, monkeypatch, words, says):
    if "pip" in says:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = workbench.call("report", *(word.format(run=folders[0]) for word in words))
    assert code == 2 and says in err and err.count("\n") == 1
