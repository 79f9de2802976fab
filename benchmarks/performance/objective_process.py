"""Time and memory of the objective's sides on a CPU, measured in a process of its own: `in_process` starts one.

Times: all sides of a shape and dtype run in turn, again and again; the median counts. A run during which other
processes took a tenth of a core is made again; the record holds both. Memory: the high-water mark of a process of its
own for each side, after a first run has compiled what is to be compiled, less what its inputs take.
"""

import ctypes
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.performance import objective_sides as sides
from kdtrain.objective.engine import matmul

DISTURBED = 0.1
"""Part of a run's time that other processes may take of a core; a run beyond it is made again, at most in the next
ROUNDS times as many turns."""
ROUNDS = 3
LONGEST = 400.0
"""Seconds of a row after which no further turn begins."""


@dataclass(frozen=True)
class Work:
    """A shape (tokens, width, vocabulary) and a dtype."""

    shape: tuple[int, int, int]
    dtype: str
    memory: float
    """GiB that the process may allocate."""
    repetitions: int


def free_memory() -> float:
    """Return the GiB of the machine that are available."""
    return _kib("/proc/meminfo", "MemAvailable") / 2**20


def in_process(kind: str, work: Work, names: Sequence[str]) -> dict[str, Any]:
    """Measure the time of all sides, or the memory of one, in a process of its own.

    kind: "time" gives the figures by side, "memory" those of the only side.
    """
    # Memory that is free is the system's at once: what a first run left would hide a part of the second.
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if kind == "memory" else {})
    words = ["-m", "benchmarks.performance.objective_process", kind, json.dumps(asdict(work)), *names]
    done = subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"does_not_fit": f"ended with {done.returncode} below {work.memory:.1f} GiB"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(kind: str, work: Work, names: Sequence[str]) -> dict[str, Any]:
    """Measure what the process is started for, under its limit of memory."""
    limit = int(work.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        student = sides.make_student(*work.shape, getattr(torch, work.dtype))
        if kind == "memory":
            return _memory(student, sides.side(names[0], student))
    except (MemoryError, RuntimeError) as error:
        return _too_large(error, work)
    return _times(student, work, names)


def _too_large(error: Exception, work: Work) -> dict[str, Any]:
    """Return the record of a side that does not fit; raise any other error again."""
    if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
        raise error
    return {"does_not_fit": f"more than {work.memory:.1f} GiB"}


def _times(student: sides.Student, work: Work, names: Sequence[str]) -> dict[str, Any]:
    """Time each side in turn, in seconds, after one run that is not timed; leave out a side that does not fit."""
    runs, found = {}, {}
    for name in names:
        try:
            run = sides.side(name, student)
            student.clear()
            run()
            runs[name] = run
        except (MemoryError, RuntimeError) as error:
            found[name] = _too_large(error, work)
    clean: dict[str, list[float]] = {name: [] for name in runs}
    disturbed: dict[str, list[float]] = {name: [] for name in runs}
    begun = time.perf_counter()
    for repetition in range(ROUNDS * work.repetitions):
        if repetition and time.perf_counter() - begun > LONGEST:
            break
        for name, run in runs.items():
            if len(clean[name]) == work.repetitions:
                continue
            student.clear()
            busy, own, started = _busy(), time.process_time(), time.perf_counter()
            run()
            seconds = time.perf_counter() - started
            others = _busy() - busy - (time.process_time() - own)
            (disturbed if others > DISTURBED * seconds + 0.01 else clean)[name].append(seconds)
    for name in runs:
        every = clean[name] + disturbed[name]
        counted = clean[name] if len(clean[name]) == work.repetitions else sorted(every)[: work.repetitions]
        lists = {"all_seconds": clean[name], "disturbed_seconds": disturbed[name]}
        found[name] = {"seconds": statistics.median(counted), **lists}
    return found


def _busy() -> float:
    """Return the seconds that all cores together were not idle since the machine started."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _memory(student: sides.Student, run: Any) -> dict[str, Any]:
    """Measure the MiB at the highest point of a run beyond those before it, and its loss."""
    value = run()
    student.clear()
    gc.collect()
    matmul.release_buffers()  # what kdtrain keeps for the next run counts as this run's
    ctypes.CDLL(None).malloc_trim(0)
    before = _kib("/proc/self/status", "VmRSS") / 1024
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is there now
    run()
    peak = _kib("/proc/self/status", "VmHWM") / 1024
    loss = None if value is None else float(value)
    return {"peak_mib": round(peak - before, 1), "process_mib": round(peak, 1), "loss": loss}


def _kib(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(name + ":"))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Work(**json.loads(sys.argv[2])), sys.argv[3:])))
