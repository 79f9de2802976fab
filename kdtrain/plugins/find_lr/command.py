"""`kdtrain find-lr`: short real runs at several rates, the best of them longer, and the rate that they suggest.

A short run is one of `distill` in a folder of its own, `OUT/lr-0.0003-60`, and trained by the same code: weights, data,
order and seed are those of the run to come, and so are the shapes of its schedules, of which warm-up and decay take the
same shares. `search` chooses the next. `OUT/find-lr.json` has every loss; what is in it is not trained
again, and a run that was cut short resumes.
"""

import gc
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.format.names import MANIFEST, VIEW
from kdtrain.commands.distill import train
from kdtrain.config import DistillConfig
from kdtrain.config.rates import WORDS
from kdtrain.config.values import USUAL_STEPS, configured, flag
from kdtrain.errors import RunError, UsageError, making, refuse_no_path, writing
from kdtrain.files import (
    Lock,
    hidden_folder,
    publish_text,
    published,
    read_json,
    remove_empty,
    remove_file,
    swap_in,
    temporary_of,
)
from kdtrain.models.adapters import is_adapter
from kdtrain.models.loading import is_model_folder
from kdtrain.monitor.progress import hushed, log, setup_logging
from kdtrain.parallel.memory_plan import student_footprint, student_parameters
from kdtrain.plugins.find_lr.options import FindLrConfig
from kdtrain.plugins.find_lr.search import LONGER, REACH, RUNGS, SURE, Suggestion, Trained, next_run, suggest
from kdtrain.ranks import refuse_many_processes
from kdtrain.run.data_plan import open_sources
from kdtrain.run.folder import deciding, make
from kdtrain.run.path_kind import is_run
from kdtrain.run.recipe import student_spec, table_rate
from kdtrain.run.run import Run
from kdtrain.tables import columns, duration, finite, short, show, show_page
from kdtrain.training.schedule import total_steps
from kdtrain.training.signals import interruptible
from kdtrain.training.validate import validate

RECORD, FIGURE, LOCK = "find-lr.json", "find-lr.png", ".find-lr"
_DIVERGED = ("diverged", "non-finite", "gradient-explosion")
"""Why a run ends whose rate is too high."""
_SHOWN = 5
"""Rates in the table of the terminal."""


@dataclass
class _Short:
    """A short run after a rung."""

    loss: float | None
    """Validation loss, nats a token; None: it diverged."""
    parts: list[float]
    seconds: float


@dataclass
class _Record:
    """What OUT/find-lr.json holds during the search."""

    options: dict[str, dict[str, Any]]
    """Those that decide the results of the runs."""
    guess: float
    guess_from: str
    rungs: list[int]
    """Steps of the runs of each rung."""
    whole: int
    """Of how many steps warm-up and decay are taken: those of the run to come, or a guess until the text is packed."""
    planned: int | None
    """Steps of the run to come; None until the text is packed."""
    cache: str | None
    """What the short runs read."""
    runs: dict[str, list[_Short]]
    """By exponent: the rate is 2^k times the guess."""

    def rate(self, exponent: float) -> float:
        """The rate of an exponent."""
        return float(self.guess * 2.0**exponent)

    @property
    def losses(self) -> dict[int, list[Trained]]:
        """The rungs of each rate."""
        found: dict[int, list[Trained]] = {}
        for name, rungs in self.runs.items():
            losses = [math.inf if each.loss is None or not math.isfinite(each.loss) else each.loss for each in rungs]
            found[int(name)] = [Trained(x, tuple(each.parts)) for x, each in zip(losses, rungs, strict=True)]
        return found

    @property
    def trained(self) -> int:
        """Steps of all short runs."""
        return sum(sum(self.rungs[: len(done)]) for done in self.runs.values())


def main(config: FindLrConfig) -> int:
    """Search, or finish a search, and show what it found.

    UsageError: data, cache, student or options do not fit together, or `--out` holds something else. RunError: a short
    run failed for another reason than its rate, or every rate diverged.
    """
    refuse_many_processes()
    setup_logging()
    with interruptible():
        result = find_lr(config)
    if config.json:
        show("", result, True)
    else:
        show_page(_page(config.out, result))
    return 0


