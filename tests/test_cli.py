"""The command line: flags and TOML become one configuration, and every error one line with its exit code."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

from kdtrain import __main__, cli
from kdtrain.cli.help import help_of
from kdtrain.config import removed
from kdtrain.config.commands import DistillConfig, EvaluateConfig
from kdtrain.config.values import flag, option
from kdtrain.errors import RunError, UsageError

STUDENT = str(Path(__file__).resolve().parents[1] / "students" / "stdlib-1m.toml")
REQUIRED = ["--student", "s", "--out", "o"]
DISTILL = [*REQUIRED, "--cache", "c"]


def parsed(tmp_path, text, *argv):
    path = tmp_path / "options.toml"
    path.write_text(text)
    return cli.parse("distill", [*DISTILL, "--config", str(path), *argv])


@pytest.mark.parametrize(
    "line", ["runs/a --json", "--json runs/a", "--path runs/a --json", "--no-hardware runs/a --json"]
)
def test_a_path_may_be_anywhere_among_the_flags(line):
    config = cli.parse("inspect", line.split())
    assert (config.path, config.json) == (Path("runs/a"), True)
    for words in ("runs/a --out b", "--out b runs/a", "--out=b runs/a"):
        export = cli.parse("export", words.split())
        assert (export.run, export.out) == (Path("runs/a"), Path("b")), "the value of a flag is not taken for the path"


def test_a_flag_for_a_setting_may_be_repeated_and_the_last_one_wins():
    assert cli.parse("distill", [*DISTILL, "--lr", "1e-2", "--lr", "1e-3"]).optimizer.lr == 1e-3


@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 1, 2**2000])
def test_a_number_above_two_to_the_53_is_refused(tmp_path, number):
    with pytest.raises(UsageError, match=r"--keep-rolling \d+ is beyond what can be counted; choose at most 2\^53"):
        parsed(tmp_path, f"[checkpoint]\nkeep_rolling = {number}\n")
    with pytest.raises(UsageError, match=r"--steps \d+ is beyond"):
        cli.parse("distill", [*DISTILL, f"--steps={number}"])
    assert cli.parse("distill", [*DISTILL, f"--steps={2**53}", f"--seed={2**63 - 1}"]).steps == 2**53


def test_a_value_of_a_file_that_looks_like_a_flag_is_a_value_and_an_empty_list_an_empty_one(tmp_path):
    assert parsed(tmp_path, "[run]\nallow_mismatch = []\n").allow_mismatch == ()
    with pytest.raises(UsageError, match=r"--seed --json: a whole number is wanted"):
        parsed(tmp_path, "[run]\nseed = '--json'\n")
    for section in ("collect", "precision"):  # where earlier versions had it
        found = parsed(tmp_path, f"[{section}]\ncollect_tensors = '--help'\n").plugins["collect"]
        assert found.collect_tensors == "--help"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A section of a user's own command."""

    side: float
    """Its length."""
    name: "str | None" = None


@dataclass(frozen=True, kw_only=True)
class Compare:
    """A user's own command, with arguments and every kind of annotation."""

    runs: tuple[Path, ...] = option(positional=True)
    colour: Colour = Colour.RED
    points: list[int] = field(default_factory=list)
    level: int | Literal["auto"] | None = None
    shape: Shape


def compared(line):
    return cli.parsing.parse("compare", Compare, line.split(), dict)


def test_a_command_of_a_package_takes_several_arguments_and_any_annotation():
    config = compared("a b --colour BLUE --points 1 2 --side 2 --level 3")
    assert config.runs == (Path("a"), Path("b"))
    assert (config.colour, config.points, config.level) == (Colour.BLUE, [1, 2], 3)
    assert config.shape == Shape(side=2.0)
    assert compared("--runs a b --side 1 --level auto --name None").level == "auto"
    assert compared("a --side 1 --level None --name x").shape.name == "x"
    assert help_of("compare", Compare).startswith("usage: compare RUNS ... --side X [OPTIONS]")


