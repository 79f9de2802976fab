"""Reads the words of a command line, and the TOML file of `--config`, into the configuration of a command.

Options come from the dataclasses of the configuration alone. Every mistake is found before anything is opened and
before torch is imported, and all of them are named in one message: a name that is no option, a value that is none, a
required option that is missing, a path that leads nowhere. What was typed wrong is answered first: an option that seems
to be missing is usually the one that was misspelt.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdtrain.config.kinds import alternatives, choices, convert, metavar, read_words, wanted, words_wanted
from kdtrain.config.removed import answers, renewed
from kdtrain.config.values import Option, configured, flag, options_of, refuse_value
from kdtrain.config.words import MOST, meant_by, option_meant, short, word_meant
from kdtrain.errors import UsageError, refuse_no_path
from kdtrain.files import read_toml, same_path
from kdtrain.models.spec import foreign_beside
from kdtrain.run.paths import near_path

_SWITCHED = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_FLAG = re.compile(r"--.|-[A-Za-z]")

Others = Callable[[], Mapping[str, type]]
Look = Callable[[Option, str, Mapping[str, str]], str | None]
"""An option, its text and the texts of all options given -> what is wrong with the path it names, or None."""


class Given(NamedTuple):
    """The words or the value given for an option."""

    words: tuple[str, ...]
    """As messages show it."""
    where: str = ""
    """How a message about it begins: empty, or the file."""
    value: Any = None
    """The file's value; None on a command line."""


def parse(command: str, kind: type, argv: list[str], others: Others, look: Look | None = None) -> Any:
    """Parse `argv` into a configuration of class `kind`.

    Args:
        command: what calls it, such as `kdtrain distill`, for messages.
        kind: its configuration.
        argv: the words after the name of the command.
        others: gives the configurations of all commands, whose options are named where they are given here.
        look: looks at paths.

    Raises:
        UsageError: every mistake found; or else a combination that cannot work.
    """
    line = _Line(command, kind, others)
    line.read(argv)
    values = line.values()
    texts = {name: (each[-1].words or ("",))[-1] for name, each in line.given.items()}
    for name, each in line.given.items():
        option = line.options[name]
        last = each[-1]
        for text in last.words if option.several else [texts[name]]:
            if look and values.get(name) not in (None, ()) and (wrong := look(option, text, texts)):
                line.mistakes.append(last.where + wrong)
    if line.mistakes:
        raise refusal(line.mistakes)
    for changed in line.changed if values.get("dry_run") else ():
        print(changed, file=sys.stderr)
    return configured(kind, None, values)


def refusal(mistakes: Iterable[str]) -> UsageError:
    """Return the error that names all `mistakes`, the first ones if there are many."""
    found = list(dict.fromkeys(mistakes))
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return UsageError("; ".join([*found[:MOST], *more]))


