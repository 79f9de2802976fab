"""The card of a cache: a README.md that says to people, and to the hub, what the cache is.

A card ends in a check sum of itself: one that somebody has changed, or written, is never replaced.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdtrain.cache.format.manifest import Manifest, Parent, weights_line
from kdtrain.errors import printable
from kdtrain.files import LARGE, publish_text, read_text

log = logging.getLogger("kdtrain")

CARD = "README.md"
_PARENTS = 20  # that a card lists
LICENSES = ("text", "teacher", "outputs")
"""What a licence is of: the text, the teacher's weights, and what the teacher said."""
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
_KNOWN = (
    *("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
    *("cc-by-sa-3.0", "odc-by", "odbl", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "mpl-2.0", "openrail", "llama3", "llama3.1"),
    *("llama3.2", "llama3.3", "gemma", "pddl", "unlicense", "unknown"),
)
"""Licences that the hub knows by these names."""


def write_card(folder: Path, manifest: Manifest) -> None:
    """Write the card of a cache, unless a README.md is there that kdtrain did not write. RunError: a full disk, ..."""
    path = folder / CARD
    if os.path.lexists(path) and not is_own(path):
        log.info("%s is not kdtrain's, and stays", path)
        return
    publish_text(path, make_card(manifest), "cache.card")


def is_own(path: Path) -> bool:
    """Whether kdtrain wrote this card, and nobody has changed it."""
    try:
        return not path.is_symlink() and is_card(read_text(path, LARGE))
    except (OSError, ValueError):
        return False


def is_card(text: str) -> bool:
    """Whether a text is a card as kdtrain writes it."""
    found = re.fullmatch(r"(?s)(.*)<!-- kdtrain card ([0-9a-f]{64}) -->\n", text)
    return found is not None and _check_sum(found[1]) == found[2]


def _check_sum(text: str) -> str:
    return hashlib.sha256(f"kdtrain card {text}".encode()).hexdigest()


def make_card(
    manifest: Manifest,
    licenses: Mapping[str, str] | None = None,
    where: str | None = None,
    *,
    preview: bool = False,
) -> str:
    """The text of a card.

    licenses: by `LICENSES`; None where nobody has been asked. where: the address at which it is published. preview: a
    preview.parquet lies beside it.
    """
    lines = ["---", *_metadata(manifest, licenses, preview), "---", "", *_body(manifest, licenses, where), ""]
    text = "\n".join(lines)
    return f"{text}<!-- kdtrain card {_check_sum(text)} -->\n"


def _metadata(manifest: Manifest, licenses: Mapping[str, str] | None, preview: bool) -> Iterator[str]:
    teacher = word((manifest.settings.teacher or {}).get("spec"))
    yield "tags: [teacher-logits, knowledge-distillation, kdtrain]"
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", teacher, re.ASCII):
        yield f"base_model: {json.dumps(teacher)}"
    yield from license_lines((licenses or {}).get("outputs", "unknown"))
    rows = sum(split["sequences"] for split in manifest.splits.values())
    yield f"size_categories: [{json.dumps(next((name for most, name in _SIZES if rows < most), 'n>10M'))}]"
    if preview:
        yield "configs: [{config_name: preview, data_files: preview.parquet}]"


def _body(manifest: Manifest, licenses: Mapping[str, str] | None, where: str | None) -> Iterator[str]:
    settings, codec, record = manifest.settings, manifest.codec, manifest.settings.teacher or {}
    teacher = word(record.get("spec")) or "a teacher"
    place = where or "THIS-FOLDER"
    kept = {"tokens": "packed tokens, without a teacher", "dense": "the log-probabilities of all entries"}.get(
        codec.kind
    )
    parts = [f"the {codec.top_k:,} most likely entries"] * bool(codec.top_k)
    parts += [f"{codec.num_samples:,} samples"] * bool(codec.num_samples)
    kept = kept or " and ".join(parts)
    yield f"# {'Packed tokens' if codec.kind == 'tokens' else f'What {teacher} said'}: a cache for distillation"
    yield ""
    yield f"For every token of a text this data set holds {kept}, in HDF5. kdtrain made it, and any tool can read it."
    yield ""
    yield "| | |"
    yield "|---|---|"
    rows: dict[str, Any] = {
        "teacher": _teacher(record),
        **({} if manifest.weights_cost is None else {"its weights": weights_line(manifest.weights_cost)}),
        "text": ", ".join(f"{key} {value}" for key, value in settings.data.items() if isinstance(value, str | int)),
        **({"written by the teacher": "; ".join(lines)} if (lines := list(written_lines(manifest))) else {}),
        **dict(_origin(manifest.origin or {})),
        "kept": kept,
        **{
            split: f"{_count(each['sequences'], 'sequence')} of {_count(settings.seq_len, 'token')}"
            for split, each in manifest.splits.items()
        },
        "vocabulary": f"{settings.vocab_size:,}",
        "bytes a token": f"{manifest.bytes_per_token['total']:.1f}",
        "digest": manifest.digest,
    }
    if codec.kind == "tokens":
        del rows["teacher"]
    if (span := manifest.temperature_range) is not None:
        only = span["min"] == span["max"]
        rows["temperatures"] = "1 only" if only else f"{span['min']:.3g} to {span['max']:.3g}"
    yield from (f"| {name} | {word(value)} |" for name, value in rows.items())
    if licenses is not None:
        yield ""
        yield "## Licences"
        yield ""
        names = {
            "text": "of the text",
            "teacher": "of the teacher",
            "outputs": "of the teacher's outputs, this data set",
        }
        yield from (f"- {words}: {word(licenses[name])}" for name, words in names.items())
    if manifest.parents:
        yield ""
        yield "## Made of"
        yield ""
        for parent in manifest.parents[:_PARENTS]:
            yield f"- {parent['digest'][:12]}: {', '.join(map(word, _parent(parent)))}"
        if (more := len(manifest.parents) - _PARENTS) > 0:
            yield f"- and {more:,} more, in manifest.json"
    yield from _fidelity(manifest)
    yield ""
    yield "## Use"
    yield ""
    yield "```bash"
    yield f"kdtrain distill --cache {place} --student SPEC --out runs/NAME"
    yield f"kdtrain verify {place}"
    yield "```"
    yield ""
    yield "```python"
    yield "import kdtrain as kd"
    yield ""
    yield f'row = kd.Cache("{place}")["{next(iter(manifest.splits))}"][0]  # a dict of tensors'
    yield "```"
    yield ""
    yield "With h5py, once the files are here (index.h5 shows all shards as one):"
    yield ""
    yield "```python"
    yield "import h5py, hdf5plugin"
    yield ""
    yield 'with h5py.File("index.h5") as cache:'
    yield f'    split = cache["{next(iter(manifest.splits))}"]'
    yield '    print({name: each.attrs["about"] for name, each in split.items() if name != "dictionary"})'
    yield '    tokens = split["tokens"][0]  # position t reads tokens[0..t], its label is tokens[t + 1]'
    yield "```"
    yield ""
    yield "The numbers are stored as codes; cache/README.md of kdtrain specifies them, with a reader of thirty lines."
    yield "`test_vector` in manifest.json holds some of them decoded, by which a reader can be proved. The manifest has"
    yield "the SHA-256 of every shard, and `kdtrain verify` compares them."


def _teacher(record: Mapping[str, Any]) -> str:
    """A teacher, with what is known of it."""
    weights, dtype = record.get("weights_digest"), record.get("dtype")
    parts = [str(record.get("spec") or "unknown")]
    parts += [f"weights {weights[:12]}"] if isinstance(weights, str) else []
    parts += [dtype] if isinstance(dtype, str) and dtype != "unknown" else []
    return ", ".join(parts)


def _origin(origin: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows of an imported cache: where it is from, how much of the teacher it has, and what nobody said."""
    if not origin:
        return
    yield "imported from", f"{origin.get('source')}, layout {origin.get('layout')}, shift {origin.get('shift')}"
    mass, most = origin.get("kept_mass"), origin.get("kl_at_most")
    bound = f": KL to the whole teacher is at most {most} nats" if isinstance(most, int | float) else ""
    yield "kept mass", f"{mass}{bound}"
    if isinstance(unknown := origin.get("unknown"), list) and unknown:
        yield "not known of the teacher", ", ".join(map(str, unknown))


def written_lines(manifest: Manifest) -> Iterator[str]:
    """How a teacher continued the text of a cache, and why its texts ended; nothing for other caches."""
    how = manifest.settings.data.get("generated")
    if not isinstance(how, Mapping):
        return
    if "temperature" in how:
        prompt = how.get("prompt_tokens")
        begins = "the turns before the last answer" if prompt is None else f"{prompt} tokens of each sequence"
        drawn = f"temperature {how.get('temperature')}, top-p {how.get('top_p')}, seed {how.get('seed')}"
        yield f"the teacher continued {begins} ({drawn})"
    else:
        yield "text by teachers, each written as the cache that it comes from states"
    for split, each in (manifest.generated or {}).items():
        ended, cut, tokens = (each.get(name, 0) for name in ("stop", "length", "tokens"))
        yield f"{split}: {_count(tokens, 'token')} by the teacher; {_count(ended, 'text')} ended, {cut:,} cut"


def _parent(parent: Parent) -> Iterator[str]:
    """What a cache took of one that it was merged or cut from."""
    if parent["teacher"]:
        yield _teacher(parent["teacher"])
    if parent["num_samples"]:
        yield _count(parent["num_samples"], "sample")
    if parent["weight"] < 1:
        yield f"{parent['weight']:.4g} of the sum"
    rows = f"rows {parent['rows']} of " if "rows" in parent else ""
    yield rows + " and ".join(f"{_count(each, 'sequence')} of {split}" for split, each in parent["sequences"].items())


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _fidelity(manifest: Manifest) -> Iterator[str]:
    """How near the cache is to the whole teacher, as measured; nothing for one without it, or of another shape."""
    rows = []
    for name, each in sorted((manifest.fidelity or {}).items()):
        if name.startswith("T=") and isinstance(each, dict) and isinstance(each.get("gradient"), dict):
            for rule, found in each["gradient"].items():
                if isinstance(found, dict) and all(
                    isinstance(found.get(k), float) for k in ("mean_angle", "mean_norm")
                ):
                    rows.append((name[2:], word(rule), f"{found['mean_angle']:.2f}", f"{found['mean_norm']:.3f}"))
    if not rows:
        return
    yield ""
    yield "## Fidelity"
    yield ""
    yield "The student's gradient, mean of a held-out sample, against that from the teacher's whole distribution:"
    yield ""
    yield "| T | tail rule | angle (degrees) | length |"
    yield "|---|---|---|---|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def license_lines(name: str) -> Iterator[str]:
    """What the head of a card says of a licence; one that the hub does not know gets a name."""
    name = name.lower()
    yield f"license: {name if name in _KNOWN else 'other'}"
    if name not in _KNOWN:
        yield f"license_name: {json.dumps(name)}"


def word(value: Any) -> str:
    """A text by a stranger, in a table of Markdown: one line, without a sign of Markdown's or HTML's."""
    text = "" if value is None else printable(str(value))[:500]
    return re.sub(r"([\\|<>`\[\]])", r"\\\1", text)
