"""The command `kdtrain`: parses, then calls one stage.

tyro makes flags and `--help` out of the dataclasses of `kdtrain.config`. A TOML file given with `--config` is turned
into flags that stand before the user's own, so that file and command line go through one validation and a flag wins.
Errors become one line on stderr: exit code 2 for what cannot be, 1 for what failed while running.
"""

import contextlib
import dataclasses
import difflib
import importlib
import io
import json
import os
import re
import sys
import time
import types
import typing
from pathlib import Path
from typing import Any

from kdtrain import config as options
from kdtrain.errors import RunError, UsageError, advice, panics_refused, printable, refuse_no_path
from kdtrain.files import read_toml

COMMANDS: dict[str, type] = {
    "cache-teacher": options.CacheTeacherConfig,
    "distill": options.DistillConfig,
    "evaluate": options.EvaluateConfig,
    "inspect": options.InspectConfig,
    "verify": options.VerifyConfig,
    "export": options.ExportConfig,
}
_LONGEST = 2000
"""Characters of a message; more come only of names in a file that nobody reads."""
ONCE = ("student", "teacher", "cache", "data", "from-logprobs", "load", "config")
"""What a command takes one of, and a user may mean several of: of other flags given twice the last one wins."""
_MOST = 2**53
"""Of a count: what a float still tells apart, and more than any run gets to. A seed has a bound of its own."""
POSITIONAL = {"inspect": "path", "verify": "path", "export": "run"}


def main(argv: list[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 done, 1 failed while running, 2 cannot be."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if argv else 2)
    if argv[0] == "--version":
        print(importlib.import_module("kdtrain").__version__)
        raise SystemExit(0)
    try:
        raise SystemExit(_run(argv[0], argv[1:]))
    except (UsageError, RunError) as error:
        told, cause = getattr(error, "told", False), not getattr(error, "not_the_cause", False)
        _fail(2 if isinstance(error, UsageError) else 1, str(error), told=told, cause=cause and not told)
    except MemoryError:
        _fail(1, "out of memory; lower --micro-batch-size, --batch-size or --seq-len")
    except KeyboardInterrupt:
        goes_on = argv[0] in ("cache-teacher", "distill")
        _fail(1, "interrupted" + ("; the same command goes on from what was saved" if goes_on else ""))
    except BrokenPipeError:
        # whoever read our output has seen enough; a second flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _fail(1, f"{error.strerror or error}: {error.filename or 'no file named'}{advice(error)}")
    except RuntimeError as error:
        # torch reports a device out of memory, and a failed allocation on the CPU, as RuntimeErrors
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            _fail(1, "out of memory; lower --micro-batch-size, --batch-size or --seq-len")
        raise


def _run(command: str, argv: list[str]) -> int:
    if command not in COMMANDS:
        raise UsageError(f"unknown command '{command[:80]}'; {_nearest(command, list(COMMANDS))}")
    _refuse_impossible_launch()
    config = _parse_once(command, argv)
    stage = importlib.import_module(f"kdtrain.commands.{command.replace('-', '_')}")
    with panics_refused("a tokenizer fails"):  # wherever it is asked; the places that know its name say it
        return int(stage.main(config) or 0)


def parse(command: str, argv: list[str]) -> Any:
    """The configuration of `command` from flags and, where `--config` is among them, a TOML file.

    Raises:
        UsageError: an unknown flag or key, a value of the wrong type, a combination that cannot be.
        SystemExit: `--help` was asked for (code 0).
    """
    import tyro

    kind = COMMANDS[command]
    argv = _named(command, argv)
    given = argv
    if (path := _value_of("--config", argv)) is not None:
        argv = _toml_flags(Path(path), kind) + argv
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught), _wide():
            config = tyro.cli(tyro.conf.OmitArgPrefixes[kind], prog=f"kdtrain {command}", args=argv)  # type: ignore[valid-type,misc]
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(caught.getvalue(), [key for keys in _keys(kind).values() for key in keys])) from None
    for table in options.sections(config).values():
        for name, value in table.items():
            flag = f"--{name.replace('_', '-')}"
            numbers = value if isinstance(value, list) else [value]
            if name != "seed" and any(type(each) is int and abs(each) > _MOST for each in numbers):
                raise UsageError(f"{flag} {str(value)[:40]} is beyond what can be counted; choose at most 2^53")
            if isinstance(value, str):
                refuse_no_path(value, flag)
                if value.startswith("~"):
                    raise UsageError(
                        f"{flag} {value}: ~ is for the shell, which did not replace it; write the path out"
                    )
    _refuse_repeated(command, given)
    return config


def _named(command: str, argv: list[str]) -> list[str]:
    """`argv` with its positional argument, the first word that is no flag and no flag's value, given its name."""
    if command not in POSITIONAL:
        return argv
    hints = typing.get_type_hints(COMMANDS[command])
    switches = {f"--{no}{name}" for name, kind in hints.items() if kind is bool for no in ("", "no-")}
    for position, word in enumerate(argv):
        before = argv[position - 1] if position else ""
        takes_word = before.startswith("-") and before not in switches and "=" not in before
        if not word.startswith("-") and not takes_word:
            return [*argv[:position], f"--{POSITIONAL[command]}", *argv[position:]]
    return argv


