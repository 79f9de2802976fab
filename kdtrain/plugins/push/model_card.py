"""The card of a student on the hub: the README.md of its export, with a head that the hub reads, and its recipe.

It is made of the export alone, whose run need not be there; a README.md that somebody has edited stays as it is.
"""

import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.constants import REPOCARD_NAME as CARD

from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import options_of
from kdtrain.errors import RunError, UsageError
from kdtrain.files import read_text
from kdtrain.models.spec import ADAPTER_CONFIG, ModelSpec, is_hub_id

RECIPE = "recipe.toml"
_MOST = 2**28
"""Bytes of a file of an export that is read, at most."""
_DATA = re.compile(r"hf:(?:datasets/)?([\w.-]+/[\w.-]+)(?:[:@].*)?", re.ASCII)
_TEXT = re.compile(r"(?m)^\| text[^|]*\| source (\S+?)(?:,| \|)")
"""The row of a README about the text of a cache."""
_LICENSE = re.compile(r"(?m)^The student's licence is (.*); those of the teacher, ")
_KNOWN = (
    *("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
    *("cc-by-sa-3.0", "odc-by", "odbl", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "mpl-2.0", "openrail", "llama3", "llama3.1"),
    *("llama3.2", "llama3.3", "gemma", "pddl", "unlicense", "unknown"),
)
"""Licences that the hub knows by these names."""


def student_card(folder: Path, files: Collection[str]) -> str | None:
    """Write the card of an export whose README.md is as it was exported, and return its text.

    None: an earlier version wrote the whole card.

    files: the names in the export. UsageError, RunError: they cannot be read.
    """
    try:
        page = read_text(folder / CARD, _MOST)
        lines = read_text(folder / RECIPE, _MOST).splitlines() if RECIPE in files else []
        recipe = tomllib.loads("\n".join(lines))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: its README.md and {RECIPE} cannot be read ({error}); export it again") from None
    if page.startswith("---\n"):
        return None
    head = "\n".join(["---", *_head(page, recipe, files), "---", "", ""])
    more = ["", "## Recipe", "", f"What differs from the defaults; {RECIPE} has every option."]
    more += ["", "```toml", *_changed(lines, recipe), "```", ""]
    return head + page + ("\n".join(more) if recipe else "")


def _changed(lines: list[str], recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a recipe whose options differ from the defaults, each section by its name."""
    usual = {name: each.written for name, each in options_of(DistillConfig).items()}
    section = dict[str, Any]()
    waiting = list[str]()
    for line in lines:
        name = line.partition(" = ")[0]
        if line.startswith("["):
            section = recipe[line[1:-1]]
            waiting = [line]
        elif name in section and (name not in usual or section[name] != usual[name]):
            yield from (*waiting, line)
            waiting = []


def _head(page: str, recipe: Mapping[str, Mapping[str, Any]], files: Collection[str]) -> Iterator[str]:
    """Yield the lines that the hub reads."""
    given = recipe.get("run", {})
    library = "transformers"
    if ADAPTER_CONFIG in files:
        library = "peft"
    elif any(name.endswith(".gguf") for name in files):
        library = "gguf"
    yield f"library_name: {library}"
    yield "pipeline_tag: text-generation"
    yield "tags: [kdtrain, knowledge-distillation]"
    if (base := _hub_id(given.get("student"))) is not None:
        yield f"base_model: {json.dumps(base)}"
        yield f"base_model_relation: {'adapter' if library == 'peft' else 'finetune'}"
    cache = given.get("cache")
    texts = [*_TEXT.findall(page), recipe.get("data", {}).get("data")]
    texts += [cache] if isinstance(cache, str) else cache or []
    found = [match[1] for text in texts if isinstance(text, str) and (match := _DATA.fullmatch(text))]
    if found:
        yield f"datasets: {json.dumps(list(dict.fromkeys(found)))}"
    if (stated := _LICENSE.search(page)) is not None:
        yield from license_lines(re.sub(r"\\([\\|<>`\[\]])", r"\1", stated[1]))  # as `markdown_text` escapes it


def _hub_id(student: Any) -> str | None:
    """Return the model on the hub from which the student began; None for another beginning."""
    try:
        source = ModelSpec.read(student).source if isinstance(student, str) else None
    except (UsageError, RunError, OSError, ValueError):
        return None
    return source if source is not None and is_hub_id(source) and not Path(source).exists() else None


def license_lines(name: str) -> Iterator[str]:
    """Yield the lines of a card's head about a licence; one that the hub does not know gets a name."""
    name = name.lower()
    yield f"license: {name if name in _KNOWN else 'other'}"
    if name not in _KNOWN:
        yield f"license_name: {json.dumps(name)}"
