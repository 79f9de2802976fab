"""The study of quality: its grid is one that the command takes, its tables follow from its record, and it goes on."""

import importlib
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import figures
from benchmarks.harness import ROOT, command
from benchmarks.harness.command import Kdtrain
from benchmarks.science import quality as study
from benchmarks.science import quality_tables
from benchmarks.science.quality_grid import (
    ALONE,
    BASE,
    LONG,
    ONLINE,
    PLAIN,
    RENORMALIZED_TEACHER,
    STUDENTS,
    STUDIES,
    TIMED,
    Run,
    compared,
)
from kdtrain.cli import parse
from kdtrain.config.choices import TAILS
from kdtrain.models.head import OutputHead
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import SparseTargets

EVERY = [*dict.fromkeys(run for study in STUDIES.values() for run in study())]


def student(run, seed, loss, **measured):
    test = dict.fromkeys(quality_tables.MEASURES, 0.1) | {"loss": loss} | measured
    return asdict(run) | {"options": [*run.options], "seed": seed, "test": test}


def record(**losses):
    """Cross-entropy, whole distributions and top-12 with these losses, a number a seed."""
    runs = {"plain": Run(options=PLAIN), "full": Run(cache="dense", options=ALONE), "top": Run()}
    students = [student(runs[name], seed, loss) for name, row in losses.items() for seed, loss in enumerate(row)]
    caches = {"stdlib-k12": {"bytes_per_token": 29.02}, "stdlib-dense": {"bytes_per_token": 2813.02}}
    return {"caches": caches, "runs": students}


@pytest.fixture
def rule_of_others(monkeypatch):
    """The module of the rule that is not kdtrain's, registered for one test."""
    name = "benchmarks.science.renormalized_teacher"
    for kept in ("entries", "modules", "_help"):
        monkeypatch.setattr(TAILS, kept, {**getattr(TAILS, kept)})
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name)
    return name


def test_every_student_is_one_that_the_command_accepts(rule_of_others):
    for run in {(run.student, run.arguments): run for run in EVERY}.values():
        config = parse("distill", ["--cache", "c", "--student", STUDENTS[run.student], "--out", "o", *run.arguments])
        options = dict(zip(run.arguments[::2], run.arguments[1::2], strict=True))
        assert config.objective.alpha == float(options["--alpha"]), run.name
        assert options.keys() >= BASE.keys(), run.name


def test_students_have_names_of_their_own_and_rows_that_can_be_told_apart():
    names = [run.name for run in EVERY]
    assert len({*names}) == len(names) and not any(set(name) & set("/ :") for name in names)
    for each in STUDIES.values():
        rows = [(quality_tables.describe(run), run.lr, run.source, run.student, run.steps) for run in each()]
        assert len({*rows}) == len(rows)


def test_students_are_compared_seed_by_seed():
    result = record(plain=[4.0, 5.0, 6.0], top=[3.9, 4.88, 5.92])
    found = quality_tables.difference(result, Run(), Run(options=PLAIN))
    assert found.mean == pytest.approx(-0.1) and found.half == pytest.approx(4.303 * 0.02 / math.sqrt(3))
    assert str(found) == "**-0.1000 ± 0.0497**"


@pytest.mark.parametrize(
    ("losses", "shown"),
    [([3.9, 4.9, 6.2], "+0.0000 ± 0.4303"), ([4.1, 5.1, 6.11], "**+0.1033 ± 0.0143**"), ([3.9], "-0.1000 (one seed)")],
)
def test_nothing_is_called_better_within_the_interval(losses, shown):
    result = record(plain=[4.0, 5.0, 6.0], top=losses)
    assert str(quality_tables.difference(result, Run(), Run(options=PLAIN))) == shown


def test_the_share_of_the_gap_is_taken_at_each_seed():
    result = record(plain=[4.0, 6.0], full=[3.0, 4.0], top=[3.25, 4.0])
    assert quality_tables.gap(result, Run()) == [0.75, 1.0]
    assert quality_tables.gap(result, Run(cache="dense", options=ALONE)) == [1.0, 1.0]
    assert quality_tables.gap(record(plain=[4.0, 4.0], full=[4.5, 3.0], top=[4.2, 3.5]), Run()) == []
    page = quality_tables.table(result, [Run(options=PLAIN), Run(), Run(cache="k50")], against=Run(options=PLAIN))
    header, _, plain, top = page.splitlines()
    assert header.endswith("loss less that of cross-entropy |")
    assert plain.startswith("| cross-entropy | - | 2 | 5.0000 ± 1.4142 |") and " 0% ± 0% |" in plain
    assert top.startswith("| top-12, ghost bucket | 29.0 | 2 | 3.6250 ± 0.5303 |") and " 88% ± 12% |" in top


def test_a_record_has_a_line_for_each_student():
    result = record(plain=[4.0], top=[3.9, 3.8])
    text = quality_tables.compact(result)
    assert json.loads(text) == result
    assert sum('"seed"' in line for line in text.splitlines()) == 3


