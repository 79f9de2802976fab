"""What the controller of adaptive quantisation is told, and what it answers."""

from dataclasses import dataclass

RULES = ("loss", "gap", "spike", "schedule")
"""What may send a run to its fallback (`controller`)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the controller is told to do."""

    quantized: str
    """Name of the quantised mode: fp8, mxfp8 or mxfp4."""
    fallback: str = "bf16"
    """Name of the high mode."""
    rules: tuple[str, ...] = ("gap",)
    """Of `RULES`."""
    threshold: float = 0.1
    """In nats: of the loss under rule `loss`; under rule `gap` the most that its own threshold may be."""
    window: int = 5
    """Steps in a window."""
    snapshot_every: int = 1
    """Steps between snapshots within a window."""
    snapshot_to_disk: bool = False
    """Whether snapshots are checkpoints."""
    keep: int = 2
    """States that the recovery buffer holds, of each kind."""
    probe_every: int = 100
    """Steps between measurements of the gap."""
    min_dwell: int = 10
    """Least steps between a switch and the next one that a rule asks for."""
    max_switches: int = 20
    """Switches after which the run stays in the fallback."""
    decay_start: int | None = None
    """Under rule `schedule`: the last step before the decay."""


@dataclass(frozen=True)
class Say:
    """Write a line to the log."""

    line: str


@dataclass(frozen=True)
class Save:
    """Publish a checkpoint under a name."""

    name: str


@dataclass(frozen=True)
class Snapshot:
    """Keep the state of a step in memory, and at most `keep` of them."""

    step: int
    keep: int


@dataclass(frozen=True)
class Forget:
    """Drop the snapshots in memory: the checkpoint that follows takes their place."""


@dataclass(frozen=True)
class SwitchTo:
    """Run the next step in another mode."""

    mode: str


@dataclass(frozen=True)
class Recover:
    """Go back to the newest good state of the recovery buffer."""


Action = Say | Save | Snapshot | Forget | SwitchTo | Recover