@pytest.mark.parametrize(
    "line, said",
    [
        ("a --side", "--side: a number is wanted, and none is given"),
        ("--side 1", "RUNS is missing: PATH ..."),
        ("a", "--side is missing: its length"),
        ("a --side 1 --colour GREEN", "--colour GREEN: choose RED or BLUE"),
        ("a --side 1 --points 1 x", "--points 1 x: a whole number is wanted"),
        ("a --side 1 --level high", "--level high: a whole number or auto is wanted"),
    ],
)
def test_a_mistake_in_the_line_of_a_packages_command_is_answered_likewise(line, said):
    with pytest.raises(UsageError) as caught:
        compared(line)
    assert str(caught.value) == said


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A user's own command, with defaults of every kind."""

    size: tuple[int, str] = (1, "a")
    points: list[int] = field(default_factory=lambda: [1, 2])
    bold: bool | None = None
    area: int = field(init=False, default=0)
    shape: Shape = Shape(side=3, name="square")


def test_a_packages_command_takes_defaults_of_every_kind():
    def drawn(line):
        return cli.parsing.parse("draw", Drawn, line.split(), dict)

    assert drawn("").shape == Shape(side=3, name="square")
    assert drawn("--side 4").shape == Shape(side=4, name="square")
    assert drawn("--size 2 b").size == (2, "b")
    assert [drawn(line).bold for line in ("", "--bold", "--no-bold")] == [None, True, False]
    text = help_of("draw", Drawn)
    assert "[1 2]" in text and "--[no-]bold" in text and "MISSING" not in text and "--area" not in text
    with pytest.raises(UsageError, match="--area: no such option"):
        drawn("--area 3")


def test_a_section_within_a_section_is_refused_when_its_command_is_registered():
    @dataclass(frozen=True)
    class Nested:
        drawn: Drawn = Drawn()

    Nested.__annotations__["drawn"] = Drawn
    with pytest.raises(UsageError, match=r"^\[drawn\] of a command holds the section 'shape'"):
        cli.register_command("nested", Nested)


def test_a_word_behind_a_switch_is_an_argument_where_one_is_wanted():
    assert cli.parse("inspect", ["--json", "1"]).path == Path("1")
    assert cli.parse("compare", ["--json", "on", "off"]).runs == (Path("on"), Path("off"))
    with pytest.raises(UsageError, match="--json 1: it takes no value"):
        cli.parse("inspect", ["runs/a", "--json", "1"])


def test_a_file_with_thousands_of_unknown_keys_is_refused_at_once(tmp_path):
    started = time.process_time()
    with pytest.raises(UsageError, match="and 19995 more"):
        parsed(tmp_path, "[run]\n" + "".join(f"k{n} = 1\n" for n in range(20_000)))
    assert time.process_time() - started < 3


def test_no_path_is_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--student", STUDENT, "--out", "o", "--data", "stdlib", "--cache"]
    assert cli.parse("distill", [*argv, "None"], look=True).cache == ()
    with pytest.raises(UsageError) as caught:
        cli.parse("distill", [*argv, ""], look=True)
    assert "perhaps" not in str(caught.value)


def test_help_shows_defaults_as_people_write_them_and_those_of_the_command():
    text = " ".join(help_of("kdtrain distill", DistillConfig, "all").split())
    assert re.search(r"--alpha-end [^\[]*\[0\]", text) and "0e+00" not in text
    assert "[validation]" in help_of("kdtrain evaluate", EvaluateConfig, "split")
    assert cli.parse("evaluate", ["--student", "s", "--data", "stdlib"]).data.split == "validation"
    short = help_of("kdtrain evaluate", EvaluateConfig)
    assert all(f"\n  {name} " in short for name in ("--student", "--cache", "--teacher", "--data"))


def test_options_of_sections_are_flat_flags():
    config = cli.parse(
        "distill", [*DISTILL, "--lr", "1e-2", "--temperature", "3", "--no-compile", "--betas", "0.8", "0.9"]
    )
    assert (config.optimizer.lr, config.objective.temperature, config.precision.compile) == (0.01, 3.0, False)
    assert config.optimizer.betas == (0.8, 0.9)