class _Line:
    """A command line while it is read: the values given for each option, and the mistakes."""

    def __init__(self, command: str, kind: type, others: Others) -> None:
        self.command = command
        self.kind = kind
        self.others = others
        self.options = options_of(kind)
        self.changed: list[str] = []
        """What the file has that is fixed or called otherwise today."""
        self.given: dict[str, list[Given]] = {}
        self.mistakes: list[str] = []
        self.unknown = False
        """Whether something was typed that is not understood, which may be the option that seems to be missing."""
        self.strange: list[str] = []
        """Options that are like none there is."""

    def read(self, argv: list[str]) -> None:
        """Read `argv`, and after it the file that it names with `--config`."""
        positionals = [each for each in self.options.values() if each.positional]
        position = 0
        flags = []
        while position < len(argv):
            word, values = argv[position], argv[position + 1 :]
            values = values[: next((place for place, each in enumerate(values) if _FLAG.match(each)), len(values))]
            position += 1
            if _FLAG.match(word):
                name, equals, value = word.partition("=")
                taken = self._flag(name, [value] if equals else values, bool(equals), bool(positionals))
                flags.append((name[2:].replace("-", "_"), value if equals else " ".join(values[:1])))
                position += 0 if equals else taken
            elif positionals:
                several = words_wanted(positionals[0].kind) is None
                self._add(positionals[0].name, word, extend=several)
                positionals = positionals if several else positionals[1:]
            else:
                position += self._stray(word, values, argv)
        if gone := answers(self.command, flags):
            raise refusal(gone)
        if self.strange:
            more = f" and {len(self.strange) - MOST} more" if len(self.strange) > MOST else ""
            named = f"{', '.join(self.strange[:MOST])}{more}: no such option{'s' if len(self.strange) > 1 else ''}"
            self.mistakes.append(f"{named}; {self.command} --help all lists them")
        for name, each in self.options.items():
            times = len(self.given.get(name, []))
            if times > 1 and (each.positional or each.field.metadata.get("once")):
                self.mistakes.append(f"{flag(name)} is given {times} times; {self.command} takes one")
        if "config" in self.given:
            try:
                path = Path(self.given["config"][-1].words[-1])
                found, wrong, self.changed = _read_file(path, self.options, self.command)
            except UsageError as error:
                found = {}
                wrong = [error.args[0]]
                self.unknown = True
            self.mistakes += wrong
            for name, given in found.items():
                self.given.setdefault(name, []).insert(0, given)

    def _flag(self, word: str, values: list[str], equals: bool, wanting: bool) -> int:
        """Take the flag `word` with as many of `values` as it has; return the number of these values.

        wanting: whether a word behind a switch may be an argument.
        """
        name = word[2:].replace("-", "_") if word.startswith("--") else ""
        option = self.options.get(name)
        on = True
        if option is None and (positive := self.options.get(name.removeprefix("no_"))) and positive.switch:
            option = positive
            on = False
        if option is None:
            return self._no_option(word, values)
        if option.switch:
            if on and values and values[0] in choices(option.kind):
                self._add(option.name, values[0])
                return 1
            if values and (equals or (not wanting and values[0].lower() in _SWITCHED)):
                meant = option.name if on == _SWITCHED.get(values[0].lower(), True) else f"no_{option.name}"
                self.mistakes.append(f"{word} {short(values[0])}: it takes no value, use {flag(meant)}")
                return 1
            self._add(option.name, "true" if on else "false")
            return 0
        several = len(values) if option.field.metadata.get("words") else 1
        words = values[: several if option.several else words_wanted(option.kind)]
        if words:
            self._add(name, *words, extend=bool(option.several))
        else:
            self.mistakes.append(f"{word}: {wanted(option.kind)}, and none is given")
            self.unknown = True
        return len(words)

    def _add(self, name: str, *words: str, extend: bool = False) -> None:
        before = self.given.setdefault(name, [])
        if extend and before:
            before[-1] = Given((*before[-1].words, *words))
        else:
            before.append(Given(words))

    def _no_option(self, word: str, values: list[str]) -> int:
        """Note that `word` is not an option, and which one it may mean; return how many values were meant for it."""
        self.unknown = True
        name = word.lstrip("-").replace("-", "_")
        if name.startswith("no_") and name[3:] in self.options:
            self.mistakes.append(f"{short(word)}: {flag(name[3:])} cannot be switched off; leave it out")
            return 0
        meant = option_meant(name, self.options)
        answer = meant_by("answers").get(name.lower())
        if answer:
            self.mistakes.append(f"{short(word)}: {answer}")
        elif meant:
            self.mistakes.append(f"{short(word)}: no such option; perhaps you meant {meant}")
        elif elsewhere := next((other for other, kind in self.others().items() if name in options_of(kind)), None):
            near = next((f"; there is {flag(each)} here" for each in self.options if each.endswith(f"_{name}")), "")
            self.mistakes.append(f"{short(word)}: no such option; it is one of kdtrain {elsewhere}{near}")
        else:
            self.strange.append(short(word))
        if not any(each.positional for each in self.options.values()):
            return len(values)
        found = None if meant is None else self.options.get(meant.split()[0][2:].replace("-", "_"))
        if found is None:
            return len(values[:1])
        return 0 if found.switch else len(values[: words_wanted(found.kind)])

    def _stray(self, word: str, values: list[str], argv: list[str]) -> int:
        """Note a word that belongs to no option; return how many of `values` belong to it."""
        self.unknown = True
        name, equals, value = word.partition("=")
        meant = option_meant(name, self.options) if re.fullmatch(r"[A-Za-z][\w-]*", name) else None
        if meant is not None:
            example = f"{meant} {value if equals else ' '.join(values[:1])}".strip()
            self.mistakes.append(f"{short(word)}: an option begins with --; perhaps you meant {example}")
            return 0 if equals else len(values)
        places = " ".join(each.flag for each in self.options.values() if each.positional)
        wanting = [each.flag for each in self.options.values() if each.required and each.flag not in argv]
        hint = f"; perhaps you meant {wanting[0]} {short(word)}" if wanting and not places else ""
        takes = f"one {places}" if places else "no word without an option before it"
        self.mistakes.append(f"{short(word)}: {self.command} takes {takes}{hint}")
        return 0

    def values(self) -> dict[str, Any]:
        """Return the value of each option that is given; unfit and missing values become mistakes."""
        values = {}
        for name, each in self.given.items():
            option = self.options[name]
            for given in each:
                try:
                    value = _value(option, given)
                    named = isinstance(value, str | Path) or option.several is True
                    for word in given.words if named and not option.field.metadata.get("text") else ():
                        refuse_no_path(word, flag(name))
                        if word.startswith("~"):
                            why = "~ is for the shell, which did not replace it; write the path out"
                            raise UsageError(f"{flag(name)} {word}: {why}")
                    refuse_value(option.field, value)
                    values[name] = value
                except UsageError as error:
                    self.mistakes.append(given.where + _wrong(option, given.words, error.args[0]))
        missing = [each for each in self.options.values() if each.required and each.name not in self.given]
        if missing and not self.unknown:
            self.mistakes.append(self._missing(missing))
        return values

    def _missing(self, missing: list[Option]) -> str:
        named = " and ".join(each.flag for each in missing)
        if self.mistakes:
            return f"{named} {'are' if missing[1:] else 'is'} missing"
        example = next(iter(getattr(self.kind, "EXAMPLES", ())), "")
        if len(missing) == 1 or not example:
            return "; ".join(f"{each.flag} is missing: {_lowered(each.text) or metavar(each.kind)}" for each in missing)
        return f"{named} are missing, as in {example}"