def find_lr(config: FindLrConfig) -> dict[str, Any]:
    """The table of all short runs and the suggestion, as OUT/find-lr.json has them.

    UsageError, RunError: as `main`. KeyboardInterrupt: a signal stopped a short run, after it was saved.
    """
    out = config.out
    with ExitStack() as stack:
        _claim(config, stack)
        record = _begin(config)
        if not (out / RECORD).exists():  # before a short run, whose folder without a record would be foreign
            stack.callback(_leave_nothing, out)
            _publish(out, asdict(record))
        log.info("short runs around %.2g (%s), first of %d steps", record.guess, record.guess_from, record.rungs[0])
        while (found := next_run(record.losses)) is not None:
            exponent, rung = found
            _train(config, record, exponent, rung)
            _publish(out, asdict(record))
        suggestion = suggest(record.losses)
        if suggestion is None:
            low = min(record.losses)
            raise RunError(f"every rate diverged, down to {record.rate(low):.2g}; look at the data and the student")
        result = _result(config, record, suggestion)
        _publish(out, result)
        _draw(out, result)
        return result


def _claim(config: FindLrConfig, stack: ExitStack) -> None:
    """Lock the folder. Refuse one that holds something else."""
    out = config.out
    refuse_no_path(str(out), "--out")
    with making(out):
        if is_run(out):
            raise UsageError(f"--out {out} holds a run, which find-lr leaves alone; name another folder")
        if not (out / RECORD).is_file() and out.exists():
            foreign = [*out.iterdir()] if out.is_dir() else [out]
            foreign = [each for each in foreign if each.name != LOCK and temporary_of(each.name) != RECORD]
            if foreign:
                raise UsageError(f"--out {out} holds something else ({foreign[0].name}); name another folder")
        stack.callback(remove_empty, make(out))
    stack.callback(Lock(out / LOCK, f"another process searches in {out}; wait for it").release)


def _begin(config: FindLrConfig) -> _Record:
    """The search in the folder, or a new one. UsageError: it has other options, or cannot be read."""
    options, path, own = deciding(config), config.out / RECORD, config.optimizer.lr
    start = config.checkpoint
    begun = start.load is not None and not (is_model_folder(start.load) or is_adapter(start.load))
    if begun and not start.override_opt_param_scheduler:
        raise UsageError(
            "--load keeps the rate of the loaded run; add --override-opt-param-scheduler to look for another"
        )
    if path.exists():
        try:
            found = read_json(path, _Record)
            known = {each for each in found.losses if abs(each) <= REACH}
            fits = (
                len(found.rungs) == RUNGS
                and found.whole > 0
                and all(len(done) <= RUNGS for done in found.runs.values())
            )
            if not (fits and 0 < found.guess < math.inf and known == {*map(int, found.runs)}):
                raise ValueError("it is not what find-lr writes")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: {error}; name another --out") from None
        changed = [
            f"{flag(name)} was {was}"
            for section, table in options.items()
            for name, value in table.items()
            if name != "rung_steps" and (was := found.options.get(section, {}).get(name)) != finite(value)
        ]
        changed += [f"--rung-steps was {found.rungs[0]}"] if found.rungs != _rungs(config) else []
        if changed:
            raise UsageError(f"--out {config.out} holds another search ({', '.join(changed)}); name another --out")
        return found
    student = student_spec(config)
    packed = config.data.data is not None or config.cross_tokenizer  # by the first short run
    sources = {} if packed else open_sources(config, config.cache)
    facts = sources["train"].facts if sources else None
    guess, source = own, "--lr"
    if isinstance(guess, str):
        size, seq_len = (None, config.data.seq_len) if facts is None else (facts.vocab_size, facts.seq_len)
        footprint = student_footprint(student, size, seq_len=min(seq_len, 64), mode="fp32")
        parameters = student_parameters(student, size) if footprint is None else footprint.parameters
        kind, row = table_rate(config, student, parameters)
        guess = row.lr
        source = f"{WORDS[kind]}, {short(parameters)} parameters"
    known_length = bool(sources) or config.epochs is None
    planned = total_steps(config, len(sources["train"]) if sources else 0) if known_length else None
    whole = planned or USUAL_STEPS
    return _Record(finite(options), guess, source, _rungs(config), whole, planned, None, {})


def _rungs(config: FindLrConfig) -> list[int]:
    return [config.first_steps * LONGER**rung for rung in range(RUNGS)]


def _leave_nothing(out: Path) -> None:
    """Remove the record of a search that did not begin, such as one of refused options."""
    if not any(out.glob("lr-*")):
        remove_file(out / RECORD)


