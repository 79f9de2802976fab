"""When to train quantised and when not: adaptive quantisation ("time-resume") as a pure state machine.

The controller observes each step's loss, reduced over all ranks, and (under rule `gap`) the cost of quantisation on a
probe. It returns actions, which the trainer carries out in order. It has no clock, no disk and no model, and
`state_dict` is its whole memory: ranks agree without communication, and a resumed run decides as an uninterrupted one.
`Policy` holds its settings; `Adaptive` connects it to the student's switch.

Several rules may apply at once; any of them switches to the fallback, and all must be calm to switch back:
- `loss`: the loss against the threshold. Above it on three steps in a row: fallback. At most 80 % of it for a whole
  window: back. An absolute threshold fits a loss near zero; a cross-entropy of 3 nats is never below 0.1, which is then
  logged once.
- `gap`: the same with (loss quantised - loss high) on one micro-batch, in nats: the cost of quantisation itself.
  Measured every `probe_every` steps, and at each step while a decision is near. Its threshold is its own median + 6
  times its own noise, 1.4826 * MAD of the last 32 clean measurements and at least a thousandth of the loss: a constant
  cost is no reason to leave a format, a growing one is. The absolute threshold applies as well, from the first
  measurement on, for a format that harms from the beginning.
- `spike`: the same with the loss against median + 6 * 1.4826 * MAD of the last 128 clean losses.
- `schedule`: high from the first step of the learning rate's decay to the end (arXiv 2509.25149, appendix D).

A non-finite loss switches to the fallback at once; after three in a row in the fallback the run goes back to the newest
good state in the recovery buffer. A state holds the weights after its step, which only a later step evaluates: it is
good once such a step was taken. `min_dwell` and `max_switches` limit flapping: once the switches are used up, the run
stays in the fallback. A checkpoint holds the decision that was made when it was written, not the one before it.
"""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from kdtrain.config.sections import QUANTIZED
from kdtrain.errors import UsageError, as_whole
from kdtrain.files import typed
from kdtrain.precision.modes import Position, Switch
from kdtrain.tables import MAD_FACTOR, median_and_mad

RULES = ("loss", "gap", "spike", "schedule")
"""What can switch a run to its fallback."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The settings of the controller.

    Raises:
        UsageError: a rule is unknown, or a number out of range.
    """

    quantized: str
    """Name of the quantised mode: fp8, mxfp8 or mxfp4."""
    fallback: str = "bf16"
    """Name of the high mode."""
    rules: tuple[str, ...] = ("gap",)
    """The rules that switch a run to its fallback: loss, gap, spike, schedule."""
    threshold: float = 0.1
    """In nats: of the loss under rule `loss`; the upper bound of the threshold under rule `gap`."""
    window: int = 5
    """Steps in a window."""
    snapshot_every: int = 1
    """Steps between snapshots within a window."""
    snapshot_to_disk: bool = False
    """True: snapshots are checkpoints; False: they stay in memory."""
    keep: int = 2
    """States of each kind in the recovery buffer; and the newest good checkpoint while none of them is evaluated."""
    probe_every: int = 100
    """Steps between measurements of the gap."""
    min_dwell: int = 10
    """Least number of steps between a switch and the next one by a rule."""
    max_switches: int = 20
    """Switches after which the run stays in the fallback."""
    decay_start: int | None = None
    """Under rule `schedule`: the last step before the decay."""

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple | list) or not {*self.rules} <= {*RULES}:
            raise UsageError(f"rules {self.rules!r} are not a tuple of {', '.join(RULES)}")
        if not 0 < self.threshold < math.inf:
            raise UsageError(f"threshold {self.threshold} is not a finite number above 0")
        least = {"window": 1, "snapshot_every": 1, "keep": 1, "probe_every": 1, "min_dwell": 0, "max_switches": 0}
        for name, bound in least.items():
            as_whole(getattr(self, name), name, bound)
        if self.quantized not in QUANTIZED:
            raise UsageError(f"quantized {self.quantized} is not one of {', '.join(QUANTIZED)}")


