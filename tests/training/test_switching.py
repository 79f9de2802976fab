"""Adaptive quantisation in the loop: decisions are carried out, logged, saved, and the same after a resume."""

import logging
import math
import os
import signal
from functools import partial

import pytest
import torch
from training_kit import events, trained

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.store import Store, load
from kdtrain.errors import RunError
from kdtrain.precision.controller import Adaptive, Policy
from kdtrain.precision.emulated import FormatRecipe
from kdtrain.precision.linear import Emulated, convert
from kdtrain.precision.loss_scale import LossScale
from kdtrain.training import step as step_module
from kdtrain.training.recovery import Recovery
from kdtrain.training.schedule import learning_rate

CALM = {
    "lr": 1e-5,
    "lr_schedule": "constant",
    "alpha": 0.0,
    "spike_patience": 0,
    "max_skips": 20,
    "nan_hooks": "off",
    "keep_special": 50,
}
LOSS = {"rules": ("loss",), "threshold": 8.0, "window": 4, "min_dwell": 5}


def quantise(run, **policy) -> Adaptive:
    """Make a run of the workshop adaptive, in mxfp4."""
    model, switch = run.student.model.model, run.student.switch
    backend = Emulated(FormatRecipe("mx", "e2m1", "e2m1"))
    convert(model, switch, backend, head=model.get_output_embeddings())
    run.student.quantized = "mxfp4"
    run.state.adaptive = Adaptive(Policy(quantized="mxfp4", **policy), switch, "high")
    return run.state.adaptive


def state_after(workshop, policy, options, name: str, steps: int, begin_at=None) -> tuple[dict, dict]:
    """Return tensors and numbers of the last checkpoint of an adaptive run, from its beginning or from a checkpoint."""
    with workshop.run(name, steps=steps, **options) as run:
        quantise(run, **policy)
        if begin_at is not None:
            found = load(begin_at)
            run.state.load(found.tensors, found.state)
        run.fit()
        last = load(run.store.path(f"step-{steps:08d}"))
        return last.tensors, last.state


@pytest.fixture
def break_update(monkeypatch):
    """Take the updates of step `at`, `times` times, at a rate that breaks the weights; gradients of these are NaN."""

    def ask(at: int, times: int = 1) -> None:
        left = [times]

        def rate(step: int, *rest) -> float:
            if step != at or not left[0]:
                return learning_rate(step, *rest)
            left[0] -= 1
            return 1e30

        monkeypatch.setattr(step_module, "learning_rate", rate)

    return ask


def metrics(run) -> dict[int, dict]:
    return {line["step"]: line for line in trained(run)}


def test_a_checkpoint_is_called_saved_when_it_is_published_and_named_by_the_step_it_holds(workshop, fault, caplog):
    fault("train.gradient:nan:6")
    found = {}

    def look(record: logging.LogRecord) -> bool:
        _, saved, name = record.getMessage().partition("Checkpoint saved: ")
        if saved:
            found[name] = run.store.problem(name)
        return True

    caplog.set_level("INFO", "kdtrain")
    caplog.handler.addFilter(look)
    with workshop.run(steps=10, checkpoint_freq=100, **CALM) as run:
        quantise(run, **LOSS)
        run.fit()
        held = {each.name: each.step for each in run.store.entries() if "iter" in each.name}
    caplog.handler.removeFilter(look)
    assert "switch_to_bf16_iter5" in found and set(found.values()) == {None}
    assert all(tiers.step_in(name) == step for name, step in held.items())


def test_snapshots_on_disk_are_named_by_the_mode_and_older_ones_are_deleted(workshop, fault):
    fault("train.loss:x2:3-8")
    with workshop.run(steps=7, checkpoint_freq=100, **CALM) as run:
        quantise(run, **LOSS | {"window": 100, "snapshot_to_disk": True, "keep": 3})
        run.fit()
        names = {each.name for each in run.store.entries() if not each.name.startswith("epoch")}
    assert names == {
        "window_1_iter2_quantized", "window_1_iter6_bf16", "window_1_iter7_bf16", "switch_to_bf16_iter5",
        "step-00000000", "step-00000007",
    }  # fmt: skip


@pytest.mark.parametrize(
    "policy, planted, steps, skipped, stops",
    [
        (LOSS, "train.loss:x2:5-8", 15, [], (3, 6, 9, 13)),
        (
            LOSS | {"window": 100, "snapshot_every": 3},
            *("train.loss:x2:8-9,train.gradient:nan:11-14", 12, [[6 * 4, 14 * 4]], (6, 8, 9)),
        ),
    ],
    ids=["in any mode", "before it goes back to a snapshot of the first process"],
)
def test_a_resumed_run_is_the_run_that_was_not_stopped_bit_by_bit(
    workshop, fault, policy, planted, steps, skipped, stops
):
    fault(planted)
    go = partial(state_after, workshop, policy, {**CALM, "lr": 1e-3, "checkpoint_freq": 1, "keep_rolling": 50})
    whole, numbers = go("whole", steps)
    assert numbers["progress"]["skipped_data"] == skipped and numbers["progress"]["rollbacks"] == len(skipped)
    for stop in stops:
        go(f"until-{stop}", stop)
        begin_at = workshop.folder / f"until-{stop}" / "checkpoints" / f"step-{stop:08d}"
        tensors, again = go(f"from-{stop}", steps, begin_at)
        assert tensors.keys() == whole.keys() and all(torch.equal(tensors[name], whole[name]) for name in whole)
        assert again["progress"]["skipped_data"] == skipped
        assert again["watchers"]["adaptive"] == numbers["watchers"]["adaptive"]


