"""Loss and gradients of the output head alone: kdtrain's engine beside cross-entropy and others' work.

On a GPU (`run`), at the widths of a 1 B and an 8 B model, the sides are those of `objective_sides.py`, on the device,
in bf16: hidden states and weight that want gradients, the loss, and its backward. Each side is a figure of its own, for
which it takes turns with compiled cross-entropy, and Liger-Kernel's also with kdtrain's of the same work; a side that
does not fit, or whose library is not installed, says so. Memory is the peak less what the inputs take, gradients
included, as all sides leave them.

On a CPU, `python -m benchmarks.performance.objective [--device cpu]` writes `benchmarks/results/objective.json`;
`--quick` takes small shapes and three repetitions, to see that it works. For each shape and dtype one process runs all
sides in turn, again and again; the median counts. A run during which other processes took a tenth of a core is made
again; the record holds both. Memory is the high-water mark of a process of its own for each side, after a first run has
compiled what is to be compiled, less what its inputs take. A side that does not fit into --memory is written down as
such, and so is a library that is not installed. The record is written after every measurement, and what it holds is not
measured again: the same command resumes where it was stopped. --only memory|time takes one kind, --rows some rows by
number; --out elsewhere starts afresh.

What it gives up: times hold for that machine and that number of threads; the record says which.
"""

import ctypes
import functools
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks.harness import RESULTS, write
from benchmarks.harness.machine import commit, cpu_model, version
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.sections import script
from benchmarks.harness.timing import CALLS, in_turn, medians, over, peak_of, without_graphs
from benchmarks.performance import objective_sides as sides
from kdtrain.objective import matmul


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    tokens: tuple[int, ...] = (8192, 32_768)
    widths: tuple[int, ...] = (2048, 4096)
    vocabulary: int = 128_256
    rounds: int = 5


TINY = Sizes((64, 128), (32,), 512, 2)
NAMES = (
    *("cross-entropy", "products", "kdtrain-cross-entropy", "kdtrain-sparse-12", "kdtrain-sparse-50"),
    *("top-k-renormalized-50", "kdtrain-dense", "kdtrain-jsd-online", "trl-jsd", "liger-jsd", "liger-cross-entropy"),
)
"""`top-k-renormalized-50` is plain PyTorch over all logits, materialised."""
OURS = {"liger-jsd": "kdtrain-jsd-online", "liger-cross-entropy": "kdtrain-cross-entropy"}
"""The sides of kdtrain that do the work of others'."""
GOALS = (
    *(
        Goal(
            f"{side} over compiled cross-entropy, N = {tokens:,}, D = {width:,}",
            f"{tokens} {width} {side}.over_cross_entropy",
            most=1.15,
        )
        for tokens in (8192, 32_768)
        for width in (2048, 4096)
        for side in ("kdtrain-sparse-12", "kdtrain-sparse-50")
    ),
    *(
        Goal(f"{ours} over {name}, N = {tokens:,}, D = {width:,}", f"{tokens} {width} {name}.ours_over_it", most=1.0)
        for tokens in (8192, 32_768)
        for width in (2048, 4096)
        for name, ours in OURS.items()
    ),
    Goal(
        "GiB of kdtrain-sparse-12, N = 32,768, D = 4,096 (5 GB)",
        "32768 4096 kdtrain-sparse-12.extra_gib",
        most=5e9 / 2**30,
    ),
)


def run(options: Options) -> int:
    """Measure, and write objective.json."""
    sizes = TINY if options.tiny else Sizes()
    settings = vars(sizes) | {"calls": CALLS, "compile": options.compile}
    record = Record("objective", options, settings, GOALS)
    for tokens, width in itertools.product(sizes.tokens, sizes.widths):
        with without_graphs():
            _measure_all(record, options, sizes, tokens, width)
    return record.finish()


def _measure_all(record: Record, options: Options, sizes: Sizes, tokens: int, width: int) -> None:
    """All figures of one shape, whose inputs are made once, if any is missing."""
    device = options.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = tokens, width, sizes.vocabulary
    made = functools.cache(lambda: sides.make_student(*shape, dtype, device, options.compile))
    for name in NAMES:
        record.measure(f"{tokens} {width} {name}", lambda name=name: _measured(name, made, sizes.rounds, device))


