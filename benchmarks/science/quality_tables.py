"""The tables of docs/quality.md and of the study's page, from the record `benchmarks/results/quality.json` alone.

A cell is the value of one seed, or mean ± standard deviation over several. Students are compared seed by seed: two of
one seed start from the same weights and see the same sequences in the same order. One is called better or worse than
another only where the 95 % confidence interval of the mean difference (Student's t) leaves 0 out.

The share of the gap is (CE - x) / (CE - full), of the test losses of cross-entropy, this student and the one that
learned from whole distributions, at the same seed; its error is the standard error of the mean over seeds.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from benchmarks.science.quality_grid import (
    ALONE,
    CACHES,
    FORMER,
    LONG,
    ONLINE,
    PASS,
    PLAIN,
    QUARTER,
    STUDIES,
    TIMED,
    Run,
    compared,
)
from kdtrain.config.sections import StoppingConfig
from kdtrain.training.guards import EarlyStopping

FORMS = {"loss": ".4f", "ece": ".2%", "kl": ".4f", "agreement": ".1%", "acceptance": ".1%"}
NAMES = {"loss": "test loss", "ece": "ECE", "kl": "KL to the teacher"}
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % point of Student's t with 1, 2, ... degrees of freedom."""
RULES = {
    "ghost": "ghost bucket",
    "drop": "dropped tail",
    "renormalize": "both sides scaled to 1",
    "renormalized-teacher": "the teacher scaled to 1",
    "sampled": "samples",
    "control-variate": "control variate",
}
PUBLISHED_LOSSES: dict[str, tuple[int | None, float, float]] = {
    "cross-entropy": (None, 2.81, 0.012),
    "top-12": (36, 2.87, 0.047),
    "top-50": (150, 2.80, 0.022),
    "top-50 + ghost token": (150, 2.77, 0.004),
    "RS-12": (36, 2.75, 0.008),
    "whole distributions": (None, 2.75, 0.007),
}
"""Sparse Logit Sampling (arXiv 2503.16870), 3 B to 300 M: bytes a token at 3 bytes an entry, test loss, ECE."""
THEIR_CROSS_ENTROPY, THEIR_WHOLE = PUBLISHED_LOSSES["cross-entropy"][1], PUBLISHED_LOSSES["whole distributions"][1]
INTERVAL, PATIENCE = 250, (1, 2, 3, 5)
"""Steps between the comparisons of early stopping, and how many without progress it waits for."""
Record = dict[str, Any]