def test_a_kill_after_the_first_checkpoint_of_a_step_loses_no_state_of_the_recovery_buffer(workshop, fault):
    spikes = "train.loss:x2:5-8,train.gradient:nan:14-17"
    fault(spikes)  # back to mxfp4 at step 12, where a window ends; broken from step 14 on
    options = {**CALM, "lr": 1e-3, "checkpoint_freq": 100, "async_save": False}
    go = partial(state_after, workshop, LOSS | {"keep": 1, "snapshot_every": 100}, options)
    whole, numbers = go("whole", 16)
    assert numbers["progress"]["skipped_data"] == [[12 * 4, 17 * 4]]

    fault(f"{spikes},checkpoint.after-rename:raise:9")  # behind windows 4 and 8, a switch, and epochs
    with pytest.raises(RunError, match=r"fault checkpoint\.after-rename was"):
        go("first", 16)
    store = Store(workshop.folder / "first" / "checkpoints")
    name = store.newest_valid()[0]
    assert store.entries()[-1].step == 12

    fault(spikes)
    tensors, again = go("first", 16, store.path(name))
    assert again["progress"]["skipped_data"] == [[12 * 4, 17 * 4]]
    assert tensors.keys() == whole.keys() and all(torch.equal(tensors[each], whole[each]) for each in whole)
    assert again["watchers"]["adaptive"] == numbers["watchers"]["adaptive"]


def test_a_checkpoint_carries_the_snapshots_of_its_window_and_none_at_its_end(workshop):
    with workshop.run(steps=8, checkpoint_freq=1, keep_rolling=50, **CALM) as run:
        quantise(run, **LOSS | {"window": 4})
        run.fit()
        kept = [len(load(run.store.path(f"step-{step:08d}")).state.get("snapshots", [])) for step in range(1, 9)]
    assert kept == [1, 2, 2, 0, 1, 2, 2, 0]


def test_a_window_that_a_kill_left_is_removed_with_the_next(workshop):
    with workshop.run(steps=8, checkpoint_freq=100, **CALM) as run:
        quantise(run, **LOSS | {"window": 2})
        run.store.save("window_end_9_iter1", 1, run.state.tensors(), run.state.numbers())
        run.fit()
        assert {name for name in run.store.names() if name.startswith("window")} == {
            "window_end_3_iter6", "window_end_4_iter8",
        }  # fmt: skip


def test_the_gap_is_what_quantisation_costs_and_measuring_it_changes_nothing(workshop):
    ends = []
    for probe_every in (2, 1000):
        with workshop.run(f"every-{probe_every}", steps=6, **CALM | {"lr": 1e-3}) as run:
            quantise(run, rules=("gap",), threshold=100.0, window=100, probe_every=probe_every)
            gaps, observe = [], run.state.adaptive.observe

            def watched(step, loss, gap, broken, observe=observe, gaps=gaps):
                gaps.append(gap)
                return observe(step, loss, gap, broken)

            run.state.adaptive.observe = watched
            run.fit()
            ends.append({name: each.clone() for name, each in run.state.tensors().items()})
        measured = [gap for gap in gaps if gap is not None]
        assert len(measured) == (3 if probe_every == 2 else 0)
        assert all(0 < abs(gap) < 0.1 for gap in measured)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_the_rules_watch_the_loss_or_one_of_a_fixed_weight_where_alpha_moves(workshop, alpha):
    with workshop.run(steps=4, **CALM | {"alpha": alpha}) as run:
        seen, observe = {}, quantise(run, rules=("loss",), threshold=100.0, window=100).observe
        run.state.adaptive.observe = lambda step, loss, *more: seen.update({step: loss}) or observe(step, loss, *more)
        run.fit()
    lines = metrics(run).items()
    fixed = {step: pytest.approx(0.1 * line["ce"] + 0.9 * line["kd_T1"]) for step, line in lines}
    assert seen == ({step: line["loss"] for step, line in lines} if alpha == 0.5 else fixed) and len(seen) == 4


