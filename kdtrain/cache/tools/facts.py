"""What people are shown of a cache: labelled values, how true it is, and the caches that it was made of.

Each fact is stated here once. The page of `kdtrain inspect`, the end of a command that makes a cache, the card in its
folder, the card of a student and a report take from it what they show. The page and the card are made here; a card
ends in a check sum of itself, so that one which somebody has changed, or written, is never replaced.

A manifest may come from a stranger: entries that are not what kdtrain writes are left out.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kdtrain.cache.format.manifest import CacheSettings, Manifest, Parent, weights_line
from kdtrain.cache.format.spec import CODECS
from kdtrain.config.choices import resolve_tail
from kdtrain.errors import log
from kdtrain.files import LARGE, publish_text, read_text
from kdtrain.tables import Table, counted, facts_table, markdown_text, number, show, size

_MOST_COUNTS = 20
"""Most counts of a text that are listed."""
_CHECKED, _LEAST = 8192, 1000
"""Tokens of the samples by which the words for an angle were checked, and of the smallest that gets one."""
MADE = (
    "its weights",
    "written by the teacher",
    "written by a student",
    "left out of the text",
    "kept mass",
    "bytes per token",
    "of these",
    "temperatures",
)
"""The facts that a command which has made a cache prints, after its splits."""


def contents(of: Manifest | CacheSettings) -> str:
    """Describe what a cache keeps of each distribution."""
    return CODECS[of.codec.kind].contents(of.codec)


def heading(settings: CacheSettings) -> str:
    """Describe what a cache keeps, and of which teacher."""
    of = f" of {(settings.teacher or {}).get('spec') or 'a teacher'} a token"
    return contents(settings) + (of if settings.codec.taught else "")


def cache_facts(manifest: Manifest, public: Callable[[Any], Any] = lambda value: value) -> dict[str, str]:
    """Return the facts about a cache, by label; `public` makes names of places fit to be published."""
    settings, codec, data = manifest.settings, manifest.codec, manifest.settings.data
    record = settings.teacher or {}
    dtype = record.get("dtype")
    teacher = f"{public(record.get('spec') or 'unknown')}{'' if dtype in (None, 'unknown') else f', {dtype}'}"
    counts = manifest.text_counts or {}
    lost = [f"{split}: {count:,} {what}" for split, each in counts.items() for what, count in each.items()]
    if (more := len(lost) - _MOST_COUNTS) > 0:
        lost[_MOST_COUNTS:] = [f"... and {more:,} more"]
    capture = manifest.capture or {}
    mass, loss, positions = (number(capture.get(name)) for name in ("kept_mass", "mass_loss", "positions"))
    parts = dict(manifest.bytes_per_token)
    total = parts.pop("total")
    largest = sorted(parts, key=parts.__getitem__, reverse=True)
    facts = {
        "teacher": teacher if codec.taught else "",
        "weights digest": str(record.get("weights_digest") or ""),
        "its file": ", sha256 ".join(str(record[key]) for key in ("quantised", "file_digest") if record.get(key)),
        "its weights": "" if manifest.weights_cost is None else weights_line(manifest.weights_cost),
        "text": ", ".join(f"{name} {public(each)}" for name, each in data.items() if isinstance(each, str | int)),
        "written by a student" if codec.written else "written by the teacher": "; ".join(_written(manifest)),
        "left out of the text": "; ".join(lost),
        "kept mass": f"{mass}, mean -log of it {loss} nats, in {positions} positions" if capture else "",
        **_origin(manifest.origin or {}),
        "kept": contents(manifest),
        **{split: split_text(manifest, split) for split in manifest.splits},
        "vocabulary": f"{settings.vocab_size:,}, of a tokenizer with {settings.tokenizer_size:,} entries",
        "documents": "each sees itself alone" if settings.document_mask else "",
        "bytes per token": number(total),
        "of these": ", ".join(f"{name} {number(parts[name])}" for name in largest),
        "temperatures": _temperatures(manifest),
        "tail rule": tail_rule(manifest) or "",
        "digest": manifest.digest,
        "made by": ", ".join(f"{name} {version}" for name, version in list(manifest.versions.items())[:4]),
    }
    return {label: text for label, text in facts.items() if text}


def split_text(manifest: Manifest, split: str) -> str:
    """Describe how large a split is."""
    stated = manifest.splits[split]
    length = manifest.settings.seq_len
    parts = [f"{counted(stated['sequences'], 'sequence')} of {length:,}", f"{stated['sequences'] * length:,} tokens"]
    mib = sum(each["bytes"] for each in stated["shards"]) / 2**20
    return ", ".join([*parts, counted(len(stated["shards"]), "shard"), size(mib)])


def tail_rule(manifest: Manifest) -> str | None:
    """Return the default tail rule of `distill` for a cache, and its alternative; None without a tail."""
    codec = manifest.codec
    if not codec.coded:
        return None
    used = resolve_tail("ghost", codec.num_samples)
    return f"{used} by default, or --tail control-variate" if codec.num_samples and codec.top_k else used


def _temperatures(manifest: Manifest) -> str:
    span = manifest.temperature_range
    if span is None:
        return ""
    if span["min"] == span["max"]:  # samples alone, or a top-k from elsewhere
        unknown = " (what lies outside of the entries is not known)" if manifest.codec.top_k else ""
        return f"for T = {number(span['min'])} only{unknown}"
    between = f"for T from {number(span['min'])} to {number(span['max'])}"
    return f"{between} (log Z is right to {number(span['worst_error'])} nats)"


def _written(manifest: Manifest) -> Iterator[str]:
    """Yield how a teacher continued the text of a cache, and why its texts ended."""
    how = manifest.settings.data.get("generated")
    if not isinstance(how, Mapping):
        return
    policy = how.get("policy")
    who = "the teacher"
    if isinstance(policy, Mapping):
        step = "" if policy.get("step") is None else f" at step {policy['step']}"
        who = f"{policy.get('spec')} ({str(policy.get('weights_digest'))[:12]}{step})"
    if "temperature" in how:
        prompt = how.get("prompt_tokens")
        begins = "the turns before the last answer" if prompt is None else f"{prompt} tokens of each sequence"
        drawn = f"temperature {how.get('temperature')}, top-p {how.get('top_p')}, seed {how.get('seed')}"
        yield f"{who} continued {begins} ({drawn})"
    else:
        yield "text by teachers, each written as the cache that it comes from states"
    for split, each in (manifest.generated or {}).items():
        ended, cut, tokens = (each.get(name, 0) for name in ("stop", "length", "tokens"))
        yield f"{split}: {counted(tokens, 'token')}; {counted(ended, 'text')} ended, {cut:,} cut"


def _origin(origin: Mapping[str, Any]) -> dict[str, str]:
    """Describe where an imported cache is from, how much of the teacher it has, and which settings are unknown."""
    if not origin:
        return {}
    names = ("shift", "kept_mass", "kl_at_most", "label_loss")  # a stranger's file may lack some
    shift, mass, most, loss = (number(origin.get(name)) for name in names)
    known = origin.get("kl_at_most") is not None
    bound = f"KL to the whole teacher is at most {most} nats"
    bound = bound if known else "the labels show that it is not the teacher's"
    unknown = origin.get("unknown")
    return {
        "imported from": f"{origin.get('source')} in the layout {origin.get('layout')}, shift {shift}",
        "kept mass": f"{mass}: {bound}; the label's loss {loss}",
        "not known of the teacher": ", ".join(map(str, unknown)) if isinstance(unknown, list) else "",
    }


def parent_lines(manifest: Manifest, most: int) -> Iterator[str]:
    """Yield a line for each cache that this one was merged or cut from, with the part it took."""
    parents = manifest.parents or []
    yield from map(_parent, parents[:most])
    if (more := len(parents) - most) > 0:
        yield f"... and {more:,} more, in manifest.json"


def _parent(parent: Parent) -> str:
    parts = [f"{parent['digest'][:12]} of {(parent['teacher'] or {}).get('spec') or 'no teacher'}"]
    if parent["num_samples"]:
        parts.append(counted(parent["num_samples"], "sample"))
    if parent["weight"] < 1:
        parts.append(f"{number(parent['weight'])} of the sum")
    if "rows" in parent:
        parts.append(f"rows {parent['rows']} of {' and '.join(parent.get('splits', []))}")
    else:
        each = (f"{counted(count, 'sequence')} of {split}" for split, count in parent["sequences"].items())
        parts.append(" and ".join(each))
    parts += [f"imported from {origin.get('source')}"] if (origin := parent.get("origin")) else []
    return ", ".join(parts)


def kept_facts(where: str, digest: str) -> list[str | Table] | None:
    """Describe a cache that a run has read, if it is here; None: another cache lies there now.

    UsageError, OSError: it is not here.
    """
    from kdtrain.cache.read.remote import kept_manifest  # a run describes no other cache

    manifest = kept_manifest(where, digest)
    return [facts_table(cache_facts(manifest)), *fidelity(manifest)] if manifest.is_known_as(digest) else None


# Fidelity -----------------------------------------------------------------------------------------------------------


def fidelity(manifest: Manifest) -> list[str | Table]:
    """Describe how near a student's gradient from the cache is to the one from the whole teacher; or return nothing."""
    with suppress(LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # it is not what kdtrain writes
        return _fidelity(manifest.fidelity or {})
    return []


def _fidelity(about: Mapping[str, Any]) -> list[str | Table]:
    tokens = about["sample"]["tokens"]
    rows = []
    divergences = []
    each_T = {name[2:]: each for name, each in about.items() if name.startswith("T=")}
    for temperature, at in list(each_T.items())[:12]:
        for rule, each in at["gradient"].items():
            angles = (f"{each['token_angle']:.1f}°", f"{each['token_norm']:.2f}")
            between, words = _in_words(each["mean_angle"], each["mean_norm"], tokens)
            rows.append((temperature, rule, *angles, between, f"{each['mean_norm']:.2f}", words))
        if at["gradient"].keys() != {"sampled"} and at["kl_spread"] is not None:  # samples alone leave no tail
            divergences.append(f"{at['kl_spread']:.2g} at T={temperature}")
    parts: list[str | Table] = [
        f"fidelity, of {tokens:,} tokens of {about['split']:s}: the gradient against the whole",
        "teacher's, of each token and of their mean (the same: angle 0° and length 1)",
    ]
    if tokens < _CHECKED:
        parts.append(f"mean angle: expected with {_CHECKED:,} tokens, if all of it is noise and if none is")
    header = ("T", "tail rule", "angle", "length", "mean angle", "mean length", "in words")
    parts.append(Table.of(header, rows, left=("tail rule", "in words")))
    if divergences:
        parts.append(f"KL(full || cache), the tail's mass spread evenly: {', '.join(divergences)}")
    if errors := about["log_partition_error"]:
        worst = max(errors, key=lambda row: row["worst"])
        parts.append(f"error of log Z at most {number(worst['worst'])} nats, at T={worst['T']:.3g}")
    return parts


def _in_words(angle: float, ratio: float, tokens: int) -> tuple[str, str]:
    """Return the mean gradient's angle over `_CHECKED` tokens, and a word for its deviation.

    Noise falls with the root of the tokens and bias stays: the angle is between all noise and all bias.
    """
    share = min((tokens / _CHECKED) ** 0.5, 1.0)
    words = {_word(part * angle, 1 + part * (ratio - 1)) for part in (share, 1.0)}
    between = f"{share * angle:.1f}° to {angle:.1f}°" if share < 1 else f"{angle:.1f}°"
    return between, words.pop() if len(words) == 1 and tokens >= _LEAST else "too few to tell"


def _word(angle: float, ratio: float) -> str:
    """Return a word for a gradient's deviation; docs/fidelity.md has the results of students of such caches."""
    if angle < 3 and abs(ratio - 1) < 0.03:
        return "the same"
    if angle < 10 and abs(ratio - 1) < 0.1:
        return "a little off"
    if angle >= 10:
        return "another way"
    return "too long" if ratio > 1 else "too short"


def show_cache(folder: Path, manifest: Manifest, as_json: bool, lines: Sequence[str] = (), **facts: Any) -> None:
    """Print the facts about a cache: a short page, or one JSON object of everything.

    lines: for the page, what only this command knows. facts: of this command alone, for the object.
    """
    known = cache_facts(manifest)
    if "of these" in known:  # the largest; kdtrain inspect has all
        known["of these"] = ", ".join(known["of these"].split(", ")[:5])
    shown = [f"{label}: {known[label]}" for label in (*manifest.splits, *MADE) if label in known]
    digest = f"digest {manifest.digest[:12]}; kdtrain inspect {shlex.quote(str(folder))} shows how true it is"
    page = [f"{folder}: {heading(manifest.settings)}", "", *shown, *lines, digest, *next_step(folder, manifest)]
    sequences = {name: split["sequences"] for name, split in manifest.splits.items()}
    record = {
        "cache": str(folder),
        "digest": manifest.digest,
        "format_version": manifest.settings.format_version,
        "teacher": (manifest.settings.teacher or {}).get("spec"),
        "num_samples": manifest.codec.num_samples,
        "sampling": manifest.settings.sampling,
        "sequences": sequences,
        "tokens": {name: count * manifest.settings.seq_len for name, count in sequences.items()},
        "bytes_per_token": manifest.bytes_per_token["total"],
        "temperature_range": manifest.temperature_range,
    }
    show(page, record | facts, as_json)


def next_step(path: Path | str, manifest: Manifest) -> Iterator[str]:
    """Yield the command that follows for a cache, if it has a teacher's distributions."""
    if manifest.codec.taught:
        yield f"Next: kdtrain distill --cache {shlex.quote(str(path))} --student SPEC --out runs/NAME"


CARD = "README.md"
_PARENTS = 20  # that a card lists


def write_card(folder: Path, manifest: Manifest) -> None:
    """Write the card of a cache, unless a README.md is there that kdtrain did not write. RunError: a full disk, ..."""
    path = folder / CARD
    if os.path.lexists(path) and not is_own(path):
        log.info("%s is not kdtrain's, and stays", path)
        return
    publish_text(path, make_card(manifest), "cache.card")


def is_own(path: Path) -> bool:
    """Return True if kdtrain wrote this card, and nobody has changed it."""
    try:
        return not path.is_symlink() and is_card(read_text(path, LARGE))
    except (OSError, ValueError):
        return False


def is_card(text: str) -> bool:
    """Return True if a text is a card as kdtrain writes it."""
    found = re.fullmatch(r"(?s)(.*)<!-- kdtrain card ([0-9a-f]{64}) -->\n", text)
    return found is not None and _check_sum(found[1]) == found[2]


def _check_sum(text: str) -> str:
    return hashlib.sha256(f"kdtrain card {text}".encode()).hexdigest()


def make_card(
    manifest: Manifest,
    where: str = "THIS-FOLDER",
    head: Iterable[str] = (),
    licences: Mapping[str, str | None] = MappingProxyType({}),
) -> str:
    """Make the text of a card.

    where: the address at which it is published. head: lines that the hub reads. licences: by what they are of.
    """
    above = ["---", *head, "---", ""] if head else []
    text = "\n".join([*above, *_body(manifest, where, licences), ""])
    return f"{text}<!-- kdtrain card {_check_sum(text)} -->\n"


def _body(manifest: Manifest, where: str, licences: Mapping[str, str | None]) -> Iterator[str]:
    teacher = markdown_text((manifest.settings.teacher or {}).get("spec")) or "a teacher"
    made = not manifest.codec.taught
    yield f"# {'Packed tokens' if made else f'What {teacher} predicts'}: a cache for distillation"
    yield ""
    kept = "no distribution: its tokens are packed without a teacher" if made else contents(manifest)
    yield f"For every token of a text this data set holds {kept}, in HDF5. kdtrain made it, and any tool can read it."
    yield ""
    yield from facts_table(cache_facts(manifest)).markdown()
    if licences:
        yield from ("", "## Licences", "")
        yield from (f"- {of}: {markdown_text(name)}" for of, name in licences.items())
    if manifest.parents:
        yield from ("", "## Made of", "")
        yield from (f"- {markdown_text(line)}" for line in parent_lines(manifest, _PARENTS))
    if found := fidelity(manifest):
        yield from ("", "## Fidelity", "")
        for part in found:
            yield from [markdown_text(part)] if isinstance(part, str) else ("", *part.markdown(), "")
    yield _USE.replace("PLACE", where).replace("SPLIT", next(iter(manifest.splits)))


_USE = """
## Use

```bash
kdtrain distill --cache PLACE --student SPEC --out runs/NAME
kdtrain verify PLACE
```

```python
import kdtrain as kd

row = kd.Cache("PLACE")["SPLIT"][0]  # a dict of tensors
```

With h5py, once the files are here (index.h5 shows all shards as one):

```python
import h5py, hdf5plugin

with h5py.File("index.h5") as cache:
    split = cache["SPLIT"]
    print({name: each.attrs["about"] for name, each in split.items() if name != "dictionary"})
    tokens = split["tokens"][0]  # position t reads tokens[0..t], its label is tokens[t + 1]
```

The numbers are stored as codes; cache/README.md of kdtrain specifies them, with a reader of thirty lines.
`test_vector` in manifest.json holds some of them decoded, by which a reader can be proved. The manifest has
the SHA-256 of every shard, and `kdtrain verify` compares them."""
