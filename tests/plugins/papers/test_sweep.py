"""`sweep`: the commands of a file, and what it refuses before any of them runs. `tests/e2e/test_sweep.py` runs one."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.checkpoint.store import Store
from kdtrain.errors import UsageError
from kdtrain.files import Lock, publish_json, read_sealed, temporary_name
from kdtrain.monitor.facts import LOCK
from kdtrain.plugins.papers.jobs import Runner, claim, read_sweep
from kdtrain.plugins.papers.sweep import arms
from kdtrain.run.folder import to_toml, used
from tests.logged_runs import write_lines, write_run

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


@pytest.fixture
def plans(monkeypatch):
    """Record the words of each command that is tried out, which finds an hour and 10 MiB, for the cache 2 and 20."""
    tried = []

    def report(runner, words):
        tried.append(words)
        if words[-1] != "--dry-run":
            return {}
        if words[0] == "cache-teacher":
            return {"estimated_hours": 2.0, "disk (MiB)": 20.0}
        bad = {"error": "--lr 3 is too much"}
        return bad if "3" in words else {"estimated_hours": 1.0, "disk for checkpoints (MiB)": 10.0}

    monkeypatch.setattr(Runner, "report", report)
    return tried


def test_a_dry_run_lists_each_command_once_and_runs_none(workbench, tmp_path, plans):
    (tmp_path / "s.toml").write_text(FILE)
    before = workbench.everything()
    code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--dry-run", "--out", "o")
    lines = [line.partition("kdtrain ")[2] for line in out.splitlines()[:-1]]
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
    measured = "1 h 00, 10 MiB, measured on a small cache"
    assert [line[6:].partition("kdtrain ")[0].strip() for line in out.splitlines()[:-1]] == [
        "2 h 00, 20 MiB, measured",
        *[measured] * 4,
    ]
    assert out.endswith("\n5 commands to do, about 6 hours and 60 MiB\n")
    commands = ["cache-teacher", "cache-teacher", "distill", "distill", "evaluate"]  # one of an arm
    assert [words[0] for words in plans] == commands and plans[-1][-1] == "--dry-run"
    *_, count, _, small = plans[1]
    assert count == "32" and all(small in words for words in plans[2:])


def test_an_option_with_a_list_is_a_grid_of_arms_unless_it_takes_several_values(workbench, tmp_path):
    grid = "alpha = [0, 0.5]\noptimizer = { lr = [1e-3, 3], betas = [0.8, 0.9] }"
    (tmp_path / "s.toml").write_text(FILE.replace("alpha = 0", grid))
    jobs = read_sweep(tmp_path / "s.toml", tmp_path / "o").runs
    names = ["kd", *(f"ce-alpha={alpha}-lr={lr}" for alpha in (0, 0.5) for lr in (0.001, 3))]
    assert [job.name for job in jobs] == [f"{name}/seed-{seed}" for seed in (0, 1) for name in names]
    tried = [(job.config.objective.alpha, job.config.optimizer.lr, job.config.optimizer.betas) for job in jobs[1:5]]
    assert tried == [(alpha, lr, (0.8, 0.9)) for alpha in (0.0, 0.5) for lr in (0.001, 3.0)]
    assert jobs[1].config.cache == (str(tmp_path / "o/caches/c"), "cache") and jobs[1].arm == names[1]


def test_the_record_of_a_sweep_is_in_the_order_of_its_file_also_after_arms_were_added(workbench, tmp_path):
    for text in (FILE, FILE.replace("[arms.kd]", "[arms.first]\nalpha = 0.1\n[arms.kd]")):
        (tmp_path / "s.toml").write_text(text)
        sweep = read_sweep(tmp_path / "s.toml", tmp_path / "o")
        with Runner(1) as runner, claim(sweep, runner):
            pass
    names = [job.name for job in (*sweep.caches, *sweep.runs)]
    assert [*read_sealed(tmp_path / "o/sweep.json")][: len(names)] == names


def test_a_run_that_is_to_do_takes_what_one_of_its_arm_took_and_what_is_unknown_is_not_added(
    workbench, tmp_path, plans
):
    text = FILE.replace('cache = ["c", "cache"]\ncache_weights = [3, 1]', 'cache = "cache"\nlr = 3')
    (tmp_path / "s.toml").write_text(f"{text}\n[arms.passes]\nepochs = 2\n")
    folder = write_run(tmp_path / "o/kd/seed-1")
    result = json.loads((folder / "result.json").read_text()) | {"error": None, "seconds": 1800.0}
    (folder / "result.json").write_text(json.dumps(result))
    plan = workbench.json("sweep", tmp_path / "s.toml", "--dry-run", "--out", tmp_path / "o", "--at-once", 2)
    how = {each["name"]: each.get("how") for each in plan["commands"]}
    assert how["kd/seed-0"] == "as kd/seed-1" and how["kd/seed-1"] is None
    assert how["ce/seed-0"] == how["ce/seed-1"] == "--lr 3 is too much"
    assert how["passes/seed-0"] == "unknown until caches/c is made"
    assert (plan["to do"], plan["unknown"], plan["estimated_hours"]) == (6, 4, (2.0 + 0.5) / 2)
    assert 20.0 <= plan["disk (MiB)"] < 20.2  # of the run's few files


def test_the_live_table_counts_the_runs_of_each_arm(workbench, tmp_path):
    (tmp_path / "s.toml").write_text(FILE.replace("[0, 1]", "[0, 1, 2]"))
    write_run(tmp_path / "o/kd/seed-0")
    result = write_run(tmp_path / "o/ce/seed-0") / "result.json"
    result.write_text(
        json.dumps({"stop_reason": "diverged", "error": "diverged", "step": 20, "steps": 40, "seconds": 90})
    )
    for name in ("kd/seed-0", "ce/seed-0"):
        found = json.loads((tmp_path / "o" / name / "result.json").read_text())
        (tmp_path / "o" / name / "result.json").write_text(json.dumps({"error": None, "seconds": 60.0, **found}))
    running = write_run(tmp_path / "o/kd/seed-1", ended=False)
    (running / "result.json").unlink(missing_ok=True)
    write_lines(running / "metrics.jsonl", [{"step": 30, "loss": 4.0, "eta_h": 15 / 3600}])
    (running / "environment.json").write_text(
        json.dumps(json.loads((running / "environment.json").read_text()) | {"steps": 40})
    )
    lock, ended = Lock(running / LOCK, ""), {}
    try:
        table = arms(read_sweep(tmp_path / "s.toml", tmp_path / "o"), 1, ended)
    finally:
        lock.release()
    assert [list(row) for row in table.rows] == [
        ["kd", "1", "1", "0", "30/40", "2.000", "1:15"],  # 15 s of this one, and 60 s of the third
        ["ce", "0", "0", "1", "20/40", "2.000", "3:00"],
        ["all", "1", "1", "1", "", "", "4:15"],
    ]
    assert set(ended) == {"kd/seed-0", "ce/seed-0"}


FINAL = ("done", "early-stop", "diverged", "no-progress", "gradient-explosion", "non-finite")
RESUMED = ("signal", "disk", "oom", "error")


def write_end(folder, reason):
    result = write_run(folder) / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"stop_reason": reason, "error": None}))


def test_a_run_that_ended_by_itself_is_done_and_one_that_its_surroundings_ended_is_not(workbench, tmp_path, plans):
    reasons = (*FINAL, *RESUMED)
    (tmp_path / "s.toml").write_text(FILE.replace("[0, 1]", str([*range(len(reasons))])))
    for seed, reason in enumerate(reasons):
        write_end(tmp_path / f"o/kd/seed-{seed}", reason)
    plan = workbench.json("sweep", tmp_path / "s.toml", "--dry-run", "--out", tmp_path / "o")
    done = {each["name"]: each["done"] for each in plan["commands"]}
    assert [done[f"kd/seed-{seed}"] for seed in range(len(reasons))] == [True] * len(FINAL) + [False] * len(RESUMED)


@pytest.mark.parametrize(
    "reasons, stopped, missing",
    [
        (("done", "early-stop"), None, None),
        (("diverged", "done"), None, None),
        (("disk", "done"), None, "1 of 2 runs without a result: kd/seed-0; the same command resumes"),
        (("error", "oom"), None, "2 of 2 runs without a result: kd/seed-0, kd/seed-1; the same command resumes"),
        (("done", "signal"), "SIGINT", "1 of 2 runs without a result: kd/seed-1; the same command resumes"),
        (("done", None), "SIGTERM", "1 of 2 runs without a result: kd/seed-1; the same command resumes"),
    ],
)
def test_a_sweep_ends_with_0_only_where_every_run_has_a_result(
    workbench, tmp_path, monkeypatch, reasons, stopped, missing
):
    def run(runner, job):
        """End as if the process of a run ended for its reason."""
        if job.is_run and reasons[job.config.seed] is not None:
            write_end(job.config.out, reasons[job.config.seed])
        runner.stopped = stopped if job.name == "kd/seed-1" else None
        return ""

    monkeypatch.setattr(Runner, "run", run)
    (tmp_path / "s.toml").write_text(FILE.partition("[arms.ce]")[0])
    code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "o")
    assert (code, bool(out)) == (1 if missing else 0, stopped is None)
    assert missing is None or err.splitlines()[-1] == f"kdtrain: {missing}"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("[arms.kd]", "[arm.kd]", r"unknown table \[arm\]; perhaps you meant 'arms'"),
        ("alpha = 0", "alpa = 0", r"\[arms.ce\] unknown option 'alpa'; perhaps you meant 'alpha'"),
        ("alpha = 0", "alpha = 2", r"\[arms.ce\] --alpha 2.0 must be at least 0 and at most 1"),
        ("alpha = 0", "seed = 3", r"\[arms.ce\] the sweep sets seed itself; list them in seeds"),
        ("alpha = 0", 'out = "x"', r"\[arms.ce\] the sweep sets out itself; leave it out"),
        ('cache = "c"', 'cache = "cc"', r"no cache cc; perhaps you meant 'c'"),
        ("[arms.ce]", "[arms.ce-0.5]", r"\[arms.ce-0.5\] is not a section of options; quote names with dots"),
        ("[arms.ce]", '[arms."../ce"]', r"\[arms.../ce\] names a folder; use letters"),
        ("[arms.ce]", "[arms.caches]", "an arm cannot be called caches"),
        ("[arms.ce]", '[arms."sweep.json"]', "an arm cannot be called sweep.json"),
        ("[common]", "[common]\nstepz = 3", r"\[common\] unknown option 'stepz'; perhaps you meant 'steps'"),
        ('cache = "c"\nopt', "cache = [1]\nopt", r"\[common\] --cache \(1,\): text is wanted"),
        ('cache = "c"\nopt', "cache = [[1]]\nopt", r"\[common\] --cache \(\[1\],\): text is wanted"),
        ('cache = "c"\nopt', f'cache = "{"c" * 300}"\nopt', r"\[common\] --cache 'c+...' is longer than a path can be"),
        ('cache = "c"\nsplit', "cache = []\nsplit", r"\[test\] --cache \[\]: "),
        ('data = "text.txt"', r'refine = "a\u0000b"', r"\[caches.c\] --refine 'a\\x00b' holds a NUL"),
        ("seeds = [0, 1]", "seeds = 2", r"seeds is not a list of whole numbers; write seeds = \[0, 1, 2\]"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "seeds has a seed twice"),
        ("seeds = [0, 1]", f"seeds = {list(range(600))}", "more than the 1,000 runs that a sweep takes"),
        ("alpha = 0", f"alpha = {[*range(90)]}\nlr = {[*range(99)]}", "more than the 1,000 runs"),
        ("alpha = 0", 'student = ["a/b", "c"]', r"\[arms.ce-student=a/b\] names a folder; use letters"),
        ("alpha = 0", "alpha = [0, 0.5, 0]", "there are two arms of this name"),
        ("alpha = 0", "alpha = []", r"\[arms.ce\] --alpha"),
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


def test_all_that_the_commands_of_a_sweep_cannot_find_is_named_at_once_before_any_of_them(workbench, tmp_path, plans):
    text = FILE.replace('"student.toml"', '"students.toml"').replace('"text.txt"', '"texts.txt"')
    text = text.replace('cache = ["c", "cache"]', 'cache = ["c", "./gone"]').replace(
        "alpha = 0", 'load = "lost"\nconfig = "no.toml"'
    )
    text = text.replace('cache = "c"\nsplit = "test"', 'data = "tests.txt"')
    (tmp_path / "s.toml").write_text(text)
    code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "o", "--dry-run")
    assert (code, out, plans) == (2, "", []) and not (tmp_path / "o").exists()
    found = [line.partition("s.toml: ")[2] for line in err.splitlines()]
    assert [each.partition(": ")[0] for each in found] == [
        "[caches.c] --data texts.txt",
        "[common] --student students.toml",
        "[arms.ce] --cache ./gone",
        "[arms.ce] --config no.toml",
        "[arms.ce] --load lost",
        "[test] --data tests.txt",
    ]


def test_a_folder_is_not_a_file_of_a_sweep(workbench, tmp_path):
    for folder in (".", "/", tmp_path):
        assert workbench.call("sweep", folder)[::2] == (2, f"kdtrain: {folder} is not TOML: it is not a regular file\n")


def test_a_wrong_test_ends_a_sweep_before_it_trains_or_is_planned(workbench, tmp_path, monkeypatch, plans):
    """As `evaluate --dry-run` refuses it: with text of its own at once, else after the cache that it waits for."""
    order = []

    def child(runner, words, stdout=0):
        order.append(words[0])
        done = words[0] != "evaluate"
        if words[0] == "cache-teacher":
            (tmp_path / "o/caches/c").mkdir(parents=True)
            (tmp_path / "o/caches/c/manifest.json").touch()
        return (0, "", "") if done else (2, "no test split", "")

    monkeypatch.setattr(Runner, "_child", child)
    for text, begun in (('data = "text.txt"', ["evaluate"]), ('cache = "c"', ["cache-teacher", "evaluate"])):
        (tmp_path / "s.toml").write_text(FILE.replace('cache = "c"\nsplit', f"{text}\nsplit"))
        code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "o")
        assert (code, out, order) == (2, "", begun) and err.endswith("kdtrain: dry run of [test]: no test split\n")
        order.clear()
    monkeypatch.setattr(
        Runner, "report", lambda runner, words: {"error": "no test split"} if words[0] == "evaluate" else {}
    )
    assert workbench.call("sweep", tmp_path / "s.toml", "--dry-run")[::2] == (2, err.splitlines()[-1] + "\n")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--cache", "cache", "--split", "test"), "--cache cache holds no test split; make one with cache-teacher"),
        (("--teacher", "teacher", "--data", "text.txt", "--seq-len", 4000), "is beyond the 128 positions of student"),
        (
            ("--teacher", "stdlib-5m", "--data", "text.txt", "--seq-len", 32),
            "have different tokenizers; add --cross-tokenizer",
        ),
        (("--teacher", "teacher", "--data", "texts.txt"), "texts.txt"),
    ],
)
def test_a_dry_run_of_evaluate_looks_at_students_and_text_and_measures_nothing(workbench, options, message):
    sound = ("evaluate", "--student", "student.toml", "--dry-run")
    assert workbench.json(*sound, "--cache", "cache") == {"students": ["student.toml"]}
    code, out, err = workbench.call(*sound, *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


@pytest.fixture
def finished(workbench, tmp_path, monkeypatch):
    """Finish a sweep by a `Runner` that trains nothing; `call`: the sweep again, `begun`: its jobs."""

    class Finished:
        begun: ClassVar[list[str]] = []
        file, out = tmp_path / "s.toml", tmp_path / "o"

        def call(self, *words):
            self.begun.clear()
            return workbench.call("sweep", *(words or (self.file, "--out", self.out)))

    def run(runner, job):
        Finished.begun.append(job.name)
        if job.is_run:
            write_end(job.config.out, "done")
            (job.config.out / "config.toml").write_text(to_toml(used(job.config)))
        elif job.words[0] == "cache-teacher" and not job.config.out.exists():
            shutil.copytree("cache", job.config.out)
        return ""

    monkeypatch.setattr(Runner, "run", run)
    found = Finished()
    found.file.write_text(FILE)
    monkeypatch.setattr(Store, "choose", lambda store, wanted: Path("step-00000040"))
    code, _, err = found.call()
    assert code == 0, err
    assert found.begun[-1] == "test of 4 students"
    for each in ("kd/seed-0", "kd/seed-1", "ce/seed-0", "ce/seed-1"):
        digest = read_manifest(found.out / "caches/c").digest
        line = {"step": 40, "split": "test", "cache": digest, "checkpoint": "step-00000040"}
        write_lines(found.out / each / "evaluations.jsonl", [line])
    return found


def test_checkpoints_that_were_removed_do_not_block_a_finished_sweep(finished, monkeypatch):
    monkeypatch.undo()
    (finished.out / "kd/seed-1/evaluations.jsonl").unlink()
    code, out, err = finished.call()
    assert (code, finished.begun) == (0, []) and "Next: kdtrain compare" in out
    assert "o/kd/seed-1 is not tested again: " in err and "holds no checkpoint" in err


def test_a_sweep_is_the_same_by_another_spelling_of_its_path_and_after_a_move(finished, tmp_path):
    assert finished.call(finished.file, "--out", os.path.relpath(finished.out))[0] == 0 and finished.begun == []
    moved = finished.out.rename(tmp_path / "moved")
    assert finished.call(finished.file, "--out", moved)[0] == 0 and finished.begun == []
    finished.file.write_text(FILE.replace("alpha = 0", "alpha = 1"))
    refused = finished.call(finished.file, "--out", os.path.relpath(moved))[2]
    assert "moved/ce/seed-0 was begun with other options (--alpha was 0)" in refused


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_a_sweep_without_its_record_compares_its_runs_and_has_its_caches_compared(finished, damage):
    record = finished.out / "sweep.json"
    whole, text = read_sealed(record), record.read_text()

    def lose():
        record.unlink(missing_ok=True) if damage == "lost" else record.write_text(text.replace("0.01", "0.02"))

    lose()
    (finished.out / "report.html").touch()
    code, _, err = finished.call()
    assert (code, finished.begun, read_sealed(record)) == (0, ["caches/c"], whole), err
    assert (finished.out / "sweep.json.damaged-1").exists() == (damage == "damaged")
    for old, new, message in (("lr = 1e-2", "lr = 2e-2", "--lr was 0.01"), ("alpha = 0\n", "", "--alpha was 0.0")):
        lose()
        finished.file.write_text(FILE.replace(old, new))
        assert f"was begun with other options ({message}" in finished.call()[2] and finished.begun == []


def test_a_cache_that_another_command_made_is_refused_and_not_recorded(finished, monkeypatch):
    whole = read_sealed(finished.out / "sweep.json")
    (finished.out / "sweep.json").unlink()

    def run(runner, job):
        raise UsageError("caches/c: it has other settings")

    with monkeypatch.context() as refusing:
        refusing.setattr(Runner, "run", run)
        finished.file.write_text(FILE.replace('data = "text.txt"', 'data = "text.txt"\ntop_k = 3'))
        assert finished.call()[0] == 2
    finished.file.write_text(FILE)
    assert finished.call()[0] == 0 and read_sealed(finished.out / "sweep.json") == whole


def test_a_kill_before_the_first_record_does_not_block(finished, tmp_path):
    finished.out = tmp_path / "killed"
    finished.out.mkdir()
    temporary_name(finished.out / "sweep.json").touch()
    assert finished.call()[0] == 0 and len(finished.begun) == 7
    assert sorted(each.name for each in finished.out.iterdir()) == ["caches", "ce", "kd", "sweep.json"]


def test_a_folder_of_something_else_and_an_arm_begun_otherwise_are_refused(workbench, tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    code, _, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "mine")
    assert code == 2 and "holds something that is not a sweep" in err and len(list((tmp_path / "mine").iterdir())) == 1


def test_a_sweep_that_is_refused_beside_another_leaves_its_record_alone(workbench, tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    sweep, record = read_sweep(tmp_path / "s.toml", tmp_path / "o"), tmp_path / "o/sweep.json"
    record.parent.mkdir()
    publish_json(record, {job.name: list(job.words) for job in (*sweep.caches, *sweep.runs)}, "sweep.record")
    before, lock = record.read_bytes(), Lock(tmp_path / "o/.sweep.json.lock", "")  # as one whose arm ce has not begun
    (tmp_path / "s.toml").write_text(FILE.replace("alpha = 0", "alpha = 0.7"))
    try:
        code, out, err = workbench.call("sweep", tmp_path / "s.toml", "--out", tmp_path / "o")
    finally:
        lock.release()
    assert (code, out) == (2, "") and "another process runs the sweep" in err and record.read_bytes() == before


def test_a_demo_writes_over_nothing_of_the_users(workbench, tmp_path):
    (tmp_path / "demo.toml").write_text("mine")
    code, _, err = workbench.call("demo", "--quick", "--out", tmp_path)
    assert code == 2 and "not of a demo" in err and (tmp_path / "demo.toml").read_text() == "mine"