@dataclass(frozen=True)
class LogLine:
    """Write a line to the log."""

    line: str


@dataclass(frozen=True)
class Save:
    """Publish a checkpoint under a name."""

    name: str


@dataclass(frozen=True)
class Snapshot:
    """Keep the state of a step in memory, and at most `keep` such states."""

    step: int
    keep: int


@dataclass(frozen=True)
class DropSnapshots:
    """Drop the snapshots in memory: the checkpoint that follows replaces them."""


@dataclass(frozen=True)
class SwitchTo:
    """Run the next step in another mode."""

    mode: str


@dataclass(frozen=True)
class Recover:
    """Go back to the newest good state of the recovery buffer."""


Action = LogLine | Save | Snapshot | DropSnapshots | SwitchTo | Recover


PATIENCE = 3
"""Steps in a row above the threshold, or non-finite, that lead to an action."""
CALM_SHARE = 0.8
"""A value is calm if it is at most this share of the threshold."""
_SPIKE_WINDOW, _SPIKE_LEAST = 128, 16
_GAP_WINDOW, _GAP_LEAST = 32, 5
_WEIGHT_MOVES = 0.1
_LEAST_SPREAD = 1e-3
"""Share of the loss that counts as noise at least: else any rise of a value that hardly varies is a spike."""


@dataclass
class _Streaks:
    """Steps in a row for which a value has been above its threshold, and calm."""

    above: int = 0
    calm: int = 0

    def add(self, value: float, threshold: float, calm_below: float) -> None:
        self.above = self.above + 1 if value > threshold else 0
        self.calm = self.calm + 1 if value <= calm_below else 0


@dataclass
class _Memory:
    """The controller's memory, but for streaks and buffer."""

    is_quantized: bool = True
    last_switch: int | None = None
    switches: int = 0
    steps_quantized: int = 0
    finite: int = 0
    """Finite steps in a row."""
    broken: int = 0
    """Non-finite steps in a row, in the fallback."""
    windows_above: int | None = 0
    """Windows, from the first on, with all losses above the threshold of rule `loss`; None after one without, or once
    this is logged."""
    window_low: bool = False
    """True if any loss of this window was at most the threshold."""
    spent: bool = False
    """True once it is logged that no switches are left."""
    gaps: list[float] = field(default_factory=list)
    """The last measurements of the gap that were at most its threshold."""
    decay_from: int | None = None
    """The last step before a decay that began early."""
    taken: int = 0
    """The last step that was taken: its loss and its gradient were finite."""
    weight: float | None = None
    """Of the divergence in the losses since the window began, where it moves."""


class _State(TypedDict):
    memory: _Memory
    streaks: dict[str, _Streaks]
    clean: list[float]
    saved: list[tuple[str, bool]]


