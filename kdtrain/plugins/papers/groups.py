"""Groups of runs held against each other: what seeds explain of a difference, the table, and the lines below it.

Runs of one seed share weights and order, so groups are compared in pairs: the mean of the differences d between runs of
the same seed, with the interval of Student's t, d +- t(n - 1) s_d / sqrt(n). With m groups beside the first one the
level is 1 - 0.05 / m (Bonferroni), so that all intervals together hold in 95 % of cases. With fewer than two seeds in
common nothing is known, and nothing is marked.
"""

import math
import os
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kdtrain.config.values import flag
from kdtrain.errors import UsageError, printable
from kdtrain.monitor.facts import tested
from kdtrain.plugins.papers.runs import MEASURES, LoggedRun, apart, grouped, read_runs
from kdtrain.tables import Table, short

MARKS = {"rollback": "v", "recovery": "^", "switch": "D", "resume": ">", "skip": "x", "decay": "s", "memory": "P"}
"""The interventions that a curve shows, each with its marker."""
MOST_RUNS = 64
"""Most runs of one comparison."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone."""

    runs: list[LoggedRun]
    name: str
    """The folder that its runs share, in a sweep its arm; or else the name of its first run."""

    @property
    def seeds(self) -> str:
        """The seeds of the group, as text."""
        shown = [printable(str(run.seed))[:20] for run in self.runs]
        return f"seed {shown[0]}" if len(shown) == 1 else f"{len(shown)} runs, seeds {', '.join(shown)}"

    def by_seed(self, name: str) -> dict[str, float]:
        """Return a number of the group's runs by seed: a run that was repeated adds nothing to the spread."""
        return {str(run.seed): value for run in reversed(self.runs) if (value := run.numbers[name]) is not None}

    def values(self, name: str) -> list[float]:
        """Return a number of the group's runs, one a seed."""
        return list(self.by_seed(name).values())

    def mean(self, name: str) -> float | None:
        """Return the mean of a number over seeds."""
        return statistics.fmean(found) if (found := self.values(name)) else None

    def deviation(self, name: str) -> float | None:
        """Return the standard deviation of a number over seeds; None with one seed."""
        return statistics.stdev(found) if len(found := self.values(name)) > 1 else None


def read_groups(folders: Sequence[Path], most: int | None = MOST_RUNS) -> list[Group]:
    """Read the runs in `folders`, those that differ in the seed alone as one group. UsageError: as `read_runs`."""
    return [Group(runs, name) for name, runs in grouped(read_runs(folders, most))]


def interventions(run: LoggedRun) -> list[Any]:
    """Return the events of a run other than starts and checkpoints."""
    return [each for each in run.record.events if each.event not in ("start", "checkpoint")]


def shown(run: LoggedRun, option: str) -> str:
    """Format the value of an option."""
    value = run.options.get(option)
    if option == "cache" and value is not None and run.cache is not None:
        named = " + ".join(map(str, value)) if isinstance(value, list) else str(value)
        return f"{printable(named)[-60:]} ({printable(run.cache)[:8]})"
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return ", ".join(printable(str(each))[:40] for each in value[:8]) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))[-80:]


def differing(groups: Sequence[Group]) -> list[str]:
    """Return the names of the options in which groups differ."""
    names = groups[0].runs[0].compared if groups else []
    return [name for name in names if len({each.runs[0].identity(name) for each in groups}) > 1]


@dataclass(frozen=True)
class Difference:
    """The difference of a group from another one in a number."""

    mean: float
    """Over the seeds of both; of the means where they share none."""
    half: float | None
    """Half of the interval; None: fewer than two seeds in common, or not tested."""

    @property
    def beyond(self) -> bool | None:
        """Whether the difference is beyond what seeds explain; None: unknown."""
        return None if self.half is None else abs(self.mean) > self.half


def difference(groups: Sequence[Group], group: Group, name: str, first: Group | None = None) -> Difference | None:
    """Compute a group's number less that of the first one; return None where they do not compare.

    They do not where tokenizers, the texts of a test or the estimators of a validation's KL differ, or a number is
    missing.
    """
    first = first or groups[0]
    own, other = group.by_seed(name), first.by_seed(name)
    if not own or not other or group is first:
        return None
    if apart([*group.runs, *first.runs], name):
        return None
    if len(both := own.keys() & other.keys()) < 2 or not MEASURES[name].best:
        return Difference(statistics.fmean(own.values()) - statistics.fmean(other.values()), None)
    pairs = [own[seed] - other[seed] for seed in sorted(both)]
    quantile = t_quantile(0.05 / max(len(groups) - 1, 1), len(pairs) - 1)
    return Difference(statistics.fmean(pairs), quantile * statistics.stdev(pairs) / math.sqrt(len(pairs)))


def t_quantile(level: float, freedom: int) -> float:
    """Return the value that |t| exceeds with probability `level`, of Student's t.

    It is found by bisection of the distribution as a function of atan(t / sqrt(freedom)) (Abramowitz & Stegun 26.7.3,
    26.7.4).
    """
    low = 0.0
    high = math.pi / 2
    odd = freedom % 2
    for _ in range(60):
        angle = (low + high) / 2
        terms = [math.cos(angle) ** odd if freedom > 1 else 0.0]
        for k in range(1 + odd, freedom - 2, 2):
            terms.append(terms[-1] * k / (k + 1) * math.cos(angle) ** 2)
        inside = math.sin(angle) * sum(terms)
        inside = (angle + inside) * 2 / math.pi if odd else inside
        low, high = (angle, high) if inside < 1 - level else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def best_of(groups: Sequence[Group], name: str) -> Group | None:
    """Find the group that is best in a number, beyond what seeds explain of its difference from each other one."""
    known = [(mean, group) for group in groups if (mean := group.mean(name)) is not None]
    pick = MEASURES[name].best
    if pick is None or len(known) < 2 or len(known) < len(groups):
        return None
    best = pick(mean for mean, _ in known)
    [group, *_] = [group for mean, group in known if mean == best]
    off = [difference(groups, group, name, other) for _, other in known if other is not group]
    return group if all(each is not None and each.beyond for each in off) else None


