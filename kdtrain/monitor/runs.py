"""Several runs side by side: a flat record of each, groups that differ in the seed alone, and what the seeds explain.

Runs of one seed share weights and order, so groups are compared in pairs: the mean of the differences d between runs of
the same seed, with the interval of Student's t, d +- t(n - 1) s_d / sqrt(n). With m groups beside the first one the
level is 1 - 0.05 / m (Bonferroni), so that all intervals together hold in 95 % of cases. With fewer than two seeds in
common nothing is known, and nothing is marked.
"""

import glob
import json
import math
import os
import statistics
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import fields_of, flag, written
from kdtrain.errors import UsageError, printable
from kdtrain.files import read_sealed
from kdtrain.monitor.measures import EVALUATED, LAST, MEASURES, Measure
from kdtrain.monitor.record import SWEEP, Event, RunRecord, arm_of, as_finite, as_table
from kdtrain.tables import Part, Table, number, short

NOT_COMPARED = {"out", "seed", "json", "yes", "resume", "overwrite", "config", "dry_run", "write_config", "sanity"}
"""Options in which runs of a group may differ: where a run lies, and how it was started."""
MARKS = {"rollback": "v", "recovery": "^", "switch": "D", "resume": ">", "skip": "x", "decay": "s", "memory": "P"}
"""The interventions that a curve shows, each with its marker."""
MOST_RUNS = 64
"""Most runs of one comparison."""


@dataclass(frozen=True)
class LoggedRun:
    """A run with a name of its own among those it is shown with."""

    name: str
    folder: Path
    record: RunRecord
    options: dict[str, Any]
    """Every option, by name; the default where config.toml has none."""
    numbers: dict[str, float | None]
    """By the names of `MEASURES`."""

    @property
    def seed(self) -> Any:
        """Of weights, order and dropout."""
        return self.options["seed"]

    @property
    def status(self) -> str:
        """How it ended."""
        result = self.record.result
        last = max((int(line["step"]) for line in self.record.metrics), default=0)
        if result is None:
            return f"no result at step {last}: training, or killed"
        total = as_finite(result.get("steps"))
        return f"{printable(str(result.get('stop_reason')))[:40]} {last:,}" + (f"/{total:,.0f}" if total else "")

    @property
    def student(self) -> str:
        """Name and size of the student."""
        named = as_table(self.record.environment.get("student"))
        parameters = self.numbers["parameters"]
        name = printable(str(named.get("name") or self.options.get("student")))[:80]
        return f"{name} ({short(parameters)})" if parameters else name

    @property
    def cache(self) -> str | None:
        """The digest of the cache it learned from; across tokenizers not that of the view."""
        viewed = as_table(self.record.environment.get("alignment")).get("cache")
        found = viewed or self.record.environment.get("cache") or (self.record.result or {}).get("cache")
        return found if isinstance(found, str) else None

    @property
    def tokenizer(self) -> str | None:
        """The digest of the tokenizer of its training tokens, where the run states it."""
        found = self.record.environment.get("tokenizer")
        return found if isinstance(found, str) else None

    @property
    def estimator(self) -> Any:
        """What the KL of its validations was measured from, as text; None where the run does not state it."""
        found = self.record.environment.get("kl_estimator")
        return found and printable(str(found))[:80]

    @property
    def interventions(self) -> list[Event]:
        """Its events but starts and checkpoints."""
        return [each for each in self.record.events if each.event not in ("start", "checkpoint")]

    def identity(self, option: str) -> str:
        """The value of an option, comparable over machines: a cache is its digest, a student what was built of it."""
        value = self.options.get(option)
        if option == "cache" and self.cache is not None:
            value = self.cache
        elif option == "student" and (built := self.record.environment.get("student")):
            value = [os.path.basename(str(value)), built]
        return json.dumps(value, sort_keys=True, default=str)

    def shown(self, option: str) -> str:
        """The value of an option as text."""
        value = self.options.get(option)
        if option == "cache" and value is not None and self.cache is not None:
            named = " + ".join(map(str, value)) if isinstance(value, list) else str(value)
            return f"{printable(named)[-60:]} ({printable(self.cache)[:8]})"
        if isinstance(value, bool) or value is None:
            return {None: "-", True: "yes", False: "no"}[value]
        if isinstance(value, list):
            return ", ".join(printable(str(each))[:40] for each in value[:8]) or "none"
        if isinstance(value, float):
            return f"{value:.4g}"
        return printable(str(value))[-80:]


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone."""

    runs: list[LoggedRun]
    name: str
    """The folder that its runs share, in a sweep its arm; or else the name of its first run."""

    @property
    def seeds(self) -> str:
        """Its seeds, as text."""
        shown = [printable(str(run.seed))[:20] for run in self.runs]
        return f"seed {shown[0]}" if len(shown) == 1 else f"{len(shown)} runs, seeds {', '.join(shown)}"

    def by_seed(self, name: str) -> dict[str, float]:
        """A number of its runs, one a seed: a run that was repeated tells nothing about the spread."""
        return {str(run.seed): value for run in reversed(self.runs) if (value := run.numbers[name]) is not None}

    def values(self, name: str) -> list[float]:
        """`by_seed` without the seeds."""
        return list(self.by_seed(name).values())

    def mean(self, name: str) -> float | None:
        """The mean of a number over seeds."""
        return statistics.fmean(found) if (found := self.values(name)) else None

    def deviation(self, name: str) -> float | None:
        """The standard deviation of a number over seeds; None with one seed."""
        return statistics.stdev(found) if len(found := self.values(name)) > 1 else None


def runs(pattern: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Flat records of every run of a pattern such as `runs/*`, or of a list of folders, for `pandas.DataFrame`.

    A record has `run`, `arm` (that of a sweep, else the name that `compare` gives its group), `seed`, `status`,
    `student`, `cache`, `kl_estimator` (what the KL of a validation is measured from: two of them do not compare), the
    numbers by name (losses in nats a token; None where there is none), and each option as `options/NAME`. The curves
    are `kd.RunRecord.read(record["run"]).metrics`.

    Raises:
        UsageError: a folder of the list is not a run, or the pattern finds no run.
    """
    if isinstance(pattern, str | os.PathLike):
        records: dict[Path, RunRecord] = {}
        places = sorted(glob.glob(os.path.expanduser(os.fspath(pattern))))
        for path in (run for place in places for run in _runs_in(Path(place))):
            with suppress(UsageError):  # a pattern may match anything
                records[path] = _read(path)
        if not records:
            raise UsageError(f"no folder of {printable(str(pattern))[:200]} holds a run")
        found = _named(list(records), list(records.values()))
    else:
        found = read_runs([Path(each) for each in pattern], most=None)
    arms = {run.folder: group.name for group in grouped(found) for run in group.runs}
    return [
        {"run": str(run.folder), "arm": arms[run.folder], "seed": run.seed, "status": run.status}
        | {"student": run.student, "cache": run.cache}
        | {"kl_estimator": run.estimator, **run.numbers}
        | {f"options/{name}": value for name, value in run.options.items()}
        for run in found
    ]