def _train(config: FindLrConfig, record: _Record, exponent: int, rung: int) -> None:
    """Train a rate for as many steps as a rung has, and record its loss."""
    rate, steps = record.rate(exponent), record.rungs[rung]
    out, parts = config.out / f"lr-{rate:.4g}-{steps}", list[float]()
    _share_tokens(config.out, out)

    def measure(run: Run, result: dict[str, Any]) -> None:
        parts.extend(_by_part(run))
        record.planned = total_steps(config, len(run.recipe.sources["train"]))

    try:
        with hushed():
            result = train(short_run(config, out, rate, steps, record.whole), finish=measure)
    except RunError as error:
        if error.reason not in (*_DIVERGED, "no-progress"):
            raise
        result = read_json(out / "result.json", dict[str, Any])
        result["last_validation_loss"] = None if error.reason in _DIVERGED else result.get("last_validation_loss")
    finally:
        gc.collect()  # its weights and moments
        torch.compiler.reset()  # each student has graphs of its own, and only a few are kept for a function
    if result["stop_reason"] == "signal":
        raise KeyboardInterrupt(result["stopped_by"])
    if record.cache not in (None, result["cache"]):
        raise UsageError(f"{config.out}: the data is another than that of the runs before; name another --out")
    record.cache, loss = result["cache"], result["last_validation_loss"]
    loss = loss if isinstance(loss, int | float) and math.isfinite(loss) else None
    seconds = float(result.get("seconds") or 0.0)
    record.runs.setdefault(str(exponent), []).append(_Short(loss, parts, seconds))
    shown = "diverged" if loss is None else f"validation loss {loss:.4f}"
    log.info("lr %.2g, %d steps: %s (%s)", rate, steps, shown, duration(seconds))


