"""The command line of `kdtrain`: parses the options, then calls one command.

Options are read by `parsing` from the dataclasses of `kdtrain.config`; a flag wins over the file of `--config`. Every
mistake is answered before anything heavy is imported, all of them at once (`words` has what a user may have meant,
`paths` looks at what a path leads to); `help` has three sizes. An error is one line on stderr: exit code 2 for options
that cannot work, 1 for a failure while running. `register_command` adds a command.
"""

import contextlib
import importlib
import json
import os
import shutil
import sys
import time
import typing
from collections.abc import Callable, Iterator
from typing import Any

from kdtrain import process
from kdtrain.cli import parsing
from kdtrain.config import commands, words
from kdtrain.config.registered import COMMANDS, Command, Main
from kdtrain.config.values import SECTIONS, options_of, sections
from kdtrain.errors import RunError, UsageError, advice, name_flags, panics_refused, printable
from kdtrain.imports import quiet_libraries
from kdtrain.registry import Registry, first_line
from kdtrain.run import paths

_LONGEST = 2000
"""Characters of a message; only a name from a damaged file is longer."""
_WITHOUT_MODELS = ("completion", "inspect", "verify")
"""Built-in commands that load no model, and so run under `python -OO`."""
_RESUMING = ("cache-teacher", "distill")
"""Built-in commands that keep what an interrupted one has done."""
_ALONE = ("chat", "evaluate", "generate")
"""Built-in commands of a single process."""
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Read by transformers when it is imported, which commands without a model do not wait for."""
_ORDER = (
    *("demo", "cache-teacher", "distill", "evaluate", "generate", "chat", "inspect", "verify", "export"),
    *("sweep", "compare", "plot", "completion"),
)
"""The order in which commands are listed, those of a plugin among them; others follow."""
_NARROWEST = 40
"""Columns of the narrowest terminal that tables and help are made for."""


def register_command(
    name: str, config: type, *, help: str = "", models: bool = False, resumes: bool = False, alone: bool = False
) -> Callable[[Main], Main]:
    """Return a decorator that makes a function the command `kdtrain NAME`.

    Args:
        name: the name that users type.
        config: a dataclass; its fields are flags, or sections if they are dataclasses.
        help: its line in `kdtrain --help`; by default the first line of the configuration's docstring.
        models: whether it loads models.
        resumes: whether the same command resumes an interrupted one.
        alone: whether it refuses to be one of several processes.

    Raises:
        UsageError: another module has registered this name, or a section of the configuration holds a section.
    """
    options_of(config, sections={})
    return COMMANDS.registers(
        name, help or first_line(config), lambda main: Command(config, main, models, resumes, alone)
    )


def register_module(
    name: str, config: type, module: str, *, models: bool = False, resumes: bool = False, alone: bool = False
) -> None:
    """Make `main` of a module, which is imported when it runs, the command `kdtrain NAME`; as `register_command`.

    module: `MODULE:FUNCTION` names another function of it.
    """
    path, _, function = module.partition(":")

    def main(config: Any) -> int | None:
        code: int | None = getattr(importlib.import_module(path), function or "main")(config)
        return code

    main.__module__ = path
    register_command(name, config, models=models, resumes=resumes, alone=alone)(main)


for _name, _config in commands.COMMANDS.items():
    _module = "generate:chat" if _name == "chat" else _name.replace("-", "_")
    _module = f"kdtrain.commands.{_module}"
    _how = {"models": _name not in _WITHOUT_MODELS, "resumes": _name in _RESUMING, "alone": _name in _ALONE}
    register_module(_name, _config, _module, **_how)


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code: 0 done, 1 failed while running, 2 options that cannot work."""
    name_flags()
    width = shutil.get_terminal_size().columns
    if "COLUMNS" in os.environ or width < _NARROWEST:  # no width, or one in which nothing fits; rich reads it
        os.environ["COLUMNS"] = str(max(width, _NARROWEST))
    argv = sys.argv[1:] if argv is None else argv
    SECTIONS.every()  # names what is broken, whatever the command
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help", *argv[2:]]
    if not argv or argv[0] in ("-h", "--help"):
        from kdtrain.cli.help import wrapped

        lines = [line for name, text in _listed().items() for line in wrapped(text, f"  {name:<14} ", indent=17)]
        more = "kdtrain COMMAND --help shows the options that matter; --help SECTION and --help all, the others."
        about = ["usage: kdtrain COMMAND [OPTIONS]", "", "Knowledge distillation of language models.", ""]
        _end("\n".join([*about, *lines, "", *wrapped(more, "")]), 0 if argv else 2)
    if argv[0] == "--version":
        _end(importlib.import_module("kdtrain").__version__)
    command = argv[0]
    full = "out of memory; lower --micro-batch-size, --batch-size or --seq-len"
    try:
        if command not in COMMANDS.names():
            raise UsageError(_unknown_command(command))
        if (topic := _topic(argv[1:])) is not None:
            from kdtrain.cli.help import help_of

            _end(help_of(f"kdtrain {command}", COMMANDS.get(command).config, topic))
        process.refuse_impossible_launch()
        try:
            # ranks meet first, so that none waits for one that has refused a path of its own
            config = parse(command, argv[1:], look=process.world_size() == 1)
        except UsageError as error:  # every process of a node raises it, and the first one prints it
            error.reported = process.local_rank() != 0  # type: ignore[attr-defined]
            raise
        os.environ |= QUIET
        with quiet_libraries(), panics_refused("a tokenizer fails"):  # where its name is known, the message has it
            if COMMANDS.get(command).models and Registry.unreadable:
                name = Registry.unreadable[0]
                raise UsageError(f"torch reads the entry points of the package {name} too, and fails; uninstall it")
            if COMMANDS.get(command).models and sys.flags.optimize > 1:
                raise UsageError("python -OO removes the docstrings that transformers needs to load a model; use -O")
            if COMMANDS.get(command).alone:
                process.refuse_many_processes()
            code = COMMANDS.get(command).main(config) or 0
            sys.stdout.flush()
            raise SystemExit(code)
    except (UsageError, RunError) as error:
        reported = getattr(error, "reported", False)
        cause = not getattr(error, "not_the_cause", False)
        _fail(2 if isinstance(error, UsageError) else 1, str(error), reported, cause and not reported)
    except MemoryError:
        _fail(1, full)
    except KeyboardInterrupt:
        resumes = COMMANDS.get(command).resumes
        _fail(1, "interrupted" + ("; the same command resumes from what was saved" if resumes else ""))
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(1) from None
    except OSError as error:
        _fail(1, f"{error.strerror or error}: {error.filename or 'no file named'}{advice(error)}")
    except RuntimeError as error:
        # torch reports a device out of memory, and a failed allocation on the CPU, as RuntimeErrors
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            _fail(1, full)
        raise