def test_steps_that_stay_broken_in_the_fallback_restore_the_newest_good_state(workshop, fault, caplog):
    fault("train.loss:nan:6-9")
    with workshop.run(steps=8, checkpoint_freq=100, **CALM) as run:
        controller = quantise(run, **LOSS)
        run.fit()
        progress, names = run.state.progress, run.store.names()
    assert progress.rollbacks == 1 and progress.step == 8 and math.isfinite(progress.loss)
    # no step was taken from the snapshot of step 5
    assert not controller.is_quantized and "recovery_1_iter4" in names
    assert [each["step"] for each in events(run, "recovery")] == [4]


def test_weights_that_an_update_broke_are_never_restored_and_an_ordinary_checkpoint_is(workshop, break_update):
    break_update(at=6)
    with workshop.run(train=workshop.source(400), steps=8, checkpoint_freq=4, **CALM) as run:
        quantise(run, **LOSS | {"window": 100, "snapshot_every": 6})  # its only state is the broken one
        run.fit()
        saved = load(run.store.path("recovery_1_iter4"))
        before = load(run.store.path("step-00000004"))
        names, latest = run.store.names(), run.store.linked("latest")
    progress = run.state.progress
    assert (progress.step, progress.rollbacks, progress.lr_factor) == (8, 1, 0.5) and math.isfinite(progress.loss)
    assert all(torch.equal(saved.tensors[name], before.tensors[name]) for name in before.tensors)
    assert "switch_to_bf16_iter6" not in names and latest == "step-00000008"


def test_a_run_that_every_update_breaks_ends_at_weights_that_can_be_resumed(workshop, break_update):
    break_update(at=1, times=100)
    options = {"steps": 8, "checkpoint_freq": 1, "eval_freq": 8, **CALM}
    for _ in range(2):
        with workshop.run(**options) as run:
            quantise(run, **LOSS)
            if (newest := run.store.newest_valid()[0]) is not None:
                found = load(run.store.path(newest))
                run.state.load(found.tensors, found.state)
                run.checkpoints.published = (0, 0)
            with pytest.raises(RunError, match=r"recovery_3_iter0 would exceed --max-rollbacks 3"):
                run.fit()
            run.saver.wait()
            assert run.store.newest_valid()[0] == run.store.linked("latest") == "recovery_3_iter0"
        first, last = (load(run.store.path(name)) for name in ("step-00000000", "recovery_3_iter0"))
        assert all(torch.equal(last.tensors[name], tensor) for name, tensor in first.tensors.items())


def test_a_checkpoint_of_adaptive_quantisation_and_an_ordinary_one_of_the_same_step_are_one(workshop):
    with workshop.run(steps=4, checkpoint_freq=100, **CALM) as run:
        quantise(run, **LOSS)
        run.fit()
        window, rolling = (run.store.path(name) for name in ("window_end_1_iter4", "step-00000004"))
        (shard,) = window.glob("*.safetensors")
        assert shard.samefile(rolling / shard.name)
        assert run.store.linked("latest") == "step-00000004"


def test_a_signal_in_a_broken_step_does_not_hide_it_from_the_controller(workshop, fault, monkeypatch):
    fault("train.loss:nan:6-6")
    skip = Recovery._skip_or_roll_back

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return skip(*arguments)

    monkeypatch.setattr(Recovery, "_skip_or_roll_back", signalled)
    with workshop.run(steps=12, **CALM) as run:
        controller = quantise(run, **LOSS)
        run.fit()
        assert run.stopped_by == "SIGTERM" and run.state.progress.step == 5
    assert (controller.is_quantized, controller.switches) == (False, 1)


def test_validation_is_high_in_every_mode(workshop):
    with workshop.run(steps=1, **CALM) as run:
        quantise(run, **LOSS)
        batch = run.validation_source.read(torch.arange(2).numpy())
        run.student.eval()
        assert run.student.switch.position == "quantized"
        quantised = run.student.hidden_eager(batch)
        run.student.switch.position = "high"
        assert torch.equal(run.student.hidden_eager(batch), quantised)


def test_a_loss_scale_changes_no_weight_and_is_taken_out_before_the_clip(workshop):
    ends = []
    for value in (1.0, 2.0**10):
        with workshop.run(f"scale-{value}", steps=4, **CALM | {"lr": 1e-3, "alpha": 0.9}) as run:
            run.state.guards.scale = LossScale(True)
            run.state.guards.scale.value = value
            run.fit()
            ends.append({name: each.clone() for name, each in run.state.tensors().items()})
            norms = [numbers["grad_norm"] for numbers in metrics(run).values()]
    assert max(norms) < 100
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-7)


def test_an_overflow_halves_the_scale_and_is_not_a_failure(workshop, fault, caplog):
    fault("train.gradient:nan:2-12")
    with workshop.run(steps=3, **CALM) as run:
        run.state.guards.scale = LossScale(True)
        run.fit()
        assert run.state.guards.scale.value == 2.0**16 / 2**11 and run.state.progress.skips == 0
    falling = [each.getMessage() for each in caplog.records if "has fallen to" in each.getMessage()]
    assert [text.split("fallen to ")[1].split(":")[0] for text in falling] == ["128", "64", "32"]