def test_the_rule_of_others_is_kl_from_the_scaled_top_k_to_the_whole_student(rule_of_others):
    g = torch.Generator().manual_seed(0)
    shapes = ((6, 8), (40, 8), (6, 40))
    hidden, weight, energies = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    hidden.requires_grad_()
    labels = torch.arange(6)
    top = energies.log_softmax(-1).topk(5)
    targets = SparseTargets(
        ids=top.indices,
        logprobs=top.values,
        counts=torch.zeros(6, 5),
        tail=torch.zeros(6, 4),
        label_logprob=torch.zeros(6),
        logit_mean=torch.zeros(6),
        logit_std=torch.ones(6),
        top_k=5,
        num_samples=0,
        knots=(1.0, 0.5),
    )
    assert TAILS.modules[RENORMALIZED_TEACHER] == rule_of_others
    options = {"temperature": torch.tensor(1.0, dtype=torch.float64), "alpha": 1.0, "normalizer": 6.0, "vocab_size": 40}
    mask = torch.ones(6, dtype=torch.bool)
    head = OutputHead(weight)
    out = distillation_loss(hidden, head, labels, mask, targets, tail=RENORMALIZED_TEACHER, **options)
    p = top.values.softmax(-1)
    expected = (p * (p.log() - (hidden @ weight.T).log_softmax(-1).gather(1, top.indices))).sum() / 6
    assert torch.allclose(out.loss, expected, rtol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for loss in (out.loss, expected))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def whole_record():
    """Every student of every picture, at two seeds, with made-up losses."""
    wanted = [*STUDIES["final"](), *TIMED, *STUDIES["temperatures"](), *STUDIES["tails"](), quality_tables.full(Run())]
    curve = {"step": [0, 250, 500], "loss": [7.6, 4.0, 3.5], "kl": [5.0, 2.0, 1.5]}
    bins = [{"tokens": 10.0, "confidence": 0.3, "accuracy": 0.35}, {"tokens": 0.0, "confidence": 0.0, "accuracy": 0.0}]
    runs = []
    for number, run in enumerate(dict.fromkeys(wanted)):
        for seed in (0, 1):
            made = student(run, seed, 3.5 - 0.01 * number + 0.002 * seed)
            runs.append(made | {"validation": curve, "calibration": bins, "T": [1.0, 1.1, 1.2]})
    sides = {name: [1000.0, 1100.0] for name in (*TIMED.values(), ONLINE)}
    caches = {run.source: {"bytes_per_token": 20.0 + number} for number, run in enumerate(wanted)}
    settings = {"batch_size": 16, "seq_len": 256}
    return {"settings": settings, "caches": caches, "speed": {"tokens_per_second": sides}, "runs": runs}


def test_the_pictures_are_drawn_twice_alike_and_without_students_not_at_all(tmp_path):
    pictures = ("gap", "calibration", "temperature", "time")
    names = {f"quality-{name}.{kind}" for name in pictures for kind in ("png", "svg")}
    first, second = (figures.draw_quality(whole_record(), tmp_path / folder) for folder in "ab")
    assert {path.name for path in first} == names
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    left, right = figures.quality_gap(whole_record()).axes
    assert len(left.texts) == 4 + 4 and len(right.texts) == len({run.cache for run in STUDIES["tails"]()} - {"dense"})
    empty = {"settings": {}, "caches": {}, "runs": []}
    assert figures.draw_quality(empty, tmp_path / "c") == []


def test_the_time_to_a_loss_is_read_off_the_curve_between_two_validations():
    curve = [(0.0, 8.0), (100.0, 4.0), (200.0, 3.0)]
    assert quality_tables.reached(curve, 3.5) == 150 and quality_tables.reached(curve, 4.0) == 100
    assert quality_tables.reached(curve, 2.9) is None
    rows = quality_tables.times(whole_record()).splitlines()[2:]
    assert rows[0] == "| cross-entropy | 1,050 | 1.00 | 2.05 | 32.5 |"


def test_an_online_teacher_has_the_curve_of_whole_distributions_and_a_time_of_its_own():
    result = whole_record()
    result["speed"]["tokens_per_second"][ONLINE] = [500.0]
    by_tokens, by_time = figures.quality_time(result).axes
    assert len(by_time.lines) == len(by_tokens.lines) + 1
    whole, online = (line.get_xdata() for line in by_time.lines[-2:])
    assert list(online) == pytest.approx([each * 1050 / 500 for each in whole])


