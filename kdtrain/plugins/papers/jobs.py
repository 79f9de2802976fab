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
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from kdtrain.cli import missing
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig, EvaluateConfig
from kdtrain.config.values import configured, flag, options_of, shareable
from kdtrain.errors import RunError, UsageError, log, refuse_no_path
from kdtrain.files import read_json, read_sealed, read_toml, typed
from kdtrain.monitor.facts import best_checkpoint
from kdtrain.monitor.record import SWEEP, RunRecord
from kdtrain.outputs import OutFolder
from kdtrain.registry import nearest
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
_RESUMED = ("signal", "disk", "oom", "error")
"""Stop reasons that say nothing about an arm: the next command resumes such a run."""
_NAMED = 8
"""Most names in a message."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): the signal that a child gets when its parent is gone."""

_KINDS = {"distill": DistillConfig, "cache-teacher": CacheTeacherConfig, "evaluate": EvaluateConfig}


class _Result(TypedDict):
    stop_reason: str


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
        """The command line, to copy."""
        return f"kdtrain {shlex.join(self.words)}"

    @property
    def is_run(self) -> bool:
        """Whether the job trains a student, so that its error does not end the sweep."""
        return self.words[0] == "distill"

    @property
    def arm(self) -> str:
        """The arm of a run, or the name of a cache."""
        return self.name.rpartition("/")[0] if self.is_run else self.name

    @property
    def done(self) -> bool:
        """Whether the job is done: a finished cache, or a run that ended by itself, diverged or stopped by a rule."""
        if self.words[0] == "cache-teacher":
            return (self.config.out / "manifest.json").exists()
        if self.words[0] == "evaluate":
            return False
        with suppress(OSError, ValueError):  # without a valid one it has not ended
            return read_json(self.config.out / "result.json", _Result)["stop_reason"] not in _RESUMED
        return False


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
        """The folders of the runs that have begun."""
        return [job.config.out for job in self.runs if (job.config.out / "environment.json").exists()]

    def refuse_missing(self) -> None:
        """Raise a RunError that names the runs without a result that counts, if there are any."""
        if missing := [job.name for job in self.runs if not job.done]:
            runs = counted(len(self.runs), "run")
            raise RunError(f"{len(missing)} of {runs} without a result: {_first(missing)}; the same command resumes")

    @property
    def trial(self) -> list[SweepJob]:
        """A dry run of [test] with the students of runs that are not done; an empty list if there are none."""
        students = dict.fromkeys(job.config.student for job in self.runs if not job.done)
        if self.test is None or not students:
            return []
        words = (*self.test.words, "--student", *students, "--dry-run")
        return [SweepJob("dry run of [test]", words, self.test.config)]

    def tests(self) -> Iterator[SweepJob]:
        """A job that measures the students of finished runs that [test] has not measured; nothing if all are."""
        if self.test is None:
            return
        wanted = {"split": self.test.config.data.split}
        if (cache := self.test.config.cache) is not None:
            from kdtrain.cache.read.reader import LocalCache  # with torch, which no other part of a sweep needs

            wanted["cache"] = LocalCache(cache).manifest.digest
        else:
            wanted |= {"data": self.test.config.data.data, "teacher": self.test.config.teacher}
        left = []
        for folder in [job.config.out for job in self.runs if job.done]:
            try:
                wanted["checkpoint"] = best_checkpoint(folder)
            except (UsageError, RunError) as error:  # removed, to save disk
                log.warning("%s is not tested again: %s", folder, error)
                continue
            if not any(wanted.items() <= each.items() for each in RunRecord.read(folder).evaluations):
                left.append(str(folder))
        if left:
            yield SweepJob(
                f"test of {counted(len(left), 'student')}", (*self.test.words, "--student", *left), self.test.config
            )


