"""`kdtrain find-lr`: short real runs at several rates, the best of them longer, and the rate that they suggest.

A short run is one of `distill` in a folder of its own, `OUT/lr-0.0003-60`, and trained by the same code: weights, data,
order and seed are those of the run to come, and so are the shapes of its schedules, of which warm-up and decay take the
same shares. `search` chooses the next. `OUT/find-lr.json` has every loss; what is in it is not trained
again, and a run that was cut short resumes. Text is packed once: its folder moves on from each run to the next.
"""

import gc
import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from kdtrain.commands.distill import foresee, train
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import configured, flag
from kdtrain.errors import RunError, UsageError, log
from kdtrain.files import read_json
from kdtrain.monitor.facts import is_run
from kdtrain.monitor.progress import hushed, setup_logging
from kdtrain.outputs import OutFolder
from kdtrain.plugins.find_lr import FindLrConfig
from kdtrain.plugins.find_lr.search import LONGER, REACH, RUNGS, SURE, Suggestion, Trained, next_run, suggest
from kdtrain.tables import Table, duration, finite

RECORD, FIGURE = "find-lr.json", "find-lr.png"
_DIVERGED = ("diverged", "non-finite", "gradient-explosion")
"""Why a run ends whose rate is too high."""
_SHOWN = 5
"""Rates in the table of the terminal."""
_LOOKS = [("#0072B2", "o", "-"), ("#D55E00", "s", "--")]
"""Colour, marker and line of each rung."""


@dataclass
class _Short:
    """The result of a rate's short run in one rung, as the record holds it."""

    loss: float | None
    """Validation loss, nats per token; None: it diverged."""
    parts: list[float]
    seconds: float


@dataclass
class _Record:
    """The record in OUT/find-lr.json during the search."""

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
        """Return the learning rate of an exponent."""
        return float(self.guess * 2.0**exponent)

    @property
    def losses(self) -> dict[int, list[Trained]]:
        """The results of each rate's rungs, by exponent."""
        return {
            int(name): [Trained(math.inf if each.loss is None else each.loss, tuple(each.parts)) for each in rungs]
            for name, rungs in self.runs.items()
        }


def main(config: FindLrConfig) -> int:
    """Search, or finish a search, and show what it found.

    UsageError: data, cache, student or options do not fit together, or `--out` holds something else. RunError: a short
    run failed for another reason than its rate, or every rate diverged.
    """
    setup_logging()
    with ExitStack() as stack:
        _claim(config, stack)
        result = find_lr(config, stack)
    config.show(_page(config.out, result), result)
    return 0


def _claim(config: FindLrConfig, stack: ExitStack) -> None:
    """Lock the folder. Refuse one that holds something else."""
    out = config.out
    folder = OutFolder(out)
    others = folder.others(RECORD)
    if is_run(out):
        raise UsageError(f"--out {out} holds a run, which find-lr leaves alone; name another folder")
    if others and not (out / RECORD).is_file():
        raise UsageError(f"--out {out} holds something else ({others[0]}); name another folder")
    stack.enter_context(folder.claimed(RECORD, f"another process searches in {out}; wait for it"))


def find_lr(config: FindLrConfig, stack: ExitStack) -> dict[str, Any]:
    """Train the short runs that are missing; return their table and the suggestion, as OUT/find-lr.json has them.

    stack: ends with the search. UsageError, RunError: as `main`. KeyboardInterrupt: a signal stopped a short run, after
    it was saved.
    """
    out = config.out
    record = _resumed(config) or _begun(config)
    if not record.runs:  # before a short run, whose folder without a record would be foreign
        stack.callback(lambda: None if any(out.glob("lr-*")) else OutFolder(out).remove(RECORD))
        _publish(out, asdict(record))
    log.info("short runs around %.2g (%s), first of %d steps", record.guess, record.guess_from, record.rungs[0])
    while (found := next_run(record.losses)) is not None:
        _train(config, record, *found)
        _publish(out, asdict(record))
    suggestion = suggest(record.losses)
    if suggestion is None:
        low = record.rate(min(record.losses))
        raise RunError(f"every rate diverged, down to {low:.2g}; look at the data and the student")
    result = _result(config, record, suggestion)
    _publish(out, result)
    _draw(out, result)
    return result


