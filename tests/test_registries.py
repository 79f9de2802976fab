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
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from kdtrain.config import choices
from kdtrain.library import Cache
from kdtrain.registry import Registry
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

DOCS = Path(__file__).resolve().parents[1] / "docs"
REGISTRIES = {name: each for name, each in vars(choices).items() if isinstance(each, Registry)}


def example(page: str) -> str:
    """Return the Python of a page of docs."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)[0]


LOSS, TEMPERATURE, LOGGER = example("objective.md"), example("temperature.md"), example("monitoring.md")
TEACHER = example("../teachers/README.md")
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
TEXT = '''
from kdtrain.data.corpus import register_text

@register_text("count")
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
    "texts": ("count", TEXT),
    "loggers": ("lines", LOGGER),
    "commands": ("say", COMMAND),
    "teachers": ("bigram", TEACHER),
}


def install(folder: Path, package: str, group: str, name: str, code: str) -> None:
    """Write `package`, whose one module registers `name`, and its metadata, to `folder`."""
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


def forked(server, root: Path, packages: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run `kdtrain` in a fork of a process that has imported torch."""
    (done,) = server.run("-m", "kdtrain", *argv, folder=root, PYTHONPATH=str(packages))
    return done


@pytest.fixture(scope="module")
def bench(server, tmp_path_factory):
    """Make a tiny teacher and student, text, a cache, and a folder with a package for each kind."""
    root = tmp_path_factory.mktemp("registries")
    write_model_folder(root / "teacher", tiny_model("llama", 300, seed=1), tiny_tokenizer(300))
    shape = "".join(f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["llama"].items())
    (root / "student.toml").write_text(f"tokenizer = 'teacher'\n\n[config]\n{shape}")
    for group, (name, code) in CODE.items():
        install(root / "packages", f"more-{group}", group, name, code)
    done = forked(
        *(server, root, root / "packages", "cache-teacher", "--teacher", "teacher", "--out", "cache"),
        *("--data", "count:80"),
        *("--seq-len", 32, "--num-sequences", 8, "--validation-sequences", 4, "--top-k", 12, "--precision", "fp32"),
    )
    assert done.returncode == 0, done.stderr
    return root


