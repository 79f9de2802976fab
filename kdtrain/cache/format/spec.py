"""What a codec keeps of a distribution: the numbers of `codec`, which encodes and decodes, without its torch."""

import re
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

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
MOST_POINTS = 2**20
"""Points of the finest grid that holds the points of a cache: more would not be exact in fp64."""
_GRID = re.compile(rf"{SAMPLING}(?:\+([0-9]{{1,6}})/([0-9]{{1,6}}))?")


def grid_name(offset: Fraction) -> str:
    """`sampling` of a grid that lies `offset` beside the first one; the inverse of `grid_offset`."""
    return f"{SAMPLING}+{offset.numerator}/{offset.denominator}" if offset else SAMPLING


def grid_offset(sampling: str | None) -> Fraction | None:
    """By how much a grid of samples lies beside the first one; None: `sampling` names no grid."""
    found = _GRID.fullmatch(sampling or "")
    if found is None or (found[2] and not 0 < int(found[1]) < int(found[2])):
        return None
    return Fraction(int(found[1]), int(found[2])) if found[2] else Fraction(0)


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """What is kept of a distribution. ValueError: impossible numbers; the message names the option."""

    kind: str
    """`sparse`, `dense` or `tokens`."""
    vocab_size: int
    """Rows of the teacher's output head (padding included)."""
    top_k: int = 0
    """Most likely entries, kept exactly."""
    num_samples: int = 0
    """Samples from the rest of the vocabulary, 0 to 255."""
    knots: tuple[float, ...] = ()
    """The values of beta at which the tail is kept, descending, 1.0 among them; empty: the default for `sparse`, which
    is 1.0 alone without a top-k."""

    def __post_init__(self) -> None:
        if self.kind not in ("sparse", "dense", "tokens"):
            raise ValueError(f"codec '{self.kind}' is unknown; use sparse, dense or tokens")
        if not 2 <= self.vocab_size < ABSENT:
            raise ValueError(f"a vocabulary of {self.vocab_size} cannot be cached; it must be 2 to {ABSENT - 1}")
        if self.kind != "sparse":
            if self.top_k or self.num_samples or self.knots:
                raise ValueError(
                    f"codec '{self.kind}' has no top-k, samples or knots; leave --top-k and --num-samples out"
                )
            return
        knots = self.knots or ((1.0,) if not self.top_k else FINE_KNOTS if self.top_k < SMALL_TOP_K else KNOTS)
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
    def columns(self) -> int:
        """K: entries kept a token."""
        return self.top_k + self.num_samples

    @property
    def counts_only(self) -> bool:
        """True where the log-probabilities of entries are not kept, only how often each was drawn."""
        return len(self.knots) == 1

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
        """A plain record of the fields."""
        return {**asdict(self), "knots": list(self.knots)}