def _measured(name: str, made: Callable[[], sides.Student], rounds: int, device: torch.device) -> dict[str, Any]:
    """Memory of a side, and its time in turn with those it is compared with."""
    if (reason := sides.available(name)) is not None:
        raise ImportError(reason)
    student = made()
    names = dict.fromkeys(("cross-entropy", *([OURS[name]] if name in OURS else []), name))
    works = {each: sides.side(each, student) for each in names}
    memory = _peak(works[name], student, device)
    calls = {each: functools.partial(_cleanly, work, student) for each, work in works.items()}
    times = in_turn(calls, rounds, device, calls=CALLS)
    peak, held = memory["peak_gib"], memory["held_gib"]
    found = {
        "seconds_a_call": medians(times)[name],
        "over_cross_entropy": over(times, name, "cross-entropy"),
        "extra_gib": None if peak is None else peak - held,
        "seconds": times,
    }
    return found | ({"ours_over_it": over(times, OURS[name], name)} if name in OURS else {})


def _cleanly(run: Callable[[], Any], student: sides.Student) -> None:
    student.clear()
    run()


def _peak(run: Callable[[], Any], student: sides.Student, device: torch.device) -> dict[str, Any]:
    """The peak of the second run: the first compiles."""
    _cleanly(run, student)
    student.clear()
    found: dict[str, Any] = peak_of(run, device)
    student.clear()
    return found


SHAPES = ((8192, 256, 2048), (4096, 256, 32_000), (2048, 1024, 32_000), (2048, 256, 151_936))
ALONE = (8192, 256, 151_936)
"""Tokens, width, vocabulary; at the last one only kdtrain's sparse sides run."""
QUICK = ((256, 64, 2048), (128, 64, 8000))
DTYPES = ("float32", "bfloat16")
DISTURBED = 0.1
"""Part of a run's time that other processes may take of a core; a run beyond it is made again, at most in the next
ROUNDS times as many turns."""
ROUNDS = 3
LONGEST = 400.0
"""Seconds of a row after which no further turn begins."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time and memory of the objective on a CPU, beside others."""

    out: Path = RESULTS / "objective.json"
    """Where the record is written."""
    quick: bool = False
    """Small shapes and three repetitions."""
    only: Literal["both", "memory", "time"] = "both"
    """What is measured."""
    rows: tuple[int, ...] = ()
    """Numbers of rows, from 0; all when empty."""
    repetitions: int = 5
    """Timed runs of each side."""
    threads: int = 2
    """Threads of torch."""
    memory: float = 0.0
    """GiB that a process may allocate; 80 % of what is free when 0."""


@dataclass(frozen=True)
class Work:
    """What one process measures: a shape, a dtype, and all its sides in turn (or one side's memory)."""

    kind: str
    shape: tuple[int, int, int]
    dtype: str
    sides: list[str]
    repetitions: int
    threads: int
    memory: float


def on_cpu(words: list[str]) -> None:
    """Measure what the record lacks, and write it after each measurement."""
    if words[:1] == ["--work"]:
        print(json.dumps(_work(Work(**json.loads(words[1])))))
        return
    settings = tyro.cli(Settings, args=words)
    shapes = QUICK if settings.quick else (*SHAPES, ALONE)
    record: dict[str, Any] = {"machine": _machine(settings), "rows": []}
    if settings.out.exists():
        record["rows"] = json.loads(settings.out.read_text())["rows"]
    pairs = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    for number, (shape, dtype) in enumerate(pairs):
        if settings.rows and number not in settings.rows:
            continue
        row = row_of(record, shape, dtype)
        for _ in _measure(settings, row, shape, dtype):
            record["rows"].sort(key=lambda each: pairs.index((_shape(each), each["dtype"])))
            write(settings.out, record)
        for name, found in row["sides"].items():
            shown = {key: found[key] for key in ("seconds", "peak_mib", "missing", "does_not_fit") if key in found}
            print(shape, dtype, name, shown, flush=True)
    print(f"wrote {settings.out}")


