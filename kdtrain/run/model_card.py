"""The README.md of an exported student, and its recipe as TOML.

The README has in some forty lines what the student is, of which teacher and cache, and how to load it; `kdtrain push`
adds what the hub reads. The recipe has every option, so that a version with other defaults repeats the run. They are
made from the checkpoint, the run's config.toml, and the manifests of the run's caches, as far as they are still there
and are those that the checkpoint names. A run may have been downloaded, so every word of it is escaped, and options
that a file cannot set, or that name a place on this machine, are left out or shortened.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import kdtrain
from kdtrain.cache.format.manifest import Manifest, read_manifest
from kdtrain.cache.tools.facts import CARD, cache_facts
from kdtrain.config.choices import resolve_tail
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import fields_of, marked
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import read_toml
from kdtrain.monitor.facts import alphas
from kdtrain.run.folder import TOKENIZER, to_toml
from kdtrain.tables import facts_table, markdown_text, percent

RECIPE = "recipe.toml"
_HOW = {"out", "config", "resume", "overwrite", "dry_run", "write_config", "sanity", "json"}
"""Options that name where a run lies and how it was started, not what it is."""
_CACHES = 20
"""Caches of a mixture that a card lists."""
_LOSSES = {
    "best_loss": "best validation loss",
    "last_loss": "validation loss at step {}",
    "first_loss": "validation loss at the start",
    "teacher_loss": "the teacher's validation loss",
}


def recipe_of(run: Path, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a run's options, by section, as they may be published: none private, of absolute paths the name."""
    try:
        tables = read_toml(run / "config.toml")
    except (OSError, ValueError):
        tables = state["options"]
    private = marked(DistillConfig, "private") | _HOW
    kept = dict[str, dict[str, Any]]()
    for section, each in fields_of(DistillConfig):
        table = tables.get(section)
        if each.name not in private and isinstance(table, dict) and table.get(each.name) is not None:
            kept.setdefault(section, {})[each.name] = public(table[each.name])
    return kept


def public(value: Any) -> Any:
    """Make a value of a run fit to publish: of an absolute path the name, and no sign that steers a terminal."""
    if isinstance(value, list):
        return [public(each) for each in value]
    if isinstance(value, str):
        return printable(PurePath(value).name if PurePath(value).is_absolute() or value.startswith("~") else value)
    return value if isinstance(value, bool | int | float) else printable(str(value))


