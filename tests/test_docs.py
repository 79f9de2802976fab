"""The prose: what README and docs tell people to type and to look at is there."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from kdtrain import cli
from kdtrain.models.spec import read_spec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"--seeds", "--upgrade", "--logdir", "--port", "--speed"}
"""Flags of commands other than `kdtrain`."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, kind: str = "") -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines()]
    return [line for line in lines if line.startswith("kdtrain ")]


def flags_of_kdtrain() -> set[str]:
    names = {name for kind in cli.COMMANDS.values() for section in cli._keys(kind).values() for name in section}
    flags = {f"--{name.replace('_', '-')}" for name in names}
    return flags | {"--help", "--version"} | {flag.replace("--", "--no-", 1) for flag in flags}


@pytest.mark.parametrize("line", commands())
def test_a_command_in_the_pages_is_one_that_kdtrain_takes(line):
    _, command, *argv = shlex.split(line)
    assert cli.parse(command, argv) is not None


def test_the_main_job_stands_in_the_readme():
    assert {line.split()[1] for line in commands()} >= {"cache-teacher", "distill", "evaluate", "export"}


@each_page
def test_every_flag_that_a_page_names_exists(page):
    named = set(
        re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", re.sub(r"pip install [^`]*|pytest [^`|]*", "", page.read_text()))
    )
    assert named - flags_of_kdtrain() - ELSEWHERE == set()


@each_page
def test_every_link_into_the_repository_leads_somewhere(page):
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
