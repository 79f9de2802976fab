"""A sweep: arms times seeds over shared caches, as commands that are run once each.

A file names arms, each a set of options of `distill` over a common base, and the caches that they share:

    seeds = [0, 1, 2]

    [caches.text]             # options of cache-teacher
    teacher = "stdlib-5m"
    data = "stdlib"

    [common]                  # options of distill; a cache goes by its name
    student = "stdlib-1m"
    cache = "text"

    [arms.kd]
    [arms.cross-entropy]
    alpha = 0

    [arms.grid]               # an arm for each value of a list, of several lists for each combination
    alpha = [0.5, 0.9]

    [test]                    # options of evaluate, for every student of the sweep
    cache = "text"

Each cache and each run is one command in a process of its own, in `OUT/caches/NAME` and `OUT/ARM/seed-N`. Nothing else
is stored but the words of these commands (`OUT/sweep.json`): what is done is read from the caches and runs, so a killed
sweep is resumed by the same command, and a run that it makes is the one that its command makes by hand.
"""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.config import CacheTeacherConfig, DistillConfig, EvaluateConfig
from kdtrain.config.values import configured, flag, options_of
from kdtrain.errors import RunError, UsageError, writing
from kdtrain.files import Lock, is_locked, make_folder, publish_json, read_sealed, read_toml
from kdtrain.monitor.record import SWEEP, RunRecord
from kdtrain.registry import nearest
from kdtrain.run.path_kind import read_result
from kdtrain.run.saved_student import checkpoint_of
from kdtrain.tables import counted

_TABLES = ("seeds", "caches", "common", "arms", "test")
_OURS = {
    "distill": ("out", "seed", "resume", "overwrite", "dry_run", "write_config", "sanity", "json"),
    "cache-teacher": ("out", "dry_run", "json"),
    "evaluate": ("student", "json"),
}
"""Options that a sweep gives itself."""
_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.+=")
_MOST = 1000
"""Most runs of a sweep."""
_LOCK = ".sweep.lock"
_RESUMED = ("signal", "disk", "oom", "error")
"""Stop reasons that say nothing about an arm: the next command resumes such a run."""
_NAMED = 8
"""Most runs that a message names."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): the signal that a child gets when its parent is gone."""

_KINDS = {"distill": DistillConfig, "cache-teacher": CacheTeacherConfig, "evaluate": EvaluateConfig}


@dataclass(frozen=True)
class SweepJob:
    """One command of a sweep."""

    name: str
    """`caches/NAME`, or `ARM/seed-N`."""
    words: tuple[str, ...]
    """The command and its options."""
    config: Any
    """What they say."""

    @property
    def line(self) -> str:
        """The command, to copy."""
        return f"kdtrain {shlex.join(self.words)}"

    @property
    def is_run(self) -> bool:
        """Whether it trains a student, so that its error does not end the sweep."""
        return self.words[0] == "distill"

    @property
    def arm(self) -> str:
        """That of a run; the name of a cache."""
        return self.name.rpartition("/")[0] if self.is_run else self.name

    @property
    def done(self) -> bool:
        """Whether it ended: a finished cache, or a run that ended by itself, diverged or by another rule of its own."""
        if self.words[0] == "cache-teacher":
            return (self.config.out / "manifest.json").exists()
        if self.words[0] == "evaluate":
            return False
        result = read_result(self.config.out)
        return result is not None and result["stop_reason"] not in _RESUMED


