"""The rules of health: what each notices, what it leaves alone, and the knob it names."""

import os
from dataclasses import replace
from typing import Any

import pytest

from kdtrain.monitor.health import RULES, WINDOW, Signs, findings
from kdtrain.monitor.record import RunRecord
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
    "data-wait": ({"data_wait": 0.23}, "training waits for its data in 23% of the time"),
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
        "the cross-entropy of training rises: ",
    ),
}


def test_nothing_is_wrong_with_a_run_that_is_well_or_has_only_begun():
    assert findings(WELL) == {} and findings(Signs(step=0)) == {}


@pytest.mark.parametrize("kind", RULES)
def test_each_rule_notices_its_own_illness_and_names_the_knob(kind):
    changed, text = ILL[kind]
    found = findings(Signs(**vars(WELL) | changed))
    assert found.keys() == {kind} and found[kind].startswith(text) and found[kind].endswith(RULES[kind].knob)


@pytest.mark.parametrize(
    "changed",
    [
        {"idle": 301.0, "step_seconds": 30.0},
        {"validations": [(250, 4.3), *((step, 4.35) for step in range(500, 1500, 250))]},
        {"idle": 1700.0, "validates": True},
        {"idle": 1700.0, "validates": True, "validation_seconds": 900.0},
        {"validations": [(step, 4.6 - step / 1e5) for step in range(0, 1250, 250)]},
        {"losses": [5.0 + (-1) ** (step // 25) for step in range(4 * WINDOW)]},
        {"data_wait": None, "free_mib": None, "saved_step": None, "teacher_loss": None},
    ],
    ids=[
        "slow steps",
        "better than the teacher",
        "first validation",
        "validation",
        "near the teacher",
        "noise",
        "unknown",
    ],
)
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
