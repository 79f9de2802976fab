"""What people are shown of a run: how it is doing, its losses beside the teacher's, its warnings, what to do next.

The page of `kdtrain inspect`, its `--watch`, the end of `distill` and what `evaluate` prints are made of these parts.
All of it may come from strangers: `kdtrain.tables` escapes it, and a number that is none is a `-`. And what a path is
(a run, a checkpoint or a cache), by its files, without torch.
"""

import math
import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kdtrain.cache.format import names as cache_format
from kdtrain.checkpoint.sealed import is_checkpoint, problem
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, UsageError, printable, warn_early
from kdtrain.files import is_locked, read_json, read_toml, typed
from kdtrain.monitor.progress import formula, pace
from kdtrain.monitor.record import RunRecord, as_finite, as_table, events, text_of
from kdtrain.monitor.rules import Signs, findings, stalled
from kdtrain.tables import Part, Table, duration, loss_text, number, percent, short, size

TAIL = 2**22
"""Bytes of a log that a page reads, from its end: some ten thousand steps."""
RESULT = "result.json"
LOCK = ".training"
"""The file that the process that trains a run has locked."""
_MOST_CACHES = 50
"""Most caches of a mixture that a page lists."""
_EVALUATIONS = 64
"""Most evaluations of a table."""
_MESSAGE = 1000
"""Most characters of a warning on a page; a longer one ends between words."""
ACTIVE = ("training", "silent", "unknown")
"""The states of a run that may be training. silent: killed, or training on another machine or in another container."""
ENDED = ("done", "early stop")
"""Those of a run that ended by itself, and well."""


def quoted(path: Path | str) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(str(path))


def heading(record: RunRecord) -> str:
    """Describe which student is trained, from which data, in which number format and where."""
    options = as_table(record.options.get("run"))
    environment = record.environment
    student = as_table(environment.get("student"))
    name = student.get("name") or (record.result or {}).get("student_name") or options.get("student")
    parameters = f", {short(count)} parameters" if isinstance(count := student.get("parameters"), int) else ""
    if isinstance(count := student.get("trained_parameters"), int):
        held = f", beside {kind} weights" if (kind := student.get("base_weights")) else ""
        parameters += f" ({short(count)} trained: {student.get('trained')}{held})"
    named = next((options[each] for each in ("cache", "data") if options.get(each)), "")
    source = f" from {named}" if named else ""
    if isinstance(named, list):
        source = f" from {' and '.join(map(str, named))}"
    teacher = f" with teacher {options['teacher']}" if options.get("teacher") else ""
    return f"{name}{parameters}{source}{teacher}, {environment.get('mode')} on {environment.get('device')}"


def state_of(path: Path, record: RunRecord) -> tuple[str, str]:
    """Return a run's state in a word (one of `ACTIVE`, failed, stopped, killed, or one of `ENDED`) and as a line."""
    training = is_locked(path / LOCK)  # None where the system does not say
    result = record.result or {}
    done = record.last_step
    steps = record.environment.get("steps") or as_table(record.options.get("optimizer")).get("steps")
    if training or (training is None and not result):
        parts = [f"training: step {done:,} of {number(steps)}", *pace(record.newest).values()]
        return ("training" if training else "unknown"), ", ".join(parts)
    if result:
        return ended(result)
    line = f"killed at step {done:,} of {number(steps)}: no process trains it, and it has no {RESULT}"
    signs = Signs.of(path, record, time.time())
    if signs.idle is None or stalled(signs) is not None:
        return "killed", line
    return "silent", line.replace("no process", "unless another machine does: no process here")