def cell(values: Iterable[float | None], form: str) -> str:
    """Format one value, or mean ± standard deviation of several; a dash where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = format(statistics.mean(known), form)
    return mean if len(known) == 1 else f"{mean} ± {format(statistics.stdev(known), form)}"


def seeds(result: Record, run: Run) -> dict[int, Record]:
    """Return the records of a run by seed, whatever its own seed."""
    wanted = {name: value for name, value in vars(run).items() if name != "seed"}
    wanted["options"] = list(run.options)
    return {each["seed"]: each for each in result["runs"] if all(each[name] == wanted[name] for name in wanted)}


@dataclass(frozen=True)
class Difference:
    """A student's measure less another's, over the seeds that both have."""

    mean: float
    half: float
    """Half of the 95 % confidence interval; infinite for one seed."""

    def __str__(self) -> str:
        return self.text("+.4f")

    def text(self, form: str) -> str:
        """Format the mean and its interval; bold where 0 is outside."""
        if math.isinf(self.half):
            return f"{self.mean:{form}} (one seed)"
        text = f"{self.mean:{form}} ± {self.half:{form.removeprefix('+')}}"
        return f"**{text}**" if abs(self.mean) > self.half else text


def difference(result: Record, run: Run, other: Run, measure: str = "loss") -> Difference | None:
    """Compute the paired difference of two runs; return None where they have no seed in common."""
    own, theirs = seeds(result, run), seeds(result, other)
    gaps = [own[seed]["test"][measure] - theirs[seed]["test"][measure] for seed in sorted(own.keys() & theirs.keys())]
    if not gaps:
        return None
    if len(gaps) == 1:
        return Difference(gaps[0], math.inf)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Difference(statistics.mean(gaps), T_975[min(len(gaps) - 1, len(T_975)) - 1] * error)


def plain(run: Run) -> Run:
    """Return the run of cross-entropy on the same text, steps and rate."""
    return replace(run, cache="k12", options=PLAIN)


def full(run: Run) -> Run:
    """Return the run of whole distributions, without cross-entropy, on the same text, steps and rate."""
    return replace(run, cache="dense", options=ALONE)


def gap(result: Record, run: Run) -> list[float]:
    """Compute the share of the gap between cross-entropy and whole distributions that is closed, a number a seed.

    The list is empty where whole distributions are no better than cross-entropy at a seed: there is no gap to close.
    """
    sides = (run, plain(run), full(run))
    loss = [{seed: each["test"]["loss"] for seed, each in seeds(result, side).items()} for side in sides]
    both = sorted(loss[0].keys() & loss[1].keys() & loss[2].keys())
    sizes = {seed: loss[1][seed] - loss[2][seed] for seed in both}
    if min(sizes.values(), default=0.0) <= 0:
        return []
    return [(loss[1][seed] - loss[0][seed]) / size for seed, size in sizes.items()]


def describe(run: Run) -> str:
    """Describe the distinguishing options of a run, in words."""
    options = dict(zip(run.options[::2], run.options[1::2], strict=True))
    if options.get("--alpha") == "0":
        words = ["cross-entropy"]
        options.pop("--alpha")
    elif run.cache == "dense":
        words = ["whole distributions"]
    else:
        kept = dict(zip(CACHES[run.cache][::2], CACHES[run.cache][1::2], strict=True))
        top, drawn = kept.get("--top-k", "0"), kept.get("--num-samples")
        kind = "independent samples" if run.cache in FORMER else "samples"
        parts = [] if top == "0" else [f"top-{top}"]
        parts += [f"{drawn} {kind}"] if drawn else []
        rule = options.pop("--tail", "sampled" if drawn else "ghost")
        words = [" + ".join(parts), *([] if rule == "sampled" else [RULES[rule]])]
    if "--alpha-schedule" in options:
        options.pop("--alpha-schedule")
        words.append(f"alpha {options.pop('--alpha', '0.9')} to 0")
    spelled = {
        **{"--alpha": "alpha {}", "--temperature": "T = {}", "--temperature-mode": "learned T: {}"},
        **{"--divergence": "{}", "--warmup-steps": "{} steps of warm-up", "--temperature-lr": "its rate {}"},
    }
    return ", ".join([*words, *(spelled.get(name, f"{name} {{}}").format(value) for name, value in options.items())])


def table(result: Record, runs: Iterable[Run], *, against: Run | None = None, rate: bool = False) -> str:
    """Tabulate the runs that have a record, a row a run, and how the loss differs from that of `against`."""
    measures = [NAMES.get(name, name) for name in FORMS]
    other = [] if against is None else [f"loss less that of {describe(against)}"]
    head = ["student", *(["rate"] if rate else []), "bytes per token", "seeds", *measures, "gap closed", *other]
    rows = []
    for run in dict.fromkeys(runs):
        if not (found := seeds(result, run)):
            continue
        cells = [describe(run), *([f"{run.lr:g}"] if rate else []), size(result, run), f"{len(found)}"]
        cells += [cell([each["test"][name] for each in found.values()], form) for name, form in FORMS.items()]
        cells += [share(gap(result, run))]
        if against is not None:
            cells.append("" if run == against else f"{difference(result, run, against) or '-'}")
        rows.append(cells)
    return markdown(head, rows)


def size(result: Record, run: Run) -> str:
    """Format the bytes a token of a run's cache, everything included; a dash where nothing of it is used."""
    known = result["caches"].get(run.source)
    return "-" if known is None or run.options[:2] == PLAIN else f"{known['bytes_per_token']:,.1f}"


def share(values: list[float]) -> str:
    """Format a share and its standard error."""
    if not values:
        return "-"
    text = f"{statistics.mean(values):.0%}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values) / math.sqrt(len(values)):.0%}"


def markdown(head: list[str], rows: Iterable[list[str]], left: int = 1) -> str:
    """Format a table, whose first columns are aligned to the left."""
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|" + "---|" * left + "--:|" * (len(head) - left)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def published(result: Record) -> str:
    """Tabulate the methods of Sparse Logit Sampling, theirs beside ours: loss, share of the gap and ECE."""
    rows = []
    for (method, (_, loss, ece)), run in zip(PUBLISHED_LOSSES.items(), STUDIES["paper"](), strict=True):
        found = seeds(result, run)
        theirs = [
            f"{loss:.2f}",
            f"{(THEIR_CROSS_ENTROPY - loss) / (THEIR_CROSS_ENTROPY - THEIR_WHOLE):.0%}",
            f"{ece:.1%}",
        ]
        ours = [cell([each["test"][name] for each in found.values()], FORMS[name]) for name in ("loss", "ece")]
        rows.append([method, *theirs, ours[0], share(gap(result, run)), ours[1]])
    return markdown(["", "loss, 3 B to 300 M", "gap closed", "ECE", "loss, here", "gap closed", "ECE"], rows)


def times(result: Record) -> str:
    """Tabulate tokens a second of each kind of training, and its cost to reach the loss at which cross-entropy ends.

    An online teacher's student is the one from a cache of whole distributions, at another rate. The teacher's forwards
    are in the online teacher's time and in no other: a cache is made once.
    """
    rows = []
    rates = {
        name: statistics.median(each) for name, each in result.get("speed", {}).get("tokens_per_second", {}).items()
    }
    base = next(run for run, name in TIMED.items() if name == "cross-entropy")
    goal = _mean_curve(result, base)
    for run, name in (*TIMED.items(), (Run(steps=LONG, cache="dense", options=ALONE), ONLINE)):
        if name in rates and goal and (curve := _mean_curve(result, run)):
            tokens = reached(curve, goal[-1][1])
            spent = ["-", "-"] if tokens is None else [f"{tokens / 1e6:.2f}", f"{tokens / rates[name] / 60:.1f}"]
            share = rates[name] / rates["cross-entropy"]
            rows.append([name, f"{rates[name]:,.0f}", f"{share:.2f}", *spent])
    return markdown(["student", "tokens/s", "of cross-entropy's", "million tokens", "minutes"], rows)