def read_sweep(file: Path, out: Path) -> Sweep:
    """Read the sweep of a TOML file.

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
        raise UsageError(f"{file}: seeds has a seed twice")
    named = {kind: _named(file, kind, tables.get(kind, {})) for kind in ("caches", "arms")}
    if not named["arms"]:
        raise UsageError(f"{file} has no arm; add [arms.NAME] with the options in which it differs from [common]")
    for name in {"caches", SWEEP} & named["arms"].keys():
        raise UsageError(f"{file}: an arm cannot be called {name}, which is a name of the sweep's own")
    every = (each for name, options in named["arms"].items() for each in _grid(name, options))
    grid = [*itertools.islice(every, _MOST + 1)]
    if len(grid) * len(seeds) > _MOST:
        raise UsageError(f"{file}: more than the {_MOST:,} runs that a sweep takes")
    named["arms"] = _named(file, "arms", dict(grid))
    if len(named["arms"]) < len(grid):
        raise UsageError(f"{file}: there are two arms of this name")

    places = {name: str(out / "caches" / name) for name in named["caches"]}
    wrong = dict[str, dict[str, None]]()

    def job(name: str, where: str, command: str, options: Mapping[str, Any], **own: Any) -> Any:
        found = None
        try:
            found = _read(name, command, options, own, places)
            made = {"-", *places.values()}  # what comes first
            lines = [] if found.done else [line for text, line in missing(found.config) if text not in made]
        except UsageError as error:
            lines = [str(error)]
        for line in lines:
            shared = command == "distill" and not any(
                each in line.replace("-", "_") for each in named["arms"][where[5:]]
            )
            wrong.setdefault(line, {})["common" if shared else where] = None
        return found

    caches = [
        job(f"caches/{name}", f"caches.{name}", "cache-teacher", options, out=places[name])
        for name, options in named["caches"].items()
    ]
    common = _flat(file, "common", tables.get("common", {}))
    arms = [(name, {**common, **options}) for name, options in named["arms"].items()]
    runs = [
        job(f"{arm}/seed-{seed}", f"arms.{arm}", "distill", options, out=out / arm / f"seed-{seed}", seed=seed)
        for seed in seeds
        for arm, options in arms
    ]
    test = job("", "test", "evaluate", _flat(file, "test", tables["test"]), student="-") if "test" in tables else None
    lines = [f"{file}: {_first([f'[{each}]' for each in found])} {line}" for line, found in wrong.items()]
    for line in lines[:-1]:
        log.error("%s", line)
    if lines:
        raise UsageError(lines[-1])
    return Sweep(out, caches, runs, test)


def _read(
    name: str, command: str, options: Mapping[str, Any], own: Mapping[str, Any], caches: Mapping[str, str]
) -> SweepJob:
    """Configure the job of a command.

    own: options that the sweep sets. caches: the paths of the sweep's caches by name. UsageError: it cannot work.
    """
    kind = _KINDS[command]
    given = dict(options)
    if taken := [each for each in given if each in _OURS[command]]:
        hint = "list them in seeds" if taken[0] == "seed" else "leave it out"
        raise UsageError(f"the sweep sets {taken[0]} itself; {hint}")
    for each, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            refuse_no_path(str(text), flag(each))
    config: Any = configured(kind, None, {**given, **own})  # type: ignore[arg-type]
    if "cache" in given:
        places = [given["cache"]] if isinstance(given["cache"], str) else given["cache"]
        for each in places:  # a plain word is a name
            if each not in caches and not set(each) & set("/:") and not Path(each).exists():
                raise UsageError(f"no cache {each}; {nearest(each, caches)}")
        given["cache"] = [caches.get(each, each) for each in places]
        if command == "evaluate":
            [given["cache"]] = given["cache"]
        config = configured(kind, config, given)
    words = given if command == "evaluate" else {**given, **own}  # its student is known when it is trained
    return SweepJob(name, (command, *_words(kind, words)), config)


def _first(names: list[str]) -> str:
    """Join the first `_NAMED` names, and say how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _named(file: Path, kind: str, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each arm or cache.

    UsageError: one is not a table, or its name is no plain name of a folder.
    """
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name} in [{kind}] is not a table; write [{kind}.{name}]")
        if not name or set(name) - _PLAIN or name.startswith((".", "-")):
            raise UsageError(f"{file}: [{kind}.{name}] names a folder; use letters, digits and - _ . + =")
    return {name: _flat(file, f"{kind}.{name}", table) for name, table in tables.items()}


def _grid(arm: str, options: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Expand an arm: yield one arm for each combination of the values of options that take one and have a list."""
    single = {each.name for each in options_of(DistillConfig).values() if not isinstance(each.default, tuple)}
    lists = {name: value for name, value in options.items() if name in single and isinstance(value, list) and value}
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        yield "-".join([arm, *(f"{name}={value}" for name, value in chosen.items())]), options | chosen


def _flat(file: Path, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the options of a table and its sections into one: names of options are unique over sections.

    UsageError: there is no such section.
    """
    found: dict[str, Any] = {}
    sections = {each.section for kind in _KINDS.values() for each in options_of(kind).values()}
    for name, value in table.items():
        if isinstance(value, dict) and name not in sections:
            raise UsageError(
                f'{file}: [{where}.{name}] is not a section of options; quote names with dots: [arms."a-0.5"]'
            )
        found |= _flat(file, where, value) if isinstance(value, dict) else {name.replace("-", "_"): value}
    return found


def _words(kind: type, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as words of a command line."""
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
    """A runner of the commands of a sweep, each in a process of its own with a share of the cores.

    Its block forwards the signals that ask to stop to each process exactly once: a second one would end it without
    saving. A process also stops, and saves, when the process of the sweep is killed.

    at_once: how many processes run at a time. With one at a time its log is shown, unless `quiet`.
    """

    _CHILD = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl({}, {}); os.getppid() == {} or sys.exit(1); "
        "from kdtrain.__main__ import main; main()"
    )

    def __init__(self, at_once: int = 1, quiet: bool = False) -> None:
        self.at_once, self.quiet = at_once, quiet
        self.stopped: str | None = None
        """The signal that stopped it."""
        self._children: set[subprocess.Popen[str]] = set()
        self._held = ExitStack()
        share = max(len(os.sched_getaffinity(0)) // at_once, 1)
        self._env = {"OMP_NUM_THREADS": f"{share}"} | os.environ

    def __enter__(self) -> "Runner":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._held.callback(signal.signal, number, signal.signal(number, self._stop))
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

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
        """Run a command with `--json`; return what it prints, or the `error` that ended it.

        KeyboardInterrupt: a signal stopped it.
        """
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
            if not OutFolder(folder).is_claimed:
                return
            time.sleep(0.2)


@contextmanager
def claim(sweep: Sweep, runner: Runner) -> Iterator[None]:
    """Keep other sweeps out of the folder during the block, and note the commands there.

    runner: runs the command of a finished cache that is not noted, which compares.

    UsageError: another process runs a sweep there, or it holds something else, or caches or runs of other options.
    """
    message = f"another process runs the sweep {sweep.out}; wait for it, or name another --out"
    with OutFolder(sweep.out).claimed(SWEEP, message):
        _note(sweep, runner)
        yield


def _note(sweep: Sweep, runner: Runner) -> None:
    out = OutFolder(sweep.out)
    file = sweep.out / SWEEP
    jobs = [*sweep.runs, *sweep.caches]
    before = dict[str, list[str]]()
    begun = [job for job in jobs if job.config.out.exists()]
    try:
        before = typed(read_sealed(file) | {"digest": []}, dict[str, list[str]])
    except FileNotFoundError:
        if not begun and any(not each.endswith(".toml") for each in out.others(SWEEP)):
            raise UsageError(f"--out {sweep.out} holds something that is not a sweep; name another folder") from None
    except (OSError, ValueError) as error:
        if not begun:
            raise UsageError(f"{file}: {error}; name another --out") from None
        log.warning("%s: %s; it was moved to %s", file, error, out.set_aside(SWEEP, "damaged"))
    for job in begun:
        old = before.get(job.name, [])
        new = list(job.words)
        if not old and job.is_run:
            old, new = _as_begun(job)
        elif not old:
            if why := runner.run(job):
                raise RunError(f"{job.name}: {why}")
            if runner.stopped is not None:
                return
            continue
        was, now = _options_in(old, job.name), _options_in(new, job.name)
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        if changed:
            text = ", ".join(f"{name} was {was.get(name, 'not given')}" for name in changed)[:200]
            hint = "rename the arm, or name another --out"
            raise UsageError(f"{job.config.out} was begun with other options ({text}); {hint}")
    words: dict[str, Any] = {job.name: list(job.words) for job in (*sweep.caches, *sweep.runs)}
    out.publish(SWEEP, words | before | words, "sweep.record")  # in the order of the file


def _as_begun(job: SweepJob) -> list[list[str]]:
    """Return the options of a run in its config.toml, and those of the sweep, as words.

    Options that a run fills in are left out.
    """
    tables = dict[str, dict[str, Any]]()
    with suppress(OSError, ValueError):  # it had not begun
        tables = typed(read_toml(job.config.out / "config.toml"), dict[str, dict[str, Any]])
    was, now = (dict(ChainMap(*each.values())) for each in (tables, shareable(job.config)))
    filled = {name for name, each in now.items() if each in (None, "auto") and name != "alpha"}
    same = sorted((was.keys() & now.keys()) - filled)
    return [[*_words(DistillConfig, {name: each[name] for name in same})] for each in (was, now)]


def _options_in(words: list[str], name: str) -> dict[str, str]:
    """Group the words of the command called `name` by flag; paths in the folder of its sweep become relative."""
    out = words[words.index("--out") + 1].removesuffix(name) if "--out" in words[:-1] else ""
    found = dict[str, str]()
    last = ""
    for word in words:
        if word.startswith("--"):
            last = word
            found.setdefault(last, "")
        elif last:
            found[last] = f"{found[last]} {word.removeprefix(out)}".strip()
    return found
