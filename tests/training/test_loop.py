"""The training loop: a step, the end of a run, and the best student."""

import copy
import json
import math
import os
import time

import numpy as np
import pytest
import torch
from training_kit import ending, events, lines_of, trained

from kdtrain import faults
from kdtrain.checkpoint.store import load
from kdtrain.data import order
from kdtrain.errors import RunError
from kdtrain.training.recovery import Next
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import load_saved
from kdtrain.training.step import Status


def validations(run):
    return [line for line in lines_of(run, "metrics.jsonl") if "loss" not in line]


def weights(run):
    return {name: tensor.clone() for name, tensor in run.student.model.state_dict().items()}


def test_a_run_trains_to_its_last_step_and_its_loss_falls(workshop):
    with workshop.run(steps=12, eval_freq=4, checkpoint_freq=5) as run:
        run.fit()
    training = trained(run)
    assert [line["step"] for line in training] == list(range(1, 13))
    assert [line["step"] for line in validations(run)] == [0, 4, 8, 12]
    assert training[-1]["loss"] < training[0]["loss"]
    assert (run.state.progress.step, run.state.progress.sequences) == (12, 48)
    assert run.state.progress.tokens == sum(line["tokens"] for line in training)
    assert run.stopped_by is None
    assert run.store.newest_valid()[0] == "step-00000012"
    assert {"step-00000005", "step-00000010"} <= set(run.store.names())


def test_a_run_shorter_than_its_interval_of_validations_validates_at_its_quarters_and_trains_the_same(workshop):
    ends = []
    for every in (250, 8):
        with workshop.run(f"every-{every}", steps=8, eval_freq=every) as run:
            run.fit()
        ends.append(([line["step"] for line in validations(run)], weights(run)))
    assert [steps for steps, _ in ends] == [[0, 2, 4, 6, 8], [0, 8]]
    assert all(torch.equal(tensor, ends[1][1][name]) for name, tensor in ends[0][1].items())


def test_a_step_reads_the_sequences_that_the_order_names(workshop):
    source = workshop.source(10)
    with workshop.run(train=source, steps=4, micro_batch_size=2, seed=5) as run:
        run.fit()
    read = [number for micro in source.reads for number in micro]
    assert read == order.batch(5, 0, 16, 10).tolist()
    assert all(len(micro) == 2 for micro in source.reads)


def test_a_source_may_have_an_order_of_its_own(workshop):
    source = workshop.source(10)
    backwards = order.Order(lambda start, size: np.arange(start + size, start, -1) % 10, np.sort)
    source.order = lambda seed: backwards
    with workshop.run(train=source, steps=2, micro_batch_size=2) as run:
        run.fit()
    assert source.reads == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_of_a_text_that_appears_while_the_run_goes_on_a_checkpoint_holds_what_was_read(workshop):
    class Text:
        def state_dict(self, sequences):
            return {"read": sequences}

        def load_state_dict(self, state):
            self.resumed = state["read"]

    source = workshop.source(10)
    source.growing = Text()
    with workshop.run(train=source, steps=2) as run:
        run.fit()
        saved = load_saved(run.store.choose("latest"))
        run.state.load(saved.tensors, saved.state)
        other = dict(saved.state, source={"read": 3})
        run.state.load(saved.tensors, other, same_data=False)
    assert saved.state["source"] == {"read": 8} and source.growing.resumed == 8


