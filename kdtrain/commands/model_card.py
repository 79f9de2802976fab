"""The card of an exported student: a README.md for people, whose head the hub reads, and the recipe as TOML.

What it says is taken from the checkpoint, from the run's config.toml, and from the manifest of the run's cache if that
is still there and is the one that the checkpoint names. A run may have been downloaded, so every word of it is escaped,
and options that a file cannot set, or that name a place on this machine, are left out or shortened.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import kdtrain
from kdtrain.cache.manifest import Manifest, read_manifest
from kdtrain.commands.run_folder import to_toml
from kdtrain.config import DistillConfig
from kdtrain.config.values import fields_of, marked
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import read_toml
from kdtrain.models.spec import is_hub_id, read_spec

CARD, RECIPE = "README.md", "recipe.toml"
_DATA = re.compile(r"hf:(?:datasets/)?([\w.-]+/[\w.-]+)(?:[:@].*)?", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*", re.ASCII)
_LOSSES = {
    "best_loss": "best validation loss",
    "last_loss": "last validation loss",
    "first_loss": "validation loss at the start",
    "teacher_loss": "the teacher's validation loss",
}


def recipe_of(run: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of a run by section, as they may be published: no private ones, and of absolute paths the name."""
    try:
        tables = read_toml(run / "config.toml")
    except (OSError, ValueError):
        tables = state["options"]
    private, kept = marked(DistillConfig, "private") | {"out", "config"}, dict[str, dict[str, Any]]()
    for section, each in fields_of(DistillConfig):
        table = tables.get(section)
        if each.name not in private and isinstance(table, dict) and table.get(each.name) is not None:
            kept.setdefault(section, {})[each.name] = _public(table[each.name])
    return kept


def _public(value: Any) -> Any:
    if isinstance(value, list):
        return [_public(each) for each in value]
    if isinstance(value, str):
        return printable(PurePath(value).name if PurePath(value).is_absolute() or value.startswith("~") else value)
    return value if isinstance(value, bool | int | float) else printable(str(value))


def card_files(
    out: Path, run: Path, state: dict[str, Any], *, parameters: int, weights: str, license: str | None
) -> dict[str, bytes]:
    """README.md and recipe.toml of an export of a checkpoint with this state.

    weights: their number format, in words. license: of the student, as the hub names it; None: not stated.
    """
    recipe = recipe_of(run, state)
    given = recipe.get("run", {})
    manifest = _manifest(given.get("cache"), run, state)
    head, body = _head(given, recipe, manifest, license), _body(out.name, given, state, manifest, parameters, weights)
    toml = to_toml(recipe)
    licence = "The licence is not stated" if license is None else f"The student's licence is {printable(license)}"
    lines = ["---", *head, "---", "", *body, "## Recipe", "", "```toml", *toml.rstrip().splitlines(), "```", ""]
    lines += [
        "## Licence",
        "",
        f"{licence}; those of the teacher, the text and the student's first weights may bind it.",
    ]
    return {CARD: "\n".join([*lines, ""]).encode(), RECIPE: toml.encode()}


def _manifest(cache: Any, run: Path, state: dict[str, Any]) -> Manifest | None:
    """Of the cache with which the student was trained; None if it is not at hand."""
    places = [Path(each) for each in ([cache] if isinstance(cache, str) else cache or []) if isinstance(each, str)]
    for place in [*places, run / "data"]:
        try:
            found = read_manifest(place)
        except (OSError, ValueError, UsageError, RunError):
            continue
        if found.digest == state["cache"]:
            return found
    return None


def _base(student: Any) -> str | None:
    """The model on the hub from which the student began; None for another beginning."""
    if not isinstance(student, str):
        return None
    try:
        spec = read_spec(student)
    except (UsageError, RunError, OSError, ValueError):
        return None
    return (
        spec.source if spec.source is not None and is_hub_id(spec.source) and not Path(spec.source).exists() else None
    )


def _head(
    given: dict[str, Any], recipe: dict[str, dict[str, Any]], manifest: Manifest | None, license: str | None
) -> Iterator[str]:
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    yield "tags: [kdtrain, knowledge-distillation]"
    if (base := _base(given.get("student"))) is not None:
        yield f"base_model: {json.dumps(base)}"
        yield "base_model_relation: finetune"
    cache = given.get("cache")
    texts = [manifest.settings.data.get("source") if manifest else None, recipe.get("data", {}).get("data")]
    texts += [cache] if isinstance(cache, str) else cache or []
    found = [match[1] for text in texts if isinstance(text, str) and (match := _DATA.fullmatch(text))]
    if found:
        yield f"datasets: {json.dumps(list(dict.fromkeys(found)))}"
    if license is not None:
        known = _LICENSE.fullmatch(license) is not None
        yield f"license: {license if known else 'other'}"
        if not known:
            yield f"license_name: {json.dumps(license)}"


def _body(
    name: str,
    given: dict[str, Any],
    state: dict[str, Any],
    manifest: Manifest | None,
    parameters: int,
    weights: str,
) -> Iterator[str]:
    progress, settings = state["progress"], None if manifest is None else manifest.settings
    record: dict[str, Any] = (None if settings is None else settings.teacher) or {}
    teacher = record.get("spec") or given.get("teacher")
    made = f"distilled from {_word(teacher)}" if teacher else "trained by cross-entropy"
    rows: dict[str, Any] = {"student": state["student"]["name"], "parameters": f"{parameters:,}", "weights": weights}
    if teacher:
        rows["teacher"] = teacher
    if record.get("weights_digest"):
        rows["teacher's weights"] = f"{record['weights_digest']} in {record.get('dtype')}"
    rows["cache"] = state["cache"]
    if settings is not None:
        rows["text"] = ", ".join(f"{key} {value}" for key, value in settings.data.items() if value is not None)
    rows |= {"step": f"{progress['step']:,}", "tokens": f"{progress['tokens']:,}"}
    for key, words in _LOSSES.items():
        if isinstance(progress.get(key), float):
            rows[words] = f"{progress[key]:.4f} nats a token"
    yield f"# {_word(name)}"
    yield ""
    yield f"A language model, {made} with kdtrain {kdtrain.__version__}."
    yield ""
    yield from ("| | |", "|---|---|")
    yield from (f"| {key} | {_word(value)} |" for key, value in rows.items())
    yield ""
    yield from ("```python", "from transformers import pipeline", "")
    yield f'pipeline("text-generation", {json.dumps(f"path/to/{name}")})("Once upon a time")'
    yield from ("```", "")


def _word(value: Any) -> str:
    """A value in a cell of a table of Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(str(value)))[:300]
