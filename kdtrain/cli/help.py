"""Help in three sizes: what most runs need on one screen, one section or option, and everything."""

import shutil
import textwrap

from kdtrain.config.choices import registered
from kdtrain.config.kinds import choices, metavar, words_wanted
from kdtrain.config.values import Option, options_of
from kdtrain.config.words import option_meant, word_meant
from kdtrain.errors import UsageError
from kdtrain.registry import first_line

_FEW = 20
"""A command with at most this many options shows them all."""
_NARROWEST, _WIDEST = 40, 110
_COLUMN = 28
"""Columns of the names of options."""


def help_of(command: str, kind: type, topic: str = "") -> str:
    """Return the text of `COMMAND --help TOPIC`.

    topic: empty for the options that most users need; `all`, the name of a section, or that of an option.

    Raises:
        UsageError: there is no such topic.
    """
    options = options_of(kind)
    required = [each for each in options.values() if each.required]
    brief = {each: _brief(each) for each in options.values() if each.field.metadata.get("brief") or each.required}
    sections = sorted(dict.fromkeys(each.section for each in options.values()), key="run".__ne__)
    name = topic.strip("-[]").replace("-", "_")
    if topic and name not in ("all", *sections):
        if (option := options.get(name.removeprefix("no_"))) is not None:
            return "\n".join(_long(option))
        near = word_meant(name, sections) or option_meant(name, options)
        hint = f"perhaps you meant --help {near.lstrip('-')}" if near else f"{command} --help lists the sections"
        raise UsageError(f"--help {topic[:60]}: no section or option of {command}; {hint}")
    words = [_name(each) if each.required else f"[{_name(each)}]" for each in options.values() if each.positional]
    words += [_name(each) for each in required if not each.positional]
    lines = [*wrapped(" ".join(["usage:", command, *words, "[OPTIONS]"]), "", indent=7), ""]
    if not topic:
        lines += [*wrapped(first_line(kind), ""), ""]
    if not topic and len(brief) > len(required) and len(options) > _FEW:
        for each, text in brief.items():
            shown = name if len(name := _name(each)) < _COLUMN - 2 else f"{each.flag} NAME"
            lines += _row(shown, text if each.required else text + each.default_text)
        more = f"{len(options) - len(brief)} more: --help all, or --help SECTION of {', '.join(sections)}"
        example = next(iter(getattr(kind, "EXAMPLES", ())), "")
        lines += ["", *wrapped(more, ""), "", *wrapped(example, "  ", indent=6, end=" \\")]
        return "\n".join(lines)
    for section in sections if name in ("", "all") else [name]:
        members = [each for each in options.values() if each.section == section]
        if section != "run":
            lines += ["", *wrapped(f"[{section}] {first_line(members[0].owner)}", "")]
        lines += [line for each in members for line in _long(each)]
    return "\n".join(lines)


def _name(option: Option) -> str:
    """Return the option as users type it, with the placeholder of its value."""
    if option.positional:
        return f"{option.flag} ..." if words_wanted(option.kind) is None else option.flag
    if option.switch:
        return option.flag.replace("--", "--[no-]", 1) if option.default is not False else option.flag
    return f"{option.flag} {option.field.metadata.get('shown') or metavar(option.kind)}"


def _names(option: Option) -> dict[str, str]:
    """Return the names that packages can add to, with their help; none for an option with words of its own."""
    return {} if choices(option.kind) else registered(option.flag)


def _brief(option: Option) -> str:
    """Return the beginning of an option's docstring, with the words that it takes where its name does not show them."""
    text = option.text.partition(";")[0].rstrip(".")
    words = list(_names(option)) or (choices(option.kind) if len(_name(option)) >= _COLUMN - 2 else [])
    words = [each for each in words if each != option.default]
    room = 78 - _COLUMN - len(option.default_text)
    return f"{text}." if not words else textwrap.shorten(f"{text}: {', '.join(words)}", room, placeholder=" ...")


def _long(option: Option) -> list[str]:
    """Return the lines of an option: its docstring, its default, and the names that packages can add to."""
    lines = _row(_name(option), f"{option.text}{option.default_text}")
    for name, text in _names(option).items():
        lines += wrapped(text, f"  {name:<18} ", indent=21, before=4)
    return lines


def _row(name: str, text: str) -> list[str]:
    if len(name) > _COLUMN - 3:
        return [f"  {name}", *wrapped(text, " " * _COLUMN, indent=_COLUMN)]
    return wrapped(text, f"  {name:<{_COLUMN - 2}}", indent=_COLUMN)


def wrapped(text: str, first: str, indent: int = 0, before: int = 0, end: str = "") -> list[str]:
    """Wrap `text` to the width of the terminal; each line but the last has `end`."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    width -= len(end) if len(first + text) > width else 0
    lead = " " * before + first
    rest = " " * (before + min(indent, width // 2))
    lines = textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=rest, break_on_hyphens=False)
    return [*(f"{line}{end}" for line in lines[:-1]), (lines or [lead.rstrip()])[-1]]