def _resumed(config: FindLrConfig) -> _Record | None:
    """Read the search in the folder, or return None. UsageError: it has other options, or cannot be read."""
    path = config.out / RECORD
    if not path.exists():
        return None
    try:
        found = read_json(path, _Record)
        exponents, rungs = [int(name) for name in found.runs], [len(done) for done in found.runs.values()]
        fits = len(found.rungs) == RUNGS and max(rungs, default=0) <= RUNGS and found.whole > 0
        if not fits or any(abs(each) > REACH for each in exponents) or not 0 < found.guess < math.inf:
            raise ValueError("it is not what find-lr writes")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; name another --out") from None
    changed = [
        f"{flag(name)} was {found.options.get(section, {}).get(name)}"
        for section, table in finite(config.deciding()).items()
        for name, value in table.items()
        if name != "rung_steps" and found.options.get(section, {}).get(name) != value
    ]
    first = config.first_steps(config.steps or found.whole)
    changed += [f"--rung-steps was {found.rungs[0]}"] if found.rungs[0] != first else []
    if changed:
        raise UsageError(f"--out {config.out} holds another search ({', '.join(changed)}); name another --out")
    return found


def _begun(config: FindLrConfig) -> _Record:
    """Prepare a new search. UsageError: data, cache or student cannot be read."""
    guess, source, sequences = foresee(config)  # text is packed by the first short run
    planned = None
    if sequences is not None or config.epochs is None:
        planned = config.total_steps(sequences or 0)
    whole = planned or replace(config, epochs=None).total_steps(0)
    rungs = [config.first_steps(whole) * LONGER**rung for rung in range(RUNGS)]
    return _Record(finite(config.deciding()), guess, source, rungs, whole, planned, None, {})


def _train(config: FindLrConfig, record: _Record, exponent: int, rung: int) -> None:
    """Train a rate for as many steps as a rung has, and record its loss."""
    rate = record.rate(exponent)
    steps = record.rungs[rung]
    out = config.out / f"lr-{rate:.4g}-{steps}"
    parts = list[float]()
    for name in ("data", "view"):
        made = next((each for each in sorted(config.out.glob(f"lr-*/{name}")) if each.is_dir()), None)
        if made is not None and not (out / name).exists():
            OutFolder(out).take(made)

    def measure(run: Any, result: dict[str, Any]) -> None:
        parts.extend(run.trainer.loss_by_part())
        record.planned = config.total_steps(len(run.recipe.sources["train"]))

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


def short_run(config: FindLrConfig, out: Path, lr: float, steps: int, whole: int) -> DistillConfig:
    """Configure the short run: `whole` steps in `steps`, where the parts of the schedule keep their shares.

    A spike ends it, where a rollback would lower its rate.

    A spike ends it, where a rollback would lower its rate.
    """
    own = {each.name: getattr(config, each.name) for each in fields(DistillConfig)}
    given = config.optimizer
    warmup = min(given.warmup_steps, whole // 2)
    decay = given.decay_steps
    options: dict[str, Any] = {
        **{"out": out, "steps": steps, "epochs": None, "json": False, "config": None},
        **{"lr": lr, "min_lr": min(given.min_lr, lr), "warmup_steps": math.ceil(warmup * steps / whole)},
        "decay_steps": None if decay is None else math.ceil(decay * steps / whole),
        **{"max_rollbacks": 0, "early_stopping": False, "eval_freq": steps, "checkpoint_freq": steps},
        **{"checkpoint_minutes": 0.0, "keep_rolling": 1, "keep_epochs": 1, "keep_special": 1},
        **{"log_to": "none", "sample_freq": 0, "on_event": None},
    }
    return configured(DistillConfig, DistillConfig(**own), options)


def _result(config: FindLrConfig, record: _Record, found: Suggestion) -> dict[str, Any]:
    """Return the record of a finished search."""
    shorts = [(each, steps) for done in record.runs.values() for each, steps in zip(done, record.rungs, strict=False)]
    trained = sum(steps for _, steps in shorts)
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
            "steps": trained,
            "share_of_the_run": trained / record.planned if record.planned else None,
            "seconds": sum(each.seconds for each, _ in shorts),
        },
        "out": str(config.out),
    }


