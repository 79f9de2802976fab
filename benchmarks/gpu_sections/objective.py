"""Loss and gradients of the output head alone, at the size of an 8 B model: kdtrain's engine beside others.

The sides are those of `objective_sides.py`, on the device, in bf16: hidden states and weight that want gradients, the
loss, and its backward. All sides take turns; a side that does not fit, or whose library is not installed, says so.
Memory is the peak less what the inputs take, gradients included, as all sides leave them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import objective_sides as sides
import torch

from gpu_sections.common import Goal, Options, Record, attempt
from gpu_sections.measuring import free, in_turn, medians, over, peak_of, without_graphs


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    tokens: tuple[int, ...] = (8192, 32_768)
    width: int = 4096
    vocabulary: int = 128_256
    rounds: int = 7


TINY = Sizes((64, 128), 32, 512, 2)
NAMES = (
    *("products", "cross-entropy", "kdtrain-cross-entropy", "kdtrain-sparse-12", "kdtrain-sparse-50"),
    *("top-k-renormalized-50", "kdtrain-dense", "kdtrain-jsd-online", "trl-jsd", "liger-jsd"),
)
"""`top-k-renormalized-50` is plain PyTorch over all logits, materialised."""
GOALS = (
    *(
        Goal(f"{side} over compiled cross-entropy, N = {tokens:,}", f"{tokens}.over_cross_entropy.{side}", most=1.05)
        for tokens in (8192, 32_768)
        for side in ("kdtrain-sparse-12", "kdtrain-sparse-50")
    ),
    Goal("GiB of kdtrain-sparse-12, N = 32,768 (5 GB)", "32768.extra_gib.kdtrain-sparse-12", most=5e9 / 2**30),
    Goal("kdtrain-jsd-online over Liger's, N = 8,192", "8192.over_liger", most=1.0),
    Goal("kdtrain-jsd-online over Liger's, N = 32,768", "32768.over_liger", most=1.0),
)


def run(options: Options) -> int:
    """Measure, and write objective.json."""
    sizes = TINY if options.tiny else Sizes()
    record = Record("objective", options, vars(sizes) | {"sides": NAMES, "compile": options.compile}, GOALS)
    for tokens in sizes.tokens:
        with without_graphs():
            keep = functools.partial(record.so_far, str(tokens))
            record.measure(str(tokens), lambda n=tokens, keep=keep: _measured(options, sizes, n, keep))
    return record.finish()


def _measured(options: Options, sizes: Sizes, tokens: int, keep: Callable[[Any], None]) -> dict[str, Any]:
    device = options.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    student = sides.make_student(tokens, sizes.width, sizes.vocabulary, dtype, device, options.compile)
    found: dict[str, Any] = {"memory": {}, "without": {}}
    works: dict[str, Callable[[], None]] = {}
    for name in NAMES:
        made = attempt(lambda name=name: _side(name, student))
        memory = made if isinstance(made, dict) else attempt(lambda made=made: _peak(made, student, device))
        free()
        keep(found)
        if "peak_gib" not in memory:
            found["without"][name] = memory
            continue
        found["memory"][name], works[name] = memory, lambda made=made: _cleanly(made, student)
    times = in_turn(works, sizes.rounds, device, keep=lambda times: keep(found | {"all_seconds": times}))
    found |= {"seconds": medians(times), "all_seconds": times}
    found["over_cross_entropy"] = {name: over(times, name, "cross-entropy") for name in times}
    found["extra_gib"] = {
        name: memory["peak_gib"] - memory["held_gib"]
        for name, memory in found["memory"].items()
        if memory["peak_gib"] is not None
    }
    if "liger-jsd" in times:
        found["over_liger"] = over(times, "kdtrain-jsd-online", "liger-jsd")
    return found


def _side(name: str, student: sides.Student) -> Callable[[], Any]:
    reason = sides.available(name)
    if reason is not None:
        raise ImportError(reason)
    return sides.side(name, student)


def _cleanly(run: Callable[[], Any], student: sides.Student) -> None:
    student.hidden_ND.grad = student.weight_VD.grad = None
    run()


def _peak(run: Callable[[], Any], student: sides.Student, device: torch.device) -> dict[str, Any]:
    """The peak of the second run: the first compiles."""
    _cleanly(run, student)
    student.hidden_ND.grad = student.weight_VD.grad = None
    found: dict[str, Any] = peak_of(run, device)
    student.hidden_ND.grad = student.weight_VD.grad = None
    return found
