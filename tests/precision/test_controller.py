"""When a run trains quantised: every transition of the controller, spelled out, with its log lines and names."""

import json
import math

import pytest

from kdtrain.precision.controller import (
    DropSnapshots,
    LogLine,
    Policy,
    PrecisionController,
    Recover,
    Save,
    Snapshot,
    SwitchTo,
)

NAN, INF = math.nan, math.inf
SAID = "[AdaptiveQuantization] "


def controller(**options) -> PrecisionController:
    quiet = {"window": 1000, "snapshot_every": 1000, "min_dwell": 0}
    return PrecisionController(Policy(**{"quantized": "mxfp4", **quiet, **options}))


def feed(made: PrecisionController, losses, gaps=None, start: int = 1) -> list[str]:
    """Feed losses to a controller; return the mode of each next step."""
    gaps = gaps or [None] * len(losses)
    modes = []
    for step, (loss, gap) in enumerate(zip(losses, gaps, strict=True), start):
        made.observe(step, loss, gap)
        modes.append("q" if made.is_quantized else "h")
    return modes


LOSS = {"rules": ("loss",), "window": 2}
GAP = {"rules": ("gap",), "window": 2}


@pytest.mark.parametrize(
    "options, losses, gaps, modes",
    [
        pytest.param(LOSS, [0.2, 0.2, 0.2], None, "qqh", id="three in a row above the threshold"),
        pytest.param(LOSS, [0.2, 0.2, 0.1, 0.2, 0.2], None, "qqqqq", id="two in a row are not enough"),
        pytest.param(LOSS, [0.1] * 5, None, "qqqqq", id="at the threshold is not above it"),
        pytest.param(LOSS, [0.2] * 3 + [0.08, 0.08], None, "qqhhq", id="a window at 80 % brings it back"),
        pytest.param(LOSS, [0.2] * 3 + [0.081] * 4, None, "qqhhhhh", id="a window above 80 % does not"),
        pytest.param(LOSS, [0.2] * 3 + [0.07, 0.2, 0.07], None, "qqhhhh", id="a window that is broken does not"),
        pytest.param(LOSS, [NAN], None, "h", id="NaN falls back at once"),
        pytest.param(LOSS, [INF], None, "h", id="infinity falls back at once"),
        pytest.param(LOSS, [NAN, 0.01, 0.01], None, "hhq", id="after NaN a calm window brings it back"),
        pytest.param({**LOSS, "min_dwell": 4}, [0.2] * 3 + [0.01] * 4, None, "qqhhhhq", id="not before it dwelt"),
        pytest.param({**LOSS, "min_dwell": 4}, [0.2] * 3 + [0.01] * 4 + [0.2] * 4, None, "qqhhhhqqqqh", id="nor back"),
        pytest.param({**LOSS, "min_dwell": 9}, [0.2] * 3 + [0.01] * 9 + [NAN], None, "qqhhhhhhhhhqh", id="NaN does"),
        pytest.param({**LOSS, "max_switches": 1}, [0.2] * 3 + [0.01] * 5, None, "qqhhhhhh", id="switches are used up"),
        pytest.param({**LOSS, "max_switches": 2}, [0.2, 0.2, 0.2, 0, 0, NAN, 0, 0], None, "qqhhqhhh", id="or later"),
        pytest.param(GAP, [3.0] * 4, [None] * 4, "qqqq", id="what is not measured decides nothing"),
        pytest.param(GAP, [3.0] * 3, [0.2] * 3, "qqh", id="three gaps in a row"),
        pytest.param(GAP, [3.0] * 5, [0.2, None, 0.2, None, 0.2], "qqqqh", id="steps between are no interruption"),
        pytest.param(GAP, [3.0] * 5, [0.2] * 3 + [0.01, 0.01], "qqhhq", id="a calm gap brings it back"),
        pytest.param(GAP, [3.0] * 4, [-0.5] * 4, "qqqq", id="a negative gap costs nothing"),
        pytest.param(GAP, [3.0], [NAN], "h", id="a gap that is NaN falls back at once"),
        pytest.param(GAP, [3.0] * 5, [0.2] * 3 + [NAN] * 2, "qqhhh", id="and keeps high what is high"),
        pytest.param({"rules": ("spike",)}, [3.0, 3.05, 3.1] * 8 + [9.0] * 3, None, "q" * 26 + "h", id="a spike"),
        pytest.param({"rules": ("spike",)}, [9.0] * 9, None, "q" * 9, id="no spike without history"),
        pytest.param({"rules": ("schedule",), "decay_start": 3}, [3.0] * 5, None, "qqhhh", id="the decay"),
        pytest.param({"rules": ("schedule",), "decay_start": 9}, [NAN, 3.0, 3.0], None, "hhh", id="NaN before it"),
        pytest.param({**LOSS, "rules": ("loss", "schedule"), "decay_start": 4}, [0.2] * 3 + [0] * 3, None, "qqhhhh",
                     id="nothing brings back what decays"),
        pytest.param({"rules": ("loss", "gap"), "window": 2}, [0.2, 0.2, 0.2], [0, 0, 0], "qqh", id="any of two rules"),
        pytest.param({"rules": ("loss", "gap"), "window": 2}, [0.2] * 3 + [0.01] * 3, [0] * 3 + [0.09] * 3, "qqhhhh",
                     id="both must be calm"),
    ],
)  # fmt: skip
def test_each_rule_switches_at_its_threshold(options, losses, gaps, modes):
    assert "".join(feed(controller(**options), losses, gaps)) == modes