def ended(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state, as `state_of` does, of a run that has a result."""
    reason = str(result.get("stop_reason"))
    where = f"at step {number(result.get('step'))} of {number(result.get('steps'))}"
    if result.get("error") is not None:
        return "failed", f"failed ({reason}) {where}: {str(result['error'])[:500]}"
    stopped = reason == "signal"
    parts = [f"{'stopped by ' + str(result.get('stopped_by')) if stopped else reason} {where}"]
    parts += [f"{duration(seconds)} of training"] if isinstance(seconds := result.get("seconds"), int | float) else []
    parts += [f"{short(tokens)} tokens"] if isinstance(tokens := result.get("tokens"), int) else []
    parts += [f"{short(rate)} tok/s"] if isinstance(rate := result.get("tokens_per_second"), int | float) else []
    mean, last = result.get("alpha_mean"), result.get("alpha_last")
    if isinstance(mean, float) and isinstance(last, float) and mean != last:
        plain = ", so half cross-entropy or more" if mean <= 0.5 else ""
        parts.append(f"alpha {mean:.2f} in the mean and {last:.2f} at the end{plain}")
    known = {"signal": "stopped", "early-stop": "early stop"}  # a file may have any other word
    return known.get(reason, "done"), ", ".join(parts)


def run_row(path: Path, record: RunRecord) -> dict[str, Any]:
    """Return the row of a run that is shown among others: its state, its losses, time and warnings."""
    result = record.result or {}
    losses = [loss for _, loss in record.curve("validation/loss")]
    return {
        "state": state_of(path, record)[0],
        "student": as_table(record.environment.get("student")).get("name"),
        "cache": as_table(record.options.get("run")).get("cache"),
        "step": result.get("step", record.last_step),
        "steps": record.environment.get("steps") or result.get("steps"),
        "best_validation_loss": result.get("best_validation_loss", min(losses, default=None)),
        "last_validation_loss": losses[-1] if losses else None,
        "seconds_left": 3600 * record.newest.get("eta_h", math.nan),
        "teacher_validation_loss": result.get("teacher_validation_loss"),
        "test": record.test,
        "seconds": result.get("seconds"),
        "warnings": sum(each.level != "info" for each in record.events),
    }


def watch_line(record: RunRecord, line: str) -> str:
    """Describe a running run: the `line` of its state, the training loss and the last validation."""
    parts = [line]
    if (loss := record.newest.get("loss_avg")) is not None:
        parts.append(f"loss {number(loss)}")
    if found := record.validated:
        parts.append(f"val @{number(found['step'])} {number(found['validation/loss'])}")
    return " | ".join(parts)


def losses(result: Mapping[str, Any], record: RunRecord) -> Iterator[Part]:
    """Yield the validation losses beside the losses of the teacher and of plain cross-entropy."""
    if not record.validations and "first_validation_loss" not in result:
        return
    finite = record.curve("validation/loss")
    best_step, best = min(finite, key=lambda each: each[1], default=(None, None))
    row = {
        "validation loss": "nats per token",
        "start": loss_text(result.get("first_validation_loss", finite[0][1] if finite else None)),
        "best": _at(result.get("best_validation_loss", best), result.get("best_step", best_step)),
        "last": _at(finite[-1][1], finite[-1][0]) if finite else number(result.get("last_validation_loss")),
    }
    known = result.get("teacher_validation_loss")
    teacher = record.validated.get("validation/teacher_loss") if known is None else known
    others = {"teacher": teacher, "merged": result.get("merged_validation_loss")}
    for name, value in {**others, "cross-entropy": result.get("cross_entropy_validation_loss")}.items():
        if isinstance(value, int | float) and math.isfinite(value):
            row[name] = loss_text(value)
    yield Table.of(list(row), [list(row.values())], left=("validation loss",))
    if result.get("cross_entropy_run"):
        yield f"cross-entropy: {result['cross_entropy_run']}, the same student, cache and tokens without a teacher"
    yield ""


def _at(loss: Any, step: Any) -> str:
    return loss_text(loss) + (f" @{step:,}" if isinstance(step, int) else "")


def last_numbers(result: Mapping[str, Any], record: RunRecord) -> str:
    """Return the other numbers of the last validation, by its step, T, and the peak of memory; empty without any."""
    last = record.validated
    numbers = {name: last.get(f"validation/{name}", math.nan) for name in ("kl", "bits_per_byte", "accuracy", "ece")}
    known = {name: value for name, value in numbers.items() if math.isfinite(value)}
    parts = []
    if "kl" in known:
        estimate = " (an estimate from samples)" if known["kl"] < 0 else ""
        parts.append(f"KL to the teacher {loss_text(known['kl'])}{estimate}")
    if "bits_per_byte" in known:
        teacher = last.get("validation/teacher_bits_per_byte")
        of_teacher = "" if teacher is None else f" (teacher {loss_text(teacher)})"
        parts.append(f"{loss_text(known['bits_per_byte'])} bits per byte{of_teacher}")
    shares = {"accuracy": "accuracy", "ece": "ECE"}
    parts += [f"{label} {100 * known[name]:.1f} %" for name, label in shares.items() if name in known]
    temperature, peak = result.get("temperature"), result.get("peak_memory_mb")
    others = [f"T {loss_text(temperature)}"] if temperature not in (None, 1.0) else []
    others += [f"peak memory {size(peak)}"] if peak else []
    validated = f"val @{number(last.get('step'))}: {', '.join(parts)}" if parts else ""
    return "\n".join(filter(None, (validated, *_alphas(record), ", ".join(others))))


def _alphas(record: RunRecord) -> Iterator[str]:
    """Yield a line for each member of a mixture: what its alpha was last measured by."""
    for line in reversed(record.steps):
        own = [each for each in line if each.startswith("withheld/")]
        found = [each.removesuffix("/share") for each in own if each.endswith("/share")]
        for name in found:
            member = name.removeprefix("withheld")
            of = f" for {member[1:]}" if member else ""
            student, teacher = (loss_text(line.get(f"{name}/{key}")) for key in ("loss", "teacher_loss"))
            rest = (line.get(f"{name}/{key}", math.nan) for key in ("share", "posterior", "gap"))
            share, posterior, gap = (number(round(each, 3)) for each in rest)
            yield (
                f"alpha {line.get(f'alpha{member}', math.nan):.2f}{of} @{number(line['step'])}, by "
                f"{number(line.get(f'{name}/tokens'))} withheld tokens (student {student}, teacher {teacher}): "
                f"labels confirm {share}, best mixture {posterior}, by heart {gap}"
            )
        if found:
            return


def members(record: RunRecord) -> Iterator[Part]:
    """Yield the caches that a run mixes: what it draws of each, and the last validation by each."""
    caches = record.environment.get("caches")
    last = record.validated
    rows = []
    for each in map(as_table, caches[:_MOST_CACHES] if isinstance(caches, list) else ()):
        about = (str(each.get(key) or "-")[:60] for key in ("sequences", "teacher"))
        own = (loss_text(last.get(f"validation/{each.get('name')}/{key}")) for key in ("loss", "teacher_loss"))
        rows.append((str(each.get("name") or "-")[:60], percent(each.get("share")), *about, *own))
    if rows:
        heads = ("cache", "share of the draws", "sequences", "taught by", "val", "teacher's val")
        yield Table.of(heads, rows, left=("cache", "taught by"))
        yield ""


def objective(record: RunRecord) -> str:
    """Return the objective in the words of a step's line."""
    options = as_table(record.options.get("objective"))
    environment = record.environment
    alpha = options.get("alpha")
    terms = as_table(environment.get("alignment")).get("terms")
    divergence = "+".join(map(str, terms[:2])) if isinstance(terms, list) else options.get("divergence")
    distils = any(as_table(record.options.get("run")).get(each) for each in ("cache", "teacher"))
    weight: Any = alpha if distils and (alpha == "auto" or isinstance(alpha, int | float)) else 0.0
    own = options.get("hidden_weight", 1.0)
    hidden = float(own) if options.get("hidden_loss") not in (None, "none") and isinstance(own, int | float) else None
    caches = environment.get("caches")
    kinds = {as_table(each).get("targets") == "none" for each in caches} if isinstance(caches, list) else set()
    routed = as_table(environment.get("student")).get("router_weight")
    router = routed if isinstance(routed, int | float) else 0.0
    return formula(weight, str(divergence), hidden, bool(weight) and len(kinds) > 1, router)


def warnings(record: RunRecord) -> Iterator[Part]:
    """Yield the kinds of warnings with the last one of each, the most frequent first."""
    found = [each for each in record.events if each.level != "info"]
    last = {each.event: each for each in found}
    texts = {kind: str(each.details.get("message", ""))[: 2 * _MESSAGE] for kind, each in last.items()}
    rows = [
        (kind, times, f"@{last[kind].step}: {textwrap.shorten(texts[kind], _MESSAGE, placeholder=' ...')}")
        for kind, times in Counter(each.event for each in found).most_common()
    ]
    if rows:
        yield from ("", Table.of(("warning", "times", "the last one"), rows, left=("warning", "the last one")))


def health_lines(path: Path, record: RunRecord) -> Iterator[str]:
    """Yield a line for each problem of a run that trains, or a line that there is none."""
    found = findings(Signs.of(path, record, time.time()))
    yield from (f"health: {kind}: {text}" for kind, text in found.items())
    if not found:
        yield "health: good"


def next_step(path: Path, state: str, exported: Any) -> str:
    """Return the command that follows for a run in this state."""
    word = quoted(path)
    if state in ACTIVE:
        return f"Next: kdtrain inspect {word} --watch"
    if state in ("stopped", "killed", "failed"):
        first = "Mend what failed. " if state == "failed" else ""
        return f"{first}Next: kdtrain distill --config {quoted(path / 'config.toml')}"
    if exported:
        if (path / "student" / "chat_template.jinja").exists():
            return f"Next: kdtrain chat {word}"
        return f'Next: kdtrain generate {word} "def main("'
    return f"Next: kdtrain export {word} --out {quoted(path.with_name(path.name + '-student'))}"


def alphas(folder: Path, fixed: float | None = None) -> dict[str, float | None]:
    """Return the mean and the last weight of the divergence in a run; None where unknown.

    fixed: that of every step; None where it moves.
    """
    found = None if fixed is None else (fixed, fixed)
    if found is None:
        with suppress(OSError, ValueError, UsageError):
            found = RunRecord.read(folder).alphas
    return dict(zip(("alpha_mean", "alpha_last"), found or (None, None), strict=True))


def closing_page(path: Path, result: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the end of `distill`: how the run ended, its losses, where things are, and what to do next.

    result: of result.json, which has the rest; without `step` no step was taken.
    """
    state, line = ended(result)
    if result.get("step") is None:
        yield f"{path}: stopped by {result.get('stopped_by')} while not training"
    else:
        record = RunRecord.read(path, TAIL)
        yield f"{path}: {line}"
        yield ""
        yield from losses(result, record)
        if numbers := last_numbers(result, record):
            yield numbers
        if counts := result.get("warnings"):
            kinds = ", ".join(f"{times} {kind}" for kind, times in counts.items())
            yield f"warnings: {kinds} (kdtrain inspect {quoted(path)} shows them)"
        if result.get("student"):
            yield f"student in {result['student']}, all numbers in {path / RESULT}"
    yield next_step(path, state, result.get("student")) if (path / "config.toml").exists() else "Next: the same command"


@dataclass(frozen=True)
class Measure:
    """The label and the format of a number of a run."""

    label: str
    """With its unit at the end."""
    text: Callable[[float], str] | None = None
    """None: with digits, a share in %."""
    by_token: bool = False
    """Whether it is of tokens, so that those of two tokenizers do not compare."""
    best: Callable[[Iterable[float]], float] | None = None
    """`min` or `max`: differences are held against the spread of seeds, and the best is marked."""

    @property
    def head(self) -> str:
        """The name at the head of a paper's column: with its split but for test, its unit and the better way."""
        arrow = {min: " ↓", max: " ↑"}.get(self.best, "")  # type: ignore[arg-type]
        return self.label.removeprefix("test: ").replace(":", "") + arrow

    def shown(self, value: float, digits: int = 4) -> str:
        """Return a value without its unit; `digits` are a loss's after the point, a percentage has two fewer."""
        if self.text is not None:
            return self.text(value)
        share = self.label.endswith("%")
        return loss_text(100 * value, max(digits - 2, 0)) if share else loss_text(value, digits)


EVALUATED = {
    "loss": Measure("loss, nats", by_token=True, best=min),
    "bits_per_byte": Measure("bits per byte", best=min),
    "teacher_loss": Measure("the teacher's loss, nats", by_token=True),
    "teacher_bits_per_byte": Measure("the teacher's bits per byte"),
    "kl": Measure("KL to the teacher, nats", by_token=True, best=min),
    "kl_error": Measure("standard error of that KL, at most, nats"),
    "agreement": Measure("agreement with the teacher, %", by_token=True, best=max),
    "acceptance": Measure("acceptance by the teacher, %", by_token=True, best=max),
    "accuracy": Measure("accuracy, %", by_token=True, best=max),
    "ece": Measure("ECE (15 bins), %", best=min),
    "last_word": Measure("last word right, %", best=max),
    "teacher_last_word": Measure("the teacher's last word right, %"),
    "compared": Measure("tokens compared with the teacher's, %"),
    "entropy_kept": Measure("entropy that the cells keep, %"),
}
"""What `evaluate` measures, by its names."""


def tested(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text, teacher and checkpoint that the test numbers of runs are of."""
    texts = sorted(set(map(text_of, found)))
    steps = {str(each.get("checkpoint")) for each in found}
    if found:
        at = min(steps) if len(steps) == 1 else "the checkpoint that was best then"
        yield f"test: {texts[0]}; of each student {printable(at)[:60]}"
    if len(texts) > 1:
        yield "the students were tested on different texts: their test numbers do not compare"


def evaluations(found: Iterable[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield the last numbers of `evaluate` for each checkpoint and text: a column each, beyond three a row each."""
    unique = {f"{each.get('student')} {each.get('checkpoint')} {text_of(each)}": each for each in found}
    last = list(unique.values())[-_EVALUATIONS:]
    order = ["student", "checkpoint", "split", "cache", "data", "teacher", "sequences", "date", *EVALUATED]
    known = {name for each in last for name, value in each.items() if isinstance(value, str | int | float)} - {"step"}
    lines = []
    for name in (each for each in (*order, *sorted(known - {*order})) if each in known):
        measure = EVALUATED.get(name, Measure(name.replace("_", " "), number))
        cut = 12 if name == "cache" else 60
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


class _Run(TypedDict):
    student: str
    out: str
    cache: NotRequired[str | list[str] | None]


class _Libraries(TypedDict):
    kdtrain: str | None


class _Environment(TypedDict):
    """The entries of environment.json by which kdtrain recognizes its own file."""

    python: str
    platform: str
    libraries: _Libraries


_recovered: set[Path] = set()
"""Runs for which this process has logged that config.toml is lost."""


def kind_of(path: Path) -> str:
    """Return `cache`, `run` or `checkpoint`."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if is_run(path):
        return "run"
    if is_checkpoint(path.resolve()):
        return "checkpoint"
    if is_cache(path):
        return "cache"
    raise UsageError(f"{path} is neither a cache nor a run nor a checkpoint")


def is_cache(folder: Path) -> bool:
    """Return whether a folder has a file of a cache, finished or not."""
    return any((folder / name).exists() for name in (cache_format.MANIFEST, cache_format.SETTINGS, cache_format.SHARDS))


def is_run(folder: Path) -> bool:
    """Return whether `folder` was written by `kdtrain distill`.

    It then has a config.toml and an environment.json, or a valid checkpoint where these are lost or unreadable. A
    config.toml alone does not make a run: it may be the user's own file for `--config`.
    """
    lost = None
    try:
        typed(read_toml(folder / "config.toml").get("run"), _Run)
    except (OSError, ValueError) as error:
        lost = "is lost" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
    if lost is None and is_environment(folder / "environment.json"):
        return True
    name = Store(folder / "checkpoints").newest_valid()[0]
    if name is not None and lost is not None and folder.resolve() not in _recovered:
        _recovered.add(folder.resolve())
        text = f"{folder / 'config.toml'} {lost}; the options of the run are those in its checkpoint {name}"
        warn_early("lost-config", text)
    return name is not None


def is_environment(path: Path) -> bool:
    """Return whether `distill` wrote this environment.json."""
    try:
        return bool(read_json(path, _Environment))
    except (OSError, ValueError):
        return False


def best_checkpoint(run: Path) -> str:
    """Return the name of a run's best checkpoint, of the newest where none is best.

    UsageError: it has none. RunError: it is damaged.
    """
    store = Store(run / "checkpoints")
    return store.choose("best" if store.path("best").exists() else "latest").name


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None. RunError: it was removed meanwhile."""
    if (damage := problem(checkpoint)) is not None and not checkpoint.exists():
        raise RunError(f"checkpoint {checkpoint}: {damage}")
    return damage


class Result(TypedDict):
    """The entries of result.json that other commands read."""

    stop_reason: str
    error: str | None
    step: int
    steps: int
    best_step: NotRequired[int | None]
    merged_validation_loss: NotRequired[float | None]


class _OtherResult(TypedDict):
    """The entries that a run compares with its own."""

    objective: str
    cache: str
    student_name: str
    tokens: int
    best_validation_loss: float


def read_result(out: Path) -> Result | None:
    """Return the result of the run in a folder; None without a valid result.json."""
    try:
        return read_json(out / RESULT, Result)
    except (OSError, ValueError):
        return None


def best_run_beside(out: Path, cache: str, plain: tuple[str, int] | None = None) -> tuple[str, float] | None:
    """Return folder and validation loss of the best run on the same cache beside the run `out`; None without one.

    plain: of runs by cross-entropy alone, and the student's name and the tokens that they must share.
    """
    runs: list[tuple[float, str]] = []
    for path in sorted(out.parent.glob(f"*/{RESULT}")):
        with suppress(OSError, ValueError):
            other = read_json(path, _OtherResult)
            kind = other["objective"] == "cross-entropy" and (other["student_name"], other["tokens"])
            if other["cache"] == cache and plain in (None, kind) and path.parent != out:
                runs.append((other["best_validation_loss"], str(path.parent)))
    return min(runs)[::-1] if runs else None


def count_warnings(out: Path) -> dict[str, int]:
    """Count the warnings of each kind, over all starts of the run."""
    with suppress(OSError, ValueError):
        return dict(sorted(Counter(each.event for each in events(out) if each.level == "warning").items()))
    return {}
