"""The time of a few steps on the device: kernels by name, the gaps between them, and copies.

The trace of `torch.profiler` is read back as it is written for a browser, because that form is the same in every
release. Kernels of several streams may overlap: busy is the time in which any of them ran, a gap what is left of the
span from the first to the last.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.timing import synchronize

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]


def profiled(step: Callable[[], Any], steps: int, device: torch.device, most: int = 25) -> dict[str, Any]:
    """Profile `steps` steps and return their table; on a CPU it has operators in place of kernels."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    step()
    synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return table(events, _ON_DEVICE if cuda else ("cpu_op",), steps, most)


def table(events: list[dict[str, Any]], kinds: tuple[str, ...], steps: int, most: int) -> dict[str, Any]:
    """Tabulate the events of a trace (times in us) of the categories `kinds`: milliseconds a step, and shares."""
    spans: list[Span] = []
    by_name: dict[str, list[float]] = defaultdict(list)
    copies: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in kinds:
            continue
        start, length = float(event["ts"]), float(event["dur"])
        spans.append((start, start + length))
        by_name[event["name"]].append(length)
        if event["cat"] == "gpu_memcpy":
            copies[event["name"]].append(length)
    if not spans:
        return {"kernels": [], "why": "the profiler saw nothing on the device"}
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    own = span - sum(gaps(spans))
    total = sum(sum(lengths) for lengths in by_name.values())
    order = sorted(by_name.items(), key=lambda each: -sum(each[1]))
    return {
        "steps": steps,
        "span_ms": span / steps / 1e3,
        "busy_ms": own / steps / 1e3,
        "gap_share": 1 - own / span,
        "longest_gaps_ms": [round(each / 1e3, 3) for each in gaps(spans)[:5]],
        "copies_ms": {name: sum(lengths) / steps / 1e3 for name, lengths in copies.items()},
        "launches": sum(map(len, by_name.values())) / steps,
        "kernels": [
            {"name": name[:160], "calls": len(t) / steps, "ms": sum(t) / steps / 1e3, "share": sum(t) / total}
            for name, t in order[:most]
        ],
    }


def gaps(spans: list[Span]) -> list[float]:
    """Return the lengths of the gaps that no span covers between the first and the last, longest first."""
    found, until = [], float("inf")
    for start, end in sorted(spans):
        if start > until:
            found.append(start - until)
        until = end if until == float("inf") else max(until, end)
    return sorted(found, reverse=True)
