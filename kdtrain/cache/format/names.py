"""The cache format, versions 3 and 4: which files a cache has, and which data sets a shard holds; `hdf5` writes it.

A shard is one HDF5 file with n whole sequences. Each data set is [n, ...], chunked one sequence a chunk
(`dense`: a block of positions; masks: many sequences), shuffled by bytes or bits, compressed with zstd and
checksummed (fletcher32). The lists and weights that decode a sparse shard are in its group `dictionary`.
Data that were never written read as NaN or as the largest value of the dtype, never as 0. `index.h5` holds
virtual data sets over all shards of a split, and links to their dictionaries. Files are written for the earliest HDF5
that can read them, without variable-length types; cache/README.md is the specification.

What it gives up: one chunk a sequence takes a few per cent more space than larger chunks; in return a sequence is one
read.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.format.folder import CELLS as CELLS
from kdtrain.cache.format.folder import MANIFEST as MANIFEST
from kdtrain.cache.format.folder import SETTINGS as SETTINGS
from kdtrain.cache.format.folder import SHARDS as SHARDS
from kdtrain.cache.format.folder import VIEW as VIEW
from kdtrain.cache.format.spec import WIDTH, CodecSpec

FORMAT_VERSION = 3
"""Of every shard, and of a cache whose shards, all but the last, hold `sequences_per_shard` sequences each."""
PIECES = 4
"""The format version of a cache of shards of any sizes, made for other caches: appended by merge, or cut by subset."""
SPLITS = ("train", "validation", "test")
INDEX = "index.h5"
TOKENIZER = "tokenizer"
DICTIONARY = "dictionary"
BROKEN = 2
"""`loss_mask` of a sequence for which the teacher's logits were non-finite."""
_DENSE_CHUNK_BYTES = 2**21
_BLOCK = 2**17  # numbers in a block of the bit shuffle at most: 256 KiB
_FLAGS = 2**15  # positions in a chunk of loss_mask and segments, which take a few bytes a sequence


@dataclass(frozen=True)
class DatasetLayout:
    """One data set of the format: everything after its leading n."""

    shape: tuple[int, ...]
    """Without n."""
    dtype: np.dtype
    chunk: tuple[int, ...]
    """Without its sequences."""
    about: str
    """What it holds: the attribute `about` in the file."""
    sequences: int = 1
    """Sequences a chunk."""
    bits: bool = True
    """True: shuffled by bits; False: by bytes, which suits numbers that use all of their low byte."""

    @property
    def fill(self) -> Any:
        """The value of data that were never written: NaN, or the largest of the dtype."""
        return np.nan if self.dtype.kind == "f" else np.iinfo(self.dtype).max

    @property
    def block(self) -> int:
        """Numbers that are shuffled together by bits: a whole chunk, up to `_BLOCK`."""
        # Blocks of the usual 4,096 numbers cost 2 % more bytes and twice the time to read.
        return min(_BLOCK, -(-self.sequences * math.prod(self.chunk) // 8) * 8)


SHARD_NAME = re.compile(r"[a-z]+-[0-9]{5,}")
"""Names of shards. Names in a manifest become paths, and a file with another name is not kdtrain's."""


def is_shard_file(name: str) -> bool:
    """True if a file of this name in `shards/` is a shard or a sidecar."""
    stem, _, suffix = name.partition(".")
    return SHARD_NAME.fullmatch(stem) is not None and suffix in ("h5", "json")


def shard_name(split: str, number: int) -> str:
    """Name of a shard without its suffix, as in the manifest."""
    return f"{split}-{number:05d}"


def shard_path(folder: Path, name: str) -> Path:
    """The HDF5 file of the shard `name`."""
    return folder / SHARDS / f"{name}.h5"


def sidecar_path(folder: Path, name: str) -> Path:
    """The JSON record of the shard `name`."""
    return folder / SHARDS / f"{name}.json"


def segment_dtype(seq_len: int) -> np.dtype:
    """The smallest unsigned type for document numbers 0 .. seq_len - 1 whose largest value stays free."""
    return next(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32) if seq_len <= np.iinfo(t).max)


def datasets(spec: CodecSpec, seq_len: int) -> dict[str, DatasetLayout]:
    """Every data set of a shard by name."""
    length, half = seq_len, np.dtype(np.float16)
    found: dict[str, DatasetLayout] = {}

    def add(name: str, dtype: np.dtype, shape: tuple[int, ...], about: str, **more: Any) -> None:
        found[name] = DatasetLayout(shape, dtype, shape, about, **more)

    add("tokens", spec.id_dtype, (length + 1,), "tokens[t + 1] is the label of position t", bits=False)
    flags = {"sequences": max(1, _FLAGS // length)}
    about = "1: the label of this position counts in the loss; 2: the teacher had no numbers"
    add("loss_mask", np.dtype(np.uint8), (length,), about, **flags)
    add("segments", segment_dtype(seq_len), (length,), "number of the document within its sequence", **flags)
    if spec.kind == "tokens":
        return found
    if spec.kind == "dense":
        add("label_logprob", half, (length,), "teacher log p of the label at T = 1, nats")
        block = max(1, min(length, _DENSE_CHUNK_BYTES // (2 * spec.vocab_size)))
        whole, about = (length, spec.vocab_size), "teacher log p of every entry at T = 1, nats"
        found["logprobs"] = DatasetLayout(whole, half, (block, spec.vocab_size), about)
        return found
    about = "places in the dictionary of the top-k, most likely first, and of drawn entries; 0: absent"
    if spec.counts_only:
        about = "places in the dictionary of drawn entries by count, less the place before where counts are equal"
    add("ids", spec.code_dtype, (spec.columns, length), about, bits=False)
    about = "K rows: code of log p of ids, less that of the entry before; D: how often the drawn entries were drawn; "
    if spec.counts_only:
        about = "D rows: how often the drawn entries were drawn, as what the entry before has more; "
    about += (
        "2 G + 2: tail and spread, distance from the prediction in steps; 1: code of log p of the label, 0 in the top-k"
    )
    add("numbers", np.dtype(np.uint16), (spec.entry_rows + 2 * len(spec.knots) + 3, length), about)
    return found


def dictionary_sets(spec: CodecSpec, rows: int, common: int) -> dict[str, DatasetLayout]:
    """Every data set of the group `dictionary` by name, each one chunk, for `rows` of candidates and `common` entries.

    Their shapes are complete: no n precedes them.
    """
    numbers, features = 2 * len(spec.knots) + 2, 7 if spec.top_k else 1
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "context_row": ((spec.vocab_size,), np.min_scalar_type(max(1, rows - 1))),
        "candidates": ((rows, WIDTH), spec.id_dtype),
        "common": ((common,), spec.id_dtype),
        "tail_weights": ((numbers, features + numbers), np.dtype(np.float32)),
    }
    return {name: DatasetLayout(shape, dtype, shape, "", bits=False) for name, (shape, dtype) in shapes.items()}


def attributes(spec: CodecSpec, seq_len: int, split: str) -> dict[str, Any]:
    """The attributes that a shard and a group of the index have in common."""
    codec = {"codec": spec.kind, "top_k": spec.top_k, "num_samples": spec.num_samples, "vocab_size": spec.vocab_size}
    return {"format_version": FORMAT_VERSION, "split": split, "seq_len": seq_len, **codec, "knots": spec.knots}
