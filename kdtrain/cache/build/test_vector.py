"""The test vector in a manifest: a few positions of one sequence, decoded, by which a reader can prove itself.

A reader that was written from cache/README.md is right if it gets these numbers. They are what kdtrain decodes, rounded
to six decimals, a pure function of the first shard: the same for any number of ranks, and after a resume.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import ABSENT, CodecSpec
from kdtrain.cache.read.shard import Shard, batch_of, shard_errors
from kdtrain.objective.targets import Targets

ENTRIES = 64
"""Most entries of a position."""


def positions(seq_len: int) -> list[int]:
    """The positions that are shown: the first two, one in the middle, the last."""
    return sorted({0, min(1, seq_len - 1), seq_len // 2, seq_len - 1})


def make_vector(folder: Path, spec: CodecSpec, split: str, shard: str, sequences: int) -> dict[str, Any] | None:
    """The test vector of a cache whose first shard has the name `shard`; None if that holds no targets.

    split: of that shard. sequences: how many it has.

    Keys: split, sequence, positions [P], tokens [P] as [read, label], and with a teacher label_logprob [P] and, sparse,
    ids [P], logprobs [P] (not of samples alone) or counts [P] (of samples), tail [P] (L at the knots, then dL/dbeta),
    logit_mean and logit_std [P]. Absent entries are left out. `dense`: ids and logprobs of the most likely entries.

    RunError: the shard cannot be read.
    """
    path = cache_format.shard_path(folder, shard)
    with shard_errors(path), closing(Shard(path, spec)) as opened:
        for row in range(sequences):
            stored = opened.read(np.array([row]), checked=False)
            if (stored.arrays["loss_mask"] == cache_format.BROKEN).any():
                continue
            batch = batch_of([stored], spec)
            tokens, shown = batch.tokens[0].tolist(), positions(batch.loss_mask.shape[1])
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
    """Whether two test vectors are equal, decimals to 1e-4."""
    if isinstance(stated, dict) and isinstance(found, dict):
        return stated.keys() == found.keys() and all(agrees(stated[key], found[key]) for key in found)
    if isinstance(stated, list) and isinstance(found, list):
        return len(stated) == len(found) and all(map(agrees, stated, found))
    if isinstance(stated, float) and isinstance(found, float):
        return abs(stated - found) <= 1e-4 * max(1.0, abs(found))
    return type(stated) is type(found) and bool(stated == found)
