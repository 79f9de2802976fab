"""What is declared beside an option, and the checks of its value: `option` and `Options`."""

import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from kdtrain.config.kinds import alternatives, convert, documented
from kdtrain.errors import UsageError
from kdtrain.registry import Registry, nearest

T = TypeVar("T")

MOST = 2**53
"""The largest count: floats are exact up to it, and no run reaches it."""
SECTIONS = Registry("the section", "kdtrain.sections", __name__, {})
"""The sections that plugins add to commands, each with its class by command."""
Conflicts = Iterable[tuple[object, str]]
"""Conditions, each true where options cannot be together, with the message that then refuses them."""
USUAL_STEPS = 2000
"""Steps of a run by default."""


def option(default: Any = dataclasses.MISSING, **attributes: Any) -> Any:
    """Make a field of `Options` with attributes; without any, a plain default does. A default makes it optional.

    Attributes:
        free: it may change when a run resumes, because it does not decide the result.
        per_rank: it may differ between ranks.
        once: it may be given only once on a command line, because a user may mean several.
        needs: the option of the same class without which it has no effect.
        alone: the option of the same class beside which its default has no effect, and is refused where it is given.
        precisions: the values of `--precision` with which it has an effect.
        least, above, most: bounds of a number, inclusive but for `above`; without `most` it must be finite.
        with_cache: of an option of the text, it has an effect with `--cache` too.
        private: what it does, for which it is not written into a run, and a file that may have been downloaded cannot
            set it.
        positional: the command line may give it without its flag.
        check: a function that refuses a value by a `UsageError`.
        reads: what the value names, which is looked at before anything heavy is imported (`kdtrain.run.paths`).
        brief: the short help has its docstring up to the first semicolon; options without it are left out there.
        text: it is a text, which may be longer than a path.
        shown: what stands for its value in help.
        several: a tuple for which one value stands too, and None for none; a command line gives each with the flag
            again, or, where this is a comma, joins them with commas.
        words: of one with `several`, one flag takes all the words behind it, as a shell makes them of `runs/*`.
        formerly: the section in which earlier versions had it, whose files are read.
        later: checkpoints were written before it was there, and leave it out where it has its default.
    """
    return dataclasses.field(default=default, metadata=attributes)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a command: a field of its configuration, or of a section of it."""

    owner: type
    """The class that declares it."""
    section: str
    """Its table in a file; `run` for those of the command itself."""
    name: str
    """As in Python, with underscores."""
    kind: Any
    """Its annotation."""
    field: dataclasses.Field[Any]
    """What was declared beside it."""
    default: Any = dataclasses.MISSING
    """Its value where none is given: that of its section's default, if the section has one."""

    @property
    def text(self) -> str:
        """The docstring of the option."""
        return documented(self.owner).get(self.name, "")

    @property
    def flag(self) -> str:
        """The flag that users type for the option."""
        return self.name.upper() if self.positional else flag(self.name)

    @property
    def switch(self) -> bool:
        """True if the flag needs no value: `--json`, `--no-compile`; it may take a word that its kind names."""
        return alternatives(self.kind)[:1] == [bool]

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def default_text(self) -> str:
        """The default in brackets; empty where there is nothing to say."""
        default = self.default
        if self.required:
            return " (required)"
        if isinstance(default, bool) or default is None or default in ("", (), []):
            return " [on]" if default is True else ""
        if isinstance(default, float):
            return f" [{f'{default:.0e}'.replace('e-0', 'e-') if 0 < default < 0.01 else f'{default:g}'}]"
        return f" [{' '.join(map(str, default)) if isinstance(default, tuple | list) else default}]"

    @property
    def written(self) -> Any:
        """The default as files hold it; None where there is none."""
        return None if self.required else written(self.field, self.default)

    @property
    def several(self) -> Any:
        """True if the flag is given again for each value; a comma if commas may join the values."""
        return self.field.metadata.get("several", False)

    @property
    def positional(self) -> bool:
        """True if it may be given without its flag."""
        return bool(self.field.metadata.get("positional"))


def sections_of(kind: type) -> dict[str, type]:
    """Return the sections that plugins add to a command, by name; none if `kind` does not take any."""
    command = getattr(kind, "EXTENDED", "")
    found = SECTIONS.every() if command else {}
    return {name: kinds[command] for name, kinds in found.items() if command in kinds}


