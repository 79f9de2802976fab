"""The ways in which a run is broken off: where, how, and with which options; all of them, and a selection.

The runs are 30 steps of 6 sequences over 40, or 12 where nothing comes late: an epoch ends inside step 7. Checkpoints
come every 4 steps, validations every 3. In a run with a rollback the losses of batches 24 to 26 are 30 times what they
were: the spike is confirmed at step 26, the run goes back to step 20 and leaves batches 21 to 26 out, and it is broken
off after that, or shortly before the spike. Runs are in fp32, quantised, or in adaptive quantisation that falls back
and returns: all ways in fp32, and of the others as many as it takes for each pair of values of two dimensions to come
up. Those that are quantised come again with adapters. Runs without gradient accumulation have a fixed alpha.
"""

import itertools
from dataclasses import astuple, dataclass, replace

BATCH, VALIDATION = 6, 8
WHERE = ("mid-epoch", "epoch-end", "first-step", "validation", "twice", "before-the-spike")
HOW = ("kill", "term", "raise")
ACCUMULATION = (1, 3)
TEMPERATURE = ("fixed", "schedule", "adversarial", "likelihood", "minimize")
ROLLBACK = (False, True)
FORMATS = {
    "fp32": ("--precision", "fp32"),
    "mxfp4": ("--precision", "mxfp4"),
    "adaptive": (
        *("--precision", "mxfp4", "--time-resume", "--quant-rule", "loss+gap", "--quant-loss-threshold", "0.42"),
        *("--quant-window-size", "3", "--quant-probe-every", "2", "--quant-min-dwell", "2"),
    ),
}
ADAPTERS = {"lora": ("--precision", "fp32", "--lora-rank", "4", "--lora-dropout", "0.1")}
Options = tuple[int, str, bool, str]
"""Accumulation, temperature, rollback and format."""
SPIKE = "train.loss:x30:24-26"


@dataclass(frozen=True)
class Case:
    """A way to end a run, and the options of the run."""

    where: str
    how: str
    accumulation: int
    temperature: str
    rollback: bool
    format: str

    @property
    def options(self) -> Options:
        """The options that decide the outcome: runs that agree in them must end equal."""
        return self.accumulation, self.temperature, self.rollback, self.format

    @property
    def name(self) -> str:
        """A word for folders and reports."""
        return "-".join([self.where, self.how, *_words(self.options)])

    def faults(self) -> list[str]:
        """Return `KDTRAIN_FAULT` for the first command, the second, ...; one more, undisturbed, ends the run."""
        forwards = -(-VALIDATION // (BATCH // self.accumulation))
        before, validations = (26, 9) if self.rollback else (0, 1)
        if self.where == "first-step":
            return [f"train.rollback:{self.how}:1" if self.rollback else f"train.after-step:{self.how}:1"]
        if self.where == "validation":
            return [f"validate.batch:{self.how}:{validations * forwards + 1}"]
        if self.where == "epoch-end":
            return [f"train.after-step:{self.how}:{27 if self.rollback else 7}"]
        if self.where == "before-the-spike":
            return [f"train.after-step:{self.how}:{22 if self.rollback else 10}"]
        if self.where == "mid-epoch":
            micro_batches = (before + 3) * self.accumulation - (self.accumulation > 1)
            return [f"train.after-micro-batch:{self.how}:{micro_batches}"]
        return [f"train.after-step:{self.how}:{before + 3}", f"train.after-step:{self.how}:2"]


def argv(options: Options, out: str, asynchronous: bool = True) -> list[str]:
    """Return the command of a run with these options."""
    accumulation, temperature, rollback, form = options
    steps = 30 if rollback or form == "adaptive" else 12  # adaptive runs fall back and return late
    words = ["distill", "--cache", "cache", "--student", "student.toml", "--out", out, "--steps", str(steps)]
    words += ["--batch-size", str(BATCH), "--micro-batch-size", str(BATCH // accumulation), "--lr", "1e-2"]
    words += ["--warmup-steps", "0", "--checkpoint-freq", "4", "--eval-freq", "3", "--no-compile"]
    words += (FORMATS | ADAPTERS)[form]
    words += ["--log-to", "none", "--temperature", "2", "--temperature-mode", temperature]
    words += ["--alpha", "0.9"] if accumulation == 1 else []
    return words + ([] if asynchronous else ["--no-async-save"])


SELECTED: tuple[Options, ...] = (
    (1, "fixed", False, "fp32"),
    (3, "schedule", True, "mxfp4"),
    (1, "adversarial", True, "adaptive"),
    (3, "likelihood", False, "fp32"),
    (1, "minimize", True, "mxfp4"),
    (3, "fixed", False, "adaptive"),
)
"""Options in which each value of each comes up; both halves have all formats, accumulations and rollbacks."""


def selection() -> list[Case]:
    """List each place with each way, each way with all selected options, and each place with half of them."""
    return [
        Case(where, how, *SELECTED[place % 2 * 3 + (place + way) % 3])
        for place, where in enumerate(WHERE)
        for way, how in enumerate(HOW)
    ]


def every_case() -> list[Case]:
    """List all combinations in fp32, and a pairwise selection in the other formats."""
    return [each for each in _product() if each.format == "fp32"] + [
        each for each in pairwise() if each.format != "fp32"
    ]


def _product() -> list[Case]:
    dimensions = WHERE, HOW, ACCUMULATION, TEMPERATURE, ROLLBACK, FORMATS
    return [Case(*each) for each in itertools.product(*dimensions)]


def adapters() -> list[Case]:
    """List runs that train adapters in fp32, broken off in the ways of the quantised ones of `pairwise`."""
    return [replace(each, format="lora") for each in pairwise() if each.format == "mxfp4"]


def pairwise() -> list[Case]:
    """Choose greedily a selection in which each pair of values of two dimensions comes up at least once."""
    cases, chosen = _product(), []
    open_pairs = set().union(*map(_pairs, cases))
    while open_pairs:
        best = max(cases, key=lambda case: len(_pairs(case) & open_pairs))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(astuple(case)), 2))


def _words(options: Options) -> list[str]:
    accumulation, temperature, rollback, form = options
    return [str(accumulation), temperature, "rollback" if rollback else "plain", form]
