"""The command line of `kdtrain`: parses the options, then calls one command.

tyro makes flags and `--help` from the dataclasses of `kdtrain.config`. The options of a `--config` file become flags in
front of the user's own, so that file and command line are validated in the same way and a flag wins. An error is one
line on stderr: exit code 2 for options that cannot work, 1 for a failure while running. `register_command` adds a
command.
"""

import contextlib
import difflib
import importlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
import typing
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtrain import config as options
from kdtrain.config import choices, commands
from kdtrain.config.values import fields_of, flag, marked
from kdtrain.errors import RunError, UsageError, advice, name_flags, panics_refused, printable, refuse_no_path
from kdtrain.files import read_toml
from kdtrain.models.spec import foreign_beside
from kdtrain.registry import Registry, first_line, nearest

COMMANDS = Registry("kdtrain", "kdtrain.commands", __name__, {})
_LONGEST = 2000
"""Characters of a message; only a name from a damaged file is longer."""
_WITHOUT_MODELS = ("completion", "inspect", "verify")
"""Commands that load no model, and so run under `python -OO`."""
_WITHOUT_LIBRARIES = ("completion",)
"""Commands that import nothing heavy."""
_NARROWEST = 40
"""Columns of the narrowest terminal that tables and help are made for; with 4, tyro never ends."""


Main = Callable[[Any], int | None]
"""A configuration -> the exit code, None for 0."""


@dataclass(frozen=True)
class Command:
    """A command: its configuration, whose fields are its options, and what runs it."""

    config: type
    main: Main


def register_command(name: str, config: type, *, help: str = "") -> Callable[[Main], Main]:
    """Decorator: make a function the command `kdtrain NAME`.

    Args:
        name: the name that users type.
        config: a dataclass; its fields are flags, or sections if they are dataclasses.
        help: its line in `kdtrain --help`; by default the first line of the configuration's docstring.
    """

    def register(main: Main) -> Main:
        COMMANDS.add(name, Command(config, main), main, help or first_line(config))
        return main

    return register


def _register_builtin(name: str, config: type) -> None:
    def main(config: Any) -> int | None:
        if sys.flags.optimize > 1 and name not in _WITHOUT_MODELS:
            raise UsageError("python -OO removes the docstrings that transformers needs to load a model; use -O")
        command = importlib.import_module(f"kdtrain.commands.{name.replace('-', '_')}")
        code: int | None = command.main(config)
        return code

    register_command(name, config)(main)


for _name, _config in commands.COMMANDS.items():
    _register_builtin(_name, _config)


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code: 0 done, 1 failed while running, 2 options that cannot work."""
    name_flags()
    _mend_width()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if argv else 2)
    if argv[0] == "--version":
        print(importlib.import_module("kdtrain").__version__)
        raise SystemExit(0)
    command = argv[0]
    try:
        if command not in COMMANDS.help():
            raise UsageError(f"unknown command '{command[:80]}'; {nearest(command, COMMANDS.help())}")
        _refuse_impossible_launch()
        try:
            config = parse(command, argv[1:])
        except UsageError as error:  # every process of a node raises it, and the first one prints it
            error.reported = os.environ.get("LOCAL_RANK", "0") != "0"  # type: ignore[attr-defined]
            raise
        if command not in _WITHOUT_LIBRARIES:
            _quiet_libraries()
        with panics_refused("a tokenizer fails"):  # where its name is known, the message has it
            raise SystemExit(COMMANDS.get(command).main(config) or 0)
    except (UsageError, RunError) as error:
        reported, cause = getattr(error, "reported", False), not getattr(error, "not_the_cause", False)
        _fail(2 if isinstance(error, UsageError) else 1, str(error), reported, cause and not reported)
    except MemoryError:
        _fail(1, "out of memory; lower --micro-batch-size, --batch-size or --seq-len")
    except KeyboardInterrupt:
        resumes = command in ("cache-teacher", "demo", "distill")
        _fail(1, "interrupted" + ("; the same command resumes from what was saved" if resumes else ""))
    except BrokenPipeError:
        # the reader of our output is gone; the flush at exit must not raise the error again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _fail(1, f"{error.strerror or error}: {error.filename or 'no file named'}{advice(error)}")
    except RuntimeError as error:
        # torch reports a device out of memory, and a failed allocation on the CPU, as RuntimeErrors
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            _fail(1, "out of memory; lower --micro-batch-size, --batch-size or --seq-len")
        raise


def _quiet_libraries() -> None:
    """Keep other libraries' bars and warnings off the terminal: in the command's process, never in a user's."""
    for name in ("torchao", "torch.utils._pytree", "huggingface_hub"):  # the first two: about unused binaries
        logging.getLogger(name).setLevel(logging.ERROR)
    # a model that cannot be run, with a stack, before our own line about it
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # a single process without a process group is intended
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    shown = importlib.import_module("transformers.utils.logging")
    shown.set_verbosity_error()
    shown.disable_progress_bar()