def _publish(out: Path, record: dict[str, Any]) -> None:
    OutFolder(out).publish(RECORD, json.dumps(finite(record), indent=1) + "\n", "find-lr.record")


def _draw(out: Path, result: dict[str, Any]) -> None:
    """Draw the figure where matplotlib is installed: losses over rates, a line a rung, the suggestion and its band."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no figure without matplotlib: pip install 'kdtrain[plot]', and the same command draws it")
        return
    from matplotlib.figure import Figure

    suggestion = result["suggestion"]
    losses = [(result["rates"][name], done) for name, done in result["runs"].items()]
    made = Figure(figsize=(3.5, 2.6), layout="constrained")  # without pyplot, which needs a screen
    axes = made.subplots()
    axes.axvspan(*suggestion["between"], color="#999999", alpha=0.2, linewidth=0)
    axes.axvline(suggestion["lr"], color="#000000", linestyle=":", linewidth=1.2)
    axes.set_xscale("log", base=2)
    for rung, (steps, (color, marker, line)) in enumerate(zip(result["rungs"], _LOOKS, strict=True)):
        points = sorted((rate, done[rung]["loss"]) for rate, done in losses if len(done) > rung)
        points = [point for point in points if point[1] is not None]
        look: dict[str, Any] = {"marker": marker, "markersize": 4, "linestyle": line, "linewidth": 1.4}
        axes.plot(*zip(*points, strict=True), color=color, label=f"{steps:,} steps", **look)
    axes.set_xticks(sorted(rate for rate, done in losses if done[0]["loss"] is not None))
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")
    axes.tick_params(axis="x", rotation=45)
    axes.tick_params(labelsize=8)
    axes.set_title(f"Validation loss by rate: {suggestion['lr']:.2g} is suggested", fontsize=9)
    axes.set_xlabel("peak learning rate", fontsize=8)
    axes.set_ylabel("nats per token", fontsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    with OutFolder(out).published(FIGURE, "find-lr.figure") as path:
        made.savefig(path, dpi=200, format="png", bbox_inches="tight", pad_inches=0.03)


def _page(out: Path, result: dict[str, Any]) -> Iterator[Any]:
    """Yield the page for a terminal, at most eleven lines."""
    rates, suggestion, cost = result["rates"], result["suggestion"], result["cost"]
    names = sorted(rates, key=int)
    yield f"{out}: validation losses around {result['guess']:.2g} ({result['guess_from']})"
    best = next(place for place, name in enumerate(names) if rates[name] == suggestion["best"])
    first = max(0, min(best - _SHOWN // 2, len(names) - _SHOWN))
    rows = []
    for place, name in list(enumerate(names))[first : first + _SHOWN]:
        losses = ["diverged" if each["loss"] is None else f"{each['loss']:.4f}" for each in result["runs"][name]]
        mark = " *" if place == best else ""
        rows.append([f"{rates[name]:.2g}{mark}", *losses, *["-"] * (RUNGS - len(losses))])
    yield Table.of(("lr", *(f"{steps:,} steps" for steps in result["rungs"])), rows, left=("lr",))
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
    """Describe a neighbour of the best rate, and how far its loss is above."""
    off, error = behind["nats"], behind["standard_error"]
    if off is None or not math.isfinite(off):
        return f"{float(name):.2g} diverged"
    spread = ""
    if error is not None:
        spread = f" ± {error:.2g}{' (alike)' if off < SURE * error else ''}"
    return f"{float(name):.2g} {off:+.3f}{spread}"
