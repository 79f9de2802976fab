"""`kdtrain sweep`: arms times seeds of a TOML file, each by its own command, and the table of all."""

import json

from kdtrain.cli import parse
from kdtrain.commands import compare
from kdtrain.config import SweepConfig
from kdtrain.errors import RunError
from kdtrain.files import Lock
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.runs import grouped, read_runs
from kdtrain.run.sweep import Job, Runner, Sweep, claim, read_sweep
from kdtrain.tables import finite, loss_text


def main(config: SweepConfig) -> int:
    """Make the caches and runs that are missing, and print the table of all runs.

    UsageError: the file, or one of its commands, cannot work; the folder holds something else. RunError: a cache cannot
    be made.
    """
    setup_logging()
    out = config.out or config.file.with_suffix("")
    sweep = read_sweep(config.file, out, parse)
    if config.dry_run:
        for job in (*sweep.caches, *sweep.runs):
            print(f"{'done' if job.done else 'to do':<6} {job.line}")
        return 0
    claim(sweep)
    lock = Lock(out / ".sweep.lock", f"another process runs the sweep {out}; wait for it, or name another --out")
    try:
        with Runner(config.at_once) as runner:
            failed = _run(sweep, runner)
            if runner.stopped is not None:
                log.info("stopped by %s; the same command resumes", runner.stopped)
                return 0
    finally:
        lock.release()
    groups = grouped(read_runs(sweep.folders, most=None))
    if config.json:
        print(json.dumps(finite({"out": str(out), "failed": failed, **compare.as_record(groups)})))
    else:
        compare.show(groups)
        runs = f"{out}/*/seed-*"
        print(f"Next: kdtrain compare {runs} --format latex; kdtrain report {runs} --out {out}/report.html")
    return 0


def _run(sweep: Sweep, runner: Runner) -> dict[str, str]:
    """Run what is left; return the runs that ended badly, which are results too, with their errors."""
    for job, error in runner.all(sweep.caches):
        if error:
            raise RunError(f"{job.name}: {error}")
        log.info("%s is made", job.name)
    failed = {}
    for job, error in runner.all(sweep.runs):
        if error:
            failed[job.name] = error
        log.info("%s %s", _ended(job, error), f"({sum(each.done for each in sweep.runs)} of {len(sweep.runs)})")
    if runner.stopped is None:
        for job, error in runner.all(sweep.tests()):
            if error:
                raise RunError(f"{job.name}: {error}")
            log.info("%s: done", job.name)
    return failed


def _ended(job: Job, error: str) -> str:
    [run] = read_runs([job.config.out]) if (job.config.out / "environment.json").exists() else [None]
    loss = None if run is None else run.numbers["best_validation_loss"]
    text = f"{job.name}: {error or 'done'}"
    return text if loss is None else f"{text}, validation {loss_text(loss)} nats a token"
