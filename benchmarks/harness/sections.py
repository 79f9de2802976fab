"""Everything that is claimed about a GPU, measured on one: `python -m benchmarks.performance SECTION` or `all`.

Each section writes one JSON, `benchmarks/results/gpu/SECTION.json`, with the device, driver, libraries, commit,
settings, figures, and each goal met or missed; `python -m benchmarks.figures gpu` draws them and
`python -m benchmarks.tables gpu` puts them into docs/performance.md.

ceilings    bf16 matrix rate and memory bandwidth of this card: what everything else is held against
step        whole training steps of a 1 B student: cross-entropy, cached and online distillation
objective   loss and gradients of the output head alone, beside others' work
fp8         steps of 1 B and 3 B students in fp8, by torchao and TransformerEngine, against bf16
adaptive    switching between fp8 and bf16 while training
cache       building and reading caches of 1 B and 8 B teachers
checkpoint  how long training stands still for a checkpoint
teacher     the shipped teacher's recipe for ten minutes

A section takes less than ten minutes on an H200 and begins nothing after nine. Started again, on the same commit, it
measures what is left. `all` runs each in a process of its own, one after the other. `--tiny --device cpu` runs the
same code on small shapes, in one process, to see that it works; nothing is judged then. `--profile` adds the kernels,
the gaps between them and the copies of the sides of `step` and `fp8`.

`python -m benchmarks.performance.SECTION` runs one section too. On a CPU without `--tiny`, those of step, objective,
cache and checkpoint measure what is claimed of a CPU instead, with options and a record of their own (`script`).
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, ROOT, SECTIONS
from benchmarks.harness.record import Options, Record, one_line
from benchmarks.harness.timing import why_not_compiled

TINY_COMPILED = ("adaptive",)
"""Sections that `all --tiny` compiles: a compiler takes longer than all small shapes together."""
LIMIT = 600.0
"""Seconds after which a section of `all` is ended: what it has measured is in its record."""


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
    out = arguments.out or (ROOT / "runs" / "gpu-tiny" if arguments.tiny else RESULTS / "gpu")
    if arguments.section == "all" and not arguments.tiny:
        return max(_alone(name, argv) for name in SECTIONS)
    reason = why_not_compiled(device) if device.type == "cuda" and not arguments.no_compile else None
    if reason is not None:
        print(f"nothing is compiled: {reason}", file=sys.stderr)
    options = Options(
        device=device,
        out=out,
        tiny=arguments.tiny,
        compile=not arguments.no_compile and reason is None,
        uncompiled=reason,
        profile=arguments.profile,
        commit=arguments.commit,
    )
    if arguments.section != "all":
        return _run(arguments.section, options)
    compiled = TINY_COMPILED if options.compile else ()
    return max(_run(name, replace(options, compile=name in compiled)) for name in SECTIONS)


def _run(name: str, options: Options) -> int:
    """One section; what it cannot be imported without stands in its record."""
    try:
        section = importlib.import_module(f"benchmarks.performance.{name}")
    except ImportError as error:
        record = Record(name, options, {})
        record.put("section", {"missing": one_line(error)})
        return record.finish()
    return int(section.run(options))


def _alone(name: str, argv: list[str]) -> int:
    """One section in a process of its own: none inherits another's memory, graphs or failures."""
    words = [name if word == "all" else word for word in argv]
    try:
        return subprocess.run([sys.executable, "-m", "benchmarks.performance", *words], timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {LIMIT:.0f} s; its record holds what was measured", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=(*SECTIONS, "all"))
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=_default_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument("--out", type=Path, help="where records are written (benchmarks/results/gpu)")
    parser.add_argument("--profile", action="store_true", help="also kernels, gaps and copies of step and fp8")
    parser.add_argument("--no-compile", action="store_true", help="nothing is compiled")
    parser.add_argument("--commit", help="the commit of the code, where there is no clone to ask")
    return parser


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
