"""The commands, flags, links and files that README and docs name exist."""

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.performance import scaling
from kdtrain import cli
from kdtrain.config import DistillConfig
from kdtrain.config.values import fields_of, flag, marked
from kdtrain.models.spec import read_spec
from kdtrain.monitor.health import RULES
from kdtrain.monitor.on_event import EVENTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCHRUN = {
    *("--standalone", "--nnodes", "--nproc-per-node", "--max-restarts"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
}
ELSEWHERE = {
    "--seeds",
    "--upgrade",
    "--logdir",
    "--port",
    "--tiny",
    "--profile",
    "--commit",
    "--budget",
    "--from",
    "--again",
    "--only",
    "--present",
}
ELSEWHERE |= TORCHRUN
"""Flags of commands other than kdtrain."""

SLURM = ROOT / "docs" / "distill.sbatch"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, kind: str = "") -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    texts = [block.replace("\\\n", " ") for page in PAGES for block in blocks(page)]
    lines = [re.sub(r"^torchrun .*? -m kdtrain ", "kdtrain ", line) for text in texts for line in text.splitlines()]
    return [line for line in lines if line.startswith("kdtrain ")]


def flags_of_kdtrain() -> set[str]:
    flags = {flag(option.name) for each in cli.COMMANDS.entries.values() for _, option in fields_of(each.config)}
    return flags | {"--help", "--version"} | {each.replace("--", "--no-", 1) for each in flags}


@pytest.mark.parametrize("line", commands())
def test_a_command_in_the_pages_is_one_that_kdtrain_takes(line):
    _, command, *argv = shlex.split(line)
    assert cli.parse(command, argv) is not None


def test_the_main_job_is_in_the_readme():
    assert {line.split()[1] for line in commands()} >= {"cache-teacher", "distill", "evaluate", "export"}


@each_page
def test_every_flag_that_a_page_names_exists(page):
    named = set(
        re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", re.sub(r"pip install [^`]*|pytest [^`|]*", "", page.read_text()))
    )
    assert named - flags_of_kdtrain() - ELSEWHERE == set()


def test_every_flag_that_a_message_names_exists():
    nodes = [node for path in (ROOT / "kdtrain").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {each for text in texts for each in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text)}
    assert {"--max-loss-ratio", "--explosion-threshold"} <= named
    assert named - flags_of_kdtrain() - ELSEWHERE == set()


@each_page
def test_every_link_into_the_repository_has_a_target(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def kinds_of_events() -> set[str]:
    """The kinds in the calls of `event`, `warning` and `warn_early`, and of functions that pass their `kind` on."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kdtrain").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    position = {"event": 0, "warning": 0, "warn_early": 0, "_warn": 0}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and "kind" in (names := [each.arg for each in node.args.args]):
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            passed = [kind for call in calls for kind in argument(call, position) if getattr(kind, "id", "") == "kind"]
            if passed:
                position[node.name] = names.index("kind") - (names[0] == "self")
    found = [kind for node in nodes if isinstance(node, ast.Call) for kind in argument(node, position)]
    parts = [each for kind in found for each in ast.walk(kind)]  # "start" if ... else "resume"
    return {each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def argument(call: ast.Call, position: dict[str, int]) -> list[ast.expr]:
    """The argument of a call that is the kind of an event, if it is such a call."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(call.func, "value", None)
    if getattr(owner, "id", "") == "log" or isinstance(owner, ast.Call):  # a logger's warning is no event
        return []
    return call.args[position[name] :][:1] if name in position else []


def test_the_tables_of_warnings_and_events_have_every_kind_that_is_written_and_no_other():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    section = page[page.index("## Warnings") : page.index("## TensorBoard")]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    documented = [kind for cell in cells for kind in re.findall(r"`([a-z-]+)`", cell)]
    assert len(documented) == len(set(documented))
    found = kinds_of_events()
    assert {"rollback", "recovery", "spike", "lost-config", "disk-full", "save", "checkpoint"} <= found
    assert set(documented) == found | RULES.keys() - {"stalled"}, "a run that stalls cannot say so"


def test_the_pages_list_the_options_that_may_change_on_a_resume_and_those_that_may_differ_between_ranks():
    def flags(text: str) -> set[str]:
        return set(re.findall(r"`(--[a-z0-9-]+)`", text))

    resuming, ranks = ((ROOT / "docs" / name).read_text() for name in ("resuming.md", "multi-node.md"))
    table = resuming[resuming.index("On a resume these options may differ") : resuming.index("Raising `--steps`")]
    assert flags(table) == {flag(name) for name in marked(DistillConfig, "free")}
    (listed,) = re.findall(r"names the difference\nand the rank\.([^.]*)may differ\.", ranks)
    assert flags(listed) == {flag(name) for name in marked(DistillConfig, "per_rank")}


def test_the_page_names_the_events_for_which_the_command_of_on_event_runs():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    (text,) = re.findall(r"runs the command at each (.*?), and at every\nevent of level `error`", page)
    assert set(re.findall(r"`([a-z-]+)`", text)) == EVENTS


def test_the_readmes_example_of_a_student_is_a_spec(tmp_path):
    (example,) = blocks(ROOT / "README.md", "toml")
    relative = tomllib.loads(example)["tokenizer"]
    assert (ROOT / "students" / relative).is_dir()
    (tmp_path / "students").mkdir()
    (tmp_path / "teachers").symlink_to(ROOT / "teachers")
    (tmp_path / "students" / "small.toml").write_text(example)
    spec = read_spec(str(tmp_path / "students" / "small.toml"))
    assert (spec.name, spec.init) == ("small", "scratch")


def test_the_flags_of_torchrun_are_torchruns():
    from torch.distributed.run import get_args_parser

    known = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert known >= TORCHRUN
    assert set(re.findall(r"^    (--[a-z-]+) ", SLURM.read_text(), re.MULTILINE)) <= TORCHRUN


def test_the_slurm_script_is_one_and_starts_kdtrain_once_a_device():
    subprocess.run(["bash", "-n", SLURM], check=True)
    asked = subprocess.run(["bash", SLURM], capture_output=True, text=True)
    assert (asked.returncode, asked.stderr.split()[0]) == (2, "usage:")
    folder = SLURM.parent / "unwritten"
    scripts = 'scontrol() { echo node-1; echo node-2; }; srun() { echo "$@"; }; export -f scontrol srun; '
    variables = {
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    said = subprocess.run(
        ["bash", "-c", f"{scripts} bash {SLURM} distill --out {folder}"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **variables},
        check=True,
    ).stdout
    assert "--nnodes 2 --nproc-per-node 8" in said and "--rdzv-endpoint node-1:29400 --rdzv-id 7-0" in said
    assert said.split()[-5:] == ["-m", "kdtrain", "distill", "--out", str(folder)]


def test_the_figures_of_the_page_on_scaling_are_those_of_its_script():
    page = scaling.PAGE.read_text()
    assert page == scaling.fill(page)
    with pytest.raises(ValueError, match="no <!-- cache -->"):
        scaling.fill(page.replace("<!-- cache -->", ""))