@dataclass(frozen=True)
class Sweep:
    """The commands of a file, in the order in which they are run."""

    out: Path
    caches: list[SweepJob]
    runs: list[SweepJob]
    test: SweepJob | None
    """Measures the students that have not been measured yet; None: the file has no [test]."""

    @property
    def folders(self) -> list[Path]:
        """The runs that have begun."""
        return [job.config.out for job in self.runs if (job.config.out / "environment.json").exists()]

    def refuse_missing(self) -> None:
        """Raise a RunError that names the runs without a result that counts, if there are any."""
        if missing := [job.name for job in self.runs if not job.done]:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            names = ", ".join(missing[:_NAMED]) + more
            runs = counted(len(self.runs), "run")
            raise RunError(f"{len(missing)} of {runs} without a result: {names}; the same command resumes")

    def tests(self) -> Iterator[SweepJob]:
        """A job that measures the students of finished runs that [test] has not measured; nothing if all are."""
        if self.test is None:
            return
        wanted = {"split": self.test.config.data.split}
        if (cache := self.test.config.cache) is not None:
            wanted["cache"] = read_manifest(cache).digest
        else:
            wanted |= {"data": self.test.config.data.data, "teacher": self.test.config.teacher}
        left = []
        for folder in [job.config.out for job in self.runs if job.done]:
            wanted["checkpoint"] = checkpoint_of(folder, "best").name
            if not any(wanted.items() <= each.items() for each in RunRecord.read(folder).evaluations):
                left.append(str(folder))
        if left:
            yield SweepJob(
                f"test of {counted(len(left), 'student')}", (*self.test.words, "--student", *left), self.test.config
            )


def read_sweep(file: Path, out: Path) -> Sweep:
    """The sweep of a TOML file.

    UsageError: it cannot be read, has an unknown table, or one of its commands cannot work.
    """
    try:
        tables = read_toml(file)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file} is not TOML: {error}") from None
    for name, table in tables.items():
        if name not in _TABLES:
            raise UsageError(f"{file}: unknown table [{name}]; {nearest(name, _TABLES)}")
        if name != "seeds" and not isinstance(table, dict):
            raise UsageError(f"{file}: {name} is not a table; write [{name}]")
    seeds = tables.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(each) is not int or each < 0 for each in seeds):
        raise UsageError(f"{file}: seeds is not a list of whole numbers; write seeds = [0, 1, 2]")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{file}: a seed stands twice in seeds")
    named = {kind: _named(file, kind, tables.get(kind, {})) for kind in ("caches", "arms")}
    if not named["arms"]:
        raise UsageError(f"{file} has no arm; add [arms.NAME] with the options in which it differs from [common]")
    if "caches" in named["arms"]:
        raise UsageError(f"{file}: an arm cannot be called caches, which is the folder of the caches")
    every = (each for name, options in named["arms"].items() for each in _grid(name, options))
    grid = [*itertools.islice(every, _MOST + 1)]
    if len(grid) * len(seeds) > _MOST:
        raise UsageError(f"{file}: more than the {_MOST:,} runs that a sweep takes")
    named["arms"] = _named(file, "arms", dict(grid))
    if len(named["arms"]) < len(grid):
        raise UsageError(f"{file}: an arm stands twice")

    def job(name: str, where: str, command: str, options: Mapping[str, Any], **own: Any) -> SweepJob:
        options = dict(options)
        if taken := [each for each in options if each in _OURS[command]]:
            hint = "list them in seeds" if taken[0] == "seed" else "leave it out"
            raise UsageError(f"{file}: [{where}] the sweep sets {taken[0]} itself; {hint}")
        if "cache" in options and isinstance(named_caches := options["cache"], str | list):
            places = [named_caches] if isinstance(named_caches, str) else named_caches
            options["cache"] = [str(out / "caches" / each) if each in named["caches"] else each for each in places]
            for each in places:  # a plain word is a name
                if each not in named["caches"] and not set(each) & set("/:") and not Path(each).exists():
                    raise UsageError(f"{file}: [{where}] no cache {each}; {nearest(each, named['caches'])}")
            if command == "evaluate":
                options["cache"] = options["cache"][0]
        try:
            config: Any = configured(_KINDS[command], None, options | own)
        except UsageError as error:
            raise UsageError(f"{file}: [{where}] {error}") from None
        own.pop("student", None)
        return SweepJob(name, (command, *_words(_KINDS[command], options | own)), config)

    common = _flat(file, "common", tables.get("common", {}))
    arms = [(name, {**common, **options}) for name, options in named["arms"].items()]
    runs = [
        job(f"{arm}/seed-{seed}", f"arms.{arm}", "distill", options, out=out / arm / f"seed-{seed}", seed=seed)
        for seed in seeds
        for arm, options in arms
    ]
    caches = [
        job(f"caches/{name}", f"caches.{name}", "cache-teacher", options, out=out / "caches" / name)
        for name, options in named["caches"].items()
    ]
    test = job("", "test", "evaluate", _flat(file, "test", tables["test"]), student="-") if "test" in tables else None
    return Sweep(out, caches, runs, test)


