"""A cache as a data set: its verified files, a card with licences, and a preview, because the hub shows no HDF5."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kdtrain as kd
from kdtrain.cache.build.card import is_card, license_lines, make_card
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, maker, read_manifest
from kdtrain.errors import UsageError, printable
from kdtrain.files import parse_json
from kdtrain.plugins.push.options import LICENSES, PushConfig
from kdtrain.plugins.push.repository import CARD, Repository, Upload
from kdtrain.tables import markdown_text

log = logging.getLogger("kdtrain")

PREVIEW = "preview.parquet"
_ROWS, _POSITIONS, _ENTRIES = 100, 64, 5
"""Rows of the preview; of each, positions that are shown, and the best entries of a position."""
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


def is_one(folder: Path) -> bool:
    """Whether a folder holds a cache, finished or not."""
    return any((folder / name).exists() for name in (cache_format.MANIFEST, cache_format.SETTINGS, cache_format.SHARDS))


def plan(config: PushConfig, folder: Path, there: Repository, beside: Path) -> Upload:
    """What is published of a cache. beside: a folder for card and preview.

    UsageError: it is damaged or unfinished, or the repository holds another cache.
    """
    manifest = read_manifest(folder)
    other = _digest(there.read(cache_format.MANIFEST))
    if other == manifest.digest:
        log.info("%s holds this very cache already; its card and preview are written again", there.address)
    elif other is not None:
        raise UsageError(f"{there.address} holds another cache (digest {other[:12]}); name another data set")
    log.info("comparing every digest of %s", folder)
    cache = kd.Cache(folder)
    if problems := cache.verify():
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        again = maker(manifest)
        raise UsageError(f"{problems[0]}{more}: run kdtrain verify {folder} --repair, then {again} again")
    names = [cache_format.SETTINGS, cache_format.INDEX]
    names += [f"{cache_format.TOKENIZER}/{name}" for name in manifest.tokenizer_files]
    for split in manifest.splits.values():
        for shard in split["shards"]:
            names += [f"{cache_format.SHARDS}/{shard['name']}.{suffix}" for suffix in ("h5", "json")]
    files = {name: folder / name for name in [*names, cache_format.MANIFEST]}
    if _write_preview(cache, beside / PREVIEW):
        files[PREVIEW] = beside / PREVIEW
    if not there.keeps_card(lambda content: is_card(content.decode(errors="replace"))):
        head = _head(manifest, str(config.license_outputs), PREVIEW in files)
        words = [f"- {of}: {markdown_text(config.licenses[name])}" for name, of in LICENSES.items()]
        card = make_card(manifest, str(there.address), head=head, more=["", "## Licences", "", *words])
        (beside / CARD).write_text(card, encoding="utf-8")
        files[CARD] = beside / CARD
    return Upload(files, f"Cache {manifest.digest[:12]}", {"cache": str(folder), "digest": manifest.digest})


def _digest(content: bytes | None) -> str | None:
    """The digest of the cache that a repository holds by its manifest; None: it holds none."""
    if content is None:
        return None
    try:
        record = parse_json(content.decode())
        found = record.get("digest") if isinstance(record, dict) else None
    except ValueError:
        found = None
    return found if isinstance(found, str) else "unknown"


def _head(manifest: Manifest, outputs: str, preview: bool) -> Iterator[str]:
    """What the hub reads of a card. outputs: the licence of the data set."""
    teacher = str((manifest.settings.teacher or {}).get("spec"))
    yield "tags: [teacher-logits, knowledge-distillation, kdtrain]"
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", teacher, re.ASCII):
        yield f"base_model: {json.dumps(teacher)}"
    yield from license_lines(outputs)
    rows = sum(split["sequences"] for split in manifest.splits.values())
    yield f"size_categories: [{json.dumps(next((name for most, name in _SIZES if rows < most), 'n>10M'))}]"
    if preview:
        yield f"configs: [{{config_name: preview, data_files: {PREVIEW}}}]"


def _write_preview(cache: "kd.Cache", path: Path) -> bool:
    """Write the preview, a row a sequence, with its text, the label's log p and the best entries. False: it cannot."""
    from kdtrain.models.tokenizer import load_tokenizer

    try:
        import datasets
    except ImportError:
        log.warning("no preview, which needs datasets: pip install 'kdtrain[data]'")
        return False
    try:
        tokenizer = load_tokenizer(str(cache.folder / cache_format.TOKENIZER))
    except UsageError as error:
        log.warning("no text in the preview: %s", error)
        tokenizer = None
    reader = cache[next(iter(cache))]
    rows = [_row(reader[number], number, tokenizer) for number in range(min(_ROWS, len(reader)))]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return True


def _row(item: dict[str, Any], number: int, tokenizer: Any) -> dict[str, Any]:
    def text(ids: list[int]) -> str:
        known = [each for each in ids if tokenizer is not None and 0 <= each < len(tokenizer)]
        return printable(tokenizer.decode(known)) if known else " ".join(map(str, ids))

    row: dict[str, Any] = {"sequence": number, "text": text(item["tokens"].tolist()[: _POSITIONS + 1])}
    if "label_logprob" not in item:
        return row
    row["label_logprob"] = [round(each, 4) for each in item["label_logprob"][:_POSITIONS].tolist()]
    if "ids" in item:
        ids, logprobs = item["ids"][:_POSITIONS, :_ENTRIES], item["logprobs"][:_POSITIONS, :_ENTRIES]
    else:
        logprobs, ids = item["logprobs"][:_POSITIONS].float().topk(min(_ENTRIES, item["logprobs"].shape[-1]))
    vocabulary = int(item["vocabulary"][0])
    row["best"] = [
        ", ".join(f"{text([token])!r} {number:.2f}" for token, number in zip(*each, strict=True) if token < vocabulary)
        for each in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return row