def test_the_file_wins_over_the_defaults_and_flags_win_over_the_file(tmp_path):
    text = "[run]\nsteps = 7\nseed = 1\n[optimizer]\nlr = 0.5\nbetas = [0.1, 0.2]\n"
    text += "[precision]\ncompile = false\n[monitor]\nlog-freq = 3\n"
    config = parsed(tmp_path, text, "--lr", "0.25", "--compile")
    assert config.seed == 1
    assert (config.steps, config.optimizer.lr, config.optimizer.betas) == (7, 0.25, (0.1, 0.2))
    assert (config.precision.compile, config.monitor.log_freq, config.optimizer.clip) == (True, 3, 1.0)
    path = tmp_path / "all.toml"
    path.write_text("[run]\nstudent = 's'\nout = 'o'\ncache = 'c'\n")
    assert cli.parse("distill", [f"--config={path}"]).cache == ("c",), "required options may be in the file alone"


@pytest.mark.parametrize(
    "text, words",
    [
        ("[optimizer]\nwarmup = 1\n", ["'warmup'", "warmup_steps"]),
        ("zzz = 3\n", ["'zzz' is outside of a section; kdtrain distill --help all lists"]),
        ("[run]\nalpha = 0.5\n", ["unknown key 'alpha' in [run]; put it under [objective]"]),
        ("[checkpoint]\nauto_resume = true\n", ["'auto_resume' in [checkpoint]", "you meant 'resume' = 'latest'"]),
        *(
            (f"[{section}]\ngrad_spike_threshold = 9\n", [f"in [{section}]; ", "'explosion_threshold'"])
            for section in ("stopping", "guards")
        ),
        ("[run]\nauto-resume = true\n", ["'auto-resume'", "perhaps you meant 'resume' = 'latest' in [checkpoint]"]),
        ("[rum]\nsteps = 5\n", ["unknown section [rum]; perhaps you meant [run]"]),
        ("[run]\nconfig = 'x'\n", ["'config'", "a file cannot name another one"]),
        ("[run]\nsteps = '3'\n", ["--steps 3: a whole number is wanted"]),
        ("[run]\nsteps = 1.5\n", ["--steps", "1.5"]),
        ("[run]\nsteps = true\n", ["--steps", "a whole number"]),
        ("[run]\nsteps = [1, 2]\n", ["--steps 1 2", "a whole number"]),
        ("[optimizer]\nbetas = []\n", ["--betas", "2 numbers"]),
        ("[precision]\ncompile = 'no'\n", ["--compile no", "true or false"]),
        ("[run\n", ["not TOML"]),
        ("x = " + "[" * 20_000 + "]" * 20_000, ["nested too deep"]),
        ('[checkpoint]\nload = "a\\u0000b"\n', ["--load", "holds a NUL"]),
        ("[checkpoint]\nload = '~/runs'\n", ["--load ~/runs", "write the path out"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        parsed(tmp_path, text)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value) and "missing" not in str(caught.value)


@pytest.mark.parametrize(
    "argv, words",
    [
        ([*DISTILL, "--out", "~no-such-user/x"], ["--out ~no-such-user/x", "write the path out"]),
        *(
            ([*DISTILL, flag, "n" * 5000], [flag, "longer than a path can be"])
            for flag in ("--out", "--cache", "--config", "--student", "--load", "--resume")
        ),
        ([*DISTILL, "--out", "p/" * 2500], ["--out", "255 bytes a name, 4,095 in all"]),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(argv, words):
    with pytest.raises(UsageError) as caught:
        cli.parse("distill", argv)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert not set("\n╭│╰─\x1b") & set(message)


@pytest.mark.parametrize("key, each", removed.REMOVED.items(), ids=removed.REMOVED)
def test_a_removed_option_is_answered_by_what_replaces_it_which_there_is(key, each):
    (name, _, value), commands = key.partition(" "), each.of or ("distill",)
    for command in commands:
        known = {flag(name) for one in cli.COMMANDS.help() for name in cli.options_of(cli.COMMANDS.get(one).config)}
        assert set(re.findall(r"(?<!kdtrain )--[a-z][a-z0-9-]+", each.answer)) <= known
        for argv in ([flag(name), value or "1"], [f"{flag(name)}={value or 1}"]):
            with pytest.raises(UsageError) as caught:
                cli.parse(command, argv)
            assert str(caught.value) == f"{flag(key)} {each.answer}"


def test_a_file_with_a_removed_option_at_its_default_is_read_and_a_dry_run_lists_it(tmp_path, capsys):
    before = (
        "[guards]\nspike_rule = 'mad'\n[objective]\ntemperature-schedule = 'linear'\n[monitor]\nhistogram_freq = 250\n"
    )
    assert replace(parsed(tmp_path, before), config=None) == cli.parse("distill", DISTILL)
    assert capsys.readouterr().err == ""
    parsed(tmp_path, before, "--dry-run")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith(
        "options.toml: spike_rule = mad: --spike-rule is gone: --spike-patience 0 disables the guard"
    )


@pytest.mark.parametrize("order", [1, -1])
def test_a_cosine_of_t_of_an_earlier_version_is_read_as_the_mode_that_replaced_it(tmp_path, order):
    text = "\n".join(["temperature-mode = 'schedule'", "temperature-schedule = 'cosine'"][::order])
    assert parsed(tmp_path, f"[objective]\ntemperature_end = 2.0\n{text}\n").objective.temperature_mode == "cosine"


def test_all_removed_options_of_a_file_at_other_values_are_named_at_once(tmp_path):
    with pytest.raises(UsageError) as caught:
        parsed(
            tmp_path, "[guards]\nspike_rule = 'none'\n[monitor]\nhistogram_freq = 0\n[objective]\ntemperature = 'x'\n"
        )
    assert all(f"--{name} is gone" in str(caught.value) for name in ("spike-rule", "histogram-freq"))


def ended(monkeypatch, capsys, action, argv=("inspect", "--hardware")):
    """Return the exit code and stderr of a command that runs `action`."""
    stage = types.ModuleType("kdtrain.commands.inspect")
    stage.main = action
    monkeypatch.setitem(sys.modules, "kdtrain.commands.inspect", stage)
    with pytest.raises(SystemExit) as stop:
        cli.main(list(argv))
    return stop.value.code, capsys.readouterr().err


def raising(error):
    def stage(config):
        raise error

    return stage


@pytest.mark.parametrize(
    "error, code, words",
    [
        (UsageError("no such\ncache"), 2, "no such cache"),
        (RunError("it broke"), 1, "it broke"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 1, "--micro-batch-size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x/log"), 1, "device: runs/x/log; free some space and"),
        (KeyboardInterrupt(), 1, "interrupted"),
        (UsageError("n" * 5000), 2, "nnn"),
        (type("PanicException", (BaseException,), {})("no\nbounds"), 2, "a tokenizer fails (no bounds); use another"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_a_command_becomes_one_line_and_its_exit_code(monkeypatch, capsys, error, code, words):
    ended_with, stderr = ended(monkeypatch, capsys, raising(error))
    assert ended_with == code
    assert stderr.startswith("kdtrain: ") and words in stderr
    assert len(stderr.splitlines()) == 1 and len(stderr) < 2100


@pytest.mark.parametrize(
    "command", ["cache-teacher", "demo", "distill", "import", "merge", "prune", "subset", "verify"]
)
def test_an_interrupted_command_that_resumes_says_so(monkeypatch, capsys, command):
    monkeypatch.setattr(cli, "parse", lambda *words, **options: None)
    entry = replace(cli.COMMANDS.get(command), main=raising(KeyboardInterrupt()))
    monkeypatch.setitem(cli.COMMANDS.entries, command, entry)
    with pytest.raises(SystemExit) as stop:
        cli.main([command])
    hint = "" if command == "verify" else "; the same command resumes from what was saved"
    assert (stop.value.code, capsys.readouterr().err) == (1, f"kdtrain: interrupted{hint}\n")


def test_an_error_names_its_rank_is_printed_by_one_rank_only_and_reaches_torchrun(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = RunError("the disk is full")
    assert ended(monkeypatch, capsys, raising(error)) == (1, "kdtrain: rank 3: the disk is full\n")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "rank 3: the disk is full"
    error.reported = True
    assert ended(monkeypatch, capsys, raising(error)) == (1, "")


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"RANK": "x"}, "RANK=x in the environment is not a number from 0"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment, with WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK=1 in the environment, with WORLD_SIZE=1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is not a number from 1"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=99999"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
    ],
)
def test_an_impossible_launch_is_refused_before_the_command_runs_on_every_process(
    monkeypatch, capsys, environment, words
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, stderr = ended(monkeypatch, capsys, lambda config: pytest.fail("the stage was called"))
    assert code == 2 and words in stderr and len(stderr.splitlines()) == 1


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="a mistake"):
        ended(monkeypatch, capsys, raising(RuntimeError("a mistake in the program")))


HANGING = """
import sys, threading, time
from kdtrain import __main__, cli

def main():
    threading.Thread(target=time.sleep, args=(float(sys.argv[2]),)).start()
    print("all that is to be said", file=sys.stderr)
    raise SystemExit(int(sys.argv[1]))

cli.main, __main__.LIMIT = main, 1.0
__main__.main()
"""


@pytest.mark.parametrize("code, seconds, ended_with", [(1, 600, 1), (2, 600, 2), (2, 0, 2), (0, 3, 0)])
def test_a_failed_command_ends_although_one_of_its_threads_does_not(code, seconds, ended_with):
    argv = [sys.executable, "-c", HANGING, str(code), str(seconds)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (ended_with, "all that is to be said\n")


@pytest.mark.parametrize(
    "given, found",
    [
        ({}, (__main__.SPINS, None)),
        ({"GOMP_SPINCOUNT": "7"}, ("7", None)),
        ({"OMP_WAIT_POLICY": "active"}, (None, "active")),
    ],
)
def test_threads_wait_as_the_user_sets_it_and_briefly_by_default(monkeypatch, given, found):
    both = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in both:
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(cli, "main", lambda: None)
    __main__.main()
    assert tuple(map(os.environ.get, both)) == found


@pytest.mark.parametrize("returned, code", [(0, 0), (None, 0), (1, 1)])
def test_a_command_decides_the_exit_code(monkeypatch, capsys, returned, code):
    assert ended(monkeypatch, capsys, lambda config: returned) == (code, "")


def test_without_a_command_the_overview_is_shown(capsys):
    for argv, code in (([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == code
        shown = capsys.readouterr().out
        assert all(command in shown for command in cli.COMMANDS.entries)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("columns", ["0", "1", "3", "no number"])
def test_help_ends_and_is_whole_at_every_width(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", ["kdtrain", "inspect", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert "Show devices, number formats" in " ".join(capsys.readouterr().out.split())
    assert int(os.environ["COLUMNS"]) >= 40


@pytest.mark.parametrize(
    "argv, code, line",
    [
        (["--help"], 0, "  distill        Train a student from a cache, from an online teacher, or (with"),
        (
            ["distill", "--student", STUDENT, "--out", "o", "--data", "stdlib"],
            2,
            "kdtrain: python -OO removes the docstrings that transformers needs",
        ),
    ],
)
def test_without_docstrings_the_help_is_whole_and_a_run_is_refused_in_one_line(argv, code, line):
    done = subprocess.run([sys.executable, "-OO", "-m", "kdtrain", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert any(each.startswith(line) for each in (done.stdout + done.stderr).splitlines()), done.stdout + done.stderr
    assert code == 0 or done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv, code",
    [("--help", 0), ("--version", 0), ("distill --help all", 0), ("inspect stdlib-5m", 1), ("completion bash", 1)],
)
def test_a_command_whose_reader_has_gone_ends_without_a_word_and_its_help_well(argv, code):
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run([sys.executable, "-m", "kdtrain", *argv.split()], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (found.returncode, found.stderr) == (code, b"")
