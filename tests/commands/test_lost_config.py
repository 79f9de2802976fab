"""Every command on a run whose config.toml is lost or unreadable, or whose links are not links."""

import json
import shutil
import tomllib

import pytest

from kdtrain.monitor.facts import is_run

RUN = ("distill", "--cache", "cache", "--student", "student.toml", "--checkpoint-freq", 1)
SPOILED = {
    "lost": None,
    "not UTF-8": b"[run]\nout = '\xff'\n",
    "not TOML": b"[run\n",
    "cut short": b'[run]\nstudent = "student.toml"\n',
    "of other types": b'[run]\nstudent = "student.toml"\nout = "x"\ncache = 5\n',
}


@pytest.fixture
def run(workbench):
    """Return a function that copies a run of two steps under another name."""
    if not (workbench.root / "whole").exists():
        assert workbench.call(*RUN, *workbench.plain, "--steps", 2, "--out", "whole")[0] == 0

    def copied(name):
        shutil.copytree(workbench.root / "whole", workbench.root / name, symlinks=True)
        return workbench.root / name

    return copied


@pytest.mark.parametrize("how", SPOILED)
def test_a_run_is_known_by_its_checkpoint_however_its_config_is_spoiled(run, how):
    config = run(f"known-{list(SPOILED).index(how)}") / "config.toml"
    config.unlink()
    if SPOILED[how] is not None:
        config.write_bytes(SPOILED[how])
    assert is_run(config.parent)


@pytest.mark.parametrize("how", ["lost", "of other types"])
def test_a_run_without_its_config_resumes_by_its_newest_checkpoint_and_one_line_says_so(workbench, run, how):
    name = f"resumed-{list(SPOILED).index(how)}"
    config = run(name) / "config.toml"
    config.unlink()
    if SPOILED[how] is not None:
        config.write_bytes(SPOILED[how])
    code, _, stderr = workbench.call(*RUN, *workbench.plain, "--steps", 3, "--out", name)
    assert code == 0, stderr
    (said,) = [line for line in stderr.splitlines() if "the options of" in line]
    assert said.endswith("; the options of the run are those in its checkpoint step-00000002")
    assert (f"{name}/config.toml is lost" in said) == (how == "lost")
    metrics = [json.loads(line) for line in (workbench.root / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2, 3]
    assert tomllib.loads(config.read_text())["run"]["cache"] == "cache"
    assert [each.read_bytes() for each in config.parent.glob("config.toml.old-*")] == [SPOILED[how]] * (how != "lost")


@pytest.mark.parametrize(
    "argv", [("inspect",), ("verify",), ("export", "--out", "exported"), ("evaluate", "--cache", "cache", "--student")]
)
def test_other_commands_know_a_run_without_its_config(workbench, run, argv):
    command, *options = argv
    folder = run(f"known-to-{command}")
    (folder / "config.toml").unlink()
    shutil.rmtree(folder / "student")
    code, stdout, stderr = workbench.call(command, *options, folder.name, "--json")
    assert code == 0, stderr
    assert stderr.count("config.toml is lost; the options of the run are those in its checkpoint step-00000002") == 1
    if command == "export":
        assert (workbench.root / "exported" / "tokenizer.json").exists()
    if command == "inspect":
        assert json.loads(stdout)["checkpoints"].keys() == {"step-00000000", "step-00000001", "step-00000002"}


def test_a_cache_name_that_no_file_system_takes_does_not_matter_to_an_export(workbench, run):
    folder = run("long-name")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('cache = "cache"', f'cache = "{"a" * 5000}"'))
    for lost in ("none", "tokenizer", "student"):
        shutil.rmtree(folder / lost, ignore_errors=True)
        workbench.json("export", folder.name, "--out", f"exported-without-{lost}")


def test_a_damaged_checkpoint_vouches_for_nothing(workbench, run):
    folder = run("nothing-left")
    (folder / "config.toml").unlink()
    for path in (folder / "checkpoints").glob("step-*/state.json"):
        path.write_text("{}")
    code, _, stderr = workbench.call(*RUN, *workbench.plain, "--steps", 3, "--out", folder.name)
    assert code == 2 and "nothing-left holds something that is not a run" in stderr


@pytest.mark.parametrize("name, kind", [("latest", "file"), ("best", "folder")])
def test_a_file_in_the_place_of_a_link_is_refused_before_training_and_stays(workbench, run, name, kind):
    folder = run(f"{name}-is-a-{kind}")
    path = folder / "checkpoints" / name
    path.unlink(missing_ok=True)
    path.mkdir() if kind == "folder" else path.write_text("mine")
    before = (folder / "metrics.jsonl").read_bytes()
    code, _, stderr = workbench.call(*RUN, *workbench.plain, "--steps", 3, "--out", folder.name)
    assert code == 2
    (said,) = [line for line in stderr.splitlines() if line.startswith("kdtrain: ")]
    assert f"checkpoints/{name} is not a link" in said and "move it away" in said
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert path.is_dir() if kind == "folder" else path.read_text() == "mine"