def test_pairs_are_compared_over_the_seeds_that_both_have():
    drawn, kept = compared()[2]
    losses = {drawn: (3.0, 3.1, 3.3), kept: (3.2, 3.32)}
    runs = [student(run, seed, loss, ece=loss / 10) for run, row in losses.items() for seed, loss in enumerate(row)]
    result = {"settings": {"batch_size": 16, "seq_len": 256}, "caches": {}, "runs": runs}
    (row,) = quality_tables.differences(result).splitlines()[2:]
    names = "50 samples | top-12, ghost bucket | 1 M | stdlib | 10.2 | 2"
    assert row == f"| {names} | **-0.2100 ± 0.1271** | **-2.10% ± 1.27%** |"


def test_further_passes_are_compared_at_the_same_text_and_steps():
    runs = STUDIES["epochs"]()
    losses = dict(zip([*runs[:2], *runs[4:6], *runs[-2:]], (4.0, 3.5, 3.9, 3.25, 3.8, 3.0), strict=True))
    result = {"settings": {"batch_size": 16, "seq_len": 256}, "caches": {}}
    result["runs"] = [student(run, 0, loss) for run, loss in losses.items()]
    result["runs"] += [student(runs[0], 1, 4.2), student(runs[1], 1, 3.66)]
    assert quality_tables.passes(result).splitlines()[2:] == [
        "| a quarter | 1 | 0.90 | 4.1000 ± 0.1414 | 3.5800 ± 0.1131 | **-0.5200 ± 0.2541** |",
        "| a quarter | 4 | 3.60 | 3.9000 | 3.2500 | -0.6500 (one seed) |",
        "| the whole | 1 | 3.60 | 3.8000 | 3.0000 | -0.8000 (one seed) |",
    ]


def test_early_stopping_is_played_on_the_curve_of_a_run():
    curve = {"step": [0, 250, 500, 750, 1000, 1250], "loss": [7.6, 3.0, 2.999, 2.5, 2.495, 2.4]}
    assert quality_tables.given_up(curve, 1) == pytest.approx(0.599)
    assert quality_tables.given_up(curve, 2) is None
    still = {"step": [0, 250, 500, 750, 1000], "loss": [7.6, 3.0, 2.995, 2.993, 2.9]}
    assert quality_tables.given_up(still, 2) == pytest.approx(0.093)
    runs = [asdict(Run(steps=LONG)) | {"validation": each} for each in (curve, still)]
    assert quality_tables.stopping({"runs": runs}).splitlines()[2:4] == [
        "| 1 | 2 of 2 | 0.5990 |",
        "| 2 | 1 of 2 | 0.0930 |",
    ]


def test_a_cache_that_the_command_no_longer_builds_is_asked_for_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        study.train_all(study.Quality(out=tmp_path), [Run(cache="i40")], None)
    assert ended.value.code == 2 and "only kdtrain at commit 05af2d3 builds it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["colours"], "quality: no study colours; there are final, "),
        (["--seeds", "0"], "quality: --seeds and --at-once must be at least 1"),
        (["speed", "--at-once", "2"], "quality: speed is measured alone"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(server, tmp_path, argv, message):
    (done,) = server.run("-m", "benchmarks.science.quality", *argv, "--out", tmp_path / "q")
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1


@pytest.fixture
def forked_commands(server, tmp_path, monkeypatch):
    """The commands of a study are forks, not interpreters of their own, which take seconds to start."""

    class Fork:
        def __init__(self, words, *, env, **_):
            server.begin(Path("-m"), words[2:], ROOT, tmp_path / "said", PYTHONPATH=env["PYTHONPATH"])

        def communicate(self):
            (self.returncode,), _ = server.end()
            return (tmp_path / "said.0.out").read_text(), None

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=Fork, DEVNULL=None, PIPE=None))


def test_a_student_is_trained_once_and_its_record_kept(forked_commands, tmp_path):
    small = {"sequences": 48, "validation_sequences": 8, "test_sequences": 8, "seq_len": 64, "divisor": 100}
    settings = study.Settings(compile=False, **small)
    asked = study.Quality(out=tmp_path / "q", settings=settings, at_once=2)
    run = Run(options=("--tail", RENORMALIZED_TEACHER, "--temperature-mode", "likelihood"))
    with Kdtrain(**study.surroundings(asked)) as kdtrain:
        study.train_all(asked, [run], kdtrain)
    study.publish(asked)
    result = json.loads((tmp_path / "q/quality.json").read_text())
    (each,) = result["runs"]
    assert each["tokens"] == 6 * 16 * 64 and each["test"]["tokens"] == 8 * 64 and each["test"]["kl"] > 0
    assert sum(bin["tokens"] for bin in each["calibration"]) == 8 * 64
    assert each["validation"]["step"] == [0, 6] and each["made_with"]["at_once"] == 2
    assert len(each["T"]) == 6 and len({*each["T"]}) > 1
    assert result["caches"]["stdlib-k12"]["entries"] == 12 and result["caches"]["stdlib-k12"]["bytes_per_token"] > 0
    assert quality_tables.table(result, [run]).count("\n") == 2
    study.train_all(asked, [run], None)  # nothing is left that would need the command
