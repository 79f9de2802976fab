"""The commands, flags, links and files that README and docs name exist."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.performance import scaling
from kdtrain import cli
from kdtrain.models.spec import read_spec

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
    names = {
        name
        for each in cli.COMMANDS.entries.values()
        for section in cli._keys(each.config).values()
        for name in section
    }
    flags = {f"--{name.replace('_', '-')}" for name in names}
    return flags | {"--help", "--version"} | {flag.replace("--", "--no-", 1) for flag in flags}


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


@each_page
def test_every_link_into_the_repository_has_a_target(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


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
