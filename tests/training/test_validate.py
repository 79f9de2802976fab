"""Validation: the whole split counts once, however it is cut, and a stop ends it."""

import pytest

from kdtrain.training.validate import calibration, summary, validate


@pytest.fixture
def measured(workshop):
    """Validate the tiny student on 7 sequences."""
    with workshop.run() as run:

        def measure(source=None, **options):
            source = source or workshop.source(7, seed=2)
            options = {"micro": 7, "batches": None, **options}
            return validate(run.student.eval(), source, **options)

        yield measure


@pytest.mark.parametrize("micro", [1, 2, 3, 5, 16])
def test_the_result_does_not_depend_on_the_size_of_a_forward(measured, micro):
    whole, cut = summary(measured()), summary(measured(micro=micro))
    assert cut["tokens"] == whole["tokens"]
    known = {name: each for name, each in whole.items() if each is not None}
    assert {name: each for name, each in cut.items() if each is not None} == pytest.approx(known, rel=1e-5)


def test_every_forward_has_the_same_shape(measured, workshop):
    source = workshop.source(7, seed=2)
    measured(source, micro=3)
    assert source.reads == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]


def test_a_limit_counts_forwards_from_the_start(measured, workshop):
    source = workshop.source(7, seed=2)
    metrics = measured(source, micro=3, batches=2)
    assert source.reads == [[0, 1, 2], [3, 4, 5]]
    assert metrics.tokens == source.loss_mask[:6].sum().item()


def test_a_stop_ends_it_within_one_forward_and_there_is_no_result(measured, workshop):
    source = workshop.source(7, seed=2)
    assert measured(source, micro=1, read=lambda read: read() if len(source.reads) < 2 else None) is None
    assert len(source.reads) == 2


def test_nothing_keeps_a_gradient(measured, workshop):
    with workshop.run("other") as run:
        hidden = []

        own = run.student.hidden_eager
        run.student.hidden_eager = lambda batch: hidden.append(own(batch)) or hidden[-1]
        validate(run.student, workshop.source(2), micro=2, batches=None)
    assert not hidden[0].requires_grad


def test_the_diagram_holds_every_token_once(measured):
    metrics = measured()
    bins = calibration(metrics)
    assert len(bins) == 15
    assert sum(each["tokens"] for each in bins) == metrics.tokens
    assert summary(metrics)["ece"] == pytest.approx(
        sum(each["tokens"] * abs(each["confidence"] - each["accuracy"]) for each in bins) / metrics.tokens
    )
