"""The limits of this card: the rate of bf16 (and fp8) matrix products, and the bandwidth of its memory.

Products are square ones of cuBLAS on random numbers, which switch more transistors than zeros and run slower; the
best of several sizes counts, each the median of its repetitions over a stretch long enough to be warm. Bandwidth is
that of copying a tensor much larger than the caches, read and write counted. Copies from the host are of pinned memory.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import in_turn, medians, timed

SIZES, TINY_SIZES = (4096, 8192, 16_384), (128, 256)
GOALS: tuple[Goal, ...] = ()


def run(options: Options) -> int:
    """Measure, and write ceilings.json."""
    sizes = TINY_SIZES if options.tiny else SIZES
    stretch, rounds = (1e-3, 2) if options.tiny else (0.3, 7)
    record = Record("ceilings", options, {"sizes": sizes, "seconds_a_round": stretch, "rounds": rounds})
    device = options.device

    def products(dtype: torch.dtype) -> dict[str, Any]:
        found = {}
        for size in sizes:
            multiply = _product(size, dtype, device)
            seconds = _stretched(multiply, stretch, rounds, device)
            found[str(size)] = 2 * size**3 / seconds / 1e12
        return {"tflops": max(found.values()), "by_size": found}

    def bandwidth() -> dict[str, float]:
        source = torch.zeros(2**20 if options.tiny else 2**31, dtype=torch.uint8, device=device)
        into = torch.empty_like(source)
        copied = _stretched(lambda: into.copy_(source), stretch, rounds, device)
        return {"gb_per_second": 2 * source.nbytes / copied / 1e9}

    record.measure("products in bf16", lambda: products(torch.bfloat16))
    record.measure("products in fp32", lambda: products(torch.float32))
    record.measure("products in fp8", lambda: products(torch.float8_e4m3fn))
    record.measure("memory", bandwidth)
    record.measure("from pinned memory", lambda: {"gb_per_second": _from_host(options, rounds, pinned=True)})
    record.measure("from pageable memory", lambda: {"gb_per_second": _from_host(options, rounds, pinned=False)})
    return record.finish()


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    g = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=g, device=device) for _ in range(2))
    if dtype != torch.float8_e4m3fn:
        left, right = left.to(dtype), right.to(dtype)
        out = torch.empty(size, size, dtype=dtype, device=device)
        return lambda: torch.mm(left, right, out=out)
    one = torch.ones((), device=device)
    narrow, turned = left.to(dtype), right.T.contiguous().to(dtype).T
    return lambda: torch._scaled_mm(
        narrow, turned, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _stretched(work: Callable[[], Any], stretch: float, rounds: int, device: torch.device) -> float:
    """Return the seconds of one call, in rounds of enough calls to last `stretch` seconds."""
    for _ in range(3):
        work()
    calls = max(1, round(stretch / max(timed(work, device), 1e-6)))
    return statistics.median(timed(work, device, calls) for _ in range(rounds))


def _from_host(options: Options, rounds: int, pinned: bool) -> float:
    numbers = 2**20 if options.tiny else 2**30
    source = torch.zeros(numbers, dtype=torch.uint8, pin_memory=pinned and options.device.type == "cuda")
    into = torch.empty(numbers, dtype=torch.uint8, device=options.device)
    copy = {"copy": lambda: into.copy_(source, non_blocking=pinned)}
    return numbers / medians(in_turn(copy, rounds, options.device))["copy"] / 1e9
