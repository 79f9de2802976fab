"""A loss spike: how far a run is rolled back, which data it leaves out, and how it ends."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from training_kit import ending, events, trained

from kdtrain import faults
from kdtrain.checkpoint.store import load
from kdtrain.data import order
from kdtrain.errors import RunError
from kdtrain.objective.alpha import MeasuredAlpha
from kdtrain.objective.measured import MOST
from kdtrain.training import nan_hooks, step, trainer
from kdtrain.training.recovery import Recovery
from kdtrain.training.step import Status, StepResult

SPIKE = {"steps": 40, "checkpoint_freq": 4, "eval_freq": 40, "early_stopping": False, "lr_schedule": "constant"}


@pytest.fixture
def spikes(fault):
    """Multiply the loss by 30, or another factor, at these batches, or make it NaN."""
    return lambda batches, how="x30": fault(f"train.loss:{how}:{batches}")


def losses(run):
    return {line["step"]: line["loss"] for line in trained(run)}


@pytest.mark.parametrize("first", [25, 28], ids=["right after a checkpoint", "at the step of one"])
def test_a_spike_is_rolled_back_to_the_checkpoint_before_it_its_data_left_out_and_the_rate_halved(
    workshop, spikes, first
):
    fired, confirmed = spikes(f"{first}-{first + 2}"), first + 2
    with workshop.run(train=workshop.source(400), **SPIKE) as run:
        run.fit()
    assert fired == {"train.loss"}
    progress = run.state.progress
    assert (progress.step, progress.rollbacks, progress.lr_factor) == (40, 1, 0.5)
    # back to step 24; the batches from 25 (sequence 96 of the stream) to the one that confirmed it are left out
    left_out = [96, 4 * confirmed]
    assert progress.skipped_data == [left_out]
    assert progress.sequences == 4 * (40 + confirmed - 24)
    (spike,), (event,) = (events(run, kind) for kind in ("spike", "rollback"))
    assert spike["message"] == f"a loss spike since step {first}, confirmed at step {confirmed}"
    assert (event["step"], event["first"], event["skipped"], event["lr_factor"]) == (24, first, left_out, 0.5)
    assert list(losses(run)) == list(range(1, 41))
    assert max(losses(run).values()) < 10 * losses(run)[1]
    before, after = (load(run.store.folder / name) for name in ("step-00000024", "rollback_1_iter24"))
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert (before.state["progress"]["sequences"], after.state["progress"]["sequences"]) == (96, 4 * confirmed)


def test_a_rollback_brings_back_what_alpha_follows(workshop, spikes, small):
    spikes("26-28")
    source = workshop.source(400)
    source.logits += 3 * torch.nn.functional.one_hot(source.tokens[:, 1:], source.vocab_size)  # some better than it
    with workshop.run(train=source, validation=source, alpha="auto", **SPIKE) as run:
        run.fit()
    weights = {line["step"]: line["alpha"] for line in trained(run)}
    assert run.state.progress.rollbacks == 1 and len({*weights.values()}) > 15
    states = [load(run.store.folder / name).tensors for name in ("step-00000024", "rollback_1_iter24")]
    own = [{k.removeprefix("alpha."): v for k, v in each.items() if k.startswith("alpha.")} for each in states]
    assert all(torch.equal(own[0][name], own[1][name]) for name in ("present", "known", "trained"))
    alpha = MeasuredAlpha()
    alpha.load_state_dict(own[0])
    assert weights[25] == alpha.value().item()  # of the step that was taken again
    assert weights[1] == pytest.approx(min(trained(run)[0]["withheld/share"], MOST))


@pytest.mark.parametrize("alpha, found", [(None, 1), (0.9, 1), (0.49, 0)])
def test_a_divergence_that_counts_for_little_is_not_watched_for_spikes(workshop, monkeypatch, alpha, found):
    seen = []
    with workshop.run() as run:
        monkeypatch.setattr(run.recovery, "_roll_back", lambda kind, *_, **__: seen.append(kind))
        for number in range(1, 44):
            metrics = {"ce": 4.0, "kd_T1": 3.0 if number > 40 else 1.0} | ({} if alpha is None else {"alpha": alpha})
            run.state.progress.step = number
            run.recovery._roll_back_spike(StepResult(Status.TAKEN, loss=4.0, grad_norm=1.0, metrics=metrics))
    assert seen == ["spike"] * found


def test_a_rollback_too_many_ends_the_run_and_the_checkpoints_stay(workshop, spikes):
    spikes("26-60")
    with (
        workshop.run(train=workshop.source(400), max_rollbacks=1, **SPIKE | {"steps": 80}) as run,
        pytest.raises(RunError, match="after 1 rollbacks"),
    ):
        run.fit()
    assert run.store.newest_valid()[0] is not None


def test_a_run_goes_back_to_its_beginning_where_no_other_checkpoint_is_from_before_the_spike(workshop, spikes):
    spikes("26-28")
    with workshop.run(train=workshop.source(400), **SPIKE | {"checkpoint_freq": 100}) as run:
        run.fit()
    assert (run.state.progress.step, run.state.progress.rollbacks) == (40, 1)
    assert events(run, "rollback")[0]["step"] == 0
    assert run.state.progress.skipped_data == [[0, 112]]


def test_without_any_checkpoint_from_before_it_the_run_has_diverged(workshop, spikes, monkeypatch):
    spikes("26-28")
    with workshop.run(train=workshop.source(400), **SPIKE) as run:
        monkeypatch.setattr(run.store, "newest_valid", lambda **_: (None, []))
        with pytest.raises(RunError, match="newest checkpoint from before it is none") as ended:
            run.fit()
    assert ended.value.reason == "diverged"


def test_a_loss_that_stays_above_its_beginning_takes_the_run_back_to_its_best_state(workshop, spikes):
    spikes("2-14", how="x1.5")  # too early for a spike, and for good
    with workshop.run(train=workshop.source(400), **SPIKE | {"eval_freq": 5}) as run:
        run.fit()
    assert (run.state.progress.step, run.state.progress.rollbacks, run.state.progress.lr_factor) == (40, 1, 0.5)
    assert events(run, "rollback")[0]["step"] in (0, 5, 10)


def test_a_validation_that_was_interrupted_takes_the_run_back_in_the_next_start(workshop, monkeypatch):
    options = SPIKE | {"steps": 10, "eval_freq": 4, "alpha": 0.9}  # a validation takes two reads
    with workshop.run(train=workshop.source(400), validation=ending(workshop, 5, 4), **options) as run:
        run.fit()
        assert (run.stopped_by, run.state.progress.step, run.state.progress.validated_step) == ("SIGTERM", 8, 4)
        run.stopped_by = None
        judged = iter([True])
        monkeypatch.setattr(run.state.guards.divergence, "validated", lambda loss: next(judged, False))
        run.fit()
    assert (run.state.progress.step, run.state.progress.rollbacks) == (10, 1)


@pytest.mark.parametrize("patience", [3, 0])
def test_a_run_that_diverges_again_and_again_ends_as_diverged_with_its_first_state_on_the_disk(workshop, patience):
    options = SPIKE | {"steps": 200, "checkpoint_freq": 50, "lr": 30.0, "spike_patience": patience, "eval_freq": 50}
    with (
        workshop.run(train=workshop.source(400), explosion_threshold=1e30, clip=0.0, **options) as run,
        pytest.raises(RunError, match="lower --lr") as ended,
    ):
        run.fit()
    assert ended.value.reason in ("diverged", "non-finite")
    assert (run.state.progress.best_step, run.state.progress.rollbacks) == (0, 3)
    assert load(run.store.choose("best")).state["progress"]["step"] == 0


def test_the_checkpoint_that_a_rollback_needs_outlives_pruning(workshop, spikes):
    spikes("25-30")
    options = SPIKE | {"checkpoint_freq": 1, "keep_rolling": 1, "spike_patience": 5}
    with workshop.run(train=workshop.source(400), **options) as run:
        run.fit()
    assert run.state.progress.rollbacks == 1
    assert events(run, "rollback")[0]["step"] == 24


def test_a_rollback_ignores_the_checkpoint_of_an_interruption(workshop, spikes):
    spikes("26-28")
    with workshop.run(train=workshop.source(400), **SPIKE) as run:
        run.store.save("interrupted-00000025", 25, run.state.tensors(), {"progress": {"step": 25}})
        run.fit()
    assert events(run, "rollback")[0]["step"] == 24
    assert (run.store.folder / "interrupted-00000025.left-1").is_dir()


def test_checkpoints_by_the_clock_change_nothing_of_a_run_that_rolls_back(workshop, spikes):
    spikes("26-28")
    ended = {}
    for minutes in (0, 1e-9):
        with workshop.run(f"{minutes}", train=workshop.source(400), **SPIKE, checkpoint_minutes=minutes) as run:
            run.fit()
        saved = [each["name"] for each in events(run, "checkpoint")]
        assert ("clock-00000027" in saved) == (minutes > 0)
        by_clock = [int(name[-8:]) for name in saved if name.startswith("clock-")]
        assert not any(step % 4 == 0 for step in by_clock)  # they are saved as they are
        assert events(run, "rollback")[0]["step"] == 24
        ended[minutes] = load(run.store.path("step-00000040"))
        assert [name for name in run.store.names() if name.startswith("clock-")] == ["clock-00000039"] * (minutes > 0)
    ours, theirs = ended.values()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)
    assert ours.state["progress"] == theirs.state["progress"]


def test_the_clock_asks_for_a_checkpoint_after_its_minutes_without_one(workshop, monkeypatch):
    clock = iter(range(25, 10**6, 25))  # a step takes less than 30 s, and two of them more
    now = [0.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    with workshop.run(train=workshop.source(400), steps=9, checkpoint_freq=4, checkpoint_minutes=0.5) as run:
        run.checkpoints.saved_at = 0.0
        monkeypatch.setattr(
            faults, "point", lambda name, *_: now.__setitem__(0, next(clock)) if "after-s" in name else 0
        )
        run.fit()
    saved = [each["name"].replace("-0000000", " ") for each in events(run, "checkpoint")]
    assert saved == ["step 0", "clock 3", "step 4", "clock 7", "step 8", "step 9"]


def test_a_rollback_does_not_bring_back_an_early_stop_that_was_put_aside(workshop, spikes):
    spikes("26-28")
    with workshop.run(train=workshop.source(400), **SPIKE) as run:
        run.state.progress.stopped = "the loss is flat"
        run.state.progress.step, run.state.progress.sequences = 24, 96
        run.saver.save(["step-00000024"], 24, run.state.tensors(), {**run.checkpoints.identity, **run.state.numbers()})
        run.saver.wait()
        run.state.progress.stopped = None
        for step in range(1, 25):
            run.state.guards.spikes.update(step, {"ce": 6.0, "kd_T1": 3.0})
        run.fit()
    assert (run.state.progress.rollbacks, run.state.progress.stopped, run.state.progress.step) == (1, None, 40)


def test_a_best_checkpoint_that_is_gone_is_forgotten(workshop):
    with workshop.run(steps=2, eval_freq=1) as run:
        run.fit()
        assert (run.store.folder / "best").is_symlink()
        run.state.progress.best_step = 7
        run.checkpoints.relink_best()
    assert (run.state.progress.best_step, run.state.progress.best_loss) == (None, None)
    assert not (run.store.folder / "best").is_symlink()


def test_the_best_is_found_under_whatever_name_its_step_has(workshop):
    with workshop.run(steps=2, eval_freq=1) as run:
        run.fit()
        best = run.state.progress.best_step
        name = run.store.linked("best")
        run.saver.wait()
        run.store.copy(name, "window_end_1_iter2")
        run.store.remove(name)  # as a kill leaves it between the window's checkpoint and its own
        run.checkpoints.relink_best()
    assert run.state.progress.best_step == best and run.store.linked("best") == "window_end_1_iter2"


def test_a_bundle_that_cannot_be_written_is_a_warning_and_the_run_goes_on(workshop, monkeypatch):
    def full(*arguments):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(nan_hooks, "write_bundle", full)
    with workshop.run(train=workshop.source(40, broken=tuple(order.batch(0, 0, 4, 40).tolist()[:1])), steps=3) as run:
        run.fit()
    assert (run.state.progress.step, run.state.progress.skips) == (3, 1)


@pytest.mark.parametrize("checkpoint_freq", [1, 4])
def test_an_update_that_breaks_the_weights_is_rolled_back_once_at_half_the_rate(workshop, monkeypatch, checkpoint_freq):
    rates = iter([1e30])
    monkeypatch.setattr(step, "learning_rate", lambda n, *_: next(rates, 1e-3) if n == 6 else 1e-3)
    options = SPIKE | {"steps": 9, "checkpoint_freq": checkpoint_freq, "max_skips": 3, "nan_hooks": "off"}
    with workshop.run(train=workshop.source(400), **options) as run:
        run.fit()
    progress, back = run.state.progress, 5 if checkpoint_freq == 1 else 4
    assert (progress.step, progress.rollbacks, progress.lr_factor, progress.skips) == (9, 1, 0.5, 4)
    assert events(run, "rollback")[0]["step"] == back
    assert [each["in_a_row"] for each in events(run, "skip")] == [1, 2, 3, 4]
    assert math.isfinite(progress.loss)
    # the data of the step that broke the weights, and of the skipped ones, is left out
    assert progress.skipped_data == [[4 * back, 4 * (6 + 4)]]


def test_a_run_whose_steps_fail_after_the_rollback_too_ends_at_weights_that_can_be_resumed(workshop, spikes):
    monkeypatched = spikes("6-100", how="nan")
    options = SPIKE | {"checkpoint_freq": 1, "max_skips": 2, "nan_hooks": "off"}
    with (
        workshop.run(train=workshop.source(400), **options) as run,
        pytest.raises(RunError, match=r"3 steps in a row, and as many after a rollback.*rollback_1_iter4") as ended,
    ):
        run.fit()
    assert monkeypatched == {"train.loss"} and ended.value.reason == "non-finite"
    assert [each["in_a_row"] for each in events(run, "skip")] == [1, 2, 3, 4, 5, 6]
    assert run.store.newest_valid()[0] == run.store.linked("latest") == "rollback_1_iter4"


def test_a_lower_limit_of_skips_in_the_middle_of_a_row_still_goes_back_once(workshop, spikes, monkeypatch):
    """As where a run that was stopped in a row of skips resumes with another `--max-skips`."""
    spikes("6-100", how="nan")
    roll_back = Recovery._roll_back_skips

    def lowered(self, loss):
        if self.state.progress.skips_in_a_row == 4:
            self.config = replace(self.config, guards=replace(self.config.guards, max_skips=2))
        return roll_back(self, loss)

    monkeypatch.setattr(Recovery, "_roll_back_skips", lowered)
    options = SPIKE | {"checkpoint_freq": 1, "max_skips": 10, "nan_hooks": "off"}
    with (
        workshop.run(train=workshop.source(400), **options) as run,
        pytest.raises(RunError, match="3 steps in a row, and as many after a rollback"),
    ):
        run.fit()
    assert len(events(run, "rollback")) == 1 and len(events(run, "skip")) == 4 + 3


@pytest.mark.parametrize(
    "planted, validated, kept",
    [("loss:nan", 1, True), ("gradient:nan", 1, False), ("loss:nan", 40, False)],
    ids=["no batch has a finite loss", "no gradient is finite", "not validated"],
)
def test_without_rollbacks_weights_whose_steps_are_broken_are_set_aside_unless_they_were_validated_and_have_gradients(
    workshop, fault, planted, validated, kept
):
    fault(f"train.{planted}:6-100")
    options = SPIKE | {"checkpoint_freq": 1, "max_skips": 2, "nan_hooks": "off", "eval_freq": validated}
    with (
        workshop.run(train=workshop.source(400), max_rollbacks=0, **options) as run,
        pytest.raises(RunError, match="3 steps in a row,"),
    ):
        run.fit()
    last = run.store.folder / "step-00000005"
    assert last.is_dir() == kept != (run.store.folder / f"{last.name}.left-1").is_dir()
    assert run.store.newest_valid()[0] == run.store.linked("latest") == (last.name if kept else "step-00000004")
    assert run.store.linked("best") in (None, *run.store.names()), "the link leads to a checkpoint that is there"
    assert kept or run.store.linked("best") != last.name
