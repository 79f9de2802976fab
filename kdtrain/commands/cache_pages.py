"""What `kdtrain inspect` and the commands that make caches show to people of a cache.

As in `pages`, all of it may come from strangers.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdtrain.cache.build.card import written_lines
from kdtrain.cache.format.manifest import Manifest, Parent, TemperatureRange, weights_line
from kdtrain.commands.inspect_pages import Part, aside, quoted
from kdtrain.tables import columns, number, size

_MOST_PARENTS, _MOST_COUNTS = 50, 20
"""Most parents of a cache, and most lines about its text, that a page lists."""
_CHECKED, _LEAST = 8192, 1000
"""Tokens of the samples by which the words for an angle were checked, and of the least that gets one."""


def cache_page(path: Path | str, facts: Mapping[str, Any], manifest: Manifest) -> Iterator[Part]:
    """A cache: what it is and for which T, what it takes, and how true it is, in words.

    facts: as `--json` prints them. KeyError, TypeError, ValueError, AttributeError: the fidelity is not kdtrain's.
    """
    settings, codec = manifest.settings, manifest.settings.codec
    yield f"{path}: {_what(manifest)}, vocabulary {settings.vocab_size:,}, from {settings.data.get('source')}"
    rows = [
        (split, each["sequences"], each["sequences"] * settings.seq_len, len(each["shards"]), size(_bytes(each)))
        for split, each in manifest.splits.items()
    ]
    yield ""
    yield columns(("split", "sequences", "tokens", "shards", "size"), rows, left=("split",))
    parts = dict(manifest.bytes_per_token or {})
    total = parts.pop("total", None)
    yield f"{number(total)} bytes a token, of these"
    largest = sorted(parts, key=parts.__getitem__, reverse=True)
    listed = ", ".join(f"{name} {number(parts[name])}" for name in largest)
    yield textwrap.fill(listed, 80, initial_indent="  ", subsequent_indent="  ")
    mask = ", each document sees itself alone" if settings.document_mask else ""
    yield f"sequences of {settings.seq_len:,} tokens{mask}; tokenizer of {settings.tokenizer_size:,} entries"
    if (found := manifest.temperature_range) is not None:
        error = f"log Z is right to {number(found['worst_error'])} nats"
        if found["min"] == found["max"] and codec.top_k:  # a top-k from elsewhere
            error = "what lies outside of the entries is not known"
        yield f"{_temperatures(found)} ({error})"
    if manifest.weights_cost is not None:
        yield weights_line(manifest.weights_cost)
    if facts.get("tail rule"):
        yield f"tail rule {facts['tail rule']}"
    if manifest.origin:
        yield from _origin(manifest.origin)
    yield from capture_lines(manifest)
    if manifest.fidelity:
        yield ""
        yield from _fidelity(manifest.fidelity)
    if manifest.parents:
        yield ""
        yield "made of"
        yield from (f"  {_parent(parent)}" for parent in manifest.parents[:_MOST_PARENTS])
        if (more := len(manifest.parents) - _MOST_PARENTS) > 0:
            yield f"  ... and {more:,} more"
    yield from aside(facts)
    yield ""
    yield f"digest {manifest.digest[:12]}, kdtrain {manifest.versions.get('kdtrain')}"
    if codec.kind != "tokens":
        yield _distil(path)


def made_page(path: Path, manifest: Manifest, said: Sequence[str]) -> Iterator[Part]:
    """What a command says of the cache that it has made: what it is, where, for which T, and what to do next.

    said: what only this command knows, a line each.
    """
    yield f"{path}: {_what(manifest)}"
    yield ""
    for split, each in manifest.splits.items():
        tokens = each["sequences"] * manifest.settings.seq_len
        yield f"{split}: {each['sequences']:,} sequences, {tokens:,} tokens, {size(_bytes(each))}"
    total, span = manifest.bytes_per_token["total"], manifest.temperature_range
    yield f"{number(total)} bytes a token{f'; {_temperatures(span)}' if span else ''}"
    yield from said
    yield f"digest {manifest.digest[:12]}; kdtrain inspect {quoted(path)} shows how true it is"
    if manifest.codec.kind != "tokens":
        yield _distil(path)


def _what(manifest: Manifest) -> str:
    """What a cache keeps, and of whom."""
    codec = manifest.codec
    if codec.kind == "tokens":
        return "bare tokens, no teacher"
    entries = [f"the {codec.top_k:,} most likely entries"] * bool(codec.top_k)
    entries += [f"{codec.num_samples:,} samples"] * bool(codec.num_samples)
    kept = "all log-probabilities (dense)" if codec.kind == "dense" else " and ".join(entries)
    return f"{kept} of {(manifest.settings.teacher or {}).get('spec') or 'a teacher'} a token"


def _temperatures(span: TemperatureRange) -> str:
    if span["min"] == span["max"]:
        return f"for T = {number(span['min'])} only"
    return f"for T from {number(span['min'])} to {number(span['max'])}"


def _distil(path: Path | str) -> str:
    return f"Next: kdtrain distill --cache {quoted(path)} --student SPEC --out runs/NAME"


def _parent(parent: Parent) -> str:
    """What a cache took of one that it was merged or cut from."""
    rows = f", rows {parent['rows']} of {' and '.join(parent.get('splits', []))}" if "rows" in parent else ""
    share = f", {number(parent['weight'])} of the sum" if parent["weight"] < 1 else ""
    samples = f", {parent['num_samples']} samples" if parent["num_samples"] else ""
    source = f", imported from {origin.get('source')}" if (origin := parent.get("origin")) else ""
    teacher = (parent["teacher"] or {}).get("spec") or "no teacher"
    return f"{parent['digest'][:12]} of {teacher}{samples}{share}{rows}{source}"


def _origin(origin: Mapping[str, Any]) -> Iterator[Part]:
    """What an imported cache says of its source."""
    yield ""
    names = ("shift", "kept_mass", "kl_at_most", "label_loss")  # a stranger's file may lack some
    shift, mass, most, loss = (number(origin.get(name)) for name in names)
    yield f"imported from {origin.get('source')} in the layout {origin.get('layout')}, shift {shift}"
    bound = f"KL to the whole teacher is at most {most} nats"
    if origin.get("kl_at_most") is None:
        bound = "the labels show that it is not the teacher's"
    yield f"kept mass {mass}: {bound}; the label's loss {loss}"
    if isinstance(unknown := origin.get("unknown"), list) and unknown:
        yield f"not known of the teacher: {', '.join(map(str, unknown))}"


def capture_lines(manifest: Manifest) -> list[str]:
    """What the teacher wrote, what of the text was left out, and what the top-k of a served teacher leaves out."""
    lines = [*written_lines(manifest)]
    for split, counts in (manifest.text_counts or {}).items():
        lines += [f"{split}: {count:,} {what}" for what, count in counts.items()]
    if (more := len(lines) - _MOST_COUNTS) > 0:
        lines[_MOST_COUNTS:] = [f"... and {more:,} more"]
    if found := manifest.capture:
        mass, loss, positions = (found.get(name) for name in ("kept_mass", "mass_loss", "positions"))
        lines.append(f"kept mass {number(mass)}, mean -log of it {number(loss)} nats, in {number(positions)} positions")
    return lines


def _bytes(split: Mapping[str, Any]) -> float:
    return sum(each["bytes"] for each in split["shards"]) / 2**20


def _fidelity(fidelity: Mapping[str, Any]) -> Iterator[Part]:
    """How near the gradient of a student that learns from the cache is to that from the whole teacher."""
    tokens, rows, divergences = fidelity["sample"]["tokens"], [], []
    header = ("T", "tail rule", "angle", "length", "mean angle", "mean length", "in words")
    for name, each in fidelity.items():
        if name.startswith("T="):
            for rule, found in each["gradient"].items():
                angles = (f"{found['token_angle']:.1f}°", f"{found['token_norm']:.2f}")
                between, words = _in_words(found["mean_angle"], found["mean_norm"], tokens)
                rows.append((name[2:], rule, *angles, between, f"{found['mean_norm']:.2f}", words))
            divergences += [f"{kl} at {name}"] if (kl := divergence(each)) else []
    yield f"fidelity, of {tokens:,} tokens of {fidelity['split']}: the gradient against the whole"
    yield "teacher's, of each token and of their mean (the same: angle 0° and length 1)"
    if tokens < _CHECKED:
        yield f"mean angle: what {_CHECKED:,} tokens would show, if all of it were noise and if none were"
    yield columns(header, rows, left=("tail rule", "in words"))
    if divergences:
        yield f"KL(full || cache), the tail's mass spread evenly: {', '.join(divergences)}"
    worst = max(fidelity["log_partition_error"], key=lambda row: row["worst"])
    yield f"error of log Z at most {number(worst['worst'])} nats, at T={worst['T']:.3g}"


def divergence(found: Mapping[str, Any]) -> str | None:
    """KL(full || cache) at a T, the tail's mass spread evenly; None for samples alone, which leave no tail."""
    return None if found["gradient"].keys() == {"sampled"} else f"{found['kl_spread']:.2g}"


def _in_words(angle: float, ratio: float, tokens: int) -> tuple[str, str]:
    """The mean gradient's angle of `_CHECKED` tokens, and how far it is off.

    Noise falls with the root of the tokens and bias stays: the angle is between all noise and all bias.
    """
    share = min((tokens / _CHECKED) ** 0.5, 1.0)
    words = {_word(part * angle, 1 + part * (ratio - 1)) for part in (share, 1.0)}
    between = f"{share * angle:.1f}° to {angle:.1f}°" if share < 1 else f"{angle:.1f}°"
    return between, words.pop() if len(words) == 1 and tokens >= _LEAST else "too few to tell"


def _word(angle: float, ratio: float) -> str:
    """How far a gradient is off; docs/fidelity.md says what students of such caches learned."""
    if angle < 3 and abs(ratio - 1) < 0.03:
        return "the same"
    if angle < 10 and abs(ratio - 1) < 0.1:
        return "a little off"
    return "another way" if angle >= 10 else "too long" if ratio > 1 else "too short"
