"""Runs side by side: what is read of each, and groups of those that differ in the seed alone."""

import json
import os
import subprocess
import sys

import pytest

import kdtrain as kd
from kdtrain.monitor.record import RunRecord
from kdtrain.plugins.papers.runs import grouped, read_runs
from tests.logged_runs import write_lines, write_run


def test_runs_that_differ_in_the_seed_alone_are_one_group_wherever_their_cache_lay(tmp_path):
    folders = [write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1, cache="elsewhere/c")]
    folders.append(write_run(tmp_path / "c", alpha=0.5))
    groups = grouped(read_runs(folders))
    assert [(name, [run.name for run in runs]) for name, runs in groups] == [("a", ["a", "b"]), ("c", ["c"])]
    # an option that a config.toml lacks has its default
    assert [runs[0].options["alpha"] for _, runs in groups] == ["auto", 0.5]


def test_cost_is_that_of_the_steps_and_the_first_one_counts_as_usual(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a")])
    assert run.numbers["tokens"] == 4000 and run.numbers["seconds"] == pytest.approx(80)
    assert run.record.places("minutes")[40] == pytest.approx(80 / 60) and run.record.places("tokens")[10] == 1000
    assert run.numbers["quantized_share"] == 0.25 and run.status == "done 40/40"


def test_a_run_that_has_not_ended_is_named_by_the_end_of_its_path_that_tells_it_apart(tmp_path):
    runs = read_runs([write_run(tmp_path / "a" / "run", ended=False), write_run(tmp_path / "b" / "run", seed=1)])
    assert runs[0].status == "no result at step 40: training, or killed"
    assert runs[0].numbers["best_validation_loss"] == 2.0 and [run.name for run in runs] == ["a/run", "b/run"]


def test_the_library_gives_flat_records_of_what_is_a_run_and_imports_nothing_heavy(tmp_path):
    write_run(tmp_path / "b", 3.0)
    write_run(tmp_path / "a", 2.0, alpha=0.25)
    (tmp_path / "notes").mkdir()
    code = (
        "import json, sys, kdtrain as kd; found = kd.runs(sys.argv[1])\n"
        "print(json.dumps([found, [name for name in ('torch', 'matplotlib', 'pandas') if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{tmp_path}/*"], capture_output=True, text=True, check=True)
    found, heavy = json.loads(done.stdout)
    assert heavy == [] and [os.path.basename(each["run"]) for each in found] == ["a", "b"]
    assert [(each["best_validation_loss"], each["options/alpha"]) for each in found] == [(2.0, 0.25), (3.0, "auto")]
    assert found == kd.runs([tmp_path / "a", tmp_path / "b"])
    assert kd.RunRecord is RunRecord
    with pytest.raises(kd.UsageError, match=r"no folder of .* holds a run"):
        kd.runs(f"{tmp_path}/none*")
    with pytest.raises(kd.UsageError, match="notes is not a run"):
        kd.runs([tmp_path / "notes"])


def test_lines_with_anything_but_numbers_do_not_reach_a_table(tmp_path):
    folder = write_run(tmp_path / "a")
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": 10**30, "loss": 1.0},
            {"step": -1, "loss": 1.0},
            {"step": 41, "loss": "<b>", "tokens": True, "validation/loss": None, "kd": 10**400},
        ],
    )
    (folder / "result.json").write_text(
        '{"stop_reason": ["x"], "steps": "many", "best_validation_loss": {}, "tokens": 1e400}'
    )
    (run,) = read_runs([folder])
    assert run.record.metrics[-1].keys() == {"step", "validation/loss"} and run.record.steps[-1]["step"] == 40
    assert run.numbers["best_validation_loss"] == 2.0 and run.numbers["tokens"] == 4000


def test_the_same_run_twice_and_too_many_runs_are_refused(tmp_path):
    folder = write_run(tmp_path / "a")
    with pytest.raises(kd.UsageError, match="named twice"):
        read_runs([folder, folder / ".." / "a"])
    with pytest.raises(kd.UsageError, match="name at most 64"):
        read_runs([folder] * 65, most=64)
