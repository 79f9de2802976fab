"""`kdtrain sweep`: arms times seeds of a TOML file, each by its own command, and the table of all."""

import math
import statistics
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Group as Together
from rich.live import Live

from kdtrain.errors import RunError, UsageError, log
from kdtrain.monitor.facts import ENDED, run_row
from kdtrain.monitor.progress import bar, console, setup_logging
from kdtrain.monitor.record import RunRecord
from kdtrain.outputs import OutFolder
from kdtrain.plugins.papers import SweepConfig
from kdtrain.plugins.papers.compare import compare
from kdtrain.plugins.papers.groups import Group, read_groups
from kdtrain.plugins.papers.jobs import Runner, Sweep, SweepJob, claim, read_sweep
from kdtrain.tables import Table, duration, loss_text, number, size


def main(config: SweepConfig) -> int:
    """Make the caches and runs that are missing, and print the table of all runs.

    UsageError: the file, or one of its commands, cannot work; the folder holds something else. RunError: a cache cannot
    be made, or a run has no result, also after a signal.
    """
    setup_logging()
    out = config.out or config.file.parent / config.file.stem
    sweep = read_sweep(config.file, out)
    if config.dry_run:
        with suppress(KeyboardInterrupt), Runner(config.at_once, quiet=True) as runner:
            _show_plan([*planned(sweep, runner)], config)
        return 0
    groups = run(sweep, config.at_once)
    if groups is not None:
        compare(groups, config)
        if not config.json:
            print(f"Next: kdtrain compare {out} --format latex; kdtrain report {out} --out {out}/report.html")
    sweep.refuse_missing()
    return 0


def planned(sweep: Sweep, runner: Runner) -> Iterator[dict[str, Any]]:
    """Yield a row for each command, with `seconds`, `MiB` and their source `how` if it is to run.

    They are None where unknown. A run takes what a finished run of its arm took, or else what its `--dry-run` measures:
    without its cache, on a small one, which is made and removed, and has no epochs to count.
    """
    known = dict[str, dict[str, Any]]()
    small = dict[str, str]()
    jobs = [*sweep.caches, *sweep.runs]
    for job in sweep.runs:
        if job.done and (row := _row(job)) and row["state"] in ENDED:
            known[job.arm] = {"seconds": row["seconds"], "MiB": OutFolder(job.config.out).mib, "how": f"as {job.name}"}
    missing = {str(each.config.out): each.name for each in sweep.caches if not each.done}
    most = max(2 * job.config.batch_size for job in sweep.runs)
    with TemporaryDirectory() as folder, bar("measure", len(jobs), unit="commands") as shown:
        for number, job in enumerate(jobs):
            shown.update(number)
            absent = [each for each in job.words if job.is_run and each in missing]
            if not (job.done or job.arm in known):
                if absent and (job.config.epochs is not None or not small.keys() >= {*absent}):
                    plan = {"error": f"unknown until {missing[absent[0]]} is made"}
                else:
                    plan = runner.report([*(small.get(each, each) for each in job.words), "--dry-run"])
                hours = plan.get("estimated_hours")
                how = "computed"
                if isinstance(hours, float):
                    how = "measured on a small cache" if absent else "measured"
                known[job.arm] = {
                    "seconds": 3600 * hours if isinstance(hours, float) else None,
                    "MiB": plan.get("disk (MiB)", plan.get("disk for checkpoints (MiB)")),
                    "how": plan.get("error", how),
                }
            if not (job.done or job.is_run):
                count = min(most, job.config.data.num_sequences or most)
                words = (*job.words, "--num-sequences", f"{count}", "--out", f"{folder}/{number}")
                small |= {} if "error" in runner.report(words) else {str(job.config.out): words[-1]}
            yield {"name": job.name, "command": job.line, "done": job.done} | ({} if job.done else known[job.arm])
        for job in sweep.trial:
            found = [small.get(each, each) for each in job.words]
            if not {*missing} & {*found} and "error" in (plan := runner.report(found)):
                raise UsageError(f"{job.name}: {plan['error']}")


def _row(job: SweepJob) -> dict[str, Any] | None:
    """Return the row of a run, by the end of its log; None where there is no log yet."""
    with suppress(OSError, ValueError, UsageError):
        return run_row(job.config.out, RunRecord.read(job.config.out, 2**19))
    return None