def test_a_switch_is_logged_and_follows_its_checkpoint():
    made = controller(rules=("loss",), window=3)
    assert [made.observe(step, 0.15) for step in (148, 149)] == [[], []]
    assert made.observe(151, 0.15) == [
        LogLine(SAID + "Loss 0.1500 exceeds threshold 0.1000, switching to bf16"),
        Save("switch_to_bf16_iter151"),
        SwitchTo("bf16"),
    ]
    assert made.mode == "bf16" and made.switches == 1
    assert [made.observe(step, 0.08) for step in (152, 154)] == [[], []]
    assert made.observe(155, 0.08) == [
        LogLine(SAID + "Loss 0.0800 is stable, switching back to mxfp4"),
        Save("switch_to_mxfp4_iter155"),
        SwitchTo("mxfp4"),
    ]


@pytest.mark.parametrize("fallback", ["bf16", "fp16"])
def test_the_fallback_has_the_configured_name(fallback):
    made = controller(fallback=fallback, **GAP)
    actions = [made.observe(step, 3.0, 0.25) for step in (1, 2, 3)][-1]
    assert actions[0] == LogLine(f"{SAID}Gap 0.2500 exceeds threshold 0.1000, switching to {fallback}")
    assert actions[1] == Save(f"switch_to_{fallback}_iter3") and made.mode == fallback


def test_a_non_finite_loss_is_logged_as_such():
    actions = controller().observe(7, NAN)
    assert Save("switch_to_bf16_iter6") in actions  # step 7 was not taken
    assert actions[0] == LogLine(SAID + "Loss nan is not finite, switching to bf16")
    actions = controller().observe(7, float("inf"), broken="Gradient norm")
    assert actions[0] == LogLine(SAID + "Gradient norm inf is not finite, switching to bf16")
    assert SwitchTo("bf16") in actions


