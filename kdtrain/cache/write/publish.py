"""Finishing a cache: the records of its shards, the index, a test vector, and the manifest that makes it whole."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch import Tensor

from kdtrain import __version__
from kdtrain.cache.format import hdf5_writing
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Manifest, Sidecar, SplitRecord, read_manifest, read_sidecar
from kdtrain.cache.format.spec import ABSENT, CodecSpec
from kdtrain.cache.read.shard import Shard, batch_of, shard_errors
from kdtrain.cache.tools.facts import write_card
from kdtrain.cache.write.folder import file_digests
from kdtrain.cache.write.shard_writer import is_of
from kdtrain.errors import RunError
from kdtrain.files import file_digest, publish_json, published
from kdtrain.objective.targets import Targets


def read_sidecars(
    folder: Path, settings: CacheSettings, splits: Mapping[str, Sequence[str]]
) -> dict[str, list[Sidecar]]:
    """Read the records of all shards. splits: the digest of the rows of each shard.

    RunError: one is missing, damaged, or of other data.
    """
    found: dict[str, list[Sidecar]] = {split: [] for split in splits}
    for split, digests in splits.items():
        for number, digest in enumerate(digests):
            name = cache_format.shard_name(split, number)
            try:
                record = read_sidecar(folder, name)
            except (OSError, ValueError) as error:
                path = cache_format.sidecar_path(folder, name)
                raise RunError(f"{path} is missing or damaged ({error}); run the same command again") from error
            if not is_of(record, digest, settings):
                raise RunError(f"the shard {name} of {folder} is of other data; run the same command again")
            found[split].append(record)
    return found


def publish_manifest(
    folder: Path,
    settings: CacheSettings,
    sidecars: Mapping[str, list[Sidecar]],
    tokens: Mapping[str, str],
    fidelity: dict[str, Any] | None,
    temperature_range: Any,
    stated: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the index and the card, then the manifest; return the manifest as it is read again.

    tokens: SHA-256 of all tokens, by split.
    stated: more keys of the manifest: `parents`, `origin`, `weights_cost`, `capture`, `generated`.
    """
    index = folder / cache_format.INDEX
    length = settings.seq_len
    pieces = settings.is_in_pieces
    with published(index, "cache.index") as temporary:
        parts = {split: [(r["name"], r["sequences"]) for r in each] for split, each in sidecars.items()}
        hdf5_writing.write_index(temporary, settings.codec, length, parts, pieces=pieces)
    records = [record for each in sidecars.values() for record in each]
    tokens_stored = sum(record["sequences"] for record in records) * length
    sizes = {name: sum(each["stored"][name] for each in records) / tokens_stored for name in records[0]["stored"]}
    total = sum(record["bytes"] for record in records) / tokens_stored
    libraries = ("torch", "transformers", "numpy", "h5py", "hdf5plugin")
    first = next(iter(sidecars))
    shard = sidecars[first][0]
    manifest = Manifest(
        settings=settings,
        splits={split: _summary(each, tokens[split], pieces) for split, each in sidecars.items()},
        fidelity=fidelity,
        temperature_range=temperature_range,
        bytes_per_token={**sizes, "overhead": total - sum(sizes.values()), "total": total},
        index_sha256=file_digest(index),
        tokenizer_files=file_digests(folder / cache_format.TOKENIZER),
        versions={
            "kdtrain": __version__,
            **{name: importlib.metadata.version(name) for name in libraries},
            "hdf5": h5py.version.hdf5_version,
        },
        test_vector=make_vector(folder, settings.codec, first, shard["name"], shard["sequences"]),
        **(stated or {}),
    )
    record = manifest.to_json()
    write_card(folder, replace(manifest, digest=record["digest"]))
    publish_json(folder / cache_format.MANIFEST, record, "cache.manifest")
    return read_manifest(folder)