def _refuse_repeated(command: str, argv: list[str]) -> None:
    flags = [word.split("=", 1)[0] for word in argv]
    for name in ONCE:
        if flags.count(f"--{name}") > 1:
            raise UsageError(f"--{name} is given {flags.count(f'--{name}')} times; kdtrain {command} takes one")


def _value_of(flag: str, argv: list[str]) -> str | None:
    for position, word in enumerate(argv):
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
        if word == flag and position + 1 < len(argv):
            return argv[position + 1]
    return None


@contextlib.contextmanager
def _wide() -> typing.Iterator[None]:
    """Let tyro print its errors unwrapped, so that they can be joined into one line; help keeps its width."""
    before = os.environ.get("COLUMNS")
    if "-h" not in sys.argv and "--help" not in sys.argv:
        os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


def _one_line(box: str, known: list[str]) -> str:
    """The first paragraph of one of tyro's error boxes without the frame, and what of the `known` options was meant."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("╭", "╰"))]
    rules = [position for position, line in enumerate(lines) if line.startswith("───")]
    first = " ".join(lines[: rules[0] if rules else None])
    message = re.sub(r"^Error parsing (?:(?!--)\S+: )?", "", first)
    strange = re.search(r"^Unrecognized options: --(?:no-)?([\w-]+)", message)
    if strange and (close := difflib.get_close_matches(strange[1].replace("-", "_"), known, 1)):
        message += f"; perhaps you meant --{close[0].replace('_', '-')}"
    return message or "the command line could not be read"


def _toml_flags(path: Path, kind: type) -> list[str]:
    """The options in a TOML file as flags."""
    known = _keys(kind)
    flags: list[str] = []
    for section, table in _read_toml(path).items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: '{section}' stands outside of a section; {_home(section, known)}")
        if section not in known:
            raise UsageError(f"{path}: unknown section [{section}]; {_nearest(section, list(known))}")
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in known[section] or name == "config":
                raise UsageError(f"{path}: unknown key '{key}' in [{section}]; {_home(name, known, section)}")
            flags += _flag(name, value)
    return flags


def _home(key: str, known: dict[str, list[str]], section: str = "") -> str:
    """What to do with a key that stands in no section or in the wrong one."""
    name = key.replace("-", "_")
    homes = [each for each, names in known.items() if name in names and name != "config"]
    if homes:
        return f"put it under [{homes[0]}]"
    return _nearest(name, known.get(section) or [each for names in known.values() for each in names])


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(str(each) for each in (value if isinstance(value, list) else [value]))]


def _read_toml(path: Path) -> dict[str, Any]:
    refuse_no_path(str(path), "--config")
    try:
        return read_toml(path)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None


def _keys(kind: type) -> dict[str, list[str]]:
    """The option names of a command by section."""
    keys: dict[str, list[str]] = {"run": []}
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        inner = hints[each.name]
        if dataclasses.is_dataclass(inner) and not isinstance(inner, types.UnionType):
            keys[each.name] = [option.name for option in dataclasses.fields(inner)]
        else:
            keys["run"].append(each.name)
    return keys


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"perhaps you meant '{close[0]}'" if close else f"known are {', '.join(known)}"


def _overview() -> str:
    lines = [f"  {name:<14} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kdtrain COMMAND [OPTIONS]\n\nKnowledge distillation of language models.\n",
            *lines,
            "\nkdtrain COMMAND --help lists the options of a command.",
        ]
    )


def _refuse_impossible_launch() -> None:
    """Refuse what a launcher such as torchrun cannot have set in the environment, where ranks are read as numbers."""
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


def _parse_once(command: str, argv: list[str]) -> Any:
    """`parse`; what it refuses is the same on every process of a node, of which the first one says it."""
    try:
        return parse(command, argv)
    except UsageError as error:
        error.told = os.environ.get("LOCAL_RANK", "0") != "0"  # type: ignore[attr-defined]
        raise


def _fail(code: int, message: str, told: bool = False, cause: bool = True) -> typing.NoReturn:
    """Leave with `code` and one line, unless another rank has `told` it; torchrun hears of what is the `cause`."""
    message = printable(" ".join(message.split()))
    message = message if len(message) <= _LONGEST else message[:_LONGEST] + "..."
    if (rank := os.environ.get("RANK") or "0") != "0" and rank.isdigit() and not message.startswith("rank "):
        message = f"rank {rank}: {message}"
    if not told:
        print(f"kdtrain: {message}", file=sys.stderr)
    if cause:
        _tell_torchrun(message)
    raise SystemExit(code)


def _tell_torchrun(message: str) -> None:
    """Leave the message where torchrun looks for what to say of a process that failed."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
