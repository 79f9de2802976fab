"""Looks at the paths that a command line names, before torch is imported, and refuses those to nowhere.

`reads` of an option (`kdtrain.config.values.option`) is what its value names. Only what costs nothing is looked at:
that it exists and is of the right kind; the command that opens it checks the rest.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from kdtrain.cache.format.names import why_no_cache
from kdtrain.config.choices import TEXTS
from kdtrain.config.values import Option, flag
from kdtrain.config.words import word_meant
from kdtrain.errors import UsageError, shown_address
from kdtrain.models.spec import SELF, ModelSpec, is_hub_id, shipped
from kdtrain.net.address import parse_address

_MOST = 2000
"""Entries of a folder that are compared with a name."""
_STARTS = ("latest", "best", "auto", "never")
"""What --resume takes besides the name of a checkpoint."""
_ADDRESS = re.compile(r"hf:|[A-Za-z][\w+.-]+:/")
"""The beginning of what is meant as an address of a cache."""
_HOMES = {"cache": ["cache"], "spec": ["students", "teachers"], "saved": ["runs"], "path": ["runs", "cache"]}
"""Folders in which a bare name is looked for, by what an option reads."""


def problem(option: Option, text: str, texts: Mapping[str, str]) -> str | None:
    """Return what is wrong with the path `text` of an option; None if nothing is, or if the option names no path.

    texts: of every option that is given.
    """
    reads = option.field.metadata.get("reads", "")
    if option.name == "out" and _ADDRESS.match(text):
        return f"{option.flag} {shown_address(text)}: it is an address; name a folder or file of this machine"
    look = _LOOKS.get(reads)
    if look is None:
        return None
    wrong = look(text, texts)
    if wrong is None:
        return None
    near = None
    if not (reads == "checkpoint" or _exists(text) or _ADDRESS.match(text)):
        near = near_path(text, _HOMES.get(reads.split()[-1], []))
    text = shown_address(text) if _ADDRESS.match(text) else text
    name = text if option.positional else f"{flag(option.name)} {text}"
    return f"{name}: {wrong.split('; ')[0]}; perhaps you meant {near}" if near else f"{name}: {wrong}"


def near_path(text: str, homes: Iterable[str] = ()) -> str | None:
    """Find a path that exists and is spelt almost like `text`, or lies in one of `homes` under such a name."""
    if not text:
        return None
    name = Path(text).name
    found = [path for path in [_walked(Path(text))] if path is not None]
    for home in homes:
        found += [f"{home}/{each}" for each in _close(name, Path(home))]
    return max(found, key=lambda path: difflib.SequenceMatcher(None, Path(path).name, name).ratio(), default=None)


def _walked(path: Path) -> str | None:
    """Return `path` with each part that is not there replaced by the one spelt most like it; None where none is."""
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        names = [part] if _exists(found / part) else _close(part, found)
        if not names:
            return None
        found = found / names[0]
    return str(found)


def _close(name: str, folder: Path) -> list[str]:
    """Return the entry of `folder` that is spelt most like `name`, if any is, also apart from its suffix."""
    stem = Path(name).stem
    near = difflib.get_close_matches(name, _names(folder), 3)
    return [each for each in near if difflib.SequenceMatcher(None, Path(each).stem, stem).ratio() > 0.6][:1]


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(each.name for each in islice(entries, _MOST) if not each.name.startswith("."))
    except OSError:
        return []


def _exists(text: str | Path) -> bool:
    """Return whether something has this path; True where that cannot be seen."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _cache(text: str, texts: Mapping[str, str]) -> str | None:
    try:
        return why_no_cache(text) if parse_address(text) is None else None
    except UsageError as error:
        return str(error.args[0]).partition(": ")[2]
    except OSError:  # refused by the command that opens it
        return None


def _spec(text: str, texts: Mapping[str, str], kind: Literal["teachers", "students"] = "students") -> str | None:
    try:
        ModelSpec.read(text, kind)
    except UsageError as error:
        return str(error.args[0]).removeprefix(f"{text}: ")
    return None