def _by_part(run: Run) -> list[float]:
    """The validation loss of parts of the split, nats a token."""
    trainer, source, micro = run.trainer, run.trainer.validation_source, run.trainer.stepper.micro
    count = min(len(source), trainer.validation_batches * micro)
    size = max(1, min(micro, count // 16))  # sixteen parts at least, if there are as many sequences
    whole = count if not source.facts.members else len(source)  # whose members stand one behind the other
    student, found = trainer.student.eval(), list[float]()
    for number in range(count // size):
        start = number * whole // (count // size)
        measured = validate(student, source, micro=size, batches=1, part=range(start, start + size))
        if measured is not None and measured.tokens:
            found.append(measured.cross_entropy / measured.tokens)
    return found


def short_run(config: FindLrConfig, out: Path, lr: float, steps: int, whole: int) -> DistillConfig:
    """The run of `whole` steps in `steps`: what is counted in steps of its schedule takes the same share.

    A spike ends it, where a rollback would lower its rate.
    """
    own = {each.name: getattr(config, each.name) for each in fields(DistillConfig)}
    given = config.optimizer
    warmup, decay = min(given.warmup_steps, whole // 2), given.decay_steps
    options: dict[str, Any] = {
        **{"out": out, "steps": steps, "epochs": None, "json": False, "config": None},
        **{"lr": lr, "min_lr": min(given.min_lr, lr), "warmup_steps": math.ceil(warmup * steps / whole)},
        "decay_steps": None if decay is None else math.ceil(decay * steps / whole),
        **{"max_rollbacks": 0, "early_stopping": False, "eval_freq": steps, "checkpoint_freq": steps},
        **{"checkpoint_minutes": 0.0, "keep_rolling": 1, "keep_epochs": 1, "keep_special": 1},
        **{"log_to": "none", "sample_freq": 0, "on_event": None},
    }
    return configured(DistillConfig, DistillConfig(**own), options)


def _share_tokens(folder: Path, out: Path) -> None:
    """Give a short run the packed text of another one, and its view, which are the same."""
    for name, record in (("data", MANIFEST), ("data", VIEW), ("view", VIEW)):
        made = next((each.parent for each in sorted(folder.glob(f"lr-*/{name}/{record}"))), None)
        if made is None or (out / name).exists():
            continue
        with writing(out / name), hidden_folder(out / name) as hidden:
            shutil.copytree(made, hidden, dirs_exist_ok=True, copy_function=_link)
            swap_in(hidden, out / name, "find-lr.data")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a disk without links
        shutil.copy2(source, target, follow_symlinks=False)


def _result(config: FindLrConfig, record: _Record, found: Suggestion) -> dict[str, Any]:
    """The record of a search that is over."""
    seconds = sum(each.seconds for rungs in record.runs.values() for each in rungs)
    behind = {f"{record.rate(each):.4g}": difference for each, difference in found.behind.items()}
    return {
        **asdict(record),
        "rates": {name: record.rate(int(name)) for name in record.runs},
        "suggestion": {
            "lr": float(f"{record.rate(found.at):.2g}"),
            "best": record.rate(found.best),
            "between": [record.rate(found.low), record.rate(found.high)],
            "how": found.how,
            "at_the_edge": found.edge,
            "behind": {name: {"nats": off, "standard_error": error} for name, (off, error) in behind.items()},
        },
        "cost": {
            "steps": record.trained,
            "share_of_the_run": record.trained / record.planned if record.planned else None,
            "seconds": seconds,
        },
        "out": str(config.out),
    }


def _publish(out: Path, record: dict[str, Any]) -> None:
    publish_text(out / RECORD, json.dumps(finite(record), indent=1) + "\n", "find-lr.record")


def _draw(out: Path, result: dict[str, Any]) -> None:
    """Draw the figure where matplotlib is installed: losses over rates, a line a rung, the suggestion and its band."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no figure without matplotlib: pip install 'kdtrain[plot]', and the same command draws it")
        return
    from kdtrain.monitor import figures

    rungs = {}
    for rung, steps in enumerate(result["rungs"]):
        points = [
            (result["rates"][name], shorts[rung]["loss"])
            for name, shorts in sorted(result["runs"].items(), key=lambda each: int(each[0]))
            if len(shorts) > rung and shorts[rung]["loss"] is not None
        ]
        if points:
            rungs[f"{steps:,} steps"] = points
    suggestion = result["suggestion"]
    made, [[axes]] = figures.figure(figures.COLUMN, 2.6, 1, 1)
    axes.axvspan(*suggestion["between"], color=figures.GREY, alpha=0.2, linewidth=0)
    axes.axvline(suggestion["lr"], color="#000000", linestyle=":", linewidth=1.2)
    for (label, points), (color, marker, line) in zip(rungs.items(), [*figures.LOOKS, *figures.MORE], strict=False):
        look: dict[str, Any] = {"marker": marker, "markersize": 4, "linestyle": line, "linewidth": 1.4}
        axes.plot(*zip(*points, strict=True), color=color, label=label, **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks([rate for rate, _ in max(rungs.values(), key=len)])
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")
    axes.tick_params(axis="x", rotation=45)
    title = f"Validation loss by rate: {suggestion['lr']:.2g} is suggested"
    figures.finish(axes, title, "peak learning rate", "nats a token")
    figures.small(axes)
    with writing(out / FIGURE), published(out / FIGURE, "find-lr.figure") as path:
        figures.save(made, path, dpi=200, bbox_inches="tight", pad_inches=0.03)


def _page(out: Path, result: dict[str, Any]) -> Iterator[Any]:
    """At most eleven lines."""
    rates, suggestion, cost = result["rates"], result["suggestion"], result["cost"]
    names = sorted(rates, key=int)
    yield f"{out}: validation losses around {result['guess']:.2g} ({result['guess_from']})"
    best = next(place for place, name in enumerate(names) if rates[name] == suggestion["best"])
    first = max(0, min(best - _SHOWN // 2, len(names) - _SHOWN))
    rows = []
    for name in names[first : first + _SHOWN]:
        losses = ["diverged" if each["loss"] is None else f"{each['loss']:.4f}" for each in result["runs"][name]]
        rate = f"{rates[name]:.2g}{' *' if rates[name] == suggestion['best'] else ''}"
        rows.append([rate, *losses, *["-"] * (RUNGS - len(losses))])
    yield columns(("lr", *(f"{steps:,} steps" for steps in result["rungs"])), rows, left=("lr",))
    share = cost["share_of_the_run"]
    of_run = "" if share is None else f", {100 * share:.0f} % of the run's {result['planned']:,}"
    yield f"cost: {cost['steps']:,} steps{of_run}, {duration(cost['seconds'])}; {RECORD} has all"
    low, high = suggestion["between"]
    how = ", the lowest loss" if suggestion["how"] == "best" else " by a parabola around *"
    yield f"suggested: {suggestion['lr']:.2g}{how}; {low:.2g} to {high:.2g} may be as good"
    if suggestion["at_the_edge"]:
        yield f"it is the last rate that is tried: search again with --lr {suggestion['best']:.2g}, in another --out"
    elif suggestion["behind"]:
        yield f"neighbours: {', '.join(_neighbour(*each) for each in suggestion['behind'].items())} nats"
    yield f"Next: kdtrain distill ... --lr {suggestion['lr']:.2g} --out runs/NAME"


def _neighbour(name: str, behind: dict[str, float | None]) -> str:
    """A neighbour of the best rate, and how far its loss is above."""
    off, error = behind["nats"], behind["standard_error"]
    if off is None or not math.isfinite(off):
        return f"{float(name):.2g} diverged"
    spread = "" if error is None else f" ± {error:.2g}{' (alike)' if off < SURE * error else ''}"
    return f"{float(name):.2g} {off:+.3f}{spread}"
