"""Which document belongs to train, validation or test when the source does not say: pure functions of a hash.

A document's rank is a number in [0, 1) made of its SHA-256. Validation is the ranks from 0.90 to 0.95, test
those from 0.95; a split that the source has itself is not withheld, and its ranks stay in train. A rank
depends on nothing but the document, so a growing source never moves one to another split. The price is that
few documents may all fall into train: then `assign` takes exact shares of the hash order, and fewer than
`FEW` texts are cut at line ends (`cut`).
"""

import hashlib
from collections.abc import Sequence

SPLITS = ("train", "validation", "test")
# Above this many documents the chance that a hash leaves a split empty is below 1e-44.
SMALL = 2000

# Below this many, one document is more than the share of a split.
FEW = 20

_WITHHELD_FROM = {"validation": 0.90, "test": 0.95}
_SHARE = 0.05


def rank(text: str) -> float:
    """A number in [0, 1), uniform over texts, that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48


def by_hash(document_rank: float, withheld: Sequence[str]) -> str:
    """The split of a document of this rank, where `withheld` names the splits that are taken from train."""
    for split in withheld:
        if _WITHHELD_FROM[split] <= document_rank < _WITHHELD_FROM[split] + _SHARE:
            return split
    return "train"


def assign(ranks: Sequence[float], withheld: Sequence[str]) -> list[str]:
    """The split of each document: by its hash, or by its place in the hash order if that leaves a split
    empty.

    Three documents or more leave no split empty.
    """
    assigned = [by_hash(document_rank, withheld) for document_rank in ranks]
    if set(assigned) >= {"train", *withheld}:
        return assigned
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    share = max(1, round(_SHARE * len(ranks)))
    assigned = ["train"] * len(ranks)
    for split in reversed(withheld):
        for place in (order.pop() for _ in range(min(share, len(order)))):
            assigned[place] = split
    return assigned


def cut(lines: Sequence[str], withheld: Sequence[str], split: str) -> range:
    """The numbers, from 0, of those lines of a text that belong to `split`: train first, then each withheld
    split.

    Every split gets at least one line; where there are too few for that, train gets them all.
    """
    share = max(1, round(_SHARE * len(lines)))
    train = len(lines) - share * len(withheld)
    if train < 1:
        return range(len(lines) if split == "train" else 0)
    if split == "train":
        return range(train)
    start = train + share * withheld.index(split)
    return range(start, start + share)