def cell(groups: Sequence[Group], group: Group, name: str, digits: int = 4) -> tuple[str, str, bool]:
    """Format a number of a group and its difference from the first group; return also whether seeds do not explain it.

    The number is the mean with the deviation over seeds.
    """
    mean = group.mean(name)
    measure = MEASURES[name]
    if mean is None:
        return "-", "", False
    show = partial(measure.shown, digits=digits)
    shown = show(mean)
    if measure.best and (own := group.deviation(name)) is not None:
        shown += f" ± {show(own)}"
    if name == "kl" and (estimator := group.runs[0].estimator):
        shown += f"\nfrom {estimator}"
    off = difference(groups, group, name)
    if off is None or not measure.best:
        return shown, "", False
    half = "" if off.half is None else f" ± {show(off.half)}"
    return shown, f"{'+' if off.mean >= 0 else '-'}{show(abs(off.mean))}{half}", bool(off.beyond)


def full_table(groups: Sequence[Group], names: Collection[str] = tuple(MEASURES), digits: int = 4) -> Table:
    """Build the table of a comparison: a column a group, a row a differing option or a number.

    A number has its difference from the first group's beside it.
    """
    rows = [
        ("how it ended", *("\n".join(dict.fromkeys(run.status for run in group.runs)) for group in groups)),
        ("student", *(group.runs[0].student for group in groups)),
    ]
    rows += [(flag(option), *(shown(group.runs[0], option) for group in groups)) for option in differing(groups)]
    for name in names:
        if any(group.mean(name) for group in groups):  # a count that is 0 everywhere tells nothing
            row = []
            for group in groups:
                own, off, far = cell(groups, group, name, digits)
                mark = " *" if far else ""
                row.append(f"{own}\n{off}{mark}" if off else own)
            rows.append((MEASURES[name].label, *row))
    header = ("", *(f"{group.name}\n{group.seeds}" for group in groups))
    return Table(header, rows, left=header, kept=2)


def notes(groups: Sequence[Group]) -> list[str]:
    """Return the lines below a comparison: what a mark means, and what to be careful about."""
    found = []
    others = len(groups) - 1
    if any(off.half is not None for each in groups[1:] for name in MEASURES if (off := difference(groups, each, name))):
        many = f", corrected for {others} comparisons (Bonferroni)" if others > 1 else ""
        found.append(
            f"differences from {groups[0].name} are of runs with the same seed, with their 95 % interval{many}; "
            "* beyond what the seeds explain"
        )
    return [*found, *caution(groups)]


def outcome(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a sentence on the outcome, by the first loss that all groups have; nothing without such a loss."""
    first, *others = groups
    for name in ("test_loss", "test_bits_per_byte", "best_validation_loss", "bits_per_byte"):
        known = [(each, off) for each in others if (off := difference(groups, each, name)) is not None]
        if known and len(known) == len(others):
            parts = []
            for each, off in known:
                if off.beyond is False:
                    verdict = "not distinguished from"
                elif off.mean < 0:
                    verdict = "better than"
                else:
                    verdict = "worse than" if off.mean else "equal to"
                unknown = ", of too few seeds" if off.beyond is None else ""
                parts.append(f"{each.name} is {verdict} {first.name} ({cell(groups, each, name)[1]}{unknown})")
            yield f"by {MEASURES[name].label.replace(':', '')}: {', '.join(parts)}"
            return


def caution(groups: Sequence[Group]) -> list[str]:
    """Return what a reader of the comparison must know: seeds, tokens, and runs that have not ended."""
    notes = []
    others = len({run.tokenizer for each in groups for run in each.runs} - {None}) > 1
    if others:
        notes.append("the students have different tokenizers: bits per byte compare, losses in nats per token do not")
    seeds = [len(each.values("last_validation_loss")) for each in groups]
    if max(seeds, default=0) < 2:
        notes.append("one seed only: any difference may be the luck of a seed; repeat a run with --seed 1")
    elif few := [f"{each.name} {count}" for each, count in zip(groups, seeds, strict=True) if count < max(seeds)]:
        notes.append(f"fewer seeds than the {max(seeds)} of the others: {', '.join(few)}")
    tokens = [value for each in groups for run in each.runs if (value := run.numbers["tokens"]) is not None]
    if not others and tokens and max(tokens) > 1.01 * min(tokens):
        spread = f"{short(min(tokens))} to {short(max(tokens))} tokens"
        notes.append(f"the runs have seen different amounts of text: {spread}")
    notes += tested([run.record.test for each in groups for run in each.runs if run.record.test])
    open_runs = [run.name for each in groups for run in each.runs if run.record.result is None]
    if open_runs:
        notes.append(f"not ended, or killed: {', '.join(open_runs)}")
    if len({run.cache for each in groups for run in each.runs}) > 1:
        notes.append("the runs learned from different caches: validation losses compare only over the same text")
        if not others and apart([run for each in groups if each.values("kl") for run in each.runs], "kl"):
            notes.append("Different caches: validation KL is not comparable here; use test KL.")
    return notes


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise UsageError if `out` exists, unless it is a file to overwrite, or if its folder does not exist."""
    if os.path.lexists(out) and (not overwrite or not out.is_file() or out.is_symlink()):
        what = "is there already; name another file, or add --overwrite" if out.is_file() else "is not a file"
        raise UsageError(f"--out {out} {what}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; make it")
