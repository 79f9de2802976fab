"""`sweep`: the commands of a file, and what it refuses before any of them runs. `tests/e2e/test_sweep.py` runs one."""

import json
import re

import pytest

from tests.logged_runs import write_run

FILE = """
seeds = [0, 1]

[caches.c]
teacher = "teacher"
data = "text.txt"

[common]
student = "student.toml"
cache = "c"
optimizer = { lr = 1e-2, betas = [0.8, 0.9] }

[arms.kd]

[arms.ce]
alpha = 0
compile = false
cache = ["c", "cache"]
cache_weights = [3, 1]

[test]
cache = "c"
split = "test"
"""


def test_a_dry_run_lists_each_command_once_and_runs_none(workbench, tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    before = workbench.everything()
    code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--dry-run", "--out", "o")
    lines = [line.split(maxsplit=2)[2].removeprefix("kdtrain ") for line in out.splitlines()]
    common = "--student student.toml --cache o/caches/c --lr 0.01 --betas 0.8 0.9"
    both = "--student student.toml --cache o/caches/c --cache cache --lr 0.01 --betas 0.8 0.9"
    assert (code, err) == (0, "") and lines == [
        "cache-teacher --teacher teacher --data text.txt --out o/caches/c",
        f"distill {common} --out o/kd/seed-0 --seed 0",
        f"distill {both} --alpha 0 --no-compile --cache-weights 3,1 --out o/ce/seed-0 --seed 0",
        f"distill {common} --out o/kd/seed-1 --seed 1",
        f"distill {both} --alpha 0 --no-compile --cache-weights 3,1 --out o/ce/seed-1 --seed 1",
    ]
    assert workbench.everything() == before


def test_a_run_with_a_result_is_done_whatever_it_is_and_one_that_a_signal_stopped_is_not(workbench, tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    reasons = {"kd/seed-0": "diverged", "kd/seed-1": "signal", "ce/seed-0": "done"}
    for name, reason in reasons.items():
        folder = write_run(tmp_path / "o" / name)
        result = json.loads((folder / "result.json").read_text()) | {"stop_reason": reason, "error": None}
        (folder / "result.json").write_text(json.dumps(result))
    _, out, _ = workbench.call("sweep", tmp_path / "s.toml", "--dry-run", "--out", tmp_path / "o")
    assert [line[:5].strip() for line in out.splitlines()] == ["to do", "done", "done", "to do", "to do"]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("[arms.kd]", "[arm.kd]", r"unknown table \[arm\]; perhaps you meant 'arms'"),
        ("alpha = 0", "alpa = 0", r"\[arms.ce\] unknown option 'alpa'; perhaps you meant 'alpha'"),
        ("alpha = 0", "alpha = 2", r"\[arms.ce\] --alpha 2.0 must be at least 0 and at most 1"),
        ("alpha = 0", "seed = 3", r"\[arms.ce\] the sweep sets seed itself; list them in seeds"),
        ("alpha = 0", 'out = "x"', r"\[arms.ce\] the sweep sets out itself; leave it out"),
        ("[arms.ce]", '[arms."../ce"]', r"\[arms.../ce\] names a folder; use letters"),
        ("[arms.ce]", "[arms.caches]", "an arm cannot be called caches"),
        ("seeds = [0, 1]", "seeds = 2", r"seeds is not a list of whole numbers; write seeds = \[0, 1, 2\]"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "a seed stands twice in seeds"),
        ("seeds = [0, 1]", f"seeds = {list(range(600))}", "1,200 runs are more than the 1,000"),
        ("[test]", "[tests]", "perhaps you meant 'test'"),
        ('split = "test"', 'split = "tset"', r"\[test\] --split 'tset'"),
        ("teacher = ", "teacher ", "is not TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_its_table_and_changes_nothing(workbench, tmp_path, old, new, message):
    (tmp_path / "s.toml").write_text(FILE.replace(old, new))
    code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "o")
    assert re.search(message, err), err
    assert (code, out, err.count("\n")) == (2, "", 1) and not (tmp_path / "o").exists()


def test_a_folder_of_something_else_and_an_arm_begun_otherwise_are_refused(workbench, tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    code, _, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "mine")
    assert code == 2 and "holds something that is not a sweep" in err and len(list((tmp_path / "mine").iterdir())) == 1


def test_a_demo_writes_over_nothing_of_the_users(workbench, tmp_path):
    (tmp_path / "demo.toml").write_text("mine")
    code, _, err = workbench.call("demo", "--quick", "--out", tmp_path)
    assert code == 2 and "not of a demo" in err and (tmp_path / "demo.toml").read_text() == "mine"
