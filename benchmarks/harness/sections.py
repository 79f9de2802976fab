"""Measure the claims about a GPU, and some about a CPU: `python -m benchmarks.performance SECTION ...` or `all`.

Each section writes one JSON with the device, libraries, commit, settings and figures, SECTION.json: on a GPU in
benchmarks/results/gpu, on a CPU in benchmarks/results.

ceilings    bf16 matrix rate and memory bandwidth of this card: what everything else is compared with
step        whole training steps: cross-entropy, cached and online distillation
objective   loss and gradients of the output head alone, beside others' work
fp8         steps of 1 B and 3 B students in fp8, by torchao and TransformerEngine, against bf16
adaptive    switching between fp8 and bf16 while training
cache       building and reading caches: speed, bytes a token, fidelity
checkpoint  how long training pauses for a checkpoint
teacher     the shipped teacher's recipe for four minutes

On a CPU step, objective, cache and checkpoint measure what is claimed of a CPU, at sizes of their own.
`--tiny --device cpu` runs the code of a GPU on small shapes, in one process, as a smoke test.

A call starts no measurement after `--budget` seconds: it writes what it has, says what is left, and exits with 0. The
same call resumes: figures of the same device, torch and settings in the record, or in a record in `--from DIR`, are
not measured again. Several sections run one after the other, each in a process of its own, on one budget.
`--profile` adds kernels, gaps and copies to `step` and `fp8`, and the phases of the engine to `objective` on a CPU.
"""

import argparse
import importlib
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import CPU_SECTIONS, RESULTS, ROOT, SECTIONS
from benchmarks.harness.record import BUDGET, Options, Record, one_line
from benchmarks.harness.timing import why_not_compiled

TINY_COMPILED = ("adaptive",)
"""Sections that `all --tiny` compiles: a compiler takes longer than all small shapes together."""
BEYOND = 150.0
"""Seconds beyond the budget after which the section in work is ended: what it has measured is in its record."""


def main(argv: list[str]) -> int:
    """Run one section or all; return 1 where something failed."""
    arguments = _parser().parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return _refuse("no CUDA device here; --tiny --device cpu runs the same code on small shapes")
    if arguments.earlier is not None and not arguments.earlier.is_dir():
        return _refuse(f"--from {arguments.earlier} is not a folder")
    names = SECTIONS if "all" in arguments.sections else tuple(dict.fromkeys(arguments.sections))
    on_cpu = device.type == "cpu" and not arguments.tiny
    if on_cpu and (of_gpu := [name for name in names if name not in CPU_SECTIONS]):
        return _refuse(f"{', '.join(of_gpu)}: of a GPU; on a CPU the full shapes take days, add --tiny")
    reason = why_not_compiled(device) if device.type == "cuda" and not arguments.no_compile else None
    if reason is not None:
        print(f"nothing is compiled: {reason}", file=sys.stderr)
    usual = RESULTS / ("" if on_cpu else "gpu")
    if arguments.tiny:
        usual = ROOT / "runs" / "gpu-tiny"
    out = arguments.out or usual
    budget = arguments.budget
    if budget is None:
        budget = math.inf if on_cpu else BUDGET
    options = Options(
        device=device,
        out=out,
        tiny=arguments.tiny,
        compile=not arguments.no_compile and reason is None,
        by_layer=not on_cpu,
        uncompiled=reason,
        profile=arguments.profile,
        budget=budget,
        earlier=arguments.earlier or (None if arguments.again or arguments.tiny else out),
        commit=arguments.commit,
        only=tuple(arguments.only),
    )
    if len(names) == 1:
        return _run(names[0], options)
    if not options.tiny:
        return _apart(names, options)
    compiled = TINY_COMPILED if options.compile else ()
    return max(_run(name, replace(options, compile=name in compiled)) for name in names)


def _refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2


def _run(name: str, options: Options) -> int:
    """Run one section; a package that its import lacks is noted in its record."""
    try:
        section = importlib.import_module(f"benchmarks.performance.{name}")
    except ImportError as error:
        record = Record(name, options, {})
        record.put("section", {"missing": one_line(error)})
        return record.finish()
    return int(section.run(options))


def _apart(names: Sequence[str], options: Options) -> int:
    """Run each section in a process of its own: none inherits another's memory, graphs or failures."""
    code = 0
    for name in names:
        left = options.started + options.budget - time.monotonic()
        if left <= 0:
            print(f"{name}: all of it is left, for the next call", flush=True)
            continue
        process = multiprocessing.get_context("spawn").Process(target=_exit, args=(name, options))
        process.start()
        process.join(None if math.isinf(left) else left + BEYOND)
        if process.exitcode is None:
            print(f"{name}: ended {BEYOND:.0f} s after the budget; its record holds the rest", file=sys.stderr)
            process.kill()
            process.join()
        code = code or int(process.exitcode != 0)
    return code


def _exit(name: str, options: Options) -> None:
    sys.exit(_run(name, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", metavar="SECTION", choices=(*SECTIONS, "all"), help="or all")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions, as a smoke test")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, help="where records are written (benchmarks/results, on a GPU its gpu)")
    parser.add_argument(
        "--from", dest="earlier", type=Path, help="a folder of records whose figures are reused (--out)"
    )
    parser.add_argument("--again", action="store_true", help="measure what the records already hold, too")
    parser.add_argument("--only", nargs="+", default=(), metavar="FIGURE", help="figures whose names begin with these")
    parser.add_argument(
        "--budget", type=float, help=f"seconds after which no measurement begins ({BUDGET:.0f} on a GPU)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes: step, fp8, objective on a CPU"
    )
    parser.add_argument("--no-compile", action="store_true", help="nothing is compiled")
    parser.add_argument("--commit", help="the commit of the code, where there is no clone to ask")
    return parser
