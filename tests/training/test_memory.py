"""A step that does not fit into memory is repeated once with half the micro-batch, and gives the same weights."""

import signal

import pytest
import torch
from training_kit import events

from kdtrain.checkpoint.store import load
from kdtrain.errors import RunError
from kdtrain.training.recovery import Next
from kdtrain.training.signals import StopRequest
from kdtrain.training.step import Status, out_of_memory

POINT = "train.after-micro-batch"


def test_a_first_step_without_memory_is_taken_in_half_micro_batches_with_the_same_result(workshop, fault):
    options = {"train": workshop.source(40), "steps": 3, "lr_schedule": "constant"}
    with workshop.run("whole", **options, micro_batch_size=2) as whole:
        whole.fit()
    fired = fault(f"{POINT}:oom:2")
    with workshop.run("halved", **options) as run:
        run.stepper.halves_for = 3
        run.fit()
    assert fired == {POINT}
    assert (run.stepper.micro, run.stepper.micros, run.state.progress.step) == (2, 2, 3)
    ours, theirs = (load(each.store.path("step-00000003")).tensors for each in (run, whole))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    (event,) = events(run, "memory")
    assert (event["level"], event["micro_batch_size"], event["step"]) == ("warning", 2, 1)
    said = "out of memory in step 2 with micro-batches of 4 sequences: continuing with 2, as --micro-batch-size 2 does"
    assert event["message"].startswith(said)


@pytest.mark.parametrize(
    "when, options, halves_until, words",
    [
        ("1-2", {}, 9, "in step 1 with micro-batches of 2 sequences; lower --micro-batch-size"),
        ("3", {}, 2, "in step 3 with micro-batches of 4 sequences"),
        ("1", {"micro_batch_size": 1}, 9, "in step 1 with micro-batches of 1 sequences"),
        ("1", {"compile_mode": "reduce-overhead"}, 9, "--compile-mode reduce-overhead cannot split them"),
    ],
    ids=["a second time", "after the first steps", "one sequence", "CUDA graphs"],
)
def test_memory_that_is_not_enough_after_that_is_an_error_with_a_reason(
    workshop, fault, when, options, halves_until, words
):
    fault(f"{POINT}:oom:{when}")
    with workshop.run(steps=4, **options) as run:
        run.stepper.halves_for = halves_until
        with pytest.raises(RunError, match=words) as caught:
            run.fit()
    assert caught.value.reason == "oom"


def test_a_cpu_without_memory_is_known_by_its_words():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("shapes differ"))


def test_a_step_that_ran_out_of_memory_and_one_that_was_interrupted_are_two_results(workshop, fault):
    fired, stopped = fault(f"{POINT}:oom:1"), StopRequest()
    stopped.settle(signal.SIGTERM)
    with workshop.run(steps=3) as run:
        run.stepper.halves_for = 3
        halved = run.stepper.take(next(run.stepper.feed()), StopRequest())
        assert fired and (halved.status, run.stepper.micro) == (Status.OUT_OF_MEMORY, 2)
        assert run.recovery.after_step(halved) is Next.READ_AGAIN
        interrupted = run.stepper.take(next(run.stepper.feed()), stopped)
        assert interrupted.status is Status.INTERRUPTED and run.recovery.after_step(interrupted) is Next.STOP
    assert run.state.progress.step == run.stepper.tokens == 0