def read_runs(folders: Sequence[Path], most: int | None = MOST_RUNS) -> list[LoggedRun]:
    """Read the runs in `folders`, which are named by the ends of their paths that tell them apart.

    A folder of a sweep stands for its runs, in the order of its file.

    Raises:
        UsageError: a folder holds no run or one that cannot be read, one is named twice, or they are too many.
    """
    folders = [run for folder in folders for run in _runs_in(folder)]
    if most is not None and len(folders) > most:
        raise UsageError(f"{len(folders)} runs are more than can be shown side by side; name at most {most}")
    records = [_read(folder) for folder in folders]
    real = [os.path.realpath(folder) for folder in folders]
    twice = [folder for place, folder in enumerate(folders) if real[place] in real[:place]]
    if twice:
        raise UsageError(f"{twice[0]} is named twice; name each run once")
    return _named(folders, records)


def _runs_in(folder: Path) -> list[Path]:
    """The runs that have begun of the sweep in `folder`; itself where there is none."""
    names: Iterable[str] = ()
    with suppress(OSError, ValueError):
        names = read_sealed(folder / SWEEP)
    return [folder / name for name in names if (folder / name / "environment.json").is_file()] or [folder]


def _named(folders: Sequence[Path], records: list[RunRecord]) -> list[LoggedRun]:
    return [
        LoggedRun(name, folder, record, _options(record), _measured(record))
        for name, folder, record in zip(_names(folders), folders, records, strict=True)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    parts = [folder.absolute().parts for folder in folders]
    names = [each[-1] for each in parts]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return [printable(name)[-60:] for name in names]


def _read(folder: Path) -> RunRecord:
    if not folder.is_dir():
        raise UsageError(f"{folder} {'is a file' if folder.exists() else 'does not exist'}; name the folder of a run")
    try:
        record = RunRecord.read(folder)
    except ValueError as error:
        raise UsageError(f"the run {folder} cannot be read: {printable(str(error))[:300]}") from None
    except OSError as error:
        raise UsageError(f"the run {folder} cannot be read: {error.strerror}: {error.filename}") from None
    written = "kdtrain" in as_table(record.environment.get("libraries"))
    if not written and not (record.metrics and "student" in as_table(record.options.get("run"))):
        raise UsageError(f"{folder} is not a run (no environment.json of kdtrain); name a folder that distill wrote")
    return record


def _options(record: RunRecord) -> dict[str, Any]:
    saved = {name: value for table in record.options.values() for name, value in as_table(table).items()}
    options = [each for _, each in fields_of(DistillConfig)]
    plain = (str, int, float, bool, tuple, list, Path)
    known = {each.name: written(each, each.default) if isinstance(each.default, plain) else None for each in options}
    return {**known, **{name: saved[name] for name in known.keys() & saved.keys()}}


def _measured(record: RunRecord) -> dict[str, float | None]:
    result, last = record.result or {}, (record.validations or [{}])[-1]
    losses = [value for _, value in record.curve("validation/loss") if as_finite(value) is not None]
    kinds = [each.event for each in record.events]
    steps, quantized = record.steps, [value for _, value in record.curve("quantized")]
    times = record.places("minutes")
    weights = record.alphas or (result.get("alpha_mean"), result.get("alpha_last"))

    def latest(name: str) -> float | None:
        found = record.curve(name)
        return as_finite(found[-1][1]) if found else None

    best = as_finite(result.get("best_validation_loss"))
    bits = [value for _, value in record.curve("validation/bits_per_byte") if as_finite(value) is not None]
    found: dict[str, float | None] = {
        **{f"test_{name}": as_finite(record.test.get(name)) for name in EVALUATED},
        **{key: as_finite(last.get(f"validation/{name}")) for key, name in LAST.items()},
        "best_validation_loss": min(losses, default=None) if best is None else best,
        "last_validation_loss": losses[-1] if losses else as_finite(result.get("last_validation_loss")),
        "bits_per_byte": min(bits, default=as_finite(result.get("best_bits_per_byte"))),
        "entropy_kept": as_finite(as_table(record.environment.get("alignment")).get("entropy_kept")),
        "parameters": as_finite(as_table(record.environment.get("student")).get("parameters")),
        "last_training_loss": latest("loss_avg"),
        "temperature": latest("T"),
        "alpha_mean": as_finite(weights[0]),
        "alpha_last": as_finite(weights[1]),
        "tokens": as_finite(max(record.places("tokens").values()) if steps else result.get("tokens")),
        "seconds": as_finite(60 * max(times.values())) if len(times) > 1 else as_finite(result.get("seconds")),
        "tokens_per_second": record.median_rate(),
        "peak_memory_mb": as_finite(result.get("peak_memory_mb")),
        "quantized_share": sum(quantized) / len(steps) if quantized else None,
        "rollbacks": float(kinds.count("rollback") + kinds.count("recovery")),
        "skipped_steps": float(kinds.count("skip")),
        "switches": float(kinds.count("switch")),
        "resumes": float(kinds.count("resume")),
        "warnings": float(sum(each.level == "warning" for each in record.events)),
    }
    return {name: found.get(name) for name in MEASURES}  # the gap that is closed is known among groups


def grouped(found: Sequence[LoggedRun]) -> list[Group]:
    """Gather runs that differ in the seed alone, in the order of their first runs.

    Each run is given the share that it closes of the gap in test loss from the first group's run of its seed to the
    teacher; none where texts or tokenizers differ, or there is no gap.
    """
    groups: dict[str, list[LoggedRun]] = {}
    for run in found:
        key = json.dumps([run.identity(name) for name in sorted(run.options) if name not in NOT_COMPARED])
        groups.setdefault(key, []).append(run)
    names = [_shared(each) for each in groups.values()]
    shared = [
        name if name and names.count(name) == 1 else each[0].name
        for name, each in zip(names, groups.values(), strict=True)
    ]
    named = [Group(each, name) for name, each in zip(shared, groups.values(), strict=True)]
    begin = named[0].by_seed("test_loss") if named else {}
    for run in (run for each in named if not _apart([named[0], each], "test_loss") for run in each.runs):
        own, teacher = run.numbers["test_loss"], run.numbers["test_teacher_loss"]
        first = begin.get(str(run.seed), -math.inf)
        if own is not None and teacher is not None and teacher < first:
            run.numbers["test_gap_closed"] = (first - own) / (first - teacher)
    return named


def _shared(runs: Sequence[LoggedRun]) -> str:
    """The arm of the sweep that all runs belong to, or else the folder that they share; empty for a run alone."""
    [arm, *others] = {arm_of(run.folder) for run in runs}
    if arm and not others:
        return arm[-1]
    return os.path.commonpath([run.name for run in runs]) if len(runs) > 1 else ""


def differing(groups: Sequence[Group]) -> list[str]:
    """The options in which groups differ."""
    names = [name for name in groups[0].runs[0].options if name not in NOT_COMPARED] if groups else []
    return [name for name in names if len({each.runs[0].identity(name) for each in groups}) > 1]


@dataclass(frozen=True)
class Difference:
    """How far a group is from another one in a number."""

    mean: float
    """Over the seeds of both; of the means where they share none."""
    half: float | None
    """Half of the interval; None: fewer than two seeds in common, or not tested."""

    @property
    def beyond(self) -> bool | None:
        """Whether it is beyond what seeds explain; None: nobody knows."""
        return None if self.half is None else abs(self.mean) > self.half


def difference(groups: Sequence[Group], group: Group, name: str, first: Group | None = None) -> Difference | None:
    """A group's number less that of the first one; None: nothing to compare.

    Nothing is where tokenizers, the texts of a test or the estimators of a validation's KL differ.
    """
    first = first or groups[0]
    own, other = group.by_seed(name), first.by_seed(name)
    if not own or not other or group is first:
        return None
    if _apart([group, first], name):
        return None
    if len(both := own.keys() & other.keys()) < 2 or not MEASURES[name].best:
        return Difference(statistics.fmean(own.values()) - statistics.fmean(other.values()), None)
    pairs = [own[seed] - other[seed] for seed in sorted(both)]
    quantile = t_quantile(0.05 / max(len(groups) - 1, 1), len(pairs) - 1)
    return Difference(statistics.fmean(pairs), quantile * statistics.stdev(pairs) / math.sqrt(len(pairs)))


def t_quantile(level: float, freedom: int) -> float:
    """The value that |t| exceeds with probability `level`, of Student's t.

    By bisection of its distribution as a function of atan(t / sqrt(freedom)) (Abramowitz & Stegun 26.7.3, 26.7.4).
    """
    low, high, odd = 0.0, math.pi / 2, freedom % 2
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
    """The group that is best in a number, beyond what seeds explain of its difference from each other one."""
    known = [(mean, group) for group in groups if (mean := group.mean(name)) is not None]
    pick = MEASURES[name].best
    if pick is None or len(known) < 2 or len(known) < len(groups):
        return None
    best = pick(mean for mean, _ in known)
    [group, *_] = [group for mean, group in known if mean == best]
    off = [difference(groups, group, name, other) for _, other in known if other is not group]
    return group if all(each is not None and each.beyond for each in off) else None


def cell(groups: Sequence[Group], group: Group, name: str, digits: int = 4) -> tuple[str, str, bool]:
    """A number of a group: its mean with the deviation over seeds, how far it is from the first group, and whether
    that is beyond what seeds explain."""
    mean, measure = group.mean(name), MEASURES[name]
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
    """A column a group, a row an option in which they differ, or a number, and how far it is from the first group's."""
    rows = [
        ("how it ended", *("\n".join(dict.fromkeys(run.status for run in group.runs)) for group in groups)),
        ("student", *(group.runs[0].student for group in groups)),
    ]
    rows += [(flag(option), *(group.runs[0].shown(option) for group in groups)) for option in differing(groups)]
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
    """The lines below a comparison: what a mark means, and what to be careful about."""
    found, others = [], len(groups) - 1
    if any(off.half is not None for each in groups[1:] for name in MEASURES if (off := difference(groups, each, name))):
        many = f", corrected for {others} comparisons (Bonferroni)" if others > 1 else ""
        found.append(
            f"differences from {groups[0].name} are of runs with the same seed, with their 95 % interval{many}; "
            "* beyond what the seeds explain"
        )
    return [*found, *caution(groups)]


def outcome(groups: Sequence[Group]) -> Iterator[str]:
    """What a comparison shows in a sentence, by the first loss that all groups have; nothing without such a loss."""
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


def _tokenizers(groups: Sequence[Group]) -> set[Any]:
    """What is known of the tokenizers of the runs."""
    return {run.tokenizer for each in groups for run in each.runs} - {None}


def _apart(groups: Sequence[Group], name: str) -> bool:
    """Whether a number of the groups does not compare, as it is of different things."""
    runs = [run for each in groups for run in each.runs]
    if name == "kl" and len({run.cache for run in runs}) > 1 and len({run.estimator or run.cache for run in runs}) > 1:
        return True
    if name.startswith("test_") and len({text_of(run.record.test) for run in runs if run.record.test}) > 1:
        return True
    return MEASURES[name].by_token and len(_tokenizers(groups)) > 1


def caution(groups: Sequence[Group]) -> list[str]:
    """What a reader of the comparison must know: seeds, tokens, and runs that have not ended."""
    notes, apart = [], len(_tokenizers(groups)) > 1
    if apart:
        notes.append("the students have different tokenizers: bits per byte compare, losses in nats a token do not")
    seeds = [len(each.values("last_validation_loss")) for each in groups]
    if max(seeds, default=0) < 2:
        notes.append("one seed only: any difference may be the luck of a seed; repeat a run with --seed 1")
    elif few := [f"{each.name} {count}" for each, count in zip(groups, seeds, strict=True) if count < max(seeds)]:
        notes.append(f"fewer seeds than the {max(seeds)} of the others: {', '.join(few)}")
    tokens = [value for each in groups for run in each.runs if (value := run.numbers["tokens"]) is not None]
    if not apart and tokens and max(tokens) > 1.01 * min(tokens):
        spread = f"{short(min(tokens))} to {short(max(tokens))} tokens"
        notes.append(f"the runs have seen different amounts of text: {spread}")
    notes += tested([run.record.test for each in groups for run in each.runs if run.record.test])
    open_runs = [run.name for each in groups for run in each.runs if run.record.result is None]
    if open_runs:
        notes.append(f"not ended, or killed: {', '.join(open_runs)}")
    if len({run.cache for each in groups for run in each.runs}) > 1:
        notes.append("the runs learned from different caches: validation losses compare only over the same text")
        if not apart and _apart([each for each in groups if each.values("kl")], "kl"):
            notes.append("Different caches: validation KL is not comparable here; use test KL.")
    return notes


def text_of(found: Mapping[str, Any]) -> str:
    """The text of an evaluation, and the teacher that read it too."""
    text = f"the cache {str(found['cache'])[:12]}" if found.get("cache") else found.get("data")
    beside = f", beside {found['teacher']}" if found.get("teacher") else ""
    return printable(f"{found.get('sequences')} sequences of the {found.get('split')} split of {text}{beside}")[:160]


def tested(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the test numbers of runs are of: text, teacher and checkpoint."""
    texts, steps = sorted(set(map(text_of, found))), {str(each.get("checkpoint")) for each in found}
    if found:
        at = min(steps) if len(steps) == 1 else "the checkpoint that was best then"
        yield f"test: {texts[0]}; of each student {printable(at)[:60]}"
    if len(texts) > 1:
        yield "the students were tested on different texts: their test numbers do not compare"


def evaluations(found: Iterable[Mapping[str, Any]]) -> Iterator[Part]:
    """What `evaluate` measured last of each checkpoint on each text: a column each, of more than three a row each."""
    unique = {f"{each.get('student')} {each.get('checkpoint')} {text_of(each)}": each for each in found}
    last = list(unique.values())[-MOST_RUNS:]
    order = ["student", "checkpoint", "split", "cache", "data", "teacher", "sequences", "date", *EVALUATED]
    known = {name for each in last for name, value in each.items() if isinstance(value, str | int | float)} - {"step"}
    lines = []
    for name in (each for each in (*order, *sorted(known - {*order})) if each in known):
        measure, cut = EVALUATED.get(name, Measure(name.replace("_", " "), number)), 12 if name == "cache" else 60
        lines.append([measure.label])
        for value in (each.get(name) for each in last):
            text = "-" if (finite := as_finite(value)) is None else measure.shown(finite)
            lines[-1].append(printable(value[:cut]) if isinstance(value, str) else text)
    if lines and len(last) > 3:
        same = [line for line in lines[1:] if len({*line[1:]}) == 1]
        header, *rows = zip(*(line for line in lines if line not in same), strict=True)
        yield Table([textwrap.fill(each, 12) for each in header], rows, left=("student", "checkpoint"))
        if same:
            yield f"\nall: {'; '.join(f'{name} {value}' for name, value, *_ in same)}"
    elif lines:
        yield Table(lines[0], lines[1:], left=lines[0])


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Refuse to write over a file unasked, over anything else at all, and where there is no folder."""
    if os.path.lexists(out) and (not overwrite or not out.is_file() or out.is_symlink()):
        what = "is there already; name another file, or add --overwrite" if out.is_file() else "is not a file"
        raise UsageError(f"--out {out} {what}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; make it")