def _text(text: str, texts: Mapping[str, str]) -> str | None:
    name, colon, rest = text.partition(":")
    if text == "stdlib" or (colon and name in TEXTS.help()) or texts.get("source", "cache") != "cache":
        return None
    if _exists(text):
        return _column(text, texts) if text.endswith(".jsonl") else None
    near = word_meant(name, TEXTS.help())
    hint = None
    if near:
        hint = f"{near}{colon}{rest}"
    elif is_hub_id(text):
        hint = f"hf:{text}"
    wrong = "there is no such file or folder"
    return f"{wrong}; perhaps you meant {hint}" if hint else f"{wrong}; give stdlib, a path, or hf:NAME[:SUBSET]"


def _column(text: str, texts: Mapping[str, str]) -> str | None:
    """Return what is wrong with the column to read from rows; None where that cannot be seen at their beginning."""
    messages, chosen = texts.get("messages_column"), texts.get("text_column", "text")
    option, column = ("text_column", chosen) if messages is None else ("messages_column", messages)
    how: dict[str, Any] = {"format": texts.get("format", "auto"), "text": chosen}
    from kdtrain.data.formats import Columns, column_hint, first_columns, row_format

    wanted = Columns(**how, messages=messages, prompts="generate" in texts)
    keys, whole = first_columns(Path(text))
    if not keys:
        return None
    try:
        row_format(text, wanted, keys)
        return None
    except UsageError as error:
        if wanted.format not in ("auto", "text"):
            return str(error.args[0]).removeprefix(f"{text}: ") if whole else None
    near = word_meant(column, keys)
    hint = f"perhaps you meant {flag(option)} {near}" if near else column_hint(keys, flag(option))
    return f"has no column '{column}'; {hint}" if near or whole else None


def _saved(text: str, texts: Mapping[str, str]) -> str | None:
    if not _exists(text):
        return "there is no such run or checkpoint; name a folder like runs/A, or runs/A/checkpoints/step-00002000"
    return None if os.path.isdir(text) else "it is a file; name the folder of a run or of a checkpoint"


def _cache_path(text: str, texts: Mapping[str, str]) -> str | None:
    if _ADDRESS.match(text):
        return _cache(text, texts)
    return None if _exists(text) or text in {**shipped("students"), **shipped("teachers")} else "it does not exist"


def _checkpoint(text: str, texts: Mapping[str, str]) -> str | None:
    run = texts.get("run") or texts.get("out") or ""
    names = _names(Path(run, "checkpoints"))
    if text in (*_STARTS, *names) or _exists(text) or ("run" in texts and not names):
        return None
    near = word_meant(text, [*names, *_STARTS])
    hint = f"perhaps you meant {near}" if near else f"there are {', '.join([*names, *_STARTS])}"
    return f"{run} has no such checkpoint; {hint}"


def _new_file(text: str, texts: Mapping[str, str]) -> str | None:
    if os.path.lexists(text):
        return "it is there already; name another file"
    return None if Path(text).parent.is_dir() else "its folder does not exist; make it"


_LOOKS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "cache": _cache,
    "spec": _spec,
    "teacher spec": lambda text, texts: None if text == SELF else _spec(text, texts, "teachers"),
    "model spec": lambda text, texts: None if os.path.isdir(text) else _spec(text, texts, "teachers"),
    "student spec": lambda text, texts: None if os.path.isdir(text) else _spec(text, texts),
    "text": _text,
    "file": lambda text, texts: None if _exists(text) else "there is no such file",
    "new file": _new_file,
    "saved": _saved,
    "path": lambda text, texts: None if re.match(r"[a-z]+:/", text) or _exists(text) else "it does not exist",
    "cache path": _cache_path,
    "checkpoint": _checkpoint,
}
"""What an option reads -> what is wrong with a text; None: nothing."""