def options_of(
    kind: type, section: str = "run", default: Any = None, sections: Mapping[str, type] | None = None
) -> dict[str, Option]:
    """Return the options of a configuration's class, by name. UsageError: its sections exclude each other.

    default: an instance of it, whose values are the defaults.
    sections: the sections that plugins add; by default all.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = dict[str, Option]()
    for each in sorted(dataclasses.fields(kind), key=lambda each: each.name == "json"):  # the last one in help
        inner = hints[each.name]
        value = default_of(kind, each.name) if default is None else getattr(default, each.name)
        if not each.init or each.metadata.get("plugins"):  # the class computes it
            continue
        if dataclasses.is_dataclass(inner):
            if section != "run":
                raise UsageError(f"[{section}] of a command holds the section '{each.name}'; put it beside [{section}]")
            found |= options_of(inner, each.name, None if value is dataclasses.MISSING else value)  # type: ignore[arg-type]
        else:
            found[each.name] = Option(kind, section, each.name, inner, each, value)
    own = {each.section for each in found.values()}
    for name, inner in (sections_of(kind) if sections is None else sections).items():
        added = options_of(inner, name)
        whose = f"the section [{name}] of {inner.__module__}"
        refuse(name in own, f"{whose} has the name of a command's own; rename it")
        for new in added.values():
            refuse(new.name in found, f"{whose}: its option '{new.name}' is taken; rename it")
            refuse(new.required, f"{whose}: its option '{new.name}' has no default")
        found |= added
    return found


def fields_of(kind: type) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Return each option of a configuration's class with its section; the names of all are different."""
    return ((each.section, each.field) for each in options_of(kind).values())


def section_of(config: Any, section: str) -> Any:
    """Return a section of a configuration, also a plugin's; the configuration itself for `run`."""
    if section == "run":
        return config
    plugins = getattr(config, "plugins", {})
    return plugins[section] if section in plugins else getattr(config, section)


def marked(kind: type, attribute: str) -> set[str]:
    """Return the options of a command whose `attribute` is true."""
    return {each.name for _, each in fields_of(kind) if each.metadata.get(attribute)}


