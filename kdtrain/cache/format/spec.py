"""What the codecs keep of a distribution, and which data sets a shard holds, without the torch of `codec`.

A shard is one HDF5 file with n whole sequences. Each data set is [n, ...], chunked one sequence a chunk
(`dense`: a block of positions; masks: many sequences), shuffled by bytes or bits, compressed with zstd and
checksummed (fletcher32). The lists and weights that decode a sparse shard are in its group `dictionary`.
Data that were never written read as NaN or as the largest value of the dtype, never as 0. `index.h5` holds
virtual data sets over all shards of a split, and links to their dictionaries. Files are written for the earliest HDF5
that can read them, without variable-length types. Another codec is a row of `CODECS` and one of `codec.ARITHMETIC`.

What it gives up: one chunk a sequence takes a few per cent more space than larger chunks; in return a sequence is one
read.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from kdtrain.cache.format.names import FORMAT_VERSION, WRITTEN
from kdtrain.errors import UsageError

_DENSE_CHUNK_BYTES = 2**21
_BLOCK = 2**17  # numbers in a block of the bit shuffle at most: 256 KiB
_FLAGS = 2**15  # positions in a chunk of loss_mask and segments, which take a few bytes a sequence
KNOTS = (1.5, 1.0, 0.7, 0.45, 0.25)
"""Default knots of beta: T from 2/3 to 4."""
FINE_KNOTS = (1.5, 1.22, 1.0, 0.84, 0.7, 0.56, 0.45, 0.34, 0.25)
"""The default below `SMALL_TOP_K` kept entries: likely entries are then in the tail, whose curve bends sharply."""
MAX_KNOTS = 64
SMALL_TOP_K = 4
ABSENT = 2**32 - 1
"""The id of an absent entry in targets, above every vocabulary; in arrays it is the largest id of the dtype."""
WIDTH = 64
"""C: candidates that a shard's dictionary lists for a token."""

SAMPLING = "grid"
"""How samples are drawn (`codec.draw_points`), as settings name it; a refinement adds its offset: grid+1/50."""
MIXTURE = "mixture"
"""`sampling` of samples of several grids, one behind the other."""
MOST_POINTS = 2**20
"""Points of the finest grid that holds the points of a cache: more would not be exact in fp64."""


STEP_VALUE, STEP_SLOPE, STEP_SPREAD = 0.008, 0.04, 0.05
"""Steps of L, of dL/dbeta, and of mean and deviation, nats."""
FINENESS = 192
"""Codes of log p a unit of log(1 - log p)."""


def steps(knots: tuple[float, ...]) -> np.ndarray:
    """Return [M], the step of each number, in stored order."""
    number = len(knots)
    return np.array([STEP_VALUE] * number + [STEP_SLOPE] * number + [STEP_SPREAD] * 2, np.float32)


@dataclass(frozen=True)
class DatasetLayout:
    """The layout of one data set of the format, without its leading dimension n."""

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


@dataclass(frozen=True, kw_only=True)
class CodecKind:
    """The properties of a codec that the format needs; its arithmetic is in `codec.ARITHMETIC`."""

    contents: Callable[["CodecSpec"], str]
    """What is kept of each distribution, in words."""
    layout: Callable[["CodecSpec", int], dict[str, DatasetLayout]]
    """The data sets of its own, by name, of sequences of a length."""
    taught: bool = True
    """Whether it keeps anything of a teacher."""
    coded: bool = False
    """Whether it keeps entries and a tail, as codes that the dictionary of a shard decodes (`compression`)."""


def _entries(spec: "CodecSpec") -> str:
    found = []
    if spec.top_k:
        found.append(f"the {spec.top_k:,} most likely entries")
    if spec.num_samples:
        found.append(f"{spec.num_samples:,} samples")
    return " and ".join(found)


def _sparse_layout(spec: "CodecSpec", length: int) -> dict[str, DatasetLayout]:
    ids = "places in the dictionary of the top-k, most likely first, and of drawn entries; 0: absent"
    codes = "K rows: code of log p of ids, less that of the entry before; D: how often the drawn entries were drawn; "
    if spec.counts_only:
        ids = "places in the dictionary of drawn entries by count, less the place before where counts are equal"
        codes = "D rows: how often the drawn entries were drawn, as what the entry before has more; "
    codes += (
        "2 G + 2: tail and spread, distance from the prediction in steps; 1: code of log p of the label, 0 in the top-k"
    )
    rows = spec.entry_rows + 2 * len(spec.knots) + 3
    return {
        "ids": DatasetLayout((spec.columns, length), spec.code_dtype, (spec.columns, length), ids, bits=False),
        "numbers": DatasetLayout((rows, length), np.dtype(np.uint16), (rows, length), codes),
    }