def test_a_step_is_the_mean_over_its_unmasked_tokens_however_it_is_cut(workshop):
    found = {}
    for micro in (4, 2, 1):
        source = workshop.source(10, masked=(1, 4, 7))
        with workshop.run(f"micro-{micro}", train=source, micro_batch_size=micro, clip=0.0) as run:
            run.fit()
        found[micro] = trained(run), weights(run)
    for micro in (2, 1):
        for ours, theirs in zip(found[micro][0], found[4][0], strict=True):
            assert ours["tokens"] == theirs["tokens"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name, tensor in found[4][1].items():
            torch.testing.assert_close(found[micro][1][name], tensor, rtol=1e-3, atol=1e-5)


def test_the_gradient_is_that_of_the_mean_over_the_unmasked_tokens(workshop):
    source = workshop.source(4, masked=(2,))
    with workshop.run(train=source, steps=1, alpha=0.0, clip=0.0, micro_batch_size=2) as run:
        logits_BTV = run.student.model.model(source.tokens[:, :-1]).logits
        losses_N = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), source.tokens[:, 1:].flatten(), reduction="none"
        )
        losses_N[source.loss_mask.flatten()].mean().backward()
        parameters = list(run.student.model.parameters())
        norm = torch.stack([parameter.grad.square().sum() for parameter in parameters]).sum().sqrt().item()
        run.state.optimizer.zero_grad()
        run.fit()
    assert trained(run)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_step_without_a_token_is_skipped_and_the_order_stays(workshop):
    first = order.batch(0, 0, 8, 8).tolist()
    source = workshop.source(8, masked=tuple(first[:4]))
    with workshop.run(train=source, steps=2, lr_schedule="constant", eval_freq=9, checkpoint_freq=9) as run:
        before, stop = weights(run), StopRequest()
        result = run.stepper.take(next(run.stepper.feed()), stop)
        then = run.recovery.after_step(result)
        assert result.status is Status.SKIPPED and then is Next.CONTINUE
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
        progress = run.state.progress
        assert (progress.step, progress.sequences, progress.skips, progress.skips_in_a_row) == (0, 4, 0, 0)
        run.fit()
    assert [line["tokens"] > 0 for line in trained(run)] == [True, True] and progress.step == 2
    assert next(reads for reads in source.reads if len(reads) == 4) == first[:4]
    assert [each["message"] for each in events(run, "skip")] == ["batch 1 at step 1: no token counts: skipped"]
    assert not events(run, "gradients"), "those of a step without tokens are zeros"


@pytest.mark.parametrize("where, what", [("train", "8 sequences in a row"), ("validation", "the validation sequences")])
def test_training_or_validation_data_without_a_token_are_named_as_such(workshop, caplog, where, what):
    sources = {"train": workshop.source(8), "validation": workshop.source(5)}
    sources[where] = workshop.source(8, masked=range(8))
    with workshop.run(**sources) as run, pytest.raises(RunError, match=f"no token of {what} counts"):
        run.fit()
    assert "initial loss nan" not in caplog.text and "look at the weights" not in caplog.text


@pytest.mark.parametrize("micro", [4, 1])
def test_a_non_finite_step_leaves_no_trace_and_its_data_are_left_out(workshop, micro):
    first = order.batch(0, 0, 16, 10).tolist()
    broken = next(number for number in first[4:8] if number not in first[:4])
    with workshop.run("sound", steps=1, lr_schedule="constant") as sound:
        sound.fit()
    source = workshop.source(10, broken=(broken,))
    with workshop.run(train=source, micro_batch_size=micro, steps=1, lr_schedule="constant", checkpoint_freq=1) as run:
        run.fit()
        before, moments = weights(run), copy.deepcopy(run.state.optimizer.state_dict()["state"])
        bad = next(run.stepper.feed())
        result = run.stepper.take(bad, StopRequest())
        run.recovery.after_step(result)
    assert result.status is Status.SKIPPED and not math.isfinite(result.loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
    for key, state in run.state.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[key][name]) for name, value in state.items())
    progress = run.state.progress
    assert (progress.step, progress.sequences, progress.skips, progress.skips_in_a_row) == (1, 8, 1, 1)
    assert (run.config.out / "non-finite-00000002").is_dir()


def test_the_best_student_is_the_one_of_the_lowest_validation_loss_and_outlives_pruning(workshop):
    with workshop.run(steps=8, eval_freq=1, lr=0.3, alpha=1.0, checkpoint_freq=1, keep_rolling=2) as run:
        run.fit()
    losses = {line["step"]: line["validation/loss"] for line in validations(run)}
    best = min(losses, key=losses.__getitem__)
    assert (run.state.progress.best_step, run.state.progress.best_loss) == (best, losses[best])
    assert os.readlink(run.store.folder / "best") == f"step-{best:08d}"
    kept = {name for name in run.store.names() if name.startswith("step-")}
    assert kept == {f"step-{best:08d}", "step-00000007", "step-00000008"}
    assert (run.state.progress.first_loss, run.state.progress.last_loss) == (losses[0], losses[8])


