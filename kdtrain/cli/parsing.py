"""Reads the words of a command line, and the TOML file of `--config`, into the configuration of a command.

Options come from the dataclasses of the configuration alone. Every mistake is found before anything is opened and
before torch is imported, and all of them are named in one message: a name that is no option, a value that is none, a
required option that is missing, a path that leads nowhere. What was typed wrong is answered first: an option that seems
to be missing is usually the one that was misspelt.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from kdtrain.cli.paths import near_path
from kdtrain.cli.words import option_meant, word_meant
from kdtrain.config.kinds import alternatives, choices, documented, metavar, read_words, wanted, words_wanted
from kdtrain.config.values import flag, refuse_value
from kdtrain.errors import UsageError, refuse_no_path
from kdtrain.files import read_toml
from kdtrain.models.spec import foreign_beside

MOST = 5
"""Mistakes that one message names."""
_LONGEST = 60
"""Characters of a word in a message."""
_SWITCHED = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One option of a command: a field of its configuration, or of a section of it."""

    owner: type
    """The class that declares it."""
    section: str
    name: str
    kind: Any
    """Its annotation."""
    field: dataclasses.Field[Any]

    @property
    def text(self) -> str:
        """Its docstring."""
        return documented(self.owner).get(self.name, "")

    @property
    def flag(self) -> str:
        """What users type for it."""
        return self.name.upper() if self.positional else flag(self.name)

    @property
    def switch(self) -> bool:
        """True if the flag takes no value: `--json`, `--no-compile`."""
        return alternatives(self.kind) == [bool]

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return self.field.default is dataclasses.MISSING and self.field.default_factory is dataclasses.MISSING

    @property
    def positional(self) -> bool:
        """True if it may be given without its flag."""
        return bool(self.field.metadata.get("positional"))


@dataclass(frozen=True)
class Given:
    """What was given for an option: words of the command line, or of a file."""

    words: tuple[str, ...]
    where: str = ""
    """How a message about it begins: empty, or the file."""


def options_of(kind: type, section: str = "run") -> dict[str, Option]:
    """The options of a configuration's class, by name."""
    hints, found = get_type_hints(kind, include_extras=True), dict[str, Option]()
    for each in dataclasses.fields(kind):
        inner = hints[each.name]
        if dataclasses.is_dataclass(inner):
            found |= options_of(inner, each.name)  # type: ignore[arg-type]
        else:
            found[each.name] = Option(kind, section, each.name, inner, each)
    return found


Look = Callable[[Option, str, Mapping[str, str]], str | None]
"""An option, its text and the texts of all options given -> what is wrong with the path it names, or None."""


def parse(command: str, kind: type, argv: list[str], others: Mapping[str, type], look: Look | None = None) -> Any:
    """The configuration of class `kind` that `argv` asks for.

    Args:
        command: what calls it, such as `kdtrain distill`, for messages.
        kind: its configuration.
        argv: the words after the name of the command.
        others: the configurations of the other commands, whose options are named where they are given here.
        look: looks at paths.

    Raises:
        UsageError: every mistake found.
    """
    line = _Line(command, kind, others)
    line.read(argv)
    values = line.values()
    sections = {name: line.build(each, values) for name, each in line.sections.items()}
    if look is not None:
        texts = {name: each[-1].words[-1] for name, each in line.given.items() if each[-1].words}
        for name, text in texts.items():
            if name in values and (wrong := look(line.options[name], text, texts)):
                line.mistakes.append(line.given[name][-1].where + wrong)
    line.refuse()
    own = {name: value for name, value in values.items() if line.options[name].section == "run"}
    return kind(**own, **{name: each for name, each in sections.items() if each is not None})


def refusal(mistakes: Iterable[str]) -> UsageError:
    """The error that names all `mistakes`, the first ones if there are many."""
    found = list(dict.fromkeys(mistakes))
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return UsageError("; ".join([*found[:MOST], *more]))