def _mean_curve(result: Record, run: Run) -> list[tuple[float, float]]:
    """Return tokens and the mean validation loss over seeds."""
    curves = [each["validation"] for each in seeds(result, run).values()]
    width = result["settings"]["batch_size"] * result["settings"]["seq_len"]
    columns = zip(*(curve["loss"] for curve in curves), strict=True)
    steps = curves[0]["step"] if curves else []
    return [(step * width, statistics.mean(column)) for step, column in zip(steps, columns, strict=True)]


def reached(curve: list[tuple[float, float]], goal: float) -> float | None:
    """Return the tokens after which a curve first meets `goal`, on straight lines between its points.

    None: it does not meet it.
    """
    for (tokens, loss), (later, lower) in pairwise(curve):
        if lower <= goal:
            return tokens + (later - tokens) * min(max((loss - goal) / (loss - lower), 0.0), 1.0)
    return None


def differences(result: Record) -> str:
    """Tabulate how much lower or higher loss and ECE of one student are than another's, seed by seed."""
    changing = ["difference in loss", "difference in ECE"]
    head = ["student", "against", "size", "text", "million tokens", "seeds", *changing]
    rows = []
    width = result["settings"]["batch_size"] * result["settings"]["seq_len"] / 1e6
    for run, other in compared():
        common = seeds(result, run).keys() & seeds(result, other).keys()
        loss, ece = (difference(result, run, other, measure) for measure in ("loss", "ece"))
        if loss is None or ece is None:
            continue
        tokens = f"{run.steps * width:.1f}"
        setting = [f"{run.student[:-1]} M", run.corpus, tokens, f"{len(common)}"]
        rows.append([describe(run), describe(other), *setting, f"{loss}", ece.text("+.2%")])
    return markdown(head, rows, left=4)


def passes(result: Record) -> str:
    """Tabulate the losses of both kinds of student by how much text there was, and how often they saw it."""
    text = {QUARTER: "a quarter", None: "the whole"}
    head = ["text", "passes", "million tokens", "cross-entropy", "from the teacher", "difference"]
    rows = []
    width = result["settings"]["batch_size"] * result["settings"]["seq_len"] / 1e6
    runs = STUDIES["epochs"]()
    for plain_run, taught in zip(runs[::2], runs[1::2], strict=True):
        if (change := difference(result, taught, plain_run)) is None:
            continue
        losses = [[each["test"]["loss"] for each in seeds(result, run).values()] for run in (plain_run, taught)]
        steps = plain_run.steps
        often = steps // PASS if plain_run.sequences else 1
        row = [text[plain_run.sequences], f"{often}", f"{steps * width:.2f}", *(cell(each, ".4f") for each in losses)]
        rows.append([*row, f"{change}"])
    return markdown(head, rows)


def stopping(result: Record) -> str:
    """Tabulate by patience the long runs that early stopping at `INTERVAL` steps would have ended."""
    curves = [each["validation"] for each in result["runs"] if each["steps"] == LONG]
    rows = []
    for patience in PATIENCE:
        lost = [found for curve in curves if (found := given_up(curve, patience)) is not None]
        rows.append([f"{patience}", f"{len(lost)} of {len(curves)}", f"{max(lost):.4f}" if lost else "-"])
    return markdown(["patience", "runs ended before their last step", "loss given up, the most"], rows, left=0)


def given_up(curve: Record, patience: int) -> float | None:
    """Return the loss where early stopping would have ended a run, less that of the last step.

    None: it would not have ended it.
    """
    guard = EarlyStopping(
        StoppingConfig(early_stopping=True, early_stopping_interval=INTERVAL, early_stopping_patience=patience)
    )
    for step, loss in zip(curve["step"][:-1], curve["loss"], strict=False):
        guard.validated(loss)
        if step and guard.plateau(step):
            return loss - curve["loss"][-1]
    return None


def blocks(result: Record) -> dict[str, str]:
    """Return the tables by their markers in the page; each student is compared with the first of its study."""
    tables = {}
    for name, study in STUDIES.items():
        runs = study()
        alike = len({(run.lr, run.steps) for run in runs}) == 1  # else the first row is no measure for the others
        tables[name] = table(result, runs, against=runs[0] if alike else None, rate=name == "rates")
    tables |= {"paper": published(result), "time": times(result), "stopping": stopping(result)}
    tables |= {"epochs": passes(result), "pairs": differences(result)}
    return {f"quality-{name}": text for name, text in tables.items()}