def test_the_temperatures_gradient_is_not_clipped_and_does_not_count(workshop):
    def final(clip, mode):
        with workshop.run(f"{clip}-{mode}", steps=3, clip=clip, temperature_mode=mode, temperature_lr=0.1) as run:
            run.fit()
        return trained(run)

    clipped, free = final(1e-6, "likelihood"), final(0.0, "likelihood")
    # the likelihood's gradient knows the teacher alone: T must not notice how the student is clipped
    assert [line["T"] for line in clipped] == [line["T"] for line in free]
    assert len({line["T"] for line in free}) == 3
    assert clipped[0]["grad_norm"] == free[0]["grad_norm"] == final(0.0, "fixed")[0]["grad_norm"]


def test_clipping_bounds_the_gradient_that_the_optimizer_sees(workshop):
    with workshop.run(steps=1, clip=1e-3, betas=(0.0, 0.0)) as run:
        run.fit()
    moments = [state["exp_avg"].square().sum() for state in run.state.optimizer.state.values()]
    assert math.sqrt(sum(moments)) == pytest.approx(1e-3, rel=1e-4)
    assert trained(run)[0]["grad_norm"] > 1e-3


@pytest.mark.parametrize("call, finished", [(1, 0), (2, 0), (4, 1), (5, 2)])
def test_a_stop_saves_the_last_finished_step_and_nothing_of_the_unfinished_one(workshop, fault, call, finished):
    with workshop.run("whole", steps=finished or 1, micro_batch_size=2, lr_schedule="constant") as whole:
        start = weights(whole)
        whole.fit()
    fault(f"train.after-micro-batch:term:{call}")
    with workshop.run("stopped", steps=4, eval_freq=4, micro_batch_size=2, lr_schedule="constant") as run:
        run.fit()
    assert faults._calls["train.after-micro-batch"] == call
    assert (run.stopped_by, run.state.progress.step) == ("SIGTERM", finished)
    expected = weights(whole) if finished else start
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(run).items())
    assert all(parameter.grad is None for parameter in run.student.parameters())
    assert run.store.newest_valid()[0] == (f"interrupted-{finished:08d}" if finished else "step-00000000")


def test_a_checkpoint_is_logged_once_it_is_published_and_never_before(workshop, monkeypatch):
    seen = []

    def told() -> list[str]:
        path = workshop.folder / "run" / "events.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
        return [line["name"] for line in lines if line["event"] == "checkpoint"]

    def point(name, amount=1):
        if name == "checkpoint.before-rename":
            time.sleep(0.1)  # whoever tells too early has done it by now
            seen.append((told(), run.store.names()))

    monkeypatch.setattr(faults, "point", point)
    with workshop.run(steps=4, checkpoint_freq=1) as run:
        run.fit()
        assert [set(names) - set(published) for names, published in seen] == [set()] * 6
    assert told() == ["step-00000000", "step-00000001", "step-00000002", "step-00000003", "epoch-0001", "step-00000004"]
    assert any(names for names, _ in seen)  # while it trained


def test_a_stop_in_the_first_validation_trains_nothing(workshop):
    source = workshop.source(10)
    with workshop.run(train=source, validation=ending(workshop, 9, 0), steps=3) as run:
        run.fit()
    assert (run.stopped_by, run.state.progress.step, source.reads) == ("SIGTERM", 0, [])


def test_a_stop_in_the_last_validation_leaves_it_to_the_next_start(workshop):
    with workshop.run(validation=ending(workshop, 9, 3, once=False), steps=2, eval_freq=2, alpha=0.9) as run:
        run.fit()
    assert (run.stopped_by, run.state.progress.step, run.state.progress.validated_step) == ("SIGTERM", 2, 0)
    assert run.store.newest_valid()[0] == "step-00000002"
    run.stopped_by, run.validation_source = None, workshop.source(9)
    with workshop.run(steps=2, eval_freq=2, alpha=0.9) as later:
        run.reporter.writers = later.writers
        run.fit()
    assert (run.stopped_by, run.state.progress.validated_step) == (None, 2)


