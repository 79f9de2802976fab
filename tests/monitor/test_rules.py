"""The rules of health: what each notices, what it leaves alone, the knob it names, and when a run warns."""

import math
import os
from dataclasses import replace
from typing import Any

import pytest

from kdtrain.monitor.record import RunRecord
from kdtrain.monitor.rules import CLIPPED, RULES, WINDOW, History, Signs, findings, initial_loss
from tests.logged_runs import write_lines

WELL = Signs(
    step=1000,
    idle=1.0,
    step_seconds=0.5,
    saved_step=900,
    free_mib=1000.0,
    checkpoint_mib=12.0,
    data_wait=0.02,
    losses=[5.0 - step / 200 + 0.1 * (-1) ** step for step in range(4 * WINDOW)],
    validations=[(250, 6.0), (500, 5.5), (750, 5.6), (1000, 5.4)],
    teacher_loss=4.4,
)

ILL = {
    "stalled": ({"idle": 301.0}, "no step for 5:01 (a step takes 0.5 s)"),
    "no-checkpoint": ({"step": 8200}, "no checkpoint for 7,300 steps: a crash now loses 1 h 00"),
    "disk-low": ({"free_mib": 20.0}, "20 MiB of disk are left, and a checkpoint takes 12 MiB"),
    "data-wait": ({"data_wait": 0.23}, "training waited for its data in 23% of the time of the last 50 steps"),
    "memory-growth": (
        {"held_mib": 151.0, "grown_mib": 51.0},
        "the process holds 151 MiB, 51 MiB more than after its warm-up",
    ),
    "learned-samples": (
        {"divergence": -0.05, "samples": 6, "epochs": 2.0},
        "the divergence from the teacher is -0.050 nats over the last 50 steps, and fresh samples give none below 0: "
        "after 2.0 epochs the student has memorized the 6 samples per token",
    ),
    "clipped": (
        {"clip": 1.0, "clipped_share": 0.15, "clipped_losses": [3.0] * CLIPPED},
        "the gradient was clipped in 15% of the last 100 steps (above --clip 1), and their loss did not fall (3.0000, "
        "then 3.0000): the steps may be too long",
    ),
    "plateau": (
        {"validations": [(250, 5.0), *((step, 5.1) for step in range(500, 1500, 250))]},
        "the last 4 validations are not below 5.000 of step 250 (teacher 4.400)",
    ),
    "flat": (
        {"validations": [(step, 7.6 - step / 1e5) for step in range(0, 1250, 250)]},
        "validation began at 7.600 and is at 7.590 after step 1,000 (teacher 4.400)",
    ),
    "diverging": (
        {"losses": [2.0 + step / 100 + 0.1 * (-1) ** step for step in range(4 * WINDOW)]},
        "the loss of training rises: ",
    ),
}


def test_nothing_is_wrong_with_a_run_that_is_well_or_has_only_begun():
    assert findings(WELL) == {} and findings(Signs(step=0)) == {}


@pytest.mark.parametrize("kind", [kind for kind, (_, test) in RULES.items() if "plugins" not in test.__module__])
def test_each_rule_notices_its_own_illness_and_names_the_knob(kind):
    changed, text = ILL[kind]
    found = findings(Signs(**vars(WELL) | changed))
    assert found.keys() == {kind} and found[kind].startswith(text) and found[kind].endswith(RULES[kind][0].knob)