def trained(server, bench: Path, run: str, *argv: object, cache: str | None = "cache") -> list[dict]:
    """Train three steps with these options, and return their lines of the log."""
    source = ("--cache", cache) if cache and "--cache" not in argv else ()
    done = forked(
        *(server, bench, bench / "packages", "distill", *source, "--student", "student.toml", "--out", run),
        *("--steps", 3, "--batch-size", 4, "--no-compile", "--log-to", "none", "--log-freq", 1, *argv),
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
    for module in [each.home] if isinstance(each.home, str) else each.home.values():
        importlib.import_module(module)
    own = [
        name for name in each.entries if re.match(r"kdtrain\.(?!plugins)", each.modules[name])
    ]  # packages add others
    assert sorted(each.builtin) == sorted(own)
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
        ("temperatures", "to-end", TEMPERATURE.replace("cooling", "to-end").replace("learns=False", "scheduled=True")),
        ("temperatures", "warm", TEMPERATURE.replace("cooling", "warm").replace("learns=False, ", "")),
    ):
        install(tmp_path / "p", f"more-{name}", group, name, code)
    ask = """
import sys
from kdtrain.cli import parse
from kdtrain.config.choices import DIVERGENCES, GROWS_WITH_T
from kdtrain.errors import UsageError
run = ["--student", "s", "--out", "o", "--data", "stdlib"]
assert parse("distill", [*run, "--temperature-mode", "to-end", "--temperature", "2"]).objective.schedules_temperature
assert not parse("distill", [*run, "--temperature-mode", "cooling"]).objective.learns_temperature
assert DIVERGENCES.has("rising", GROWS_WITH_T) and not DIVERGENCES.has("flat", GROWS_WITH_T)
likelihood = ["likelihood", "--divergence", "flat"]
for more in (["--temperature-mode", *each] for each in (["to-end"], ["warm"], likelihood)):
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
    stays, needs_teacher, ignores = done.stdout.splitlines()
    assert "to-end goes from 1 to 1" in stays
    assert "warm" in needs_teacher and "teacher" in needs_teacher
    assert "flat, whose loss does not depend on T" in ignores


def test_a_packages_teacher_builds_a_cache_teaches_a_run_and_is_compared_with_the_student(server, bench):
    (bench / "bigram.toml").write_text("kind = 'bigram'\ntokenizer = 'teacher'\n[options]\nseed = 3\n")
    data = ("--data", "count:80", "--seq-len", 32, "--num-sequences", 8)
    text = (*data, "--validation-sequences", 4)
    words = ("cache-teacher", "--teacher", "bigram.toml", "--out", "bigrams", *text, "--dense", "--precision", "fp32")
    assert (done := forked(server, bench, bench / "packages", *words)).returncode == 0, done.stderr
    cache = Cache(bench / "bigrams")
    options = {"seed": 3}
    identity = {"spec": "bigram", "kind": "bigram", "options": options, "weights_digest": "seed 3"}
    assert cache.manifest.settings.teacher == identity
    row, table = cache["train"][0], 2 * torch.randn(300, 300, generator=torch.Generator().manual_seed(3))
    expected = table[row["tokens"][:-1]].log_softmax(-1)
    torch.testing.assert_close(row["logprobs"].float(), expected, rtol=0, atol=1e-2)
    cached = trained(server, bench, "cached", "--cache", "bigrams", "--precision", "fp32")
    online = trained(server, bench, "online", "--teacher", "bigram.toml", *text, "--precision", "fp32", cache=None)
    assert [step["ce"] for step in online] == pytest.approx([step["ce"] for step in cached], rel=1e-3)
    assert [step["kd"] for step in online] == pytest.approx([step["kd"] for step in cached], rel=1e-3)
    words = ("evaluate", "--student", "online/student", "--teacher", "bigram.toml", *data, "--json")
    done = forked(server, bench, bench / "packages", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kl"] > 0.5


def test_a_run_logs_to_the_logger_of_a_package_beside_a_built_in_one(server, bench):
    steps = trained(server, bench, "logged", "--precision", "fp32", "--log-to", "tensorboard,lines:numbers.txt")
    lines = (bench / "logged" / "numbers.txt").read_text().splitlines()
    training = [line for line in lines if "train/loss" in line]
    assert [int(line.split()[0]) for line in training] == [1, 2, 3]
    assert repr(steps[-1]["loss"]) in training[-1]
    assert list((bench / "logged" / "tensorboard").iterdir())


def test_a_logger_that_is_not_ready_is_refused_before_anything_is_written(server, tmp_path):
    code = "from kdtrain import Logger, UsageError, register_logger\n\n@register_logger('away')\nclass Away(Logger):\n"
    code += "    @classmethod\n    def ready(cls, text):\n        raise UsageError(f'no server at {text}')\n"
    install(tmp_path / "p", "far", "loggers", "away", code)
    (tmp_path / "text.txt").write_text("some words " * 500)
    write_model_folder(tmp_path / "student", tiny_model("llama", 300, seed=1), tiny_tokenizer(300))
    argv = ("distill", "--student", "student", "--out", "run", "--data", "text.txt", "--log-to", "away:here")
    done = forked(server, tmp_path, tmp_path / "p", *argv)
    assert (done.returncode, done.stderr) == (2, "kdtrain: no server at here\n")
    assert not (tmp_path / "run").exists()


def test_a_package_adds_a_command_with_its_own_options(bench):
    done = kdtrain(bench, bench / "packages", "say", "--word", "ho")
    assert (done.returncode, done.stdout) == (0, "ho\n")
    assert "say            from the package more-commands" in kdtrain(bench, bench / "packages", "--help").stdout
    script = kdtrain(bench, bench / "packages", "completion", "bash").stdout
    assert 'say) flags="--word --help"' in script, "completion knows the commands of packages"


def test_help_lists_what_packages_add_without_importing_them(bench, tmp_path):
    install(tmp_path / "p", "broken", "divergences", "worse", "raise RuntimeError('imported')\n")
    for topic in ("all", "objective", "divergence"):
        shown = kdtrain(bench, tmp_path / "p", "distill", "--help", topic)
        assert shown.returncode == 0
        (option,) = re.findall(r"^  --divergence.*?(?=^  --|\Z)", shown.stdout, re.MULTILINE | re.DOTALL)
        assert "  worse              from the package broken\n" in option
        assert "  jsd                Jensen-Shannon" in option


THIEF = "import kdtrain\nkdtrain.register_divergence('jsd')(lambda events, parameter: events.student.sum(-1))"


@pytest.mark.parametrize(
    "packages, said",
    [
        ({}, "--divergence mine is unknown; known are "),
        ({"one": "", "other": ""}, "--divergence mine is in one and in other; uninstall one"),
        ({"one": "import nothing_of_this_name"}, "fails to load: ModuleNotFoundError: No module named"),
        ({"one": "x = 1"}, "one of the package one does not register it"),
        ({"one": "def broken(:"}, "the package one fails to load: SyntaxError"),
        ({"one": THIEF}, "--divergence jsd is registered by kdtrain.objective.divergence and by one"),
    ],
    ids=["unknown", "twice", "no import", "no registration", "no Python", "another's name"],
)
def test_a_name_that_cannot_be_loaded_is_one_line_and_exit_code_2(tmp_path, packages, said):
    (tmp_path / "p").mkdir()
    for package, code in packages.items():
        install(tmp_path / "p", package, "divergences", "mine", f"{code}\n")
    argv = ("distill", "--student", "s", "--out", "o", "--data", "stdlib", "--divergence", "mine")
    done = kdtrain(tmp_path, tmp_path / "p", *argv)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("kdtrain: --divergence mine") and said in done.stderr


SECTION = "from dataclasses import dataclass\nimport kdtrain\nfrom kdtrain.config.values import register_section\n"
SECTION += (
    "from kdtrain.config.values import Options\n\n\n@dataclass(frozen=True, kw_only=True)\nclass More(Options):\n"
)
SECTION += (
    '    """Options."""\n\n    {option}\n    """An option."""\n\n\nregister_section({name!r}, {{"distill": More}})\n'
)
FINE = SECTION.format(name="mysec", option="my_option: int = 1")
BROKEN = {
    "raises": "raise RuntimeError('boom')",
    "missing": None,
    "registers nothing": "x = 1",
    "another's section": SECTION.format(name="server", option="my_option: int = 1"),
    "an option's name": SECTION.format(name="mysec", option="lr: float = 1.0"),
    "the name of --json": SECTION.format(name="mysec", option="json: bool = False"),
    "no default": SECTION.format(name="mysec", option="my_option: int"),
    "no type": SECTION.format(name="mysec", option="my_option: 'nothing' = 1"),
    "a section's name": SECTION.format(name="optimizer", option="my_option: int = 1"),
    "exits": "import sys\nsys.exit(3)",
    "half": f"{FINE}kdtrain.register_divergence('hollow')(lambda events, parameter: events)\nraise ValueError('half')",
    "no package": "=",
    "a command's name": COMMAND.replace('"say"', '"distill"') + FINE,
    "a plugin's command": COMMAND.replace('"say"', '"audit"') + FINE,
    "a built-in name": f"{FINE}from kdtrain.config.choices import TEACHERS\nTEACHERS.add('local', More, More)",
    "a default out of bounds": SECTION.format(name="mysec", option="my_option: int = option(5, most=3)").replace(
        "import Options", "import Options, option"
    ),
    "the name of [run]": SECTION.format(name="run", option="my_option: int = 1"),
    "two lines": "print('a banner')\nraise RuntimeError('two\\nlines')",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_named_in_one_line_and_ends_no_command(server, tmp_path, kind):
    code, name = BROKEN[kind], {"a section's name": "optimizer", "the name of [run]": "run"}.get(kind, "mysec")
    install(tmp_path / "p", "bad", "sections", name, code or "")
    if kind == "missing":
        (tmp_path / "p" / "bad.py").unlink()
    if kind == "no package":
        (tmp_path / "p" / "bad-1.0.dist-info" / "entry_points.txt").write_text("[kdtrain.sections]\nmysec bad\n")
    every = (("--version",), ("--help",), ("completion", "bash")) if kind in ("exits", "a command's name") else ()
    for words in (*every, ("distill", "--help", "all")):
        start = kdtrain if every else partial(forked, server)  # a fork has the commands of kdtrain before a package
        done = start(tmp_path, tmp_path / "p", *words)
        assert done.returncode == 0 and done.stdout and "it is left out" not in done.stdout, done.stderr
        (line,) = [each for each in done.stderr.splitlines() if each != "a banner"]
        assert "bad" in line and "it is left out" in line and "a banner" not in done.stdout
        if words[0] == "distill":
            assert "--lr " in done.stdout and "--teacher-server " in done.stdout and "hollow" not in done.stdout
    (tmp_path / "c.toml").write_text("[mysec]\nmy_option = 2\n")
    argv = ("distill", "--student", "s", "--out", "o", "--data", "stdlib", "--config", "c.toml")
    done = forked(server, tmp_path, tmp_path / "p", *argv)
    assert done.returncode == 2 and "unknown section [mysec]; " in done.stderr and "Traceback" not in done.stderr
    assert "bad" in done.stderr.splitlines()[-2], "the reason stands before the answer"


def test_all_of_a_package_is_left_out_with_its_section_and_a_broken_file_is_no_traceback_of_torch(server, bench):
    """Its observer needs the section; and torch reads the entry points of every package itself."""
    taken = SECTION.format(name="mysec", option="lr: float = 1.0")
    install(bench / "half", "bad", "sections", "mysec", taken)
    (bench / "half/watch.py").write_text(
        "from kdtrain.config.choices import register_observer\n"
        "register_observer('mysec')(lambda request: request.config.plugins['mysec'].lr and None)\n"
    )
    entries = bench / "half/bad-1.0.dist-info/entry_points.txt"
    entries.write_text("[kdtrain.sections]\nmysec = bad\nother = bad\n[kdtrain.observers]\nmysec = watch\n")
    words = ("distill", "--cache", "cache", "--student", "student.toml", "--batch-size", 4, "--steps", 1)
    words += ("--no-compile", "--log-to", "none", "--precision", "fp32", "--dry-run", "--out", "left-out")
    done = forked(server, bench, bench / "half", *words)
    assert done.returncode == 0 and done.stderr.count("it is left out") == 1, done.stderr
    entries.write_text("[kdtrain.sections]\nmysec bad\n")
    done = forked(server, bench, bench / "half", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2
    assert "torch reads the entry points of the package bad too, and fails" in done.stderr


def test_completion_names_a_package_whose_command_is_broken_and_leaves_it_out(server, tmp_path):
    install(tmp_path / "p", "bad", "commands", "say", "import sys\nprint('a banner')\nsys.exit(3)\n")
    done = forked(server, tmp_path, tmp_path / "p", "completion", "bash")
    assert done.returncode == 0 and done.stdout.startswith("# kdtrain completion") and "say)" not in done.stdout
    assert "kdtrain say: the package bad fails to load: SystemExit: 3; it is left out" in done.stderr
    done = forked(server, tmp_path, tmp_path / "p", "say")
    assert done.returncode == 2 and done.stderr.endswith("the package bad fails to load: SystemExit: 3\n")


def test_a_package_adds_a_section_of_options_and_an_observer_whose_values_reach_it(server, bench):
    """In help, in a TOML file, on the command line; and neither a run without them nor a resumed one sees them."""
    (code,) = [
        each
        for each in re.findall(r"^```python\n(.*?)^```", (DOCS / "library.md").read_text(), re.M | re.S)
        if "register_section" in each
    ]
    packages = bench / "sections"
    install(packages, "more-sections", "sections", "steep", code)
    with (packages / "more_sections-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("[kdtrain.observers]\nsteep = more_sections\n")
    (bench / "steep.toml").write_text("[steep]\nsteep_above = 1e-9\n")
    words = ("distill", "--cache", "cache", "--student", "student.toml", "--batch-size", 4, "--no-compile")
    words += ("--log-to", "none", "--precision", "fp32", "--steps")
    for run, *more in (("steep", 2, "--config", "steep.toml"), ("steep", 3), ("calm", 2, "--steep-above", 1e9)):
        done = forked(server, bench, packages, *words, *more, "--out", run)
        assert done.returncode == 0, done.stderr
    assert (bench / "steep/steep.txt").read_text() == "2\n" and (bench / "calm/steep.txt").read_text() == "0\n"
    assert "steep" not in tomllib.loads((bench / "steep/config.toml").read_text())
    assert tomllib.loads((bench / "calm/config.toml").read_text())["steep"] == {"steep_above": 1e9}
    done = forked(server, bench, packages, "distill", "--help", "steep")
    assert "[steep] Count the steps with a large gradient." in done.stdout and "--steep-above X" in done.stdout
    assert "--steep-above" in forked(server, bench, packages, "completion", "bash").stdout
    done = forked(server, bench, packages, *words, 2, "--out", "no", "--steep-above", -1)
    assert (done.returncode, done.stderr) == (2, "kdtrain: --steep-above -1.0 must be above 0\n")