def _named(file: Path, kind: str, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each arm or cache. UsageError: one is not a table, or its name is no plain name of a folder."""
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name} in [{kind}] is not a table; write [{kind}.{name}]")
        if not name or set(name) - _PLAIN or name.startswith((".", "-")):
            raise UsageError(f"{file}: [{kind}.{name}] names a folder; use letters, digits and - _ . + =")
    return {name: _flat(file, f"{kind}.{name}", table) for name, table in tables.items()}


def _grid(arm: str, options: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arms of an arm: one for each combination of the values of options that take one and have a list."""
    single = {each.name for each in options_of(DistillConfig).values() if not isinstance(each.default, tuple)}
    lists = {name: value for name, value in options.items() if name in single and isinstance(value, list) and value}
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        yield "-".join([arm, *(f"{name}={value}" for name, value in chosen.items())]), options | chosen


def _flat(file: Path, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a table, those in its sections too: names of options are unique over sections.

    UsageError: there is no such section.
    """
    found: dict[str, Any] = {}
    sections = {each.section for kind in _KINDS.values() for each in options_of(kind).values()}
    for name, value in table.items():
        if isinstance(value, dict) and name not in sections:
            raise UsageError(
                f'{file}: [{where}.{name}] is no section of options; quote names with dots: [arms."a-0.5"]'
            )
        found |= _flat(file, where, value) if isinstance(value, dict) else {name.replace("-", "_"): value}
    return found


def _words(kind: type, options: Mapping[str, Any]) -> Iterator[str]:
    """Options as words of a command line."""
    known = options_of(kind)
    for name, value in options.items():
        if isinstance(value, bool):
            yield flag(name) if value else flag(f"no_{name}")
            continue
        values = [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
        if known[name].several is True:
            yield from (word for each in values for word in (flag(name), each))
        else:
            yield from (flag(name), *([",".join(values)] if known[name].several else values))


class Runner:
    """Runs the commands of a sweep, each in a process of its own with a share of the cores.

    Its block forwards the signals that ask to stop to each process exactly once: a second one would make it leave
    without saving. A process also stops, and saves, when that of the sweep is killed.

    at_once: processes beside each other. Of one at a time the log is shown, unless `quiet`.
    """

    _CHILD = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl({}, {}); os.getppid() == {} or sys.exit(1); "
        "from kdtrain.cli import main; main()"
    )

    def __init__(self, at_once: int = 1, quiet: bool = False) -> None:
        self.at_once, self.quiet = at_once, quiet
        self.stopped: str | None = None
        """The signal that stopped it."""
        self._children: set[subprocess.Popen[str]] = set()
        self._before: dict[int, Any] = {}
        share = max(len(os.sched_getaffinity(0)) // at_once, 1)
        self._env = {"OMP_NUM_THREADS": f"{share}"} | os.environ

    def __enter__(self) -> "Runner":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopped = signal.Signals(number).name
        for child in [*self._children]:
            child.send_signal(number)

    def all(self, jobs: Iterable[SweepJob]) -> Iterator[tuple[SweepJob, str]]:
        """Run the jobs that are not done; yield each as it ends, with the error that ended it, empty without one."""
        with ThreadPoolExecutor(self.at_once) as pool:
            begun = {pool.submit(self.run, job): job for job in jobs if not job.done}
            try:
                for each in as_completed(begun):
                    if self.stopped is None:
                        yield begun[each], each.result()
            finally:  # after an error no further command begins
                pool.shutdown(cancel_futures=True)

    def run(self, job: SweepJob) -> str:
        """Run one command, unless a signal has stopped the sweep; return the last line of an error, empty without one.

        UsageError: it refuses its options.
        """
        if (folder := getattr(job.config, "out", None)) is not None:
            self._await(folder)
        if self.stopped is not None:
            return ""
        code, last, _ = self._child(job.words)
        if code == 2:
            raise UsageError(f"{job.name}: {last}")
        died = f"killed by {signal.Signals(-code).name}" if code < 0 else "failed"
        return (last or died) if code and self.stopped is None else ""

    def report(self, words: Iterable[str]) -> dict[str, Any]:
        """What a command prints with `--json`, or the `error` that ended it. KeyboardInterrupt: a signal stopped it."""
        code, last, out = self._child((*words, "--json"), stdout=subprocess.PIPE)
        if self.stopped is not None:
            raise KeyboardInterrupt
        return {"error": last or "failed"} if code else json.loads(out)  # type: ignore[no-any-return]

    def _child(self, words: Iterable[str], stdout: int = subprocess.DEVNULL) -> tuple[int, str, str]:
        """Run a command; return its exit code, the last line of an error, and what it prints on a piped stdout."""
        code = self._CHILD.format(_DEATH_SIGNAL, int(signal.SIGTERM), os.getpid())
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words], env=self._env, text=True, process_group=0, **pipes
        )
        self._children.add(child)
        if self.stopped is not None:
            child.send_signal(signal.SIGTERM)
        last = ""
        for line in child.stderr or ():
            if line.startswith("kdtrain: "):
                last = line.removeprefix("kdtrain: ").strip()
            elif self.at_once == 1 and not self.quiet:  # the logs of several would be mixed
                sys.stderr.write(line)
        out = child.communicate()[0]
        self._children.discard(child)
        return child.returncode, last, out

    def _await(self, folder: Path, seconds: float = 60.0) -> None:
        """Wait while a process of a killed sweep still saves what it has in a folder."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.stopped is None:
            if not any(map(is_locked, folder.glob(".*lock*"))):
                return
            time.sleep(0.2)


@contextmanager
def claim(sweep: Sweep) -> Iterator[None]:
    """Keep other sweeps out of the folder during the block, and note the commands there.

    UsageError: another process runs a sweep there, or it holds something else, or runs of other options.
    """
    make_folder(sweep.out)
    message = f"another process runs the sweep {sweep.out}; wait for it, or name another --out"
    lock = Lock(sweep.out / _LOCK, message)
    try:
        _note(sweep)
        yield
    finally:
        lock.release()


def _note(sweep: Sweep) -> None:
    file = sweep.out / SWEEP
    try:
        before = read_sealed(file)
    except FileNotFoundError:
        before = {}
        if any(each.suffix != ".toml" and each.name != _LOCK for each in sweep.out.iterdir()):
            raise UsageError(f"--out {sweep.out} holds something that is not a sweep; name another folder") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}; name another --out") from None
    now = {job.name: list(job.words) for job in (*sweep.caches, *sweep.runs)}
    for name, words in now.items():
        if name in before and before[name] != words and (sweep.out / name).exists():
            old, new = _options_in(before[name]), _options_in(words)
            changed = ", ".join(
                f"{each} was {old.get(each, 'not given')}" for each in {**old, **new} if old.get(each) != new.get(each)
            )
            hint = "rename the arm, or name another --out"
            raise UsageError(f"{sweep.out / name} was begun with other options ({changed[:200]}); {hint}")
    with writing(file):
        publish_json(file, now | before | now, "sweep.record")  # in the order of the file


def _options_in(words: Iterable[str]) -> dict[str, str]:
    """The values of each flag of a command line."""
    found, name = dict[str, str](), ""
    for word in words:
        if word.startswith("--"):
            name = word
            found.setdefault(name, "")
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found
