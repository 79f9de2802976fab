"""Help in three sizes: what most runs need on one screen, one section or option, and everything."""

import shutil
import textwrap
from collections.abc import Iterable
from itertools import groupby

from kdtrain.cli.words import option_meant, word_meant
from kdtrain.config import choices as registries
from kdtrain.config.kinds import metavar, words_wanted
from kdtrain.config.options import Option, options_of
from kdtrain.config.values import flag
from kdtrain.errors import UsageError
from kdtrain.registry import Registry, first_line

_FEW = 20
"""A command with at most this many options shows them all."""
_NARROWEST, _WIDEST = 40, 110
_COLUMN = 28
"""Columns of the names of options."""


def help_of(command: str, kind: type, topic: str = "") -> str:
    """The text of `COMMAND --help TOPIC`.

    topic: empty for the options that most users need; `all`, the name of a section, or that of an option.

    Raises:
        UsageError: there is no such topic.
    """
    options = options_of(kind)
    sections = {each.section: None for each in options.values()}
    name = topic.strip("-[]").replace("-", "_")
    head = [*wrapped(usage(command, kind), "", indent=7), ""]
    if not topic:
        head += [*wrapped(first_line(kind), ""), ""]
        brief = {each: text for each in options.values() if (text := each.field.metadata.get("brief"))}
        if len(options) <= _FEW or not brief:
            return _lines([*head, *_all(options.values())])
        shown = {each: each.text for each in options.values() if each.required} | brief
        defaults = {each: "" if each.required else _default(each) for each in shown}
        lines = [line for each, text in shown.items() for line in _row(_short_name(each), f"{text}{defaults[each]}")]
        more = f"{len(options) - len(shown)} more: --help all, or --help SECTION of {', '.join(sections)}"
        example = next(iter(getattr(kind, "EXAMPLES", ())), "")
        return _lines([*head, *lines, "", *wrapped(more, ""), "", *wrapped(example, "  ", indent=6, end=" \\")])
    if name == "all":
        return _lines([*head, *_all(options.values())])
    if name in sections:
        return _lines([*head, *_all(each for each in options.values() if each.section == name)])
    if name.removeprefix("no_") in options:
        return _lines(_long(options[name.removeprefix("no_")]))
    near = word_meant(name, sections) or option_meant(name, options)
    hint = f"perhaps you meant --help {near.lstrip('-')}" if near else f"{command} --help lists the sections"
    raise UsageError(f"--help {topic[:60]}: no section or option of {command}; {hint}")


def usage(command: str, kind: type) -> str:
    """The line that shows what the command needs."""
    options = options_of(kind).values()
    words = [("{}" if each.required else "[{}]").format(_place(each)) for each in options if each.positional]
    words += [_name(each) for each in options if each.required and not each.positional]
    return f"usage: {' '.join([command, *words, '[OPTIONS]'])}"


def _short_name(option: Option) -> str:
    """`_name`, or without the choices, which the short text names, if it is long."""
    name = _name(option)
    return name if len(name) < _COLUMN - 2 else f"{option.flag} NAME"


def _place(option: Option) -> str:
    return f"{option.flag} ..." if words_wanted(option.kind) is None else option.flag


def _name(option: Option) -> str:
    """The option as users type it, with what stands for its value."""
    if option.positional:
        return _place(option)
    if option.switch:
        return option.flag.replace("--", "--[no-]", 1) if option.default is not False else option.flag
    return f"{option.flag} {option.field.metadata.get('shown') or metavar(option.kind)}"


def _all(options: Iterable[Option]) -> list[str]:
    lines: list[str] = []
    for section, group in groupby(sorted(options, key=lambda each: each.section != "run"), lambda each: each.section):
        members = list(group)
        title = section if section == "run" else f"[{section}] {first_line(members[0].owner)}"
        lines += [] if section == "run" else ["", *wrapped(title, "")]
        lines += [line for each in members for line in _long(each)]
    return lines


def _long(option: Option) -> list[str]:
    """An option with its docstring, its default, and the names that packages can add to."""
    lines = _row(_name(option), f"{option.text}{_default(option)}")
    for each in vars(registries).values():
        if isinstance(each, Registry) and each.option == flag(option.name) and not option.positional:
            for name, text in each.help().items():
                lines += wrapped(text, f"  {name:<18} ", indent=21, before=4)
    return lines


def _default(option: Option) -> str:
    default = option.default
    if option.required:
        return " (required)"
    if option.switch:
        return " [on]" if default is True else ""
    if default is None or default in ("", (), []):
        return ""
    if isinstance(default, float):
        return f" [{f'{default:.0e}'.replace('e-0', 'e-') if 0 < default < 0.01 else f'{default:g}'}]"
    shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
    return f" [{shown}]"


def _row(name: str, text: str) -> list[str]:
    if len(name) > _COLUMN - 3:
        return [f"  {name}", *wrapped(text, " " * _COLUMN, indent=_COLUMN)]
    return wrapped(text, f"  {name:<{_COLUMN - 2}}", indent=_COLUMN)


def wrapped(text: str, first: str, indent: int = 0, before: int = 0, end: str = "") -> list[str]:
    """`text` in the width of the terminal; each line but the last has `end`."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    width -= len(end) if len(first + text) > width else 0
    lead = " " * before
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=lead + first,
        subsequent_indent=lead + " " * min(indent, width // 2),
        break_on_hyphens=False,
    ) or [(lead + first).rstrip()]
    return [*(f"{line}{end}" for line in lines[:-1]), lines[-1]]


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
