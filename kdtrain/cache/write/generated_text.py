"""The text that a teacher wrote into a cache's shards: its digest, and why each answer ended.

A row of such a cache is a prompt, which is no label of the loss, the teacher's tokens, which are, and filler. Its last
label shows why it ended: `stop` at an end token, which the teacher wrote, `length` where its room ended.

Shapes: n rows, T positions.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Sidecar
from kdtrain.cache.read.shard import Shard, shard_errors

_ROWS = 64  # read at once


def finish_reasons(tokens_nT1: np.ndarray, loss_mask_nT: np.ndarray, ends: Sequence[int]) -> list[str | None]:
    """Return `stop` or `length` for each row; None if nothing counts, as in a row with a non-finite logit.

    tokens_nT1: [n, T + 1]. loss_mask_nT: bool [n, T]. ends: the manifest's `end_tokens`.
    """
    length = loss_mask_nT.shape[1]
    last_n = length - loss_mask_nT[:, ::-1].argmax(1)
    last_tokens = tokens_nT1[np.arange(len(tokens_nT1)), last_n].tolist()
    labels = loss_mask_nT.sum(1).tolist()
    reasons: list[str | None] = []
    for number, token in zip(labels, last_tokens, strict=True):
        if number:
            reasons.append("stop" if token in ends else "length")
        else:
            reasons.append(None)
    return reasons


def read_written(
    folder: Path, settings: CacheSettings, sidecars: Mapping[str, Sequence[Sidecar]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the SHA-256 of all tokens by split, and `generated` of the manifest: labels, and rows by their end."""
    digests = {}
    found = {}
    ends = settings.end_tokens
    for split, records in sidecars.items():
        sha = hashlib.sha256()
        counts = {"stop": 0, "length": 0, "tokens": 0}
        for record in records:
            path = cache_format.shard_path(folder, record["name"])
            with shard_errors(path), closing(Shard(path, settings.codec)) as shard:
                for start in range(0, record["sequences"], _ROWS):
                    text = shard.text(np.arange(start, min(start + _ROWS, record["sequences"])))
                    sha.update(np.ascontiguousarray(text["tokens"], dtype="<u4").tobytes())
                    mask_nT = text["loss_mask"] == 1
                    counts["tokens"] += int(mask_nT.sum())
                    for reason in filter(None, finish_reasons(text["tokens"], mask_nT, ends)):
                        counts[reason] += 1
        digests[split] = sha.hexdigest()
        found[split] = counts
    return digests, found