def _dense_layout(spec: "CodecSpec", length: int) -> dict[str, DatasetLayout]:
    half = np.dtype(np.float16)
    block = max(1, min(length, _DENSE_CHUNK_BYTES // (2 * spec.vocab_size)))
    label, every = (f"teacher log p of {what} at T = 1, nats" for what in ("the label", "every entry"))
    return {
        "label_logprob": DatasetLayout((length,), half, (length,), label),
        "logprobs": DatasetLayout((length, spec.vocab_size), half, (block, spec.vocab_size), every),
    }


CODECS = {
    "sparse": CodecKind(contents=_entries, layout=_sparse_layout, coded=True),
    "dense": CodecKind(contents=lambda spec: "all log-probabilities (dense)", layout=_dense_layout),
    "tokens": CodecKind(contents=lambda spec: "bare tokens, no teacher", layout=lambda spec, length: {}, taught=False),
}
"""Every codec by its name."""


_RANGE: dict[str, Any] = {
    "min": 1.0,
    "max": 1.0,
    "worst_error": 0.0,
    "rule": "log-probabilities from elsewhere: the tail is one bucket, right at T = 1 only",
}
"""The temperature range of a cache that was built from log-probabilities (`codec.keep`)."""
_SAMPLED_RANGE = _RANGE | {"rule": "samples alone: right at T = 1 only"}


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """How a distribution is kept. ValueError: impossible numbers; the message names the option."""

    POLICY: ClassVar[str] = "policy_logprob"
    """The data set of the log p of each label by the student that wrote it (`written`)."""

    kind: str
    """One of `CODECS`."""
    vocab_size: int
    """Rows of the teacher's output head (padding included)."""
    top_k: int = 0
    """Most likely entries, kept exactly."""
    num_samples: int = 0
    """Samples from the rest of the vocabulary, 0 to 255."""
    knots: tuple[float, ...] = ()
    """The values of beta at which the tail is kept, descending, 1.0 among them; empty: the default for `sparse`, which
    is 1.0 alone without a top-k."""
    written: bool = False
    """Whether a student wrote the text, and its log p of each label is kept beside the teacher's."""

    @classmethod
    def requested(cls, given: Any, vocab_size: int) -> "CodecSpec":
        """Return the codec that the options name (`config.CodecConfig`). UsageError: it is impossible."""
        try:
            if given.dense:
                return cls(kind="dense", vocab_size=vocab_size)
            return cls(kind="sparse", vocab_size=vocab_size, top_k=given.top_k, num_samples=given.samples)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def __post_init__(self) -> None:
        if self.kind not in CODECS:
            raise ValueError(f"codec '{self.kind}' is unknown; use {', '.join([*CODECS][:-1])} or {[*CODECS][-1]}")
        if not 2 <= self.vocab_size < ABSENT:
            raise ValueError(f"a vocabulary of {self.vocab_size} cannot be cached; it must be 2 to {ABSENT - 1}")
        if not self.coded:
            if self.top_k or self.num_samples or self.knots:
                raise ValueError(
                    f"codec '{self.kind}' has no top-k, samples or knots; leave --top-k and --num-samples out"
                )
            return
        usual: tuple[float, ...] = (1.0,)
        if self.top_k:
            usual = FINE_KNOTS if self.top_k < SMALL_TOP_K else KNOTS
        knots = self.knots or usual
        object.__setattr__(self, "knots", tuple(float(knot) for knot in knots))
        if not 0 <= self.top_k <= self.vocab_size:
            raise ValueError(f"--top-k {self.top_k} is outside 0 to {self.vocab_size}, the vocabulary")
        if not 0 <= self.num_samples <= 255:
            raise ValueError(f"--num-samples {self.num_samples} is outside 0 to 255")
        if self.top_k + self.num_samples == 0:
            raise ValueError("--top-k 0 with --num-samples 0 keeps nothing; set one of them, or use --dense")
        descending = all(a > b > 0 for a, b in zip(self.knots, self.knots[1:], strict=False))
        least = 2 if self.top_k else 1
        if not least <= len(self.knots) <= MAX_KNOTS or not descending or 1.0 not in self.knots:
            raise ValueError(
                f"knots {self.knots[:8]} must be {least} to {MAX_KNOTS}, descending, above 0, with 1.0 among them"
            )

    @property
    def taught(self) -> bool:
        """True if any numbers of a teacher are kept."""
        return CODECS[self.kind].taught

    @property
    def coded(self) -> bool:
        """True if entries and a tail are kept, as codes (`CodecKind.coded`)."""
        return CODECS[self.kind].coded

    @property
    def columns(self) -> int:
        """K: entries kept a token."""
        return self.top_k + self.num_samples

    @property
    def counts_only(self) -> bool:
        """True where the log-probabilities of entries are not kept, only how often each was drawn."""
        return len(self.knots) == 1

    @property
    def sampling(self) -> str | None:
        """How its samples are drawn, as settings name it; None without samples."""
        return SAMPLING if self.num_samples else None

    @property
    def stated_range(self) -> dict[str, Any]:
        """The temperature range of a cache whose teacher is not available to measure it."""
        return _SAMPLED_RANGE if self.num_samples else _RANGE

    @property
    def entry_rows(self) -> int:
        """Rows of numbers about the entries: log p of each, and how often the samples were drawn."""
        return self.num_samples + (0 if self.counts_only else self.columns)

    @property
    def id_dtype(self) -> np.dtype:
        """uint16 while its largest value, which marks an absent entry, is not an id; else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 65_535 else np.uint32)

    @property
    def code_dtype(self) -> np.dtype:
        """Dtype of the stored ids: places in the dictionary's lists, and every literal id, stay below its largest."""
        return np.dtype(np.uint16 if 2 * self.vocab_size + 256 < 2**16 else np.uint32)

    @property
    def absent(self) -> int:
        """The id of an absent entry outside targets."""
        return int(np.iinfo(self.id_dtype).max)

    def to_json(self) -> dict[str, Any]:
        """Return a plain record of the fields, without `written` where no student wrote the text."""
        record = {**asdict(self), "knots": list(self.knots)}
        if not self.written:
            del record["written"]
        return record


_POLICY = "log p of the label at T = 1 of the student that wrote it, nats; 0 where the label does not count"


def datasets(spec: CodecSpec, seq_len: int) -> dict[str, DatasetLayout]:
    """Return every data set of a shard by name."""
    segment = next(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32) if seq_len <= np.iinfo(t).max)  # one is free
    flags = "1: the label of this position counts in the loss; 2: the teacher had no numbers"
    document = "number of the document within its sequence"
    several = max(1, _FLAGS // seq_len)
    row, text = (seq_len,), (seq_len + 1,)
    return {
        "tokens": DatasetLayout(text, spec.id_dtype, text, "tokens[t + 1] is the label of position t", bits=False),
        "loss_mask": DatasetLayout(row, np.dtype(np.uint8), row, flags, several),
        "segments": DatasetLayout(row, segment, row, document, several),
        **CODECS[spec.kind].layout(spec, seq_len),
        **({spec.POLICY: DatasetLayout(row, np.dtype(np.float32), row, _POLICY)} if spec.written else {}),
    }


def dictionary_sets(spec: CodecSpec, rows: int, common: int) -> dict[str, DatasetLayout]:
    """Return the data sets of the group `dictionary` by name, one chunk each; `rows` of candidates, `common` entries.

    Their shapes are complete: no n precedes them.
    """
    numbers = 2 * len(spec.knots) + 2
    features = 7 if spec.top_k else 1
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "context_row": ((spec.vocab_size,), np.min_scalar_type(max(1, rows - 1))),
        "candidates": ((rows, WIDTH), spec.id_dtype),
        "common": ((common,), spec.id_dtype),
        "tail_weights": ((numbers, features + numbers), np.dtype(np.float32)),
    }
    return {name: DatasetLayout(shape, dtype, shape, "", bits=False) for name, (shape, dtype) in shapes.items()}


def attributes(spec: CodecSpec, seq_len: int, split: str) -> dict[str, Any]:
    """Return the attributes that a shard and a group of the index have in common."""
    codec = {"codec": spec.kind, "top_k": spec.top_k, "num_samples": spec.num_samples, "vocab_size": spec.vocab_size}
    version = WRITTEN if spec.written else FORMAT_VERSION
    return {"format_version": version, "split": split, "seq_len": seq_len, **codec, "knots": spec.knots}
