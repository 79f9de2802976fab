"""Everything that is claimed about a GPU, measured on one: `python -m benchmarks.performance SECTION ...` or `all`.

Each section writes one JSON, `benchmarks/results/gpu/SECTION.json`, with the device, driver, libraries, commit,
settings and figures; `python -m benchmarks.figures gpu` draws them and
`python -m benchmarks.tables gpu` puts them into docs/performance.md.

ceilings    bf16 matrix rate and memory bandwidth of this card: what everything else is held against
step        whole training steps of a 1 B student: cross-entropy, cached and online distillation
objective   loss and gradients of the output head alone, beside others' work
fp8         steps of 1 B and 3 B students in fp8, by torchao and TransformerEngine, against bf16
adaptive    switching between fp8 and bf16 while training
cache       building and reading caches of 1 B and 8 B teachers
checkpoint  how long training stands still for a checkpoint
teacher     the shipped teacher's recipe for four minutes

A call begins no measurement after `--budget` seconds: it writes what it has, says what is left, and ends with 0. A call
with `--from DIR` takes over what the records in DIR hold of the same device, torch and settings, and measures the rest:
so a machine that is lent for minutes, and starts bare each time, fills the records call by call. Several sections run
each in a process of its own, one after the other, on one budget; `all` is every one of them.

`--tiny --device cpu` runs the same code on small shapes, in one process, to see that it works; nothing is judged then.
`--profile` adds the kernels, the gaps between them and the copies of the sides of `step` and `fp8`.

`python -m benchmarks.performance.SECTION` runs one section too. On a CPU without `--tiny`, those of step, objective,
cache and checkpoint measure what is claimed of a CPU instead, with options and a record of their own (`script`).
"""

import argparse
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, ROOT, SECTIONS
from benchmarks.harness.record import BUDGET, Options, Record, one_line
from benchmarks.harness.timing import why_not_compiled

TINY_COMPILED = ("adaptive",)
"""Sections that `all --tiny` compiles: a compiler takes longer than all small shapes together."""
BEYOND = 150.0
"""Seconds beyond the budget after which the section in work is ended: what it has measured is in its record."""


def script(section: str, on_cpu: Callable[[list[str]], Any] | None = None) -> int:
    """What `python -m benchmarks.performance.SECTION` does: the section, or on a CPU at full size `on_cpu(words)`."""
    words = sys.argv[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=_default_device())
    parser.add_argument("--tiny", action="store_true")
    asked, rest = parser.parse_known_args(words)
    if on_cpu is None or asked.device == "cuda" or asked.tiny:
        return main([section, *words])
    return int(on_cpu(rest) or 0)


def main(argv: list[str]) -> int:
    """Run one section or all; 1 where something failed."""
    arguments = _parser().parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --tiny --device cpu runs the same code on small shapes", file=sys.stderr)
        return 2
    if device.type == "cpu" and not arguments.tiny:
        print("on a CPU the full shapes take days; add --tiny", file=sys.stderr)
        return 2
    if arguments.earlier is not None and not arguments.earlier.is_dir():
        print(f"--from {arguments.earlier} is not a folder", file=sys.stderr)
        return 2
    names = SECTIONS if "all" in arguments.sections else tuple(dict.fromkeys(arguments.sections))
    reason = why_not_compiled(device) if device.type == "cuda" and not arguments.no_compile else None
    if reason is not None:
        print(f"nothing is compiled: {reason}", file=sys.stderr)
    options = Options(
        device=device,
        out=arguments.out or (ROOT / "runs" / "gpu-tiny" if arguments.tiny else RESULTS / "gpu"),
        tiny=arguments.tiny,
        compile=not arguments.no_compile and reason is None,
        by_layer=True,
        uncompiled=reason,
        profile=arguments.profile,
        budget=arguments.budget,
        earlier=arguments.earlier,
        commit=arguments.commit,
    )
    if len(names) == 1:
        return _run(names[0], options)
    if not options.tiny:
        return _apart(names, options)
    compiled = TINY_COMPILED if options.compile else ()
    return max(_run(name, replace(options, compile=name in compiled)) for name in names)


def _run(name: str, options: Options) -> int:
    """One section; what it cannot be imported without stands in its record."""
    try:
        section = importlib.import_module(f"benchmarks.performance.{name}")
    except ImportError as error:
        record = Record(name, options, {})
        record.put("section", {"missing": one_line(error)})
        return record.finish()
    return int(section.run(options))


def _apart(names: Sequence[str], options: Options) -> int:
    """Each section in a process of its own: none inherits another's memory, graphs or failures."""
    code = 0
    for name in names:
        left = options.started + options.budget - time.monotonic()
        if left <= 0:
            print(f"{name}: all of it is left, for a call with --from", flush=True)
            continue
        process = multiprocessing.get_context("spawn").Process(target=_exit, args=(name, options))
        process.start()
        process.join(left + BEYOND)
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
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=_default_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument("--out", type=Path, help="where records are written (benchmarks/results/gpu)")
    parser.add_argument(
        "--from", dest="earlier", type=Path, help="a folder of records whose figures are not taken again"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"seconds after which no measurement begins ({BUDGET:.0f})"
    )
    parser.add_argument("--profile", action="store_true", help="also kernels, gaps and copies of step and fp8")
    parser.add_argument("--no-compile", action="store_true", help="nothing is compiled")
    parser.add_argument("--commit", help="the commit of the code, where there is no clone to ask")
    return parser


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