def _end(text: str, code: int = 0) -> typing.NoReturn:
    """Print a line, if anybody still reads it, and exit."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop_output()
    raise SystemExit(code)


def _drop_output() -> None:
    """Point stdout at the null device: its reader is gone, and the flush at exit must not raise the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(command: str, argv: list[str], *, look: bool = False) -> Any:
    """Parse the configuration of `command` from flags and from the TOML file that `--config` names.

    look: also refuse paths that lead nowhere.

    Raises:
        UsageError: it names every mistake: unknown flags and keys, values of the wrong type, missing options; or a
            combination that cannot work.
    """
    kind = COMMANDS.get(command).config
    return parsing.parse(f"kdtrain {command}", kind, argv, _configurations, paths.problem if look else None)


def missing(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each path of a configuration that leads nowhere, with its mistake."""
    options = options_of(type(config))
    tables = sections(config).values()
    given = {name: each for table in tables for name, each in table.items() if each not in (None, False)}
    for name, value in given.items():
        for text in map(str, value if isinstance(value, list) else [value]):
            if wrong := paths.problem(options[name], text, given):
                yield text, wrong


def _configurations() -> dict[str, type]:
    """Return the configurations of the commands that come with kdtrain, not of packages, which may fail to load."""
    COMMANDS.help()
    return {name: each.config for name, each in COMMANDS.entries.items()}


def _topic(argv: list[str]) -> str | None:
    """Return the topic of `--help`: empty for the short help; None without it."""
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            after = argv[place + 1 : place + 2]
            return "" if not after or after[0].startswith("-") else after[0]
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


def _listed() -> dict[str, str]:
    """Return every command with its line of help, the commands for a first day first."""
    known = COMMANDS.help()
    return {name: known[name] for name in [*_ORDER, *sorted(known)] if name in known}


def _unknown_command(word: str) -> str:
    known = _listed()
    if word.startswith("-"):
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        takers = [each for each, entry in COMMANDS.entries.items() if name in options_of(entry.config)]
        hint = f"such as kdtrain {takers[0]} {word[:60]}" if takers else f"one of {', '.join(known)}"
        return f"{word[:60]}: name a command first, {hint}"
    meant = words.meant_by("commands").get(word.lower().replace("_", "-")) or words.word_meant(word, known)
    hint = f"perhaps you meant {meant}" if meant in known else f"there are {', '.join(known)}"
    return f"unknown command '{word[:80]}'; {hint}"


def _fail(code: int, message: str, reported: bool = False, cause: bool = True) -> typing.NoReturn:
    """Exit with `code` and one line, unless another rank prints it (`reported`); torchrun gets the line of `cause`."""
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
