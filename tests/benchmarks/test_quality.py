"""The study of quality: its tables follow from its record, and the tail rule of others is what it says."""

import importlib
import math
import sys
from dataclasses import asdict

import pytest
import torch

from benchmarks.science import quality_tables
from benchmarks.science.quality_grid import ALONE, PLAIN, RENORMALIZED_TEACHER, STUDIES, Run
from kdtrain.config.choices import TAILS
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import SparseTargets


def student(run, seed, loss, **measured):
    test = dict.fromkeys(("loss", "ece", "kl", "agreement", "acceptance"), 0.1) | {"loss": loss} | measured
    return asdict(run) | {"options": [*run.options], "seed": seed, "test": test}


def record(**losses):
    """Make a record of cross-entropy, whole distributions and top-12 with these losses, a number a seed."""
    runs = {"plain": Run(options=PLAIN), "full": Run(cache="dense", options=ALONE), "top": Run()}
    students = [student(runs[name], seed, loss) for name, row in losses.items() for seed, loss in enumerate(row)]
    caches = {"stdlib-k12": {"bytes_per_token": 29.02}, "stdlib-dense": {"bytes_per_token": 2813.02}}
    return {"caches": caches, "runs": students}


@pytest.fixture
def rule_of_others(monkeypatch):
    """Register the rule that is not kdtrain's for one test, and return the name of its module."""
    name = "benchmarks.science.renormalized_teacher"
    for kept in ("entries", "modules", "_help"):
        monkeypatch.setattr(TAILS, kept, {**getattr(TAILS, kept)})
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name)
    return name


def test_students_have_rows_that_can_be_told_apart():
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
    head = HeadPart(weight)
    out = distillation_loss(hidden, head, labels, mask, targets, tail=RENORMALIZED_TEACHER, **options)
    p = top.values.softmax(-1)
    expected = (p * (p.log() - (hidden @ weight.T).log_softmax(-1).gather(1, top.indices))).sum() / 6
    assert torch.allclose(out.loss, expected, rtol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for loss in (out.loss, expected))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)
