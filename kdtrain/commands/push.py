"""`kdtrain push`: publishes a cache as a data set on the hub, with a card and a preview.

All files go up before one commit names them, the manifest among them, so that nobody ever reads half a cache. What the
hub holds already, by its SHA-256, is not sent again: an upload that broke off resumes. Sent is what the format names
and the digests vouch for, nothing else that lies in the folder.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

from kdtrain.cache.build.card import CARD, LICENSES, is_card, make_card
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Manifest, maker, read_manifest
from kdtrain.cache.hub import make_repository, upload
from kdtrain.config import PushConfig
from kdtrain.errors import UsageError, printable
from kdtrain.files import MEDIUM, parse_json, refuse_links
from kdtrain.monitor.progress import setup_logging
from kdtrain.net.address import Address, parse_address
from kdtrain.net.hub import api, ask, fetch_file
from kdtrain.tables import show

log = logging.getLogger("kdtrain")

PREVIEW = "preview.parquet"
_ROWS, _POSITIONS, _ENTRIES = 100, 64, 5
"""Rows of the preview; of each, positions that are shown, and the best entries of a position."""


def main(config: PushConfig) -> int:
    """Verify the cache, upload it, and print where it is.

    UsageError: it is damaged or unfinished, the address is none on the hub or holds something else, or no permission.
    RunError: the hub does not answer.
    """
    setup_logging()
    address = parse_address(config.to)
    if address is None or address.repository is None or address.revision != "main":
        raise UsageError(f"{config.to}: a cache is pushed to a data set on the hub; give hf:ORG/NAME")
    if parse_address(config.cache) is not None:
        raise UsageError(f"{config.cache} is not a folder; a cache is pushed from the folder in which it was built")
    manifest = read_manifest(config.cache)
    refuse_links(config.cache)
    hub = _there_first(config, address, manifest)
    from kdtrain.cache.tools.verify import verify_cache  # with h5py

    log.info("comparing every digest of %s", config.cache)
    if problems := verify_cache(config.cache):
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        again = maker(manifest)
        raise UsageError(f"{problems[0]}{more}: run kdtrain verify {config.cache} --repair, then {again} again")
    commit = _push(config, address, manifest, hub)
    result = {"cache": str(config.cache), "to": str(address), "digest": manifest.digest, "commit": commit}
    show(f"pushed {config.cache}", result, config.json)
    return 0


def _there_first(config: PushConfig, address: Address, manifest: Manifest) -> Any:
    """The hub, on which the data set is now, before minutes go into digests.

    UsageError: no token, no permission, or another cache is there.
    """
    make_repository(address, str(address.repository), "dataset", config.private)
    hub = api()
    there = ask(address, lambda: _there(hub, address, manifest))
    if there == manifest.digest:
        log.info("%s holds this very cache already; its card and preview are written again", address)
    elif there is not None:
        raise UsageError(f"{address} holds another cache (digest {there[:12]}); name another data set")
    return hub


def _push(config: PushConfig, address: Address, manifest: Manifest, hub: Any) -> str:
    """Upload, and return the commit."""
    with tempfile.TemporaryDirectory(prefix="kdtrain-") as folder:
        names = [cache_format.SETTINGS, cache_format.INDEX]
        names += [f"{cache_format.TOKENIZER}/{name}" for name in manifest.tokenizer_files]
        for split in manifest.splits.values():
            for shard in split["shards"]:
                names += [f"{cache_format.SHARDS}/{shard['name']}.{suffix}" for suffix in ("h5", "json")]
        sources = {name: config.cache / name for name in [*names, cache_format.MANIFEST]}  # the manifest last
        previewed = _write_preview(config.cache, Path(folder) / PREVIEW)
        if previewed:
            sources[PREVIEW] = Path(folder) / PREVIEW
        text = ask(address, lambda: _content(hub, address, CARD))
        if text is None or is_card(text):
            licenses = {each: str(getattr(config, f"license_{each}")) for each in LICENSES}
            card = make_card(manifest, licenses, str(address), preview=previewed)
            (Path(folder) / CARD).write_text(card, encoding="utf-8")
            sources[CARD] = Path(folder) / CARD
        else:
            log.warning("%s has a %s that kdtrain did not write; it stays as it is", address, CARD)
        log.info("uploading %d files of %s to %s", len(sources), config.cache, address)
        return upload(address, str(address.repository), "dataset", sources, f"Cache {manifest.digest[:12]}")


def _there(hub: Any, address: Address, manifest: Manifest) -> str | None:
    """The digest of the cache that the data set holds; None if it holds none."""
    text = _content(hub, address, cache_format.MANIFEST)
    if text is None:
        return None
    try:
        record = parse_json(text)
        digest = record.get("digest") if isinstance(record, dict) else None
    except ValueError:
        digest = None
    return digest if isinstance(digest, str) else "unknown"


def _content(hub: Any, address: Address, name: str) -> str | None:
    """The text of a small file of the data set; None if there is none."""
    if not hub.get_paths_info(str(address.repository), [name], repo_type="dataset"):
        return None
    return fetch_file(address, name, most=MEDIUM).read_text("utf-8", errors="replace")


def _write_preview(folder: Path, path: Path) -> bool:
    """Write the preview: a row is a sequence, with its text, the label's log p and the best entries. False: it cannot.

    The hub shows the first rows of a parquet file; of HDF5 it shows nothing.
    """
    from kdtrain.cache.read.reader import Cache
    from kdtrain.models.hub import ask_tokenizer

    try:
        import datasets
    except ImportError:
        log.warning("no preview, which needs datasets: pip install 'kdtrain[data]'")
        return False
    try:
        tokenizer = ask_tokenizer(str(folder / cache_format.TOKENIZER), trust_remote_code=False)
    except UsageError as error:
        log.warning("no text in the preview: %s", error)
        tokenizer = None
    cache = Cache(folder)
    split = next(iter(cache))
    reader, rows = cache[split], []
    for number in range(min(_ROWS, len(reader))):
        rows.append(_row(reader[number], number, tokenizer))
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return True


def _row(item: dict[str, Any], number: int, tokenizer: Any) -> dict[str, Any]:
    def text(ids: list[int]) -> str:
        known = [each for each in ids if tokenizer is not None and 0 <= each < len(tokenizer)]
        return printable(tokenizer.decode(known)) if known else " ".join(map(str, ids))

    tokens = item["tokens"].tolist()
    row: dict[str, Any] = {"sequence": number, "text": text(tokens[: _POSITIONS + 1])}
    if "label_logprob" not in item:
        return row
    row["label_logprob"] = [round(each, 4) for each in item["label_logprob"][:_POSITIONS].tolist()]
    if "ids" in item:
        ids, logprobs = item["ids"][:_POSITIONS, :_ENTRIES], item["logprobs"][:_POSITIONS, :_ENTRIES]
    else:
        logprobs, ids = item["logprobs"][:_POSITIONS].float().topk(min(_ENTRIES, item["logprobs"].shape[-1]))
    vocabulary = int(item["vocabulary"][0])
    row["best"] = [
        ", ".join(
            f"{text([token])!r} {logprob:.2f}" for token, logprob in zip(*each, strict=True) if token < vocabulary
        )
        for each in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return row