WELL_TOO = {
    "slow steps": {"idle": 301.0, "step_seconds": 30.0},
    "better than the teacher": {"validations": [(250, 4.3), *((step, 4.35) for step in range(500, 1500, 250))]},
    "first validation": {"idle": 1700.0, "validates": True},
    "validation": {"idle": 1700.0, "validates": True, "validation_seconds": 900.0},
    "near the teacher": {"validations": [(step, 4.6 - step / 1e5) for step in range(0, 1250, 250)]},
    "noise": {"losses": [5.0 + (-1) ** (step // 25) for step in range(4 * WINDOW)]},
    "unknown": {"data_wait": None, "free_mib": None, "saved_step": None, "teacher_loss": None},
    "the loss falls": {"clip": 1.0, "clipped_share": 1.0, "clipped_losses": [3.0 - n / 100 for n in range(CLIPPED)]},
    "clipped during the warm-up": {"clip": 1.0, "clipped_share": 1.0, "clipped_losses": [3.0] * (CLIPPED - 1)},
    "memory grown by half": {"held_mib": 150.0, "grown_mib": 50.0},
    "noise around a divergence above 0": {"divergence": 0.01, "samples": 6},
}


@pytest.mark.parametrize("changed", WELL_TOO.values(), ids=WELL_TOO)
def test_what_is_usual_is_no_illness(changed):
    assert findings(Signs(**vars(WELL) | changed)) == {}


def test_the_signs_of_a_run_are_read_from_its_folder(tmp_path):
    lines = [f'{{"step": {n}, "loss": 3, "tokens": 100, "tok/s_last": 50, "data_wait_s": 1}}' for n in range(1, 41)]
    lines += ['{"step": 40, "validation/loss": 5.5, "validation/teacher_loss": 4.4}', '{"step": 40, "loss": "x"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "events.jsonl").write_text('{"event": "checkpoint", "level": "info", "step": 20}\n')
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest" / "state").write_bytes(bytes(2**20))
    os.utime(tmp_path / "metrics.jsonl", (1000, 1000))
    signs = Signs.of(tmp_path, RunRecord.read(tmp_path), now=1500.0)
    assert (signs.step, signs.idle, signs.step_seconds, signs.saved_step) == (40, 500.0, 2.0, 20)
    assert (signs.checkpoint_mib, signs.data_wait, signs.losses) == (1.0, 0.5, [3.0] * 40)
    assert (signs.validations, signs.teacher_loss) == ([(40, 5.5)], 4.4)
    assert findings(signs).keys() == {"stalled", "data-wait"}
    assert Signs.of(tmp_path, RunRecord.read(tmp_path, last=400), now=1500.0).losses == [3.0] * 4


def test_a_validation_that_is_due_is_no_stalled_step_and_may_take_twice_the_longest_one_so_far(tmp_path):
    """Validations of 1,000 seconds after each tenth of 40 steps; the run is silent after step 30."""
    lines = [{"step": 0, "validation/loss": 5.5}]
    for step in range(1, 31):
        speed = {} if step == 1 else {"tok/s_last": 0.1 if step in (11, 21) else 50.0}
        lines += [{"step": step, "loss": 3.0, "tokens": 100, **speed}]
        lines += [{"step": step, "validation/loss": 5.0}] * (step in (10, 20))
    write_lines(tmp_path / "metrics.jsonl", lines)
    os.utime(tmp_path / "metrics.jsonl", (1000, 1000))
    record = replace(RunRecord.read(tmp_path), environment={"steps": 40}, options={"monitor": {"eval_freq": 10}})

    def kinds(silent: float, **more: Any) -> set[str]:
        return {*findings(Signs.of(tmp_path, replace(record, **more), now=1000 + silent))} & {"stalled"}

    assert kinds(1900) == set() and kinds(2100) == {"stalled"}
    assert kinds(400, options={"monitor": {"eval_freq": 7}}) == {"stalled"}, "no validation is due"
    assert kinds(400, metrics=[*record.metrics, {"step": 30, "validation/loss": 5.0}]) == {"stalled"}, "it is over"
    early = [each for each in record.metrics if each["step"] < 10 and "tok/s_last" not in each]
    assert kinds(1700, metrics=[*early, {"step": 10, "loss": 3.0}]) == set(), "none was timed"


def warned(history: History, steps: list[dict[str, float]], first: int = 1) -> list[tuple[int, str]]:
    """Return step and kind of each warning of a process with these steps, which holds `held` MiB, 100 by default."""
    found = []
    for step, numbers in enumerate(steps, first):
        signs = history.add(step, numbers, numbers.get("held", 100.0), epochs=step / 100)
        found += [(step, kind) for kind, _, _ in history.warnings(signs)]
    return found


def clip(*stretches: tuple[int, float]) -> list[dict[str, float]]:
    return [{"grad_norm": norm, "ce": 3.0} for count, norm in stretches for _ in range(count)]


def test_clipped_steps_are_warned_of_after_the_warm_up_once_until_it_is_over():
    assert warned(History(clip=1.0), clip((150, 2.0), (150, 0.1), (50, 2.0))) == [(100, "clipped"), (311, "clipped")]
    assert warned(History(clip=1.0, warmup=30), clip((140, 2.0))) == [(130, "clipped")]
    assert warned(History(clip=1.0, warmup=30), clip((30, 9.0), (200, 0.1))) == []
    rising = [{"grad_norm": 9.0, "ce": 1.0 + step / 100} for step in range(150)]
    assert warned(History(clip=1.0), rising) == [(100, "clipped")] and warned(History(clip=1.0), rising[::-1]) == []


@pytest.mark.parametrize("most, norm", [(0.0, 1e9), (1.0, 1.0), (1.0, math.nan)])
def test_a_step_that_is_not_clipped_does_not_count(most, norm):
    history = History(clip=most)
    assert warned(history, clip((150, norm))) == [] and history.add(151, {"grad_norm": norm}, 1.0).clipped_share == 0.0


def test_memorized_samples_are_warned_of_once():
    below = [{"kd": value} for value in (*[0.3] * 40, *[-0.4] * 60, *[9.0] * 60, *[-9.0] * 60)]
    assert warned(History(samples=6), below) == [(62, "learned-samples")]
    signs = History(samples=6).add(1, {"kd": -0.1}, 1.0)
    assert signs.divergence is None, "too few steps"
    for samples, values in ((0, [-1.0] * 99), (6, [math.nan] * 99)):
        assert warned(History(samples=samples), [{"kd": value} for value in values]) == []


LATE = [*[50.0] * 60, *[100.0] * 10, *[200.0] * 2, 290.0, 310.0]
"""After step 60 a checkpoint's buffers are there, after step 70 those of a validation."""
HELD = {
    "from the end of the warm-up": (History(), [10.0, *[900.0] * 49, 100.0, 120.0, 80.0], [], -20.0),
    "warned once": (History(101), [*[1.0] * 50, 100.0, 150.0, 151.0, 400.0], [153], 300.0),
    "first checkpoint and validation": (History(every=(60, 70)), LATE, [74], 110.0),
    "frequent checkpoints": (History(every=(1,)), [*[10.0] * 40, *[100.0] * 30], [], 0.0),
}


@pytest.mark.parametrize("history, memory, steps, grown", HELD.values(), ids=HELD)
def test_memory_is_compared_with_that_after_the_warm_up(history, memory, steps, grown):
    first = min(history.settles) - 50
    assert warned(history, [{"held": value} for value in memory], first) == [(step, "memory-growth") for step in steps]
    assert history.add(first + len(memory), {}, memory[-1]).grown_mib == grown


def test_clipping_and_memory_of_another_process_are_read_from_its_metrics(tmp_path):
    numbers = {"loss": 3.0, "ce": 3.0, "clipped_share": 0.5, "memory_growth_mb": 60.0, "memory_resident_mb": 160.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, **numbers} for step in range(1, 131)])
    record = replace(RunRecord.read(tmp_path), options={"optimizer": {"clip": 1.0, "warmup_steps": 20}})
    found = findings(Signs.of(tmp_path, record, now=os.path.getmtime(tmp_path / "metrics.jsonl")))
    assert found.keys() == {"clipped", "memory-growth"} and "holds 160 MiB, 60 MiB more" in found["memory-growth"]


@pytest.mark.parametrize(
    "loss, init, sound",
    [
        (5.7, "scratch", True),  # ln 300 = 5.704
        (6.2, "scratch", True),
        (6.4, "scratch", False),
        (5.0, "scratch", False),
        (5.0, "pretrained", True),
        (5.8, "pretrained", False),
        (6.2, "teacher-layers", True),
        (9.0, "teacher-layers", False),
        (9.0, "loaded", True),
        (math.nan, "teacher-layers", False),
        (math.inf, "scratch", False),
    ],
)
def test_the_initial_loss_is_judged_by_where_the_weights_come_from(loss, init, sound):
    verdict, text = initial_loss(loss, 300, init)
    assert verdict is sound
    assert "ln V is 5.704" in text
    worse = "layers copied without the rest are worse than fresh weights"
    assert (worse in text and "kdtrain prune" in text) is ((loss, init) == (9.0, "teacher-layers"))