def _value(option: Option, given: Given) -> Any:
    """Return the value of an option. UsageError: states which values fit."""
    if given.value is not None:  # a file's: with its own type
        value = given.value if isinstance(given.value, list) or not option.several else [given.value]
        return convert(value, option.kind)
    if option.several and given.words == ("None",):
        return ()
    words = [part for word in given.words for part in (word.split(",") if option.several == "," else [word])]
    return read_words(words, option.kind)


def _lowered(text: str) -> str:
    return (text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text).rstrip(".")


def _wrong(option: Option, words: tuple[str, ...], problem: str) -> str:
    """Return the message about `words` that do not fit `option`."""
    if problem != wanted(option.kind):
        return problem
    first = " ".join(words[:1])
    near = word_meant(first, choices(option.kind))
    if near is None and int in alternatives(option.kind):
        plain = re.sub(r"[,_ ]", "", first)
        if re.fullmatch(r"\d+(\.\d+)?([eE]\+?\d{1,2})?", plain) and float(plain).is_integer():
            near = str(int(float(plain)))
    hint = f"; perhaps you meant {near}" if near else ""
    return f"{flag(option.name)} {short(' '.join(words))}: {problem}{hint}"


def _read_file(
    path: Path, options: Mapping[str, Option], command: str
) -> tuple[dict[str, Given], list[str], list[str]]:
    """Read each option's value from a file; return also the mistakes in its keys, and the options renamed since.

    UsageError: it cannot be read, has options of an earlier version without a place today, or names a command although
    it may have been downloaded.
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
    given = dict[str, Given]()
    wrong = list[str]()
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
    """Return advice for a key that is in no section or in the wrong one; empty if no option is like it."""
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