@pytest.mark.parametrize("last, finished", [(0, 0), (1, 0), (4, 2), (5, 2)])
def test_data_that_cannot_be_read_any_more_end_a_run_whose_last_finished_step_is_saved(workshop, last, finished):
    options = {"steps": 4, "micro_batch_size": 2, "eval_freq": 4}
    with workshop.run("whole", checkpoint_freq=1, **options) as whole:
        whole.fit()
    with (
        workshop.run("failing", train=ending(workshop, 10, last, fails=True), **options) as run,
        pytest.raises(RunError, match="the cache is gone"),
    ):
        run.fit()
    name = f"interrupted-{finished:08d}" if finished else "step-00000000"
    assert run.store.newest_valid()[0] == name
    expected, saved = load(whole.store.path(f"step-{finished:08d}")), load(run.store.path(name))
    assert all(torch.equal(tensor, expected.tensors[key]) for key, tensor in saved.tensors.items())
    assert saved.state["progress"] == expected.state["progress"]
    assert [each["reason"] for each in events(run, "stop")] == ["a failed read"]


def test_a_validation_that_cannot_be_read_any_more_ends_a_run_whose_last_step_is_saved(workshop):
    with (
        workshop.run(validation=ending(workshop, 5, 3, fails=True), steps=3, eval_freq=2, alpha=0.9) as run,
        pytest.raises(RunError, match="the cache is gone"),
    ):
        run.fit()
    assert run.store.newest_valid()[0] == "interrupted-00000002"


def test_a_finished_run_that_is_started_again_measures_and_saves_nothing_again(workshop):
    validation = workshop.source(5)
    with workshop.run(validation=validation, steps=2) as run:
        run.fit()
        reads, saved = len(validation.reads), run.store.names()
        run.fit()
    assert (len(validation.reads), run.store.names()) == (reads, saved)


def test_each_step_draws_from_its_own_seed(workshop):
    drawn = []

    class Drawing(workshop.source):
        def read(self, indices):
            drawn.append(np.random.rand())
            return super().read(indices)

    for name in ("first", "second"):
        with workshop.run(name, train=Drawing(10), steps=3) as run:
            np.random.rand(len(drawn))
            run.fit()
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_an_epoch_whose_last_batch_was_skipped_has_its_checkpoint_all_the_same(workshop):
    # 12 sequences are three batches; the third one is broken
    broken = order.batch(0, 8, 4, 12).tolist()[0]
    with workshop.run(train=workshop.source(12, broken=(broken,)), steps=3, checkpoint_freq=100) as run:
        run.fit()
    assert (run.state.progress.skips, run.state.progress.sequences) == (1, 16)
    assert "epoch-0001" in run.store.names()


def test_a_run_is_compiling_until_its_first_step_is_taken(workshop, monkeypatch):
    seen = []
    with workshop.run(steps=3) as run:
        take = run.stepper.take

        def spy(batches, stop, save_due):
            seen.append(stop.compiling)
            run.student.compile_objective = False  # said, and not done
            return take(batches, stop, save_due)

        monkeypatch.setattr(run.stepper, "take", spy)
        run.student.compile_objective = True
        run.fit()
    assert seen == [True, False, False]


def test_a_run_that_begins_at_a_loaded_step_counts_its_distance_to_a_checkpoint_from_there(workshop, monkeypatch):
    seen = []
    with workshop.run(steps=12, eval_freq=12, checkpoint_freq=10) as run:
        run.state.progress.step = 7
        finished = run.reporter.finished
        monkeypatch.setattr(run.reporter, "finished", lambda *args: (seen.append(args[2]), finished(*args))[1])
        run.fit()
    assert seen == [7, 7, 7, 10, 10]
