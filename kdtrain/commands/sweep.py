"""`kdtrain sweep`: arms times seeds of a TOML file, each by its own command, and the table of all."""

from pathlib import Path

from kdtrain.commands.compare import compare
from kdtrain.config import SweepConfig
from kdtrain.errors import RunError
from kdtrain.files import Lock
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.runs import Group, grouped, read_runs
from kdtrain.run.sweep import Runner, Sweep, SweepJob, claim, read_sweep
from kdtrain.tables import loss_text


def main(config: SweepConfig) -> int:
    """Make the caches and runs that are missing, and print the table of all runs.

    UsageError: the file, or one of its commands, cannot work; the folder holds something else. RunError: a cache cannot
    be made.
    """
    setup_logging()
    out = config.out or config.file.with_suffix("")
    if config.dry_run:
        sweep = read_sweep(config.file, out)
        for job in (*sweep.caches, *sweep.runs):
            print(f"{'done' if job.done else 'to do':<6} {job.line}")
        return 0
    groups = run(config.file, out, config.at_once)
    if groups is not None:
        compare(groups, config.json)
        if not config.json:
            runs = f"{out}/*/seed-*"
            print(f"Next: kdtrain compare {runs} --format latex; kdtrain report {runs} --out {out}/report.html")
    return 0


def run(file: Path, out: Path, at_once: int) -> list[Group] | None:
    """Run what is left of a sweep; return its runs by arm, None where a signal stopped it.

    UsageError, RunError: as `main`.
    """
    sweep = read_sweep(file, out)
    claim(sweep)
    lock = Lock(out / ".sweep.lock", f"another process runs the sweep {out}; wait for it, or name another --out")
    try:
        with Runner(at_once) as runner:
            for part in (sweep.caches, sweep.runs, sweep.tests()):
                for job, error in runner.all(part):
                    if error and not job.is_run:
                        raise RunError(f"{job.name}: {error}")
                    log.info("%s", _ended(sweep, job, error))
            if runner.stopped is not None:
                log.info("stopped by %s; the same command resumes", runner.stopped)
                return None
    finally:
        lock.release()
    return grouped(read_runs(sweep.folders, most=None))


def _ended(sweep: Sweep, job: SweepJob, error: str) -> str:
    text = f"{job.name}: {error or 'done'}"
    if not job.is_run or not (job.config.out / "environment.json").exists():
        return text
    [found] = read_runs([job.config.out])
    done = f"{sum(each.done for each in sweep.runs)} of {len(sweep.runs)} runs"
    if (loss := found.numbers["best_validation_loss"]) is not None:
        text = f"{text}, validation {loss_text(loss)} nats a token"
    return f"{text} ({done})"
