"""Reads the options in the TOML file of `--config`: a section is a table, an option a key of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdtrain.cli.paths import near_path
from kdtrain.cli.words import MOST, option_meant, short, word_meant
from kdtrain.config.removed import renewed
from kdtrain.config.values import Option, flag
from kdtrain.errors import UsageError, refuse_no_path
from kdtrain.files import read_toml, same_path
from kdtrain.models.spec import foreign_beside


class Given(NamedTuple):
    """What was given for an option."""

    words: tuple[str, ...]
    """As messages show it."""
    where: str = ""
    """How a message about it begins: empty, or the file."""
    value: Any = None
    """The file's value; None on a command line."""


def read_file(path: Path, options: Mapping[str, Option], command: str) -> tuple[dict[str, Given], list[str], list[str]]:
    """What a file gives for each option, what is wrong with its keys, and what of it is called otherwise today.

    `parsing` reads the values.

    Raises:
        UsageError: it cannot be read, has options of an earlier version without a place today, or names a command
            although it may have been downloaded.
    """
    refuse_no_path(str(path), "--config")
    try:
        tables = read_toml(path)
    except FileNotFoundError:
        hint = f"; perhaps you meant {near}" if (near := near_path(str(path))) else ""
        raise UsageError(f"--config {path}: there is no such file{hint}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        raise UsageError(f"--config {path}: {why}") from None
    today = {name: renewed(command, table) for name, table in tables.items() if isinstance(table, dict)}
    if gone := [line for each in today.values() for line in each.refused]:
        raise UsageError(f"{path}: {'; '.join(gone)}")
    tables |= {name: each.table for name, each in today.items()}
    options = {name: each for name, each in options.items() if name != "config"}
    sections: dict[str, list[str]] = {"run": []}
    for each in options.values():
        sections.setdefault(each.section, []).append(each.name)
    given, wrong = dict[str, Given](), list[str]()
    for section, table in tables.items():
        hinted = len(wrong) < MOST  # each hint costs a look at all names
        if not isinstance(table, dict):
            near = (_place(section, options, sections) if hinted else "") or f"{command} --help all lists the sections"
            wrong.append(f"'{short(section)}' is outside of a section; {near}")
        elif section not in sections:
            like = word_meant(section, sections) if hinted else None
            hint = f"perhaps you meant [{like}]" if like else f"sections are {', '.join(sections)}"
            wrong.append(f"unknown section [{short(section)}]; {hint}")
        for key, value in table.items() if isinstance(table, dict) and section in sections else ():
            name = key.replace("-", "_")
            field = options[name].field.metadata if name in options else {}
            if name not in sections[section] and field.get("formerly") != section:
                near = _place(name, options, sections, section) if len(wrong) < MOST else ""
                advice = near or f"{command} --help {section} lists the keys"
                wrong.append(f"unknown key '{short(key)}' in [{section}]; {advice}")
                continue
            if does := field.get("private"):
                _refuse_foreign(path, name, does)
            words = tuple(str(each) for each in value) if isinstance(value, list) else (str(value),)
            given[name] = Given(words, f"{path}: ", value)
    changed = [f"{path}: {line}" for each in today.values() for line in each.changed]
    return given, [f"{path}: {wrong[0]}", *wrong[1:]] if wrong else [], changed


def _place(key: str, options: Mapping[str, Option], sections: Mapping[str, list[str]], section: str = "") -> str:
    """Advice for a key that is in no section or in the wrong one; empty if it is like none."""
    name = key.replace("-", "_")
    if name == "config":
        return "a file cannot name another one"
    if name in options:
        return f"put it under [{options[name].section}]"
    meant = option_meant(name, sections.get(section, [])) or option_meant(name, options)
    if meant is None:
        return ""
    name, _, value = meant[2:].partition(" ")
    name = name.replace("-", "_")
    known = options.get(name.removeprefix("no_"))
    there = "" if known is None or known.section == section else f" in [{known.section}]"
    value = f" = '{value}'" if value else ""
    return f"perhaps you meant '{name}'{value}{there}"


def _refuse_foreign(path: Path, name: str, does: str) -> None:
    """Refuse a private option in a file that may have been downloaded with a run, a cache or a model."""
    others = (each for each in foreign_beside(path) if not same_path(each, path))
    if (foreign := min(others, default=None)) is not None:
        raise UsageError(
            f"{path}: {name} {does}, and this file lies with {foreign}, which may have been downloaded; "
            f"give {flag(name)} yourself if you trust it"
        )