def _show_plan(commands: list[dict[str, Any]], config: SweepConfig) -> None:
    left = [each for each in commands if not each["done"]]
    hours = sum(each["seconds"] or 0.0 for each in left) / config.at_once / 3600
    disk, unknown = sum(each["MiB"] or 0.0 for each in left), sum(each["seconds"] is None for each in left)
    lines = []
    for each in commands:
        cost = "" if each["done"] else f"{duration(each['seconds'])}, {size(each['MiB'])}, {each['how']}"
        lines.append(f"{'done' if each['done'] else 'to do':<6} {cost:<40} {each['command']}")
    more = f", without {unknown} that are unknown" if unknown else ""
    lines.append(f"{len(left)} commands to do, about {number(round(hours, 2))} hours and {size(disk)}{more}")
    total = {"unknown": unknown, "estimated_hours": round(hours, 4), "disk (MiB)": round(disk, 1)}
    config.show(lines, {"commands": commands, "to do": len(left), **total})


def run(sweep: Sweep, at_once: int) -> list[Group] | None:
    """Run what is left of a sweep; return its runs by arm, None where a signal stopped it.

    UsageError, RunError: as `main`.
    """
    ended = dict[str, dict[str, Any]]()
    live: Any = {
        "get_renderable": lambda: Together(*arms(sweep, at_once, ended).drawn(console.width)),
        "refresh_per_second": 0.5,
        "transient": True,
    }
    first = [sweep.caches, sweep.trial]
    if sweep.test is not None and sweep.test.config.cache is None:  # a test of a text needs none of the caches
        first = [sweep.trial, sweep.caches]
    with Runner(at_once) as runner, claim(sweep, runner):
        for part in (*first, sweep.runs, sweep.tests()):
            runner.quiet = console.is_terminal and part is sweep.runs
            with Live(console=console, **live) if runner.quiet else nullcontext():
                for job, error in runner.all(part):
                    if error and not job.is_run:
                        raise RunError(f"{job.name}: {error}")
                    if job.is_run and (row := _row(job)):
                        ended[job.name] = row
                    log.info("%s", _ended(sweep, job, error))
        if runner.stopped is not None:
            log.info("stopped by %s; the same command resumes", runner.stopped)
            return None
    return read_groups(sweep.folders, most=None)


def arms(sweep: Sweep, at_once: int, ended: dict[str, dict[str, Any]]) -> Table:
    """Tabulate the state of a sweep's runs, a row an arm. ended: rows of runs that have ended, which are read once."""
    rows, every = [], [0, 0, 0, 0.0]
    for arm in dict.fromkeys(job.arm for job in sweep.runs):
        jobs = [job for job in sweep.runs if job.arm == arm]
        ended |= {job.name: row for job in jobs if job.name not in ended and job.done and (row := _row(job))}
        over, others = [ended[job.name] for job in jobs if job.name in ended], [j for j in jobs if j.name not in ended]
        now = [row for job in others if (row := _row(job)) and row["state"] in ("training", "unknown")]
        times = [row["seconds"] for row in over if row["seconds"]]
        times += [
            r["seconds_left"] * r["steps"] / (r["steps"] - r["step"]) for r in now if r["step"] < (r["steps"] or 0)
        ]
        waiting = len(others) - len(now)
        left = sum(row["seconds_left"] for row in now) + waiting * statistics.fmean(times or [math.nan])
        failed = sum(row["state"] not in ENDED for row in over)
        counts = [len(over) - failed, len(now), failed, left / at_once]
        every = [sum(each) for each in zip(every, counts, strict=True)]
        step = ", ".join(f"{number(row['step'])}/{number(row['steps'])}" for row in now or over[-1:])
        loss = ", ".join(loss_text(row["last_validation_loss"]) for row in now or over[-1:])
        rows.append((arm, *counts[:3], step, loss, duration(left / at_once)))
    rows.append(("all", *every[:3], "", "", duration(every[3])))
    return Table.of(("arm", "done", "running", "failed", "step", "validation", "left"), rows, left=("arm",))


def _ended(sweep: Sweep, job: SweepJob, error: str) -> str:
    row = _row(job) if job.is_run else None
    if row is None:
        return f"{job.name}: {error or 'done'}"
    text = f"{job.name}: {error or row['state']}"
    loss = row["best_validation_loss"]
    text += "" if loss is None else f", validation {loss_text(loss)} nats per token"
    return f"{text} ({sum(each.done for each in sweep.runs)} of {len(sweep.runs)} runs)"