def row_of(record: dict[str, Any], shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    """The row of a shape and dtype, a new one where the record has none."""
    for row in record["rows"]:
        if (_shape(row), row["dtype"]) == (shape, dtype):
            return row
    row = {"tokens": shape[0], "width": shape[1], "vocabulary": shape[2], "dtype": dtype, "sides": {}}
    record["rows"].append(row)
    return row


def _shape(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["tokens"], row["width"], row["vocabulary"]


def _measure(settings: Settings, row: dict[str, Any], shape: tuple[int, int, int], dtype: str) -> Iterator[None]:
    """Fill a row, and come back after each measurement."""
    names = ["kdtrain-sparse-12", "kdtrain-sparse-50"] if shape == ALONE else sides.cpu_names()
    found = row["sides"]
    row["sides"] = found = {name: found.get(name, {}) for name in names}
    for name in names:
        if (reason := sides.available(name)) is not None:
            found[name] = {"missing": reason}
    present = [name for name in names if "missing" not in found[name]]
    common = (3 if settings.quick else settings.repetitions, settings.threads, settings.memory or _free() * 0.8)
    for name in present if settings.only != "time" else ():
        if not found[name].keys() & {"peak_mib", "does_not_fit"}:
            found[name] |= _start(Work("memory", shape, dtype, [name], *common))
            yield
    fitting = [name for name in present if "does_not_fit" not in found[name]]
    if settings.only != "memory" and any("seconds" not in found[name] for name in fitting):
        row["load_average"], row["commit"] = os.getloadavg(), commit()
        times = _start(Work("time", shape, dtype, fitting, *common))
        for name in fitting:
            found[name] |= times.get(name, times)
        yield


def _start(work: Work) -> dict[str, Any]:
    """The result of `work` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.performance.objective", "--device", "cpu", "--work", json.dumps(vars(work))],
        # Memory that is free is the system's at once: what a first run left would hide a part of the second.
        env={**os.environ, "OMP_NUM_THREADS": str(work.threads)}
        | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if work.kind == "memory" else {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        return {"does_not_fit": f"ended with {done.returncode} below {work.memory:.1f} GiB"}
    return json.loads(done.stdout.splitlines()[-1])


def _work(work: Work) -> dict[str, Any]:
    torch.set_num_threads(work.threads)
    limit = int(work.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        student = sides.make_student(*work.shape, getattr(torch, work.dtype))
        if work.kind == "memory":
            return _memory(student, sides.side(work.sides[0], student))
    except (MemoryError, RuntimeError) as error:
        return {"does_not_fit": _too_large(error, work)}
    return _times(student, work)


def _too_large(error: Exception, work: Work) -> str:
    """What is said of a side that does not fit; any other error is raised again."""
    if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
        raise error
    return f"more than {work.memory:.1f} GiB"


def _times(student: sides.Student, work: Work) -> dict[str, Any]:
    """Seconds of each side, in turn, after one run that is not timed; what does not fit beside the others is left."""
    runs, found = {}, {}
    for name in work.sides:
        try:
            run = sides.side(name, student)
            student.clear()
            run()
            runs[name] = run
        except (MemoryError, RuntimeError) as error:
            found[name] = {"does_not_fit": _too_large(error, work)}
    clean: dict[str, list[float]] = {name: [] for name in runs}
    disturbed: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for repetition in range(ROUNDS * work.repetitions):
        if repetition and time.perf_counter() - started > LONGEST:
            break
        for name, run in runs.items():
            if len(clean[name]) == work.repetitions:
                continue
            student.clear()
            seconds, others = _timed(run)
            (disturbed if others > DISTURBED * seconds + 0.01 else clean)[name].append(seconds)
    return found | {name: _median(clean[name], disturbed[name], work.repetitions) for name in runs}


def _timed(run: Any) -> tuple[float, float]:
    """Wall-clock seconds of a run, and the seconds of all cores that went to other processes meanwhile."""
    busy, own, started = _busy(), time.process_time(), time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return seconds, _busy() - busy - (time.process_time() - own)


def _busy() -> float:
    """Seconds that all cores together were not idle since the machine started."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _median(clean: list[float], disturbed: list[float], wanted: int) -> dict[str, Any]:
    """The median of undisturbed runs; where there were too few, of the fastest of all."""
    counted = clean if len(clean) == wanted else sorted(clean + disturbed)[:wanted]
    return {"seconds": statistics.median(counted), "all_seconds": clean, "disturbed_seconds": disturbed}


def _memory(student: sides.Student, run: Any) -> dict[str, Any]:
    """MiB at the highest point of a run beyond what was there before it, and its loss."""
    value = run()
    student.clear()
    gc.collect()
    matmul.release_buffers()  # what kdtrain keeps for the next run counts as this run's
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is there now
    run()
    peak = _status("VmHWM")
    loss = None if value is None else float(value)
    return {"peak_mib": round(peak - before, 1), "process_mib": round(peak, 1), "loss": loss}


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def _free() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:"))


def _machine(settings: Settings) -> dict[str, Any]:
    return {
        "processor": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "repetitions": 3 if settings.quick else settings.repetitions,
        "libraries": {name: version(name) for name in ("kdtrain", "torch", "trl", "liger-kernel")},
    }


if __name__ == "__main__":
    sys.exit(script("objective", on_cpu))
