"""What all benchmarks share: pages that show their records, and the command that they call."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import figures, tables
from benchmarks.harness import RESULTS, SECTIONS, command
from benchmarks.science import divergence, real, real_trl
from kdtrain.objective.metrics import Metrics
from kdtrain.plugins.papers.jobs import read_sweep
from kdtrain.training.validate import calibration

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "teachers" / "stdlib-5m"


def test_filling_a_page_changes_what_is_between_the_markers_and_nothing_else():
    page = "before\n<!-- a-table -->\nold\n<!-- /a-table -->\nafter\n"
    assert tables.fill(page, "new", "a-table") == page.replace("old", "new")
    with pytest.raises(ValueError, match="a-table"):
        tables.fill("a page without markers", "new", "a-table")


def test_a_part_of_the_gpu_study_that_resumed_has_that_in_its_record(tmp_path, monkeypatch):
    attempts = iter([command.stop, lambda *_: {"tokens": 1}])
    monkeypatch.setattr(real, "kdtrain", lambda *argv: next(attempts)(1, argv[0]))
    with pytest.raises(SystemExit):
        real._once(tmp_path, "text", "cache-teacher")
    assert real._once(tmp_path, "text", "cache-teacher")["resumed"] is True
    monkeypatch.setattr(real, "kdtrain", lambda *_: {})
    assert real._once(tmp_path, "prune", "prune")["resumed"] is False


def test_seconds_that_decide_how_long_others_train_are_of_one_attempt(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        real_trl, "kdtrain", lambda *argv: (tmp_path / "ours-cache").mkdir() or command.stop(1, argv[0])
    )
    with pytest.raises(SystemExit):
        real_trl._ours(tmp_path)
    monkeypatch.setattr(real_trl, "kdtrain", lambda *_: {})
    with pytest.raises(SystemExit):
        real_trl._ours(tmp_path)
    assert f"remove {tmp_path / 'ours-cache'}, and run again" in capsys.readouterr().err
    (tmp_path / "ours-cache").rmdir()
    assert real_trl._ours(tmp_path) >= 0


def test_a_block_is_placed_on_the_page_with_its_markers_and_its_links_lead_there(tmp_path):
    far = tmp_path / "far.md"
    far.write_text("<!-- a -->\n<!-- /a -->\n")
    (text,) = tables.placed({"a": "[a](../benchmarks/results/a.json)"}, [far]).values()
    (link,) = re.findall(r"\]\((.*)\)", text)
    assert (tmp_path / link).resolve() == RESULTS / "a.json"
    with pytest.raises(ValueError, match="<!-- b -->"):
        tables.placed({"b": "new"}, [far])


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_shows_the_published_records_and_no_others(name):
    for page, text in tables.filled(name).items():
        assert text == page.read_text(), page


def test_the_page_on_audits_has_the_rows_that_the_record_says_find_a_fault_always():
    record = json.loads((RESULTS / "audit.json").read_text())
    page = (ROOT / "docs" / "audit.md").read_text()
    kinds = ("50 samples", "50 samples, likelihood and counts alone", "top-k 12")
    for fault in record["power"]["50 samples"]:
        (row,) = re.findall(rf"^\| {re.escape(fault)} \| [^|]* \| (.*) \|$", page, re.MULTILINE)
        found = [[rows for rows, share in record["power"][kind][fault].items() if share == 1] for kind in kinds]
        assert row.split(" | ") == [each[0] if each else "not by 200" for each in found], fault
    alarms = record["false_alarms"].values()
    failed, audits = (sum(each[key] for each in alarms) for key in ("failed", "audits"))
    assert f"{failed} of {audits:,} audits" in " ".join(page.split())


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


def test_a_command_that_fails_ends_a_benchmark_with_its_exit_code():
    with pytest.raises(SystemExit) as ended:
        command.kdtrain("no-such-command")
    assert ended.value.code == 2


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: file.stem)
def test_a_record_names_a_command_that_exists_or_the_commit_whose_command_made_it(file):
    words = json.loads(file.read_text())["command"]
    if words.startswith("kdtrain sweep "):
        assert (ROOT / words.removeprefix("kdtrain sweep ")).exists(), words
        return
    if words.startswith("make "):
        assert f"\n{words.removeprefix('make ')}:" in (ROOT / "Makefile").read_text(), words
        return
    found = re.fullmatch(r"python (?:-m ([\w.]+)|(\S+\.py))(?: (\S+))?(?: \S+)?(?: of commit ([0-9a-f]{8}))?", words)
    assert found, words
    place = found[2] or found[1].replace(".", "/")
    places = [place] if found[2] else [f"{place}.py", f"{place}/__main__.py"]
    if found[4] and (ROOT / ".git").exists():
        asked = ["git", "-C", str(ROOT), "ls-tree", "--name-only", found[4], *places]
        listed = subprocess.run(asked, capture_output=True, text=True)
        assert listed.returncode or listed.stdout, words  # a shallow clone has no such commit
    elif not found[4]:
        assert any((ROOT / each).exists() for each in places), words
        assert found[1] != "benchmarks.performance" or found[3] in SECTIONS, words


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "science").glob("*.toml")), ids=lambda file: file.stem)
def test_each_sweep_is_one_that_the_command_reads(file, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "others")
    monkeypatch.chdir(ROOT)  # students and others' files go by their place in the repository
    monkeypatch.setattr("kdtrain.plugins.papers.jobs.missing", lambda *_: [])  # what it needs is made first
    sweep = read_sweep(file, tmp_path / "out")
    assert sweep.runs and not any(job.done for job in sweep.runs) and not (tmp_path / "out").exists()


def test_each_rule_for_divergence_finds_what_doubles_and_the_commands_give_no_false_alarm():
    steady = [{"step": step, "loss": 4 + 0.01 * (step % 3), "ce": 4 + 0.01 * (step % 3)} for step in range(1, 81)]
    series = dict.fromkeys((*divergence.SOUND, *divergence.WRONG), steady)
    found = {name: divergence.judge(make, series) for name, make in divergence.RULES.items()}
    assert not any(each["false_alarms"] for each in found.values())
    assert found["the command: both"]["doubled"]["demo"] == "12 of 12"
    assert found["loss, 3 x mean"]["doubled"]["demo"] == "0 of 12"


def test_a_record_names_no_place_on_this_machine(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "environment.json").write_text(
        '{"threads": 2, "device": "cpu", "mode": "bf16", "platform": "Linux-of-ours"}'
    )
    assert set(command.environment(run)) == {"date", "python", "torch", "cpu", "threads", "device", "precision"}


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