def test_an_early_decay_ends_quantisation_after_a_resume_too():
    first, second = (controller(rules=("schedule",), decay_start=100) for _ in range(2))
    assert first.observe(1, 3.0, None) == [] and first.is_quantized
    first.begin_decay(2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for each in (first, second):
        each.observe(2, 3.0, None)
        assert not each.is_quantized


def test_the_decay_is_logged_once():
    made = controller(rules=("schedule",), decay_start=2)
    said = [made.observe(step, 3.0)[:1] for step in (1, 2, 3, 4)]
    assert said == [[], [LogLine(SAID + "Decay begins after step 2, switching to bf16")], [], []]


def test_used_up_switches_are_logged_once():
    made = controller(**LOSS, max_switches=1)
    feed(made, [0.2] * 3)
    lines = [action.line for step in range(4, 12) for action in made.observe(step, 0.01) if isinstance(action, LogLine)]
    assert [line for line in lines if "used up" in line] == [SAID + "1 switches are used up, staying in bf16"]


def test_windows_end_in_a_checkpoint_and_the_oldest_leaves_the_buffer():
    made = controller(window=100, snapshot_every=50, snapshot_to_disk=True, keep=2)
    saved = []
    for step in range(1, 301):
        for action in made.observe(step, 0.05):
            saved += [action.name] if isinstance(action, Save) else []
        assert made.buffer_names() == saved[-2:]
    assert saved == [
        "window_1_iter50_quantized", "window_end_1_iter100", "window_2_iter150_quantized",
        "window_end_2_iter200", "window_3_iter250_quantized", "window_end_3_iter300",
    ]  # fmt: skip
    made.observe(301, 0.05)
    assert made.recovery_names() == saved[-2:][::-1]


def test_a_snapshot_on_disk_carries_the_mode_in_its_name():
    made = controller(window=1000, snapshot_every=100, snapshot_to_disk=True)
    assert made.observe(100, 0.05)[0] == Save("window_1_iter100_quantized")
    made = controller(window=1000, snapshot_every=100, snapshot_to_disk=True)
    made.observe(99, NAN)
    assert made.observe(100, 0.05) == [Save("window_1_iter100_bf16")]


def test_snapshots_in_memory_cost_no_disk_and_are_taken_of_good_states_only():
    made = controller(rules=("loss",), window=1000, snapshot_every=1, keep=2)
    assert made.observe(1, 0.05) == [Snapshot(1, 2)]
    assert made.observe(2, 0.5) == []


def test_the_checkpoint_of_a_windows_end_replaces_its_snapshots_if_it_is_good():
    made = controller(rules=("loss",), window=2, snapshot_every=1)
    assert made.observe(1, 0.05) == [Snapshot(1, 2)]
    assert made.observe(2, 0.05)[:2] == [DropSnapshots(), Save("window_end_1_iter2")]
    assert made.observe(3, 0.05) == [Snapshot(3, 2)]
    assert DropSnapshots() not in made.observe(4, 0.5)


def test_the_buffer_never_drops_its_only_good_state():
    made = controller(rules=("loss",), window=1000, snapshot_every=1, snapshot_to_disk=True, keep=2)
    feed(made, [0.05, 0.5, 0.5])
    assert made.recovery_names() == ["window_1_iter1_quantized"]


def test_a_state_is_good_only_once_a_later_step_was_taken_from_it():
    made = controller(rules=("loss",), window=2)
    feed(made, [0.05] * 2)
    assert made.buffer_names() == ["window_end_1_iter2"] and made.recovery_names() == []
    made.observe(3, NAN, broken="Loss")
    assert made.recovery_names() == [] and not made.evaluated(2)
    made.observe(3, 0.05)
    assert made.recovery_names() == ["window_end_1_iter2"] and made.evaluated(2)
    again = controller(rules=("loss",), window=2)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.recovery_names() == ["window_end_1_iter2"]


def test_a_buffer_of_one_state_keeps_the_evaluated_one_until_the_newest_is_evaluated():
    made = controller(rules=("loss",), window=1, keep=1)
    feed(made, [0.05] * 3)
    assert made.buffer_names() == ["window_end_2_iter2", "window_end_3_iter3"]
    assert made.recovery_names() == ["window_end_2_iter2"]


def test_a_state_that_the_run_went_back_to_is_spent_and_a_repeated_name_counts_once():
    made = controller(rules=("loss",), window=2, keep=2)
    feed(made, [0.05] * 5)
    assert made.recovery_names() == ["window_end_2_iter4", "window_end_1_iter2"]
    made.spend("window_end_2_iter4")
    assert made.recovery_names() == ["window_end_1_iter2"]
    feed(made, [0.05] * 3)
    assert made.buffer_names() == made.recovery_names() == ["window_end_1_iter2"]


def test_three_broken_steps_in_the_fallback_go_back_to_a_good_state():
    made = controller(**LOSS)
    assert SwitchTo("bf16") in made.observe(1, NAN)
    assert [made.observe(step, NAN) for step in (1, 1, 1)] == [[], [], [Recover()]]
    assert made.observe(1, 3.0) == []


def test_a_loss_rule_that_can_never_quantise_names_the_rule_that_can():
    made = controller(rules=("loss",), window=4)
    lines = [action.line for step in range(1, 40) for action in made.observe(step, 3.0) if isinstance(action, LogLine)]
    (line,) = [line for line in lines if "may never" in line]
    assert "--quant-rule gap" in line
    made = controller(rules=("loss",), window=4)
    lines = [
        a for step in range(1, 40) for a in made.observe(step, 0.05 if step == 2 else 3.0) if isinstance(a, LogLine)
    ]
    assert not any("may never" in each.line for each in lines)


@pytest.mark.parametrize("usual", [0.0, 0.02])
def test_the_gaps_threshold_is_six_times_its_own_noise_above_its_median(usual):
    noise = [0.01, -0.01, 0.005, -0.005, 0.0] * 8
    high = usual + 6 * 1.4826 * 0.005
    for last, falls_back in ((high + 1e-4, True), (high - 1e-4, False)):
        made = controller(**GAP)
        feed(made, [3.0] * 40, [usual + each for each in noise])
        modes = feed(made, [3.0] * 3, [last] * 3, start=41)
        assert modes == ["q", "q", "h" if falls_back else "q"]


def test_a_cost_that_grows_as_evenly_as_a_student_learns_does_not_switch():
    grows = [step * 1e-3 for step in range(60)]
    assert set(feed(controller(rules=("gap",)), [3.0] * 60, grows)) == {"q"}


def test_a_gap_that_hardly_varies_counts_as_noisy_as_a_thousandth_of_the_loss():
    made = controller(**GAP)
    assert feed(made, [3.0] * 40 + [3.0] * 3, [0.001] * 40 + [0.001 + 6 * 1.4826 * 0.0029] * 3)[-1] == "q"
    assert feed(made, [3.0] * 3, [0.001 + 6 * 1.4826 * 0.0032] * 3, start=44)[-1] == "h"


def test_the_gap_is_measured_at_its_interval_and_at_each_step_while_a_decision_is_near():
    made = controller(rules=("gap",), window=3, probe_every=10)
    asked = []
    for step in range(1, 61):
        wants = made.wants_gap(step)
        asked += [step] if wants else []
        made.observe(step, 3.0, (0.5 if 20 <= step < 30 else 0.0) if wants else None)
    assert asked == [10, 20, 21, 22, 30, 31, 32, 40, 50, 60]


def test_the_gap_is_not_measured_where_it_cannot_change_anything():
    assert not controller(rules=("loss",), probe_every=1).wants_gap(1)
    assert not controller(rules=("gap", "schedule"), probe_every=1, decay_start=4).wants_gap(5)
    made = controller(rules=("gap",), probe_every=1, max_switches=1)
    made.observe(1, NAN)
    assert not made.wants_gap(2)


def test_a_run_resumed_anywhere_decides_as_an_uninterrupted_one():
    options = {"rules": ("loss", "gap", "spike"), "window": 3, "snapshot_every": 2, "snapshot_to_disk": True,
               "min_dwell": 2, "max_switches": 6, "probe_every": 1}  # fmt: skip
    losses = [0.05, 0.2, 0.2, 0.2, NAN, NAN, NAN, 0.01, 0.01, 0.01, 0.01, 0.3, 0.3, 0.3, 0.3] + [0.01] * 20
    gaps = [0.01, 0.02, None, 0.3, None, 0.0, 0.0] * 5
    whole = controller(**options)
    steps = list(enumerate(zip(losses, gaps, strict=True), 1))
    expected = [whole.observe(step, *values) for step, values in steps]
    for cut in range(len(steps)):
        first, second = controller(**options), controller(**options)
        before = [first.observe(step, *values) for step, values in steps[:cut]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after = [second.observe(step, *values) for step, values in steps[cut:]]
        assert before + after == expected, cut
        assert second.state_dict() == whole.state_dict()


def test_a_checkpoint_before_a_switch_holds_the_mode_after_it():
    made = controller(**LOSS)
    feed(made, [0.2] * 3)
    resumed = controller(**LOSS)
    resumed.load_state_dict(made.state_dict())
    assert resumed.mode == "bf16"


def test_the_share_of_quantised_steps_is_counted():
    made = controller(**LOSS)
    feed(made, [0.2] * 3 + [0.01] * 4)
    assert made.steps_quantized == 3 + 2


def test_a_checkpoint_of_a_switch_holds_the_snapshot_of_its_own_step():
    made = controller(rules=("loss",), window=4, snapshot_every=1)
    actions = [made.observe(step, 0.15) for step in (1, 2, 3)][-1]
    assert isinstance(actions[-1], SwitchTo)  # a step above the threshold is not a good one
    calm = [made.observe(step, 0.01) for step in (5, 6, 7, 9)][-1]
    kinds = [type(action) for action in calm]
    assert kinds.index(Snapshot) < kinds.index(Save)


def test_the_checkpoint_of_a_switch_follows_those_of_the_buffer_that_its_memory_names():
    made = controller(rules=("loss",), window=4, snapshot_every=100)
    feed(made, [0.01] + [0.15] * 3 + [0.01] * 3)
    assert made.observe(8, 0.01) == [
        LogLine(SAID + "Loss 0.0100 is stable, switching back to mxfp4"),
        DropSnapshots(),
        Save("window_end_2_iter8"),
        Save("switch_to_mxfp4_iter8"),
        SwitchTo("mxfp4"),
    ]
    made.observe(9, 0.01)
    assert made.recovery_names()[0] == "window_end_2_iter8"


def test_a_state_of_other_rules_does_not_change_the_rules_of_a_run():
    gap, loss = controller(**GAP), controller(**LOSS)
    gap.observe(1, 3.0, 0.2)
    loss.load_state_dict(gap.state_dict())
    assert "".join(feed(loss, [0.2, 0.2, 0.2], start=2)) == "qqh"


@pytest.mark.parametrize("alpha, name", [(None, "Loss"), (0.5, "Loss at alpha 0.50")])
def test_a_line_names_the_weight_of_the_loss_it_judges_where_alpha_moves(alpha, name):
    made = PrecisionController(Policy(quantized="mxfp4", rules=("loss",), threshold=0.1, window=2))
    if alpha is not None:
        made.judged({"alpha": alpha, "ce": 1.0, "kd_T1": 1.0})
    first = [made.observe(step, 0.15) for step in (1, 2, 3)][-1][0]
    back = [made.observe(step, 0.05) for step in range(4, 14)][-1][0]
    assert first == LogLine(f"{SAID}{name} 0.1500 exceeds threshold 0.1000, switching to bf16")
    assert back == LogLine(f"{SAID}{name} 0.0500 is stable, switching back to mxfp4")


def test_losses_are_of_one_weight_until_alpha_has_moved_by_a_tenth():
    made = PrecisionController(Policy(quantized="mxfp4", rules=("spike",), window=2))
    weights = [made.judged({"alpha": round(0.02 * step, 2), "ce": 0.0, "kd_T1": 1.0}) for step in range(12)]
    assert weights == [0.0] * 5 + [0.1] * 5 + [0.2] * 2
