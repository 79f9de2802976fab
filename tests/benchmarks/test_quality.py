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

from benchmarks.harness import ROOT, command
from benchmarks.harness.command import Kdtrain
from benchmarks.science import quality as study
from benchmarks.science import quality_tables
from benchmarks.science.quality_grid import (
    ALONE,
    BASE,
    PLAIN,
    RENORMALIZED_TEACHER,
    STUDENTS,
    STUDIES,
    Run,
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