def configured(kind: type[T], config: T | None, options: Mapping[str, Any]) -> T:
    """Return `config`, or the defaults of `kind`, with `options` by their names on the command line in any section.

    UsageError: an unknown option, a value that does not fit, or a required one that is missing.
    """
    known = options_of(kind)
    added = sections_of(kind)
    hints = get_type_hints(kind)
    own: dict[str, dict[str, Any]] = {each.section: {} for each in known.values()}
    for name, value in options.items():
        if name not in known:
            raise UsageError(f"unknown option '{name}'; {nearest(name, list(known))}")
        own[known[name].section][name] = value
        other = known[name].field.metadata.get("alone", name)
        before = known[other].default if config is None else getattr(section_of(config, known[other].section), other)
        if value == known[name].default and (present := options.get(other, before)) != known[other].default:
            raise UsageError(f"{flag(name)} {value} has no effect with {flag(other)} {present}; give a number")
    given = own.pop("run", {})
    plugins = dict(getattr(config, "plugins", {}))
    for section, values in own.items():
        base = default_of(kind, section) if config is None else section_of(config, section)
        if base is dataclasses.MISSING:
            given[section] = hints[section](**values)
        elif values:
            (plugins if section in added else given)[section] = dataclasses.replace(base, **values)
    if added:
        given["plugins"] = plugins
    if config is not None:
        return dataclasses.replace(config, **given)  # type: ignore[type-var]
    needed = [each.name for each in dataclasses.fields(kind) if default_of(kind, each.name) is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [flag(name) for name in needed if name not in given]:
        raise UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return kind(**given)


def default_of(kind: type, name: str) -> Any:
    """Return the default of an option, or of a section, of a configuration's class; MISSING where there is none."""
    field = kind.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
    if field is None:
        return sections_of(kind)[name]()
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flag(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def refuse(wrong: bool, message: str) -> None:
    """Raise a `UsageError` with `message` if `wrong`."""
    if wrong:
        raise UsageError(message)


class Options:
    """The base of configurations. Refuses values, by a `UsageError` that names the option.

    A path may be given as text, text as a path, and a tuple as a list; they are converted.
    """

    def __post_init__(self) -> None:
        fields, wrong = dataclasses.fields(self), list[str]()  # type: ignore[arg-type]
        for each in fields:
            value = getattr(self, each.name)
            if each.metadata.get("several"):
                if value is None:
                    value = ()
                elif not isinstance(value, tuple | list):
                    value = (value,)
                value = tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in value)
            try:
                object.__setattr__(self, each.name, convert(value, each.type))
            except UsageError as error:
                raise UsageError(f"{flag(each.name)} {value!r}: {error}") from None
        for each in fields:
            value = getattr(self, each.name)
            needs = each.metadata.get("needs")
            try:
                refuse(
                    needs is not None
                    and value != each.default
                    and getattr(self, needs) in (None, False, "none", "constant", ()),
                    f"{flag(each.name)} has no effect without {flag(needs or '')}; "
                    f"add it, or leave {flag(each.name)} out",
                )
                refuse_value(each, value)
            except UsageError as error:
                wrong.append(error.args[0])
        refuse(bool(wrong), "; ".join(wrong))
        for cannot, message in self.conflicts():
            refuse(bool(cannot), message)

    def conflicts(self) -> Conflicts:
        """Return the conflicts of a class; `__post_init__` refuses the first."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed(Options):
    """The base of the configurations of commands that print a result."""

    json: bool = option(False, free=True, per_rank=True)
    """Print one JSON object on stdout, logs on stderr."""

    def show(self, page: Any, record: Mapping[str, Any], wrapped: bool = False) -> None:
        """Print the result of the command on stdout, on rank 0: its record with --json, else a page (`tables.show`)."""
        from kdtrain.tables import show  # with rich, for which no mistake waits

        show(page, record, self.json, wrapped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extended(Printed):
    """The base of the configurations to which plugins add sections (`registered.register_section`)."""

    EXTENDED: ClassVar[str] = ""
    """The command whose added sections it takes."""
    plugins: dict = dataclasses.field(default_factory=dict, metadata={"plugins": True})  # type: ignore[type-arg]
    """The sections that plugins add, by name; where one is not given, it has its defaults."""

    def __post_init__(self) -> None:
        known = sections_of(type(self))
        for name, each in self.plugins.items():
            refuse(name not in known, f"no installed plugin adds the section '{name}'; {nearest(name, known)}")
            refuse(not isinstance(each, known[name]), f"the section '{name}' is not a {known[name].__name__}")
        every = {name: self.plugins.get(name) or kind() for name, kind in known.items()}
        object.__setattr__(self, "plugins", every)
        super().__post_init__()
        for each in every.values():
            if (check := getattr(each, "check", None)) is not None:
                check(self)

    @property
    def remote(self) -> Any:
        """The section of a plugin whose teacher runs elsewhere; None: no such teacher is given."""
        return next(self.having("teacher_kind"), None)

    def having(self, attribute: str) -> Iterator[Any]:
        """Yield the sections of plugins in which an attribute is there and true."""
        return (each for each in self.plugins.values() if getattr(each, attribute, None))


def register_section(name: str, kinds: Mapping[str, type]) -> None:
    """Add the section `name` to commands.

    Args:
        name: its table in a TOML file.
        kinds: the frozen dataclass of its options by command, `distill` or `cache-teacher`; its base is `Options`, and
            every option has a default. It may have a method `check`, which gets the whole configuration of the command
            and refuses, by a `UsageError`, what does not go with its own values. One with a teacher that runs elsewhere
            has `teacher_kind`, a name of `kdtrain.teachers` or None, and `connect(teacher, codec)`, which tells that
            teacher where it runs. One that makes data, such as a cache of its answers, has `data_plan`, a name of
            `kdtrain.plans` or None.

    Raises:
        UsageError: another module or a command has this name or that of an option, or an option has no default.
    """
    every = {**SECTIONS.entries, name: kinds}  # this one last, so that a clash is its own
    for command, kind in kinds.items():
        beside = {section: each[command] for section, each in every.items() if command in each}
        for each in Extended.__subclasses__():
            if command == each.EXTENDED:
                options_of(each, sections=beside)
        kind()
    SECTIONS.add(name, dict(kinds), next(iter(kinds.values())))


def refuse_value(option: dataclasses.Field[Any], value: Any) -> None:
    """Raise a `UsageError` for a value that is outside of an option's bounds, or that its `check` refuses."""
    for each in value if option.metadata.get("several") else (value,):
        if isinstance(each, Real) and not isinstance(each, bool):
            _refuse_outside(flag(option.name), each, option.metadata)
    if value is not None and (check := option.metadata.get("check")) is not None:
        check(value)


def _refuse_outside(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    least, above = bounds.get("least", -math.inf), bounds.get("above", -math.inf)
    most = bounds.get("most", MOST if isinstance(value, int) else sys.float_info.max)
    if most == MOST < value:
        raise UsageError(f"{name} {str(value)[:40]} is beyond what can be counted; choose at most 2^53")
    if not (least <= value <= most and value >= above != value):
        wanted = f"above {above:g}" if above > -math.inf else f"at least {least:g}"
        limit = f" and at most {most:g}" if "most" in bounds and most < math.inf else ""
        raise UsageError(f"{name} {value} must be {wanted}{limit}{' and finite' if value == math.inf else ''}")


def sections(config: Any) -> dict[str, dict[str, Any]]:
    """Return the options of `config` by section, as plain values; options without a section are under "run"."""
    result: dict[str, dict[str, Any]] = {"run": {}}
    for section, each in fields_of(type(config)):
        owner = section_of(config, section)
        result.setdefault(section, {})[each.name] = written(each, getattr(owner, each.name))
    return result


def written(option: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of an option as files hold it: paths as text, tuples as lists, one of several values itself."""
    if option.metadata.get("several") and isinstance(value, tuple) and len(value) < 2:
        value = value[0] if value else None
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def shareable(config: Any) -> dict[str, dict[str, Any]]:
    """Return `sections` without private options: they are written into a run and may be published with it.

    A command may hold a secret address, and repeating a run from its config.toml must not run a command by itself.
    """
    private = marked(type(config), "private")
    tables = sections(config).items()
    return {section: {name: table[name] for name in table if name not in private} for section, table in tables}
