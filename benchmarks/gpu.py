"""Everything that is claimed about a GPU, measured on one: `python benchmarks/gpu.py SECTION` or `all`.

Each section writes one JSON, `benchmarks/results/gpu/SECTION.json`, with the device, driver, libraries, commit,
settings, figures, and each goal met or missed; `benchmarks/plot_gpu.py` draws them and
`benchmarks/report_gpu.py` puts them into docs/performance.md.

ceilings    bf16 matrix rate and memory bandwidth of this card: what everything else is held against
step        whole training steps of a 1 B student: cross-entropy, cached and online distillation
objective   loss and gradients of the output head alone, beside others' work
fp8         steps of 1 B and 3 B students in fp8, by torchao and TransformerEngine, against bf16
adaptive    switching between fp8 and bf16 while training
cache       building and reading caches of 1 B and 8 B teachers
checkpoint  how long training stands still for a checkpoint
teacher     the shipped teacher's recipe for ten minutes

A section takes less than ten minutes on an H200 and begins nothing after nine. Started again, on the same commit, it
goes on with what is left. `all` runs each in a process of its own, one after the other. `--tiny --device cpu` runs the
same code on small shapes, in one process, to see that it works; nothing is judged then. `--profile` adds the kernels,
the gaps between them and the copies of the sides of `step` and `fp8`.
"""

import argparse
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from gpu_sections import common, measuring

SECTIONS = ("ceilings", "step", "objective", "fp8", "adaptive", "cache", "checkpoint", "teacher")
TINY_COMPILED = ("adaptive",)
"""Sections that `all --tiny` compiles: a compiler takes longer than all small shapes together."""
LIMIT = 600.0
"""Seconds after which a section of `all` is ended: what it has measured is in its record."""


def main(argv: list[str] | None = None) -> int:
    """Run one section or all; 1 where something failed."""
    arguments = _parser().parse_args(argv)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --tiny --device cpu runs the same code on small shapes", file=sys.stderr)
        return 2
    if device.type == "cpu" and not arguments.tiny:
        print("on a CPU the full shapes take days; add --tiny", file=sys.stderr)
        return 2
    out = arguments.out or (common.ROOT / "runs" / "gpu-tiny" if arguments.tiny else common.RESULTS)
    if arguments.section == "all" and not arguments.tiny:
        return max(_alone(name, argv if argv is not None else sys.argv[1:]) for name in SECTIONS)
    reason = measuring.why_not_compiled(device) if device.type == "cuda" and not arguments.no_compile else None
    if reason is not None:
        print(f"nothing is compiled: {reason}", file=sys.stderr)
    options = common.Options(
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


def _run(name: str, options: common.Options) -> int:
    """One section; what it cannot be imported without stands in its record."""
    try:
        section = importlib.import_module(f"gpu_sections.{name}")
    except ImportError as error:
        record = common.Record(name, options, {})
        record.put("section", {"missing": common.one_line(error)})
        return record.finish()
    return int(section.run(options))


def _alone(name: str, argv: list[str]) -> int:
    """One section in a process of its own: none inherits another's memory, graphs or failures."""
    words = [name if word == "all" else word for word in argv]
    try:
        return subprocess.run([sys.executable, __file__, *words], timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {LIMIT:.0f} s; its record holds what was measured", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description="\n".join(lines), formatter_class=formatter)
    parser.add_argument("section", choices=(*SECTIONS, "all"))
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, help="where records are written (benchmarks/results/gpu)")
    parser.add_argument("--profile", action="store_true", help="also kernels, gaps and copies of step and fp8")
    parser.add_argument("--no-compile", action="store_true", help="nothing is compiled")
    parser.add_argument("--commit", help="the commit of the code, where there is no clone to ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
