"""A user's package adds a name to an option by an entry point, without a change to kdtrain.

The packages are folders on PYTHONPATH, with the metadata that pip would write.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kdtrain.config import choices
from kdtrain.registry import Registry
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

DOCS = Path(__file__).resolve().parents[1] / "docs"
REGISTRIES = {name: each for name, each in vars(choices).items() if isinstance(each, Registry)}


def example(page: str) -> str:
    """The Python of a page of docs."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)[0]


LOSS, TEMPERATURE = example("objective.md"), example("temperature.md")
BACKEND = '''
"""Products of weights that are worth their sign."""
import torch
from kdtrain.precision.backends import register_backend

@register_backend("signs")
class Signs:
    """Weights of one bit."""

    def __init__(self, recipe):
        self.recipe = recipe

    def refuses(self, inputs, outputs, transposed):
        return None

    def product(self, layer, inputs, outputs):
        return self

    def __call__(self, x_ND, weight_OD, dtype, high_forward):
        size = weight_OD.abs().mean()
        rounded_OD = weight_OD + (weight_OD.sign() * size - weight_OD).detach()
        return x_ND.to(dtype) @ rounded_OD.to(dtype).T
'''
TAIL = '''
from dataclasses import replace
from kdtrain.config.choices import TAILS
from kdtrain.objective.tails import register_tail

@register_tail("half")
def half(targets, statistics, beta):
    """The ghost bucket, at half its weight."""
    events = TAILS.get("ghost").events(targets, statistics, beta)
    weight = events.teacher.exp()
    weight[:, -1] /= 2
    return replace(events, weight=weight)
'''
SOURCE = '''
from kdtrain.data.corpus import register_source

@register_source("count")
def count(rest):
    """Texts that count to a number."""
    for first in range(int(rest)):
        yield " ".join(str(first + n) for n in range(60))
'''
COMMAND = '''
from dataclasses import dataclass
from kdtrain.cli import register_command

@dataclass(frozen=True, kw_only=True)
class Config:
    """Print a word."""

    word: str = "hello"
    """What is printed."""

@register_command("say", Config)
def main(config):
    print(config.word)
    return 0
'''
CODE = {
    "divergences": ("hellinger", LOSS),
    "temperatures": ("cooling", TEMPERATURE),
    "backends": ("signs", BACKEND),
    "tails": ("half", TAIL),
    "sources": ("count", SOURCE),
    "commands": ("say", COMMAND),
}


def install(folder: Path, package: str, group: str, name: str, code: str) -> None:
    """`package`, whose one module registers `name`, and its metadata, under `folder`."""
    module = package.replace("-", "_")
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kdtrain.{group}]\n{name} = {module}\n")