def parse(command: str, argv: list[str]) -> Any:
    """The configuration of `command`, from flags and from the TOML file that `--config` names.

    Raises:
        UsageError: an unknown flag or key, a value of the wrong type, a combination that cannot work.
        SystemExit: `--help` is among the flags (code 0).
    """
    import tyro

    kind: type = COMMANDS.get(command).config
    argv = _named(kind, argv)
    given = [
        (word[2:].partition("=")[0], word.partition("=")[2] or after)
        for word, after in itertools.pairwise([*argv, ""])
        if word.startswith("--")
    ]
    _refuse_old(kind, given)
    if path := next((value for name, value in given if name == "config"), None):
        argv = _toml_flags(Path(path), kind) + argv
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught), _wide():
            config = tyro.cli(tyro.conf.OmitArgPrefixes[kind], prog=f"kdtrain {command}", args=argv)  # type: ignore[valid-type,misc]
    except SystemExit as stop:
        if not stop.code:
            print(_choices(kind), end="")
            raise
        raise UsageError(_one_line(caught.getvalue(), [each.name for _, each in fields_of(kind)])) from None
    for table in options.sections(config).values():
        for name, value in table.items():
            if isinstance(value, str):
                refuse_no_path(value, flag(name))
                if value.startswith("~"):
                    raise UsageError(
                        f"{flag(name)} {value}: ~ is for the shell, which did not replace it; write the path out"
                    )
    for name in sorted(marked(kind, "once")):
        if (times := [each for each, _ in given].count(flag(name)[2:])) > 1:
            raise UsageError(f"{flag(name)} is given {times} times; kdtrain {command} takes one")
    return config


def _refuse_old(kind: type, given: Iterable[tuple[str, Any]], where: str = "") -> None:
    """Refuse options of an earlier version, by name and value, and say what replaces each."""
    old = getattr(kind, "OLD", {})
    names = [(name.replace("-", "_"), value) for name, value in given]
    keys = [key for name, value in names for key in (name, name.removeprefix("no_"), f"{name} {value}") if key in old]
    if keys:
        raise UsageError(where + "; ".join(f"{flag(key)} {old[key][0]}" for key in dict.fromkeys(keys)))


def _named(kind: type, argv: list[str]) -> list[str]:
    """`argv` with a flag before its positional argument, the first word that is not a flag or a flag's value."""
    positional = next(iter(marked(kind, "positional")), None)
    if positional is None:
        return argv
    switches = {f"--{no}{each.name}" for _, each in fields_of(kind) if each.type is bool for no in ("", "no-")}
    for position, word in enumerate(argv):
        before = argv[position - 1] if position else ""
        takes_word = before.startswith("-") and before not in switches and "=" not in before
        if not word.startswith("-") and not takes_word:
            return [*argv[:position], flag(positional), *argv[position:]]
    return argv


@contextlib.contextmanager
def _wide() -> typing.Iterator[None]:
    """Make tyro print its errors unwrapped, so that they join into one line; help keeps its width."""
    before = os.environ.get("COLUMNS")
    if "-h" not in sys.argv and "--help" not in sys.argv:
        os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


def _mend_width() -> None:
    """Replace a COLUMNS that is no width, and a width in which nothing fits; tyro and rich read both."""
    found = shutil.get_terminal_size().columns
    if "COLUMNS" in os.environ or found < _NARROWEST:
        os.environ["COLUMNS"] = str(max(found, _NARROWEST))