def card_files(
    name: str,
    run: Path,
    state: Mapping[str, Any],
    *,
    parameters: int,
    weights: str,
    license: str | None = None,
    adapter: bool = False,
    loading: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Return README.md and recipe.toml of an export of a checkpoint with this state.

    name: of the folder. weights: their number format, in words. license: of the student; None: not stated. adapter: the
    folder holds adapters alone. loading: lines that load it, if not as a folder for transformers. more: more facts.
    """
    recipe = recipe_of(run, state)
    given = recipe.get("run", {})
    manifests = _manifests(given.get("cache"), run, state)
    codecs = [each.settings.codec for each in manifests.values()]
    rules = {resolve_tail("ghost", codec.num_samples) for codec in codecs if codec.coded}
    if recipe.get("objective", {}).get("tail") == "ghost":  # the default, which is another rule for a cache of samples
        del recipe["objective"]["tail"]
        if len(rules) == 1 and not given.get("cross_tokenizer"):
            recipe["objective"]["tail"] = rules.pop()
    facts = {"student": state["student"]["name"], "parameters": f"{parameters:,}", "weights": weights}
    teachers = dict[str, None]()
    for each in _members(run, state):
        teacher, found = _member_facts(each, manifests.get(str(each.get("digest"))), given.get("teacher"))
        facts |= found
        teachers |= dict.fromkeys([teacher] if teacher else [])
    progress = state["progress"]
    trained = state["student"].get("weights")
    facts |= {"their mixture": state["cache"]} if "caches" in state else {}
    if trained is not None:
        facts["trained"] = (
            f"adapters beside {trained} weights, of which the losses below are; merged they are another model"
        )
    facts |= {"step": f"{progress['step']:,}", "tokens": f"{progress['tokens']:,}"}
    mean, last = alphas(run).values()
    if mean is not None and last is not None:
        facts["teacher's weight (alpha)"] = f"{mean:.2f} in the mean, {last:.2f} at the end"
    for key, words in _LOSSES.items():
        if isinstance(loss := progress.get(key), float):
            size = progress.get("bytes_per_token")
            bits = f", {loss / size / math.log(2):.4f} bits a byte" if size else ""
            facts[words.format(progress["validated_step"])] = f"{loss:.4f} nats per token{bits}"
    facts |= more or {}
    made = f"distilled from {' and '.join(map(markdown_text, teachers))}" if teachers else "trained by cross-entropy"
    version = kdtrain.__version__
    loading = loading or ("```python", *_loading(name, run, adapter), "```")
    licence = "The licence is not stated" if license is None else f"The student's licence is {markdown_text(license)}"
    lines = [
        *(f"# {markdown_text(name)}", ""),
        f"{'Adapters of a' if adapter else 'A'} language model, {made} with kdtrain {version}.",
        *("", *facts_table(facts).markdown(), ""),
        *(*loading, ""),
        f"{licence}; those of the teacher, the text and the student's first weights may bind it.",
        f"{RECIPE} has every option of the run.",
    ]
    text = f"# every option of a run, by kdtrain {version}\n{to_toml(recipe)}"
    return {CARD: "\n".join([*lines, ""]).encode(), RECIPE: text.encode()}


def cache_of(run: Path, state: Mapping[str, Any]) -> str:
    """Return the digest of the cache that a run read; across tokenizers its state names the view."""
    for place in (run / "data", run / "view"):
        if place.is_dir():
            from kdtrain.tokenizers.view_format import viewed_settings

            if (settings := viewed_settings(place)) is not None:
                return settings["cache"]
    return str(state["cache"])


def _members(run: Path, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the caches that a run mixed, or the one that it read, with their digests."""
    return (state.get("caches") or [{"digest": cache_of(run, state)}])[:_CACHES]


def _manifests(cache: Any, run: Path, state: Mapping[str, Any]) -> dict[str, Manifest]:
    """Return the manifests of the run's caches that are at hand, by digest."""
    wanted = [each.get("digest") for each in _members(run, state)]
    found = dict[str, Manifest]()
    places = [Path(each) for each in (cache if isinstance(cache, list) else [cache]) if isinstance(each, str)]
    for place in [*places[:_CACHES], run / "data"]:
        try:
            manifest = read_manifest(place)
        except (OSError, ValueError, UsageError, RunError):
            continue
        found |= {digest: manifest for digest in wanted if digest is not None and manifest.is_known_as(digest)}
    return found


def _member_facts(member: Mapping[str, Any], manifest: Manifest | None, named: Any) -> tuple[Any, dict[str, str]]:
    """Return the teacher behind a cache of the run, and the cache's facts; `named`: the run's --teacher."""
    of = f" of {member['name']}" if "name" in member else ""
    known = {} if manifest is None else cache_facts(manifest, public)
    spec = (manifest.settings.teacher or {}).get("spec") if manifest is not None else None
    teacher = public(spec or member.get("teacher") or named or "")
    facts = {
        f"share of the draws{of}": percent(member["share"]) if "share" in member else "",
        f"teacher{of}": known.get("teacher") if spec else teacher,
        f"weights digest{of}": known.get("weights digest"),
        f"its weights{of}": known.get("its weights"),
        f"cache{of}": member.get("digest"),
        f"text{of}": known.get("text"),
    }
    return teacher, {label: text for label, text in facts.items() if text}


def _loading(name: str, run: Path, adapter: bool) -> Iterator[str]:
    """Yield the lines of code that load the folder."""
    place = json.dumps(f"path/to/{name}")
    if adapter:
        yield from ("from peft import AutoPeftModelForCausalLM", "")
        yield f"model = AutoPeftModelForCausalLM.from_pretrained({place})"
    else:
        chat = (run / TOKENIZER / "chat_template.jinja").exists()
        prompt = '[{"role": "user", "content": "Say hello."}]' if chat else '"Once upon a time"'
        yield from ("from transformers import pipeline", "", f'pipeline("text-generation", {place})({prompt})')