def kdtrain(root: Path, packages: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "kdtrain", *(str(word) for word in argv)]
    return subprocess.run(words, cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A tiny teacher and student, text, a cache, and a folder with a package for each kind."""
    root = tmp_path_factory.mktemp("registries")
    write_model_folder(root / "teacher", tiny_model("llama", 300, seed=1), tiny_tokenizer(300))
    shape = "".join(f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["llama"].items())
    (root / "student.toml").write_text(f"tokenizer = 'teacher'\n\n[config]\n{shape}")
    for group, (name, code) in CODE.items():
        install(root / "packages", f"more-{group}", group, name, code)
    done = kdtrain(
        *(root, root / "packages", "cache-teacher", "--teacher", "teacher", "--out", "cache", "--data", "count:80"),
        *("--seq-len", 32, "--num-sequences", 8, "--validation-sequences", 4, "--top-k", 12, "--precision", "fp32"),
    )
    assert done.returncode == 0, done.stderr
    return root


def trained(server, bench: Path, run: str, *argv: object) -> list[dict]:
    """The steps of a run of three with these options."""
    (done,) = server.run(
        *("-m", "kdtrain", "distill", "--cache", "cache", "--student", "student.toml", "--out", run),
        *("--steps", 3, "--batch-size", 4, "--no-compile", "--no-tensorboard", "--log-freq", 1, *argv),
        folder=bench,
        PYTHONPATH=str(bench / "packages"),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (bench / run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize("name, code", CODE.values(), ids=CODE)
def test_each_addition_of_a_package_is_a_file_of_under_30_lines(name, code):
    assert len(code.strip().splitlines()) < 30
    assert ast.parse(code)


@pytest.mark.parametrize("each", REGISTRIES.values(), ids=REGISTRIES)
def test_the_names_that_help_lists_are_those_that_the_code_registers(each):
    importlib.import_module(each.home)
    assert sorted(each.builtin) == sorted(each.entries)
    assert all(each.builtin.values())


def test_a_run_uses_the_loss_and_the_temperature_and_the_back_end_of_a_package(server, bench):
    fp32 = ("--precision", "fp32", "--temperature", 2)
    fp8 = ("--precision", "fp8", "--temperature", 2, "--fp8-backend")
    plain, half = trained(server, bench, "plain", *fp32), trained(server, bench, "half", *fp32, "--tail", "half")
    cooled = trained(server, bench, "cooled", *fp32, "--divergence", "hellinger", "--temperature-mode", "cooling")
    rounded = trained(server, bench, "rounded", *fp8, "emulated", "--divergence", "hellinger:0.25")
    one_bit = trained(server, bench, "one-bit", *fp8, "signs", "--divergence", "hellinger:0.25")
    assert half[0]["ce"] == plain[0]["ce"] == cooled[0]["ce"]
    assert len({run[0]["kd"] for run in (plain, half, cooled)}) == 3
    assert [step["T"] for step in cooled] == [2.0, 1.5, 1.25]
    assert abs(rounded[0]["kd"] / cooled[0]["kd"] - 1) > 0.1, "the number behind the name changes nothing"
    assert "fp8 by signs, not faster here" in (bench / "one-bit" / "train.log").read_text()
    assert abs(one_bit[0]["ce"] - rounded[0]["ce"]) > 1e-3


def test_a_packages_scheduled_temperature_needs_no_teacher_and_a_divergence_that_ignores_T_learns_none(tmp_path):
    """A registration states what the checks of options need to know; no check compares names."""
    flat = "from kdtrain import register_divergence\n"
    flat += "register_divergence('flat', depends_on_temperature=False)(lambda events, number: events.student.sum(-1))\n"
    rising = "from kdtrain import register_divergence\n"
    rising += "register_divergence('rising', grows_with_temperature=True)(lambda events, n: events.student.sum(-1))\n"
    for group, name, code in (
        *(("divergences", "flat", flat), ("divergences", "rising", rising)),
        ("temperatures", "cooling", TEMPERATURE),
        ("temperatures", "warm", TEMPERATURE.replace("cooling", "warm").replace("learns=False, ", "")),
    ):
        install(tmp_path / "p", f"more-{name}", group, name, code)
    ask = """
import sys
from kdtrain.cli import parse
from kdtrain.config.choices import DIVERGENCES, GROWS_WITH_T
from kdtrain.errors import UsageError
run = ["--student", "s", "--out", "o", "--data", "stdlib"]
assert not parse("distill", [*run, "--temperature-mode", "cooling"]).objective.learns_temperature
assert DIVERGENCES.has("rising", GROWS_WITH_T) and not DIVERGENCES.has("flat", GROWS_WITH_T)
for more in (["--temperature-mode", "warm"], ["--temperature-mode", "likelihood", "--divergence", "flat"]):
    try:
        parse("distill", [*run[:4], "--cache", "c", *more] if "flat" in more else [*run, *more])
    except UsageError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "p")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    needs_teacher, ignores = done.stdout.splitlines()
    assert "warm" in needs_teacher and "teacher" in needs_teacher
    assert "flat, whose loss does not depend on T" in ignores


def test_a_package_adds_a_command_with_its_own_options(bench):
    done = kdtrain(bench, bench / "packages", "say", "--word", "ho")
    assert (done.returncode, done.stdout) == (0, "ho\n")
    assert "say            from the package more-commands" in kdtrain(bench, bench / "packages", "--help").stdout


def test_help_lists_what_packages_add_without_importing_them(bench, tmp_path):
    install(tmp_path / "p", "broken", "divergences", "worse", "raise RuntimeError('imported')\n")
    shown = kdtrain(bench, tmp_path / "p", "distill", "--help")
    assert shown.returncode == 0
    assert "  worse              from the package broken\n" in shown.stdout
    assert "  jsd                Jensen-Shannon" in shown.stdout


@pytest.mark.parametrize("option, group", [("--divergence", "divergences"), ("--fp8-backend", "backends")])
@pytest.mark.parametrize(
    "packages, said",
    [
        ({}, "is unknown; known are "),
        ({"one": "", "other": ""}, "is in one and in other; uninstall one"),
        ({"one": "import nothing_of_this_name"}, "fails to load: ModuleNotFoundError: No module named"),
        ({"one": "x = 1"}, "one of the package one does not register it"),
        ({"one": "def broken(:"}, "the package one fails to load: SyntaxError"),
    ],
    ids=["unknown", "twice", "no import", "no registration", "no Python"],
)
def test_a_name_that_cannot_be_loaded_is_one_line_and_exit_code_2(tmp_path, option, group, packages, said):
    (tmp_path / "p").mkdir()
    for package, code in packages.items():
        install(tmp_path / "p", package, group, "mine", f"{code}\n")
    argv = ("distill", "--student", "s", "--out", "o", "--data", "stdlib", "--precision", "fp8", option, "mine")
    done = kdtrain(tmp_path, tmp_path / "p", *argv)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"kdtrain: {option} mine") and said in done.stderr


def test_a_package_that_takes_the_name_of_another_is_refused(tmp_path):
    code = "from kdtrain.objective.divergence import register_divergence\n"
    code += "register_divergence('jsd')(lambda events, parameter: events.student.sum(-1))\n"
    install(tmp_path / "p", "thief", "divergences", "mine", code)
    argv = ("distill", "--student", "s", "--out", "o", "--data", "stdlib", "--divergence", "mine")
    done = kdtrain(tmp_path, tmp_path / "p", *argv)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--divergence jsd is registered by kdtrain.objective.divergence and by thief" in done.stderr
