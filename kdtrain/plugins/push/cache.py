"""A cache as a data set: its verified files, a card with licences, and a preview, because the hub shows no HDF5."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.constants import REPOCARD_NAME as CARD

import kdtrain as kd
from kdtrain.cache.format.manifest import Manifest
from kdtrain.cache.tools.facts import is_card, make_card
from kdtrain.errors import UsageError, log, printable
from kdtrain.files import read_json
from kdtrain.net.hub import Repository
from kdtrain.plugins.push import LICENSES, PushConfig
from kdtrain.plugins.push.model_card import license_lines

PREVIEW = "preview.parquet"
MOST = 2**25
"""Bytes of a record in the repository, or beside a student, at most."""
Fetch = Callable[[str], Path | None]
"""The path of a file of the repository -> the file, here; None: it has none."""
_ROWS, _POSITIONS, _ENTRIES = 100, 64, 5
"""Rows of the preview; of each, positions that are shown, and the best entries of a position."""
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


class Upload(NamedTuple):
    """The files of one upload, and what belongs to them."""

    files: Mapping[str, Path]
    """By their paths in the repository."""
    message: str
    result: dict[str, object]
    """What is shown of it."""
    owns: Callable[[bytes], bool]
    """Whether kdtrain wrote a card; that of others stays."""
    remove: Collection[str] = ()
    """Paths in the repository of files that go in the same commit."""


def plan_cache(config: PushConfig, folder: Path, address: Repository, fetch: Fetch, beside: Path) -> Upload:
    """Plan the upload of a cache. fetch: fetches a file of the repository. beside: a folder for card and preview.

    UsageError: it is damaged or unfinished, or the repository holds another cache.
    """
    cache = kd.Cache(folder)
    manifest = cache.manifest
    if (found := fetch(manifest.files[-1])) is not None:
        try:
            other = read_json(found, dict[str, Any], MOST).get("digest")
        except (OSError, ValueError):
            other = "unknown"
        if other != manifest.digest:
            raise UsageError(f"{address} holds another cache (digest {str(other)[:12]}); name another data set")
        log.info("%s holds this very cache already; its card and preview are written again", address)
    log.info("comparing every digest of %s", folder)
    if problems := cache.verify():
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise UsageError(f"{problems[0]}{more}: run kdtrain verify {folder} --repair, then {manifest.maker} again")
    files = {name: folder / name for name in manifest.files}
    if _write_preview(cache, beside / PREVIEW):
        files[PREVIEW] = beside / PREVIEW
    head = _head(manifest, str(config.license_outputs), PREVIEW in files)
    licences = {of: config.licenses[name] for name, of in LICENSES.items()}
    files[CARD] = beside / CARD
    card = make_card(manifest, str(address), head=head, licences=licences)
    files[CARD].write_text(card, encoding="utf-8")
    result: dict[str, object] = {"cache": str(folder), "digest": manifest.digest}
    message = f"Cache {manifest.digest[:12]}"
    return Upload(files, message, result, lambda card: is_card(card.decode(errors="replace")))


def _head(manifest: Manifest, outputs: str, preview: bool) -> Iterator[str]:
    """Yield the lines of a card that the hub reads. outputs: the licence of the data set."""
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
    """Write the preview, a row a sequence, with its text, the label's log p and the best entries.

    Return False if it cannot be written.
    """
    from kdtrain.models.tokenizer import load_tokenizer

    try:
        import datasets
    except ImportError:
        log.warning("no preview, which needs datasets: pip install 'kdtrain[data]'")
        return False
    try:
        tokenizer: Any = load_tokenizer(cache.tokenizer)
    except UsageError as error:
        log.warning("no text in the preview: %s", error)
        tokenizer = None

    def text(ids: list[int]) -> str:
        known = [each for each in ids if tokenizer is not None and 0 <= each < len(tokenizer)]
        return printable(tokenizer.decode(known)) if known else " ".join(map(str, ids))

    def row(item: dict[str, Any], number: int) -> dict[str, Any]:
        found: dict[str, Any] = {"sequence": number, "text": text(item["tokens"].tolist()[: _POSITIONS + 1])}
        if "label_logprob" not in item:
            return found
        found["label_logprob"] = [round(each, 4) for each in item["label_logprob"][:_POSITIONS].tolist()]
        if "ids" in item:
            ids, logprobs = item["ids"][:_POSITIONS, :_ENTRIES], item["logprobs"][:_POSITIONS, :_ENTRIES]
        else:
            logprobs, ids = item["logprobs"][:_POSITIONS].float().topk(min(_ENTRIES, item["logprobs"].shape[-1]))
        places = zip(ids.tolist(), logprobs.tolist(), strict=True)
        vocabulary = int(item["vocabulary"][0])
        found["best"] = [
            ", ".join(
                f"{text([token])!r} {value:.2f}" for token, value in zip(*each, strict=True) if token < vocabulary
            )
            for each in places
        ]
        return found

    reader = cache[next(iter(cache))]
    datasets.disable_progress_bars()
    rows = [row(reader[number], number) for number in range(min(_ROWS, len(reader)))]
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return True
