"""The rules of health: what each notices, what it leaves alone, and the knob it names."""

import os

import pytest

from kdtrain.monitor.health import RULES, WINDOW, Signs, findings
from kdtrain.monitor.record import RunRecord

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
    "no-progress": (
        {"validations": [(250, 5.0), *((step, 5.1) for step in range(500, 1500, 250))]},
        "the last 4 validations are not below 5.000 of step 250 (teacher 4.400)",
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
        {"losses": [5.0 + (-1) ** (step // 25) for step in range(4 * WINDOW)]},
        {"data_wait": None, "free_mib": None, "saved_step": None, "teacher_loss": None},
    ],
    ids=["slow steps", "better than the teacher", "noise", "unknown"],
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