def _one_line(box: str, known: list[str]) -> str:
    """The first paragraph of one of tyro's error boxes without the frame, and the nearest of the `known` options."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("╭", "╰"))]
    rules = [position for position, line in enumerate(lines) if line.startswith("───")]
    first = " ".join(lines[: rules[0] if rules else None])
    message = re.sub(r"^Error parsing (?:(?!--)\S+: )?", "", first)
    strange = re.search(r"^Unrecognized options: --(?:no-)?([\w-]+)", message)
    if strange and (close := difflib.get_close_matches(strange[1].replace("-", "_"), known, 1)):
        message += f"; perhaps you meant {flag(close[0])}"
    return message or "the command line could not be read"


def _toml_flags(path: Path, kind: type) -> list[str]:
    """The options in a TOML file as flags."""
    refuse_no_path(str(path), "--config")
    try:
        tables = read_toml(path)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    known: dict[str, list[str]] = {"run": []}
    for section, each in fields_of(kind):
        known.setdefault(section, []).append(each.name)
    flags: list[str] = []
    tables = {name: _renewed(kind, table) if isinstance(table, dict) else table for name, table in tables.items()}
    given = [pair for table in tables.values() if isinstance(table, dict) for pair in table.items()]
    _refuse_old(kind, given, f"{path}: ")
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: '{section}' is outside of a section; {_home(section, known)}")
        if section not in known:
            raise UsageError(f"{path}: unknown section [{section}]; {nearest(section, list(known))}")
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in known[section] or name == "config":
                raise UsageError(f"{path}: unknown key '{key}' in [{section}]; {_home(name, known, section)}")
            if name in marked(kind, "private"):
                _refuse_foreign_command(path, name)
            if isinstance(value, bool):
                flags.append(flag(name if value else f"no_{name}"))
            else:
                flags += [flag(name), *map(str, value if isinstance(value, list) else [value])]
    return flags


def _renewed(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    """A section of a file with today's names; a run's file has every option, and nobody chose an old one's default."""
    section, renewed = {key.replace("-", "_"): value for key, value in table.items()}, dict(table)
    for key in table:
        name = key.replace("-", "_")
        _, renew = getattr(kind, "OLD", {}).get(name, ("", None))
        new = None if renew is None else renew(section[name], section)
        if new is not None and not new.keys() & section.keys():
            del renewed[key]
            renewed |= new
    return renewed


def _refuse_foreign_command(path: Path, name: str) -> None:
    """Refuse a command line in a file that may have been downloaded with a run, a cache or a model."""
    others = (each for each in foreign_beside(path) if each.resolve() != path.resolve())
    if (foreign := min(others, default=None)) is not None:
        raise UsageError(
            f"{path}: {name} runs a command, and this file lies with {foreign}, which may have been downloaded; "
            f"give {flag(name)} yourself if you trust it"
        )


def _home(key: str, known: dict[str, list[str]], section: str = "") -> str:
    """Advice for a key that is in no section or in the wrong one."""
    name = key.replace("-", "_")
    homes = [each for each, names in known.items() if name in names and name != "config"]
    if homes:
        return f"put it under [{homes[0]}]"
    return nearest(name, known.get(section) or [each for names in known.values() for each in names])


def _choices(kind: type) -> str:
    """The names that a command's extensible options take, a line each."""
    names = {flag(each.name) for _, each in fields_of(kind)}
    lines = []
    for each in vars(choices).values():
        if isinstance(each, Registry) and each.option in names:
            lines += [f"\n{each.option}", *(f"  {name:<18} {text}" for name, text in each.help().items())]
    return "".join(f"{line}\n" for line in lines)


def _overview() -> str:
    lines = "\n".join(f"  {name:<14} {text}" for name, text in COMMANDS.help().items())
    return (
        "usage: kdtrain COMMAND [OPTIONS]\n\nKnowledge distillation of language models.\n\n"
        f"{lines}\n\nkdtrain COMMAND --help lists the options of a command."
    )


def _refuse_impossible_launch() -> None:
    """Refuse an environment whose ranks no launcher such as torchrun sets."""
    found = {}
    for name, least in (("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        text = os.environ.get(name) or str(least)
        if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
            raise UsageError(
                f"{name}={text[:20]} in the environment is not a number from {least}; unset it, or use torchrun"
            )
        found[name] = int(text)
    if found["RANK"] >= found["WORLD_SIZE"]:
        raise UsageError(
            f"RANK={found['RANK']} in the environment, with WORLD_SIZE={found['WORLD_SIZE']}; use torchrun"
        )


def _fail(code: int, message: str, reported: bool = False, cause: bool = True) -> typing.NoReturn:
    """Exit with `code` and one line, unless another rank prints it (`reported`); torchrun gets that of the `cause`."""
    message = printable(" ".join(message.split()))
    message = message if len(message) <= _LONGEST else message[:_LONGEST] + "..."
    if (rank := os.environ.get("RANK") or "0") != "0" and rank.isdigit() and not message.startswith("rank "):
        message = f"rank {rank}: {message}"
    if not reported:
        print(f"kdtrain: {message}", file=sys.stderr)
    if cause and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):  # which torchrun reads of a failed process
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    raise SystemExit(code)