class _Line:
    """A command line while it is read: what was given for each option, and the mistakes."""

    def __init__(self, command: str, kind: type, others: Mapping[str, type]) -> None:
        self.command, self.kind, self.others = command, kind, others
        self.options = options_of(kind)
        hints = get_type_hints(kind)
        self.sections = {
            each.name: each for each in dataclasses.fields(kind) if dataclasses.is_dataclass(hints[each.name])
        }
        self.old: dict[str, Any] = getattr(kind, "OLD", {})
        self.given: dict[str, list[Given]] = {}
        self.mistakes: list[str] = []
        self.unknown = False
        """Whether something was typed that is not understood, which may be the option that seems to be missing."""
        self.strange: list[str] = []
        """Options that are like none there is."""
        self.wrong: set[str] = set()
        """Sections with values that are refused."""

    def refuse(self) -> None:
        """Raise a UsageError if there are mistakes."""
        if self.mistakes:
            raise refusal(self.mistakes)

    def read(self, argv: list[str]) -> None:
        """Take `argv`, and behind it the files that it names with `--config`."""
        positionals = [each for each in self.options.values() if each.positional]
        position, flags = 0, []
        while position < len(argv):
            word, values = argv[position], _until_flag(argv[position + 1 :])
            position += 1
            if _is_flag(word):
                name, equals, value = word.partition("=")
                taken = self._flag(name, [value] if equals else values, bool(equals))
                flags.append((name[2:].replace("-", "_"), value if equals else " ".join(values[:1])))
                position += 0 if equals else taken
            elif positionals:
                many = words_wanted(positionals[0].kind) is None
                self._add(positionals[0].name, word, extend=many)
                positionals = positionals if many else positionals[1:]
            else:
                position += self._stray(word, values, argv)
        if old := self._old(flags):
            raise refusal(old)
        if self.strange:
            more = f" and {len(self.strange) - MOST} more" if len(self.strange) > MOST else ""
            wrong = "no such options" if self.strange[1:] else "no such option"
            named = ", ".join(self.strange[:MOST]) + more
            self.mistakes.append(f"{named}: {wrong}; {self.command} --help all lists them")
        for name, each in self.options.items():
            if each.field.metadata.get("once") and (times := len(self.given.get(name, []))) > 1:
                self.mistakes.append(f"{flag(name)} is given {times} times; {self.command} takes one")
        if "config" in self.given:
            try:
                self._file(Path(self.given["config"][-1].words[-1]))
            except UsageError as error:
                self.mistakes.append(error.args[0])

    def _flag(self, word: str, values: list[str], equals: bool) -> int:
        """Take the flag `word` with as many of `values` as it has; return how many those are."""
        name = word[2:].replace("-", "_")
        option = self.options.get(name) if word.startswith("--") else None
        positive = self.options.get(name.removeprefix("no_")) if word.startswith("--") else None
        if option is None and positive is not None and positive.switch:
            option, name = positive, positive.name
        if option is None:
            return self._no_option(word, values)
        if option.switch:
            on = word[2:].replace("-", "_") == name
            if values and (equals or values[0].lower() in _SWITCHED):
                meant = on == _SWITCHED.get(values[0].lower(), True)
                self.mistakes.append(
                    f"{word} {_short(values[0])}: it takes no value, use {flag(name if meant else f'no_{name}')}"
                )
                return 1
            self._add(name, "true" if on else "false")
            return 0
        many = words_wanted(option.kind)
        words = values[:many]
        if not words:
            self.mistakes.append(f"{word}: {wanted(option.kind)}, and none is given")
            self.unknown = True
        else:
            self._add(name, *words)
        return len(words)

    def _add(self, name: str, *words: str, extend: bool = False) -> None:
        before = self.given.setdefault(name, [])
        if extend and before:
            before[-1] = Given((*before[-1].words, *words))
        else:
            before.append(Given(words))

    def _no_option(self, word: str, values: list[str]) -> int:
        """Note that `word` is no option, and what it may stand for; return how many values were meant for it."""
        self.unknown = True
        name = word.lstrip("-").replace("-", "_")
        if name.startswith("no_") and name[3:] in self.options:
            self.mistakes.append(f"{_short(word)}: {flag(name[3:])} cannot be switched off; leave it out")
            return 0
        meant = option_meant(name, self.options)
        elsewhere = next((other for other, kind in self.others.items() if name in options_of(kind)), None)
        if meant is None and elsewhere is not None:
            hint = f"; it is one of kdtrain {elsewhere}"
        else:
            hint = self._perhaps(meant) if meant else ""
        if hint:
            self.mistakes.append(f"{_short(word)}: no such option{hint}")
        else:
            self.strange.append(_short(word))
        if not any(each.positional for each in self.options.values()):
            return len(values)
        found = None if meant is None else self.options.get(meant.split()[0][2:].replace("-", "_"))
        return len(values[:1] if found is None else values[: 0 if found.switch else words_wanted(found.kind)])

    def _stray(self, word: str, values: list[str], argv: list[str]) -> int:
        """Note a word that belongs to no option; return how many of `values` belong to it."""
        self.unknown = True
        name, equals, value = word.partition("=")
        meant = option_meant(name, self.options) if re.fullmatch(r"[A-Za-z][\w-]*", name) else None
        if meant is not None:
            number = value if equals else " ".join(values[:1])
            self.mistakes.append(
                f"{_short(word)}: an option begins with --{self._perhaps(f'{meant} {number}'.strip())}"
            )
            return 0 if equals else len(values)
        places = " ".join(each.flag for each in self.options.values() if each.positional)
        wanting = [each.flag for each in self.options.values() if each.required and each.flag not in argv]
        hint = self._perhaps(f"{wanting[0]} {_short(word)}") if wanting and not places else ""
        takes = f"{self.command} takes {f'one {places}' if places else 'no word without an option before it'}"
        self.mistakes.append(f"{_short(word)}: {takes}{hint}")
        return 0

    def _old(self, given: Iterable[tuple[str, Any]]) -> list[str]:
        """What replaces options of an earlier version, by name or by value."""
        keys = [key for name, value in given for key in (name, name.removeprefix("no_"), f"{name} {value}")]
        return [f"{flag(key)} {self.old[key][0]}" for key in dict.fromkeys(keys) if key in self.old]

    @staticmethod
    def _perhaps(meant: str) -> str:
        return f"; perhaps you meant {meant}"

    # The file of --config ---------------------------------------------------------------------------------------

    def _file(self, path: Path) -> None:
        """Take the options in a TOML file, behind those of the command line."""
        refuse_no_path(str(path), "--config")
        try:
            tables = read_toml(path)
        except FileNotFoundError:
            near = near_path(str(path))
            hint = self._perhaps(near) if near else ""
            raise UsageError(f"--config {path}: there is no such file{hint}") from None
        except OSError as error:
            raise UsageError(f"--config {path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"--config {path}: not TOML: {error}") from None
        where, wrong = f"{path}: ", list[str]()
        tables = {name: self._renewed(table) if isinstance(table, dict) else table for name, table in tables.items()}
        pairs = [pair for table in tables.values() if isinstance(table, dict) for pair in table.items()]
        if old := self._old((key.replace("-", "_"), value) for key, value in pairs):
            raise UsageError(where + str(refusal(old).args[0]))
        homes: dict[str, list[str]] = {"run": []}
        for each in self.options.values():
            homes.setdefault(each.section, []).append(each.name)
        for section, table in tables.items():
            if not isinstance(table, dict):
                wrong.append(f"'{_short(section)}' is outside of a section; {self._home(section, homes)}")
            elif section not in homes:
                near = word_meant(section, homes)
                hint = f"perhaps you meant [{near}]" if near else f"sections are {', '.join(homes)}"
                wrong.append(f"unknown section [{_short(section)}]; {hint}")
            else:
                wrong += self._table(path, section, table, homes)
        self.mistakes += [where + wrong[0], *wrong[1:]] if wrong else []

    def _table(self, path: Path, section: str, table: dict[str, Any], homes: dict[str, list[str]]) -> Iterator[str]:
        """Take the options in one section of a file; yield what is wrong."""
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in homes[section] or name == "config":
                yield f"unknown key '{_short(key)}' in [{section}]; {self._home(name, homes, section)}"
                continue
            option = self.options[name]
            if option.field.metadata.get("private"):
                _refuse_foreign_command(path, name)
            if option.switch is not isinstance(value, bool):
                yield f"{flag(name)} {_short(str(value))}: {wanted(option.kind)}"
                continue
            words = tuple(str(each) for each in value) if isinstance(value, list) else (str(value),)
            self.given.setdefault(name, []).insert(0, Given(words, f"{path}: "))

    def _renewed(self, table: dict[str, Any]) -> dict[str, Any]:
        """A section of a file with today's names; a run's file has every option, and nobody chose an old default."""
        section, renewed = {key.replace("-", "_"): value for key, value in table.items()}, dict(table)
        for key in table:
            name = key.replace("-", "_")
            _, renew = self.old.get(name, ("", None))
            new = None if renew is None else renew(section[name], section)
            if new is not None and not new.keys() & section.keys():
                del renewed[key]
                renewed |= new
        return renewed

    def _home(self, key: str, homes: dict[str, list[str]], section: str = "") -> str:
        """Advice for a key that is in no section or in the wrong one."""
        name = key.replace("-", "_")
        own = [each for each, names in homes.items() if name in names and name != "config"]
        if own:
            return f"put it under [{own[0]}]"
        known = homes.get(section) or self.options
        meant = option_meant(name, known) or option_meant(name, self.options)
        if meant is None:
            return f"{self.command} --help {section or 'all'} lists the keys"
        words = meant[2:].split()
        key, value = words[0].replace("-", "_"), f" = '{words[1]}'" if words[1:] else ""
        other = self.options[key.removeprefix("no_")].section if key.removeprefix("no_") in self.options else section
        return f"perhaps you meant '{key}'{value}" + ("" if other == section else f" in [{other}]")

    # Values -----------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """The value of each option that is given; those that are none, or missing, become mistakes."""
        values = {}
        for name, each in self.given.items():
            option = self.options[name]
            for given in each:
                try:
                    value = read_words(list(given.words), option.kind)
                    if isinstance(value, str | Path):
                        _refuse_word(given.words[0], flag(name))
                    refuse_value(option.field, value)
                    values[name] = value
                except UsageError as error:
                    self.wrong.add(option.section)
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

    def build(self, section: dataclasses.Field[Any], values: Mapping[str, Any]) -> Any:
        """The section with `values`; None for its default, or if it is refused, which becomes a mistake."""
        own = {name: value for name, value in values.items() if self.options[name].section == section.name}
        factory = section.default_factory
        if self.unknown or section.name in self.wrong:
            return None
        try:
            if factory is dataclasses.MISSING:
                return get_type_hints(self.kind)[section.name](**own)
            return dataclasses.replace(factory(), **own) if own else None
        except UsageError as error:
            self.mistakes.append(error.args[0])
        except TypeError:  # a required option of it is missing, which is noted
            if not self.mistakes:
                raise
        return None


def _is_flag(word: str) -> bool:
    return re.match(r"--.|-[A-Za-z]", word) is not None


def _lowered(text: str) -> str:
    return (text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text).rstrip(".")


def _until_flag(words: list[str]) -> list[str]:
    end = next((place for place, word in enumerate(words) if _is_flag(word)), len(words))
    return words[:end]


def _short(word: str) -> str:
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


def _refuse_word(word: str, name: str) -> None:
    refuse_no_path(word, name)
    if word.startswith("~"):
        raise UsageError(f"{name} {word}: ~ is for the shell, which did not replace it; write the path out")


def _wrong(option: Option, words: tuple[str, ...], problem: str) -> str:
    """The message about `words` that are no value of `option`."""
    if problem != wanted(option.kind):
        return problem
    first = " ".join(words[:1])
    near = word_meant(first, choices(option.kind))
    if near is None and int in alternatives(option.kind):
        plain = re.sub(r"[,_ ]", "", first)
        if re.fullmatch(r"\d+(\.\d+)?([eE]\+?\d{1,2})?", plain) and float(plain).is_integer():
            near = str(int(float(plain)))
    hint = f"; perhaps you meant {near}" if near else ""
    return f"{flag(option.name)} {_short(' '.join(words))}: {problem}{hint}"


def _refuse_foreign_command(path: Path, name: str) -> None:
    """Refuse a command line in a file that may have been downloaded with a run, a cache or a model."""
    others = (each for each in foreign_beside(path) if each.resolve() != path.resolve())
    if (foreign := min(others, default=None)) is not None:
        raise UsageError(
            f"{path}: {name} runs a command, and this file lies with {foreign}, which may have been downloaded; "
            f"give {flag(name)} yourself if you trust it"
        )
