"""What `kdtrain import` does; it registers the built-in layouts."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import kdtrain.plugins.layouts.distillkit
import kdtrain.plugins.layouts.topk  # noqa: F401
from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.tools.facts import show_cache
from kdtrain.cache.tools.self_check import Look
from kdtrain.data.rows import readable
from kdtrain.errors import UsageError, log
from kdtrain.files import file_digest, json_digest
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import ChatTokenizer, load_tokenizer, tokenizer_digest
from kdtrain.monitor.progress import bar, setup_logging
from kdtrain.outputs import OutFolder
from kdtrain.plugins.layouts.build import build, sample, try_sample
from kdtrain.plugins.layouts.layout import Layout
from kdtrain.plugins.layouts.options import LAYOUTS, ImportConfig
from kdtrain.plugins.layouts.rows import COUNTS, Cutter
from kdtrain.plugins.layouts.source import SourceFile, open_source
from kdtrain.tables import duration, number

_TOKENS_PER_SHARD = 2**18
_MAKERS_WORD = ("dtype", "revision", "attention", "temperature")
"""What no layout states: an option each, or unknown."""


def main(config: ImportConfig) -> int:
    """Build the cache, or what an interrupted import left to build, look at it, and print what it is.

    Returns 1 if the finished cache does not look right.

    Raises:
        UsageError: source and options do not fit together, or the entries are not about the next token.
        RunError: the disk is full or cannot be written; published shards stay.
    """
    started = time.monotonic()
    setup_logging()
    OutFolder(config.out).refuse()
    layout: Layout = LAYOUTS.get(config.layout)(config)
    spec = ModelSpec.read(config.tokenizer, "teachers")
    tokenizer = load_tokenizer(spec)
    files = open_source(config.source, layout)
    first = next((record for file in files for _, record in file.records()), None)
    if first is None:
        raise UsageError(f"{files[0].path}: has no rows")
    seq_len = config.seq_len or len(first[layout.tokens]) - 1
    if seq_len < 2:
        raise UsageError(f"{files[0].path}: its first row has {seq_len + 1} tokens; give --seq-len")
    top_k = config.top_k or layout.top_k
    if top_k is None:
        named = (record[name].lengths for _, record in sample(files) for name in layout.entries)
        top_k = min((number for lengths in named for number in lengths[lengths > 0].tolist()), default=None)
        if top_k is None:
            raise UsageError(f"{files[0].path}: a sample of its rows has no entries at all")
    settings = _settings(config, layout, tokenizer, files, seq_len, top_k, layout.segments in first)
    pad = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else 0
    cutter = Cutter(layout, settings.codec, seq_len, config.shift, settings.document_mask, pad)
    alignment = try_sample(files, cutter)
    verdict = "aligned" if alignment.shift == 0 else "a sample cannot tell whether the entries are aligned"
    (log.info if alignment.shift == 0 else log.warning)("%s: %s: %s", config.source, verdict, alignment)
    listed = list[dict[str, Any]]()
    root = Path(config.source)
    with bar("digests of the source", len(files), unit="files") as shown:
        for path in (each.path for each in files):
            with readable(str(path)):
                name = path.relative_to(root).as_posix() if root.is_dir() else path.name
                listed.append({"name": name, "bytes": path.stat().st_size, "sha256": file_digest(path)})
            shown.update(len(listed))
    # Or a resume would keep the shards of an earlier state of the same files.
    settings = replace(settings, data={**settings.data, "files_sha256": json_digest(listed)})
    origin = {
        "layout": config.layout,
        "source": root.name,
        **layout.facts,
        "shift": config.shift,
        "unknown": [name for name in _MAKERS_WORD if getattr(config, name) is None],
        "alignment": alignment.to_json(),
        "files": listed,
    }
    saved = ChatTokenizer.of(tokenizer, spec)
    with bar("import", sum(map(len, files)), unit="rows") as shown:
        manifest = build(config.out, settings, files, cutter, origin, tokenizer=saved, progress=shown.update)
    seen = Look.at(LocalCache(config.out))
    findings = [] if seen is None else [*seen.findings]
    for text in findings:
        log.error("%s does not look right: %s", config.out, text)
    _show(config, manifest, findings, time.monotonic() - started)
    return 1 if findings else 0


def _settings(
    config: ImportConfig,
    layout: Layout,
    tokenizer: Any,
    files: list[SourceFile],
    seq_len: int,
    top_k: int,
    document_mask: bool,
) -> CacheSettings:
    vocab_size = config.vocab_size or layout.vocab_size or len(tokenizer)
    if layout.vocab_size is not None and vocab_size < layout.vocab_size:
        raise UsageError(f"--vocab-size {vocab_size} is less than the {layout.vocab_size} of the source; leave it out")
    if vocab_size < len(tokenizer):
        raise UsageError(
            f"the tokenizer has {len(tokenizer):,} entries and the source {vocab_size:,}; give the teacher's own, or "
            f"--vocab-size"
        )
    if layout.top_k is not None and top_k > layout.top_k:
        raise UsageError(f"--top-k {top_k} is more than the {layout.top_k} entries of the source")
    try:
        codec = CodecSpec(kind="sparse", top_k=top_k, vocab_size=vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    text = {
        "source": Path(config.source).name,
        "layout": config.layout,
        **layout.facts,
        "columns": sorted(layout.columns),
        "shift": config.shift,
        "files": len(files),
        "bytes": sum(each.path.stat().st_size for each in files),
    }
    return CacheSettings(
        codec=codec,
        seq_len=seq_len,
        tokenizer_size=len(tokenizer),
        tokenizer_digest=tokenizer_digest(tokenizer),
        teacher={"spec": config.teacher, **{name: getattr(config, name) or "unknown" for name in _MAKERS_WORD}},
        data=text,
        document_mask=document_mask,
        sequences_per_shard=config.sequences_per_shard or min(512, max(1, _TOKENS_PER_SHARD // seq_len)),
    )


_FACTS = ("kept_mass", "kl_at_most", "label_loss", "labels_kept", "shift", "alignment", "unknown")
"""What of the manifest's `origin` is shown."""


def _show(config: ImportConfig, manifest: Manifest, findings: list[str], seconds: float) -> None:
    origin = manifest.origin or {}
    facts = {name: origin.get(name) for name in (*COUNTS, *_FACTS)}
    aligned = (facts["alignment"] or {}).get("shift") == 0
    lines = [
        f"{number(facts['rows'])} rows of {config.layout}, {number(facts['rows_left_out'])} left out; at --shift "
        f"{config.shift} {'aligned' if aligned else 'a sample cannot tell whether they are aligned'}",
        f"kept mass {number(facts['kept_mass'])}, KL to the whole teacher at most {number(facts['kl_at_most'])} nats; "
        f"label's loss {number(facts['label_loss'])}",
        *([f"not known of the teacher: {', '.join(map(str, facts['unknown']))}"] if facts["unknown"] else []),
        f"took {duration(seconds)}",
        *(f"does not look right: {each}" for each in findings),
    ]
    show_cache(config.out, manifest, config.json, lines, **facts, findings=findings, seconds=round(seconds, 1))