class PrecisionController:
    """Decides the mode of each next step by the rules of its `policy`.

    >>> controller = PrecisionController(Policy(quantized="fp8", rules=("loss",), threshold=5.0, window=2))
    >>> for step, loss in enumerate((4.0, 6.0, 6.0, 6.0), 1):
    ...     actions = controller.observe(step, loss)
    >>> controller.mode, controller.position
    ('bf16', 'high')
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._memory = _Memory()
        self._streaks = {rule: _Streaks() for rule in policy.rules if rule != "schedule"}
        self._clean: list[float] = []
        self._saved: list[tuple[str, bool]] = []
        if self._decays(0):
            self._memory.is_quantized = False

    @property
    def mode(self) -> str:
        """The mode of the next step."""
        return self.policy.quantized if self._memory.is_quantized else self.policy.fallback

    @property
    def position(self) -> Position:
        """Position of the layers' switch at the next step, if the fallback is the high format."""
        return "quantized" if self._memory.is_quantized else "high"

    @property
    def is_quantized(self) -> bool:
        """True if the next step is quantised."""
        return self._memory.is_quantized

    @property
    def switches(self) -> int:
        """Switches so far."""
        return self._memory.switches

    @property
    def steps_quantized(self) -> int:
        """Finished steps that were quantised."""
        return self._memory.steps_quantized

    def buffer_names(self) -> list[str]:
        """Return all checkpoints of the recovery buffer, oldest first; others of their kind are no longer needed."""
        return [name for name, _ in self._saved]

    def recovery_names(self) -> list[str]:
        """Return the checkpoints of the recovery buffer that hold a good state, newest first."""
        steps = {name: re.search(r"_iter(\d+)", name) for name, good in reversed(self._saved) if good}
        return [name for name, step in steps.items() if step is not None and self.evaluated(int(step[1]))]

    def evaluated(self, step: int) -> bool:
        """Return whether a step was taken from the weights after `step`: only that shows that they are not broken."""
        return step < self._memory.taken

    def spend(self, name: str) -> None:
        """Take a checkpoint out of the recovery buffer, because the run was restored from it."""
        self._saved = [each for each in self._saved if each[0] != name]

    def begin_decay(self, step: int | None) -> None:
        """Let the learning rate decay early, from the step after `step` on; None: as planned."""
        self._memory.decay_from = step

    def judged(self, metrics: Mapping[str, float]) -> float:
        """Return the loss of a step to observe, nats per token: where alpha moves, one of a fixed weight of `kd_T1`.

        The weight stays until alpha has moved by `_WEIGHT_MOVES`; then it is alpha, and losses before no longer count.
        """
        memory = self._memory
        alpha = metrics.get("alpha")
        if alpha is None:
            return metrics["loss"]
        if memory.weight is None or abs(alpha - memory.weight) >= _WEIGHT_MOVES:
            memory.weight = alpha
            self._clean = []
            for each in self._streaks.values():
                each.above = each.calm = 0
        return (1 - memory.weight) * metrics["ce"] + memory.weight * metrics["kd_T1"]

    def wants_gap(self, step: int) -> bool:
        """Return whether to measure the gap at `step`: it is due, or a decision is near and allowed."""
        if "gap" not in self._streaks or self._decays(step) or (not self.is_quantized and self._is_spent()):
            return False
        gap = self._streaks["gap"]
        near = gap.above if self.is_quantized else gap.calm
        return step % self.policy.probe_every == 0 or (near > 0 and self._has_dwelt(step))

    def observe(self, step: int, loss: float, gap: float | None = None, broken: str | None = None) -> list[Action]:
        """Return the actions after step `step` (1, 2, ...).

        loss: the step's loss, reduced over all ranks. gap: loss quantised minus loss high, if it was measured.
        broken: what was non-finite, the loss or the gradient, if the step was not taken; `loss` is then its value.

        The checkpoint of a switch comes last: it holds the snapshot of its own step, and its memory names the
        checkpoint of a window that ends there, which a run that is killed between the two must find when it goes back.
        """
        before = self.mode
        actions = self._judge(step, loss, gap) if broken is None else self._broken(step, broken, loss)
        if self.mode != before:
            taken = broken is None and math.isfinite(loss)
            held = step if taken else step - 1
            actions += [Save(f"switch_to_{self.mode}_iter{held}"), SwitchTo(self.mode)]
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return the whole memory, as plain JSON values."""
        return {
            "memory": asdict(self._memory),
            "streaks": {rule: asdict(each) for rule, each in self._streaks.items()},
            "clean": list(self._clean),
            "saved": [list(each) for each in self._saved],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        known = typed(state, _State)
        self._memory = known["memory"]
        # A state of another run may have other rules.
        self._streaks = {rule: known["streaks"].get(rule, _Streaks()) for rule in self._streaks}
        self._clean = known["clean"]
        self._saved = known["saved"]

    def forget_buffer(self) -> None:
        """Empty the recovery buffer: its checkpoints are another run's."""
        self._saved = []

    def _judge(self, step: int, loss: float, gap: float | None) -> list[Action]:
        """Do what `observe` does but for a switch's checkpoint; set the new mode in memory before anything is saved."""
        memory = self._memory
        if not math.isfinite(loss):
            return self._broken(step, "Loss", loss)
        memory.broken = 0
        memory.finite += 1
        memory.taken = step
        memory.steps_quantized += memory.is_quantized
        if gap is not None and not math.isfinite(gap) and self.is_quantized:
            return self._broken(step, "Gap", gap) + self._keep(step, good=False)
        thresholds = self._update(loss, gap)
        good = not any(each.above for each in self._streaks.values())
        actions = self._complain(step, loss)
        actions += self._decide(step, loss, gap, thresholds)
        return actions + self._keep(step, good)

    def _broken(self, step: int, what: str, value: float) -> list[Action]:
        """React to a non-finite value: switch to the fallback at once; in the fallback, go back to a good state."""
        self._memory.finite = 0
        if self.is_quantized:
            line = f"[AdaptiveQuantization] {what} {value:.4f} is not finite, switching to {self.policy.fallback}"
            return self._switch(step, line)
        if what == "Gap":
            return []
        self._memory.broken += 1
        return [] if self._memory.broken % PATIENCE else [Recover()]

    def _update(self, loss: float, gap: float | None) -> dict[str, float]:
        """Count each rule's value, and return its threshold."""
        # Too few values give no bound: of the gap the policy's threshold holds alone, and no loss is a spike.
        clean, gaps, most = self._clean, self._memory.gaps, self.policy.threshold
        bounds = {
            "loss": most,
            "gap": min(most, _bound(gaps, loss)) if len(gaps) >= _GAP_LEAST else most,
            "spike": _bound(clean, statistics.median(clean)) if len(clean) >= _SPIKE_LEAST else math.inf,
        }
        thresholds = {}
        for rule, streaks in self._streaks.items():
            value = gap if rule == "gap" else loss
            threshold = thresholds[rule] = bounds[rule]
            if value is not None:
                calm_below = threshold if rule == "spike" else CALM_SHARE * threshold
                streaks.add(value, threshold, calm_below)
        if "spike" in self._streaks and loss <= thresholds["spike"]:
            self._clean = [*self._clean, loss][-_SPIKE_WINDOW:]
        if gap is not None and "gap" in self._streaks and gap <= thresholds["gap"]:
            self._memory.gaps = [*self._memory.gaps, gap][-_GAP_WINDOW:]
        return thresholds

    def _decide(self, step: int, loss: float, gap: float | None, thresholds: dict[str, float]) -> list[Action]:
        if self._decays(step):
            line = f"[AdaptiveQuantization] Decay begins after step {step}, switching to {self.policy.fallback}"
            return self._switch(step, line) if self.is_quantized else []
        if not self._has_dwelt(step):
            return []
        if not self.is_quantized:
            return self._come_back(step, loss, gap)
        for rule, streaks in self._streaks.items():
            value = gap if rule == "gap" else loss
            if streaks.above >= PATIENCE and value is not None:
                what = "Gap" if rule == "gap" else self._loss_name()
                bound = f"exceeds threshold {thresholds[rule]:.4f}, switching to {self.policy.fallback}"
                return self._switch(step, f"[AdaptiveQuantization] {what} {value:.4f} {bound}")
        return []

    def _come_back(self, step: int, loss: float, gap: float | None) -> list[Action]:
        calm = all(each.calm >= self.policy.window for each in self._streaks.values())
        if not calm or self._memory.finite < self.policy.window or ("gap" in self._streaks and gap is None):
            return []
        if self._is_spent():
            logged = self._memory.spent
            self._memory.spent = True
            line = f"[AdaptiveQuantization] {self.switches} switches are used up, staying in {self.policy.fallback}"
            return [] if logged else [LogLine(line)]
        what, value = ("Gap", gap) if "gap" in self._streaks else (self._loss_name(), loss)
        stable = f"is stable, switching back to {self.policy.quantized}"
        return self._switch(step, f"[AdaptiveQuantization] {what} {value:.4f} {stable}")

    def _loss_name(self) -> str:
        """Name the loss that the rules judge, for a line: where alpha moves it is not the loss of a step's line."""
        weight = self._memory.weight
        return "Loss" if weight is None else f"Loss at alpha {weight:.2f}"

    def _switch(self, step: int, line: str) -> list[Action]:
        """Switch, and log `line`."""
        memory = self._memory
        memory.is_quantized = not memory.is_quantized
        memory.last_switch = step
        memory.switches += 1
        for each in self._streaks.values():
            each.above = each.calm = 0
        return [LogLine(line)]

    def _keep(self, step: int, good: bool) -> list[Action]:
        """Return snapshots within a window, and a checkpoint at its end; the oldest leave the recovery buffer."""
        policy = self.policy
        number = (step - 1) // policy.window + 1
        ends = step % policy.window == 0
        due = step % policy.snapshot_every == 0
        name = None
        if ends:
            name = f"window_end_{number}_iter{step}"
        elif due and policy.snapshot_to_disk:
            name = f"window_{number}_iter{step}_{'quantized' if self.is_quantized else policy.fallback}"
        actions: list[Action] = []
        if good and not policy.snapshot_to_disk and (ends or due):
            actions.append(DropSnapshots() if ends else Snapshot(step, policy.keep))
        if name is not None:
            self.spend(name)  # a restored run uses the same names again
            # The buffer changes before the checkpoint is saved, whose memory thus names the checkpoint itself.
            self._saved.append((name, good))
            actions.append(Save(name))
        kept = list(self._saved)
        restorable = self.recovery_names()
        while len(kept) > policy.keep:  # the oldest go, but never the only good one
            only_good = [name for name, good in kept if good] == [kept[0][0]]
            kept.pop(1 if only_good else 0)
        if restorable and not {name for name, _ in kept} & set(restorable):  # nor the only one that is evaluated
            kept.insert(0, (restorable[0], True))
        self._saved = kept
        return actions

    def _complain(self, step: int, loss: float) -> list[Action]:
        """Log one line if all losses of the first windows are above the threshold of rule `loss`."""
        memory, policy = self._memory, self.policy
        if "loss" not in self._streaks or memory.windows_above is None:
            return []
        memory.window_low = memory.window_low or loss <= policy.threshold
        if step % policy.window:
            return []
        memory.windows_above = None if memory.window_low else memory.windows_above + 1
        memory.window_low = False
        if memory.windows_above != PATIENCE:
            return []
        memory.windows_above = None
        return [
            LogLine(
                f"[AdaptiveQuantization] Loss stayed above threshold {policy.threshold:.4f} for {PATIENCE} windows, "
                "rule loss may never quantize this run; --quant-rule gap measures what quantization costs instead"
            )
        ]

    def _decays(self, step: int) -> bool:
        planned = self.policy.decay_start or 0
        begun = self._memory.decay_from
        return "schedule" in self.policy.rules and step >= (planned if begun is None else begun)

    def _has_dwelt(self, step: int) -> bool:
        last = self._memory.last_switch
        return last is None or step - last >= self.policy.min_dwell

    def _is_spent(self) -> bool:
        return self.switches >= self.policy.max_switches


def _bound(values: list[float], loss: float) -> float:
    """Return the median + 6 scaled MADs of `values`, with noise of at least a thousandth of `loss`."""
    median, spread = median_and_mad(values)
    return median + MAD_FACTOR * max(spread, _LEAST_SPREAD * abs(loss))


class Adaptive(PrecisionController):
    """The controller of a run, connected to the switch of the student's layers.

    Args:
        policy: see `PrecisionController`.
        fallback: position of the switch in the fallback.
    """

    def __init__(self, policy: Policy, switch: Switch, fallback: Position) -> None:
        super().__init__(policy)
        self.switch = switch
        self.fallback = fallback
        self.gap: float | None = None
        self.switch_to(self.mode)

    @property
    def positions(self) -> tuple[Position, Position]:
        """The two positions between which the run switches: quantised, and the fallback's."""
        return "quantized", self.fallback

    def switch_to(self, mode: str) -> None:
        """Set the switch for `mode`: the policy's quantised mode, or its fallback."""
        self.switch.position = "quantized" if mode == self.policy.quantized else self.fallback

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, in its mode."""
        super().load_state_dict(state)
        self.switch_to(self.mode)