def _summary(records: list[Sidecar], tokens: str, pieces: bool) -> SplitRecord:
    stated = ("name", "sequences", "sha256", "bytes", *(["first_sequence"] if pieces else []))
    return {
        "sequences": sum(record["sequences"] for record in records),
        "broken": sum(len(record["broken"]) for record in records),
        "tokens_sha256": tokens,
        "shards": [
            {key: record[key] for key in stated}  # type: ignore[literal-required, misc]
            for record in records
        ],
    }


# The test vector -----------------------------------------------------------------------------------------------------

ENTRIES = 64
"""Most entries of a position."""


def make_vector(folder: Path, spec: CodecSpec, split: str, shard: str, sequences: int) -> dict[str, Any] | None:
    """Make the test vector of a cache whose first shard has the name `shard`; None if that holds no targets.

    A few positions of one sequence, decoded, by which a reader can prove itself that was written from cache/README.md:
    it is right if it gets these numbers. They are what kdtrain decodes, rounded to six decimals, a pure function of the
    first shard: the same for any number of ranks, and after a resume.

    split: of that shard. sequences: how many it has.

    Keys: split, sequence, positions [P], tokens [P] as [read, label], and with a teacher label_logprob [P] and, sparse,
    ids [P], logprobs [P] (not of samples alone) or counts [P] (of samples), tail [P] (L at the knots, then dL/dbeta),
    logit_mean and logit_std [P]. Absent entries are left out. `dense`: ids and logprobs of the most likely entries.

    RunError: the shard cannot be read.
    """
    path = cache_format.shard_path(folder, shard)
    with shard_errors(path), closing(Shard(path, spec)) as opened:
        for row in range(sequences):
            stored = opened.read(np.array([row]))
            if (stored.arrays["loss_mask"] == cache_format.BROKEN).any():
                continue
            batch = batch_of([stored], spec)
            tokens = batch.tokens[0].tolist()
            length = batch.loss_mask.shape[1]
            shown = sorted({0, min(1, length - 1), length // 2, length - 1})
            places = {"positions": shown, "tokens": [tokens[at : at + 2] for at in shown]}
            found = {} if batch.targets is None else _targets(batch.targets, shown, spec)
            return {"split": split, "sequence": row, **places, **found}
    return None


def _targets(targets: Targets, shown: list[int], spec: CodecSpec) -> dict[str, Any]:
    picked = {name: each[shown] for name, each in vars(targets).items() if isinstance(each, Tensor)}
    found: dict[str, Any] = {"label_logprob": _rounded(picked["label_logprob"])}
    if not spec.coded:
        values, ids = picked["logprobs"].float().sort(stable=True, dim=-1, descending=True)
        return found | {"ids": ids[:, :ENTRIES].tolist(), "logprobs": [_rounded(row[:ENTRIES]) for row in values]}
    there = [[k for k, each in enumerate(row) if each != ABSENT][:ENTRIES] for row in picked["ids"].tolist()]

    def entries(name: str) -> list[Tensor]:
        return [row[kept] for row, kept in zip(picked[name], there, strict=True)]

    found["ids"] = [row.tolist() for row in entries("ids")]
    if not spec.counts_only:
        found["logprobs"] = [_rounded(row) for row in entries("logprobs")]
    if spec.num_samples:
        found["counts"] = [row.int().tolist() for row in entries("counts")]
    found["tail"] = [_rounded(row) for row in picked["tail"]]
    return found | {name: _rounded(picked[name]) for name in ("logit_mean", "logit_std")}


def _rounded(values: Tensor) -> list[float]:
    return [round(each, 6) + 0.0 for each in values.double().tolist()]


def agrees(stated: Any, found: Any) -> bool:
    """Return True if two test vectors are equal, decimals to 1e-4."""
    if isinstance(stated, dict) and isinstance(found, dict):
        return stated.keys() == found.keys() and all(agrees(stated[key], found[key]) for key in found)
    if isinstance(stated, list) and isinstance(found, list):
        return len(stated) == len(found) and all(map(agrees, stated, found))
    if isinstance(stated, float) and isinstance(found, float):
        return abs(stated - found) <= 1e-4 * max(1.0, abs(found))
    return type(stated) is type(found) and bool(stated == found)
