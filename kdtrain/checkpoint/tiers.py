"""The tiers of checkpoints: their names, which one is newest, and which ones are kept. Pure: no disk access.

Rolling checkpoints are `step-00000250`, epoch checkpoints `epoch-0001`. Those saved by the clock, at steps that differ
from run to run, are `clock-00000123`, and one is kept. Those of the recovery buffer of adaptive quantisation are
`window_end_2_iter200` and `window_1_iter100_quantized`, and special ones have any other name (`interrupted-00000123`,
`rollback_1_iter120`, `switch_to_bf16_iter150`). The state in which gradients exploded, `exploded-00000123`, is kept
apart, to be looked at: it is never the newest, no link points at it, and retention does not remove it. Hidden names,
the links `latest` and `best`, and set-aside checkpoints (`step-00000250.left-1`, `step-00000250.damaged-1`) do not
count.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from kdtrain.errors import as_whole

SUFFIX = ".safetensors"
"""Of the files that hold a checkpoint's tensors."""

Tier = Literal["clock", "epoch", "exploded", "rolling", "special", "window"]

LINKS = ("latest", "best")
_NUMBERED: dict[Tier, tuple[str, int]] = {
    **{"rolling": ("step", 8), "epoch": ("epoch", 4)},
    **{"clock": ("clock", 8), "exploded": ("exploded", 8)},
}
"""By tier: how a name begins, and its least digits."""
_RANK: dict[Tier, int] = {"clock": 0, "epoch": 0, "exploded": 0, "rolling": 1, "special": 2, "window": 2}


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint for retention: its name, its place in the run, and whether it is whole."""

    name: str
    step: int
    rollbacks: int = 0
    valid: bool = True


@dataclass(frozen=True)
class Keep:
    """How many valid checkpoints of each tier are kept, at least one; the recovery buffer keeps its own."""

    rolling: int = 10
    epoch: int = 5
    special: int = 3

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            as_whole(count, name, 1)


def name_of(tier: Tier, number: int) -> str:
    """Return the name of a checkpoint of a numbered tier: of its step, or of the end of an epoch, counted from 1."""
    prefix, digits = _NUMBERED[tier]
    return f"{prefix}-{number:0{digits}d}"


def is_apart(name: str) -> bool:
    """Return True if a checkpoint of this name is kept for inspection only."""
    return tier(name) == "exploded"


def is_name(name: str) -> bool:
    """Return True if a checkpoint may have this name."""
    odd = not name or name.startswith(".") or not {"/", "\0"}.isdisjoint(name)
    # the last: as `files.set_aside` ends a name
    return not (odd or name in LINKS or re.search(r"\.(?:left|damaged|old|replaced)-\d+$", name))


def is_planned(name: str) -> bool:
    """Return True if an uninterrupted run, on any machine, also has this checkpoint."""
    return not name.startswith("interrupted-") and tier(name) not in ("clock", "exploded")


def tier(name: str) -> Tier:
    """Return the tier of a name."""
    for kind, (prefix, digits) in _NUMBERED.items():
        if re.fullmatch(rf"{prefix}-\d{{{digits},}}", name):
            return kind
    window = re.fullmatch(r"window_(?:end_\d+_iter\d+|\d+_iter\d+_[a-z0-9]+)", name)
    return "window" if window else "special"


def step_in(name: str) -> int:
    """Return the step parsed from a name, for a checkpoint with an unreadable manifest; -1 if it has none."""
    found = re.search(r"^(?:step-|interrupted-|clock-|exploded-)(\d+)|iter(\d+)", name)
    return int(found[1] or found[2]) if found else -1


def ordered(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    """Return `entries`, oldest first: by step, by the number of rollbacks before it, then special ones last."""
    return sorted(entries, key=lambda each: (each.step, each.rollbacks, _RANK[tier(each.name)], each.name))


def removable(entries: Iterable[CheckpointEntry], keep: Keep, protected: Collection[str] = ()) -> list[str]:
    """Return the names that retention no longer needs, oldest first.

    The newest valid ones of each tier stay, as many as `keep` states, the newest valid one of all tiers, and the
    `protected`. Damaged ones stay for inspection and do not count.
    """
    valid = [each for each in ordered(entries) if each.valid]
    kept = {*protected, *(each.name for each in valid[-1:])}
    counts: list[tuple[Tier, int]] = [("rolling", keep.rolling), ("epoch", keep.epoch), ("special", keep.special)]
    for kind, count in [*counts, ("clock", 1)]:
        kept |= {each.name for each in [each for each in valid if tier(each.name) == kind][-count:]}
    return [each.name for each in valid if each.name not in kept]
