"""What cells cost the objective: `python -m benchmarks.performance.cells --student TOKENIZER`, on a quiet machine.

Loss and gradients of the output head from 50 samples a token, in turn: of a teacher with the student's tokenizer
(`one`), and of one with another (`--teacher`), by cells. Both teachers' logits are N(0, 4^2), and their samples are
stored as counts, as a cache stores them. A figure is the median over rounds of the ratio to `one` of
the same round, and every second round goes the other way. Folders of tokenizers are those that a pair of models has, or
any other that `transformers` saved.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, ROOT, write
from benchmarks.harness.command import options
from benchmarks.harness.machine import cpu_model
from benchmarks.harness.timing import in_turn, medians, over
from kdtrain.config.values import Options, option
from kdtrain.models.output_head import HeadPart
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import FLOOR, SparseTargets, Targets
from kdtrain.tokenizers.alignment import Alignment
from kdtrain.tokenizers.targets import AlignedTargets
from kdtrain.tokenizers.teacher_cells import TeacherCells, coarsened

SAMPLES = 50


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Measure the objective over cells against that of one tokenizer."""

    student: Path
    """The folder of the student's tokenizer."""
    teacher: Path = ROOT / "teachers" / "stdlib-5m"
    """That of the teacher's."""
    tokens: int = option(2048, least=1)
    """Tokens of a call."""
    widths: tuple[int, ...] = option((256, 1024), several=True)
    """Widths of the student."""
    rounds: int = option(7, least=1)
    """Calls of each side."""
    compile: bool = True
    """Compile the elementwise work."""
    save: bool = True
    """Write the figures to benchmarks/results/cells.json, beside those of other pairs."""


def main(settings: Settings) -> None:
    """Measure the widths in fp32 and bf16."""
    teacher, student = load_tokenizer(settings.teacher), load_tokenizer(settings.student)
    alignment = Alignment(teacher, student)
    cells, theirs = alignment.cells, TeacherCells.of(alignment.cells, alignment.spelling)
    index = CellIndex.of(torch.from_numpy(cells.of_student), cells.count)
    found: dict[str, Any] = {
        "entries": [len(cells.of_teacher), len(cells.of_student)],
        "cells": cells.count,
        "tokens": settings.tokens,
        "threads": torch.get_num_threads(),
        "compile": settings.compile,
        "cpu": cpu_model(),
    }
    for width in settings.widths:
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{width} {dtype}".replace("torch.", "")] = _measured(settings, theirs, index, width, dtype)
    print(json.dumps(found, indent=1))
    if settings.save:
        known = json.loads((RESULTS / "cells.json").read_text()) if (RESULTS / "cells.json").exists() else {}
        write(RESULTS / "cells.json", {**known, f"{settings.teacher.name} {settings.student.name}": found})


def _measured(
    settings: Settings, cells: TeacherCells, index: CellIndex, width: int, dtype: torch.dtype
) -> dict[str, Any]:
    g, count, size = torch.Generator().manual_seed(0), settings.tokens, len(index.column)
    hidden_ND = torch.randn(count, width, generator=g).to(dtype).requires_grad_()
    weight_VD = (2 * torch.randn(size, width, generator=g) / width**0.5).to(dtype).requires_grad_()
    labels_N, mask_N = torch.randint(size, (count,), generator=g), torch.ones(count, dtype=torch.bool)
    own = _samples(count, size, g)
    theirs = _samples(count, len(cells.of_token), g)
    near = coarsened(theirs, cells, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    aligned = AlignedTargets(near, mask_N, torch.ones(count), index)

    def call(targets: Targets | None) -> Tensor:
        hidden_ND.grad = weight_VD.grad = None
        loss = distillation_loss(
            hidden_ND,
            HeadPart(weight_VD),
            labels_N,
            mask_N,
            targets,
            temperature=1.0,
            alpha=0.9 if targets is not None else 0.0,
            vocab_size=size,
            normalizer=float(count),
            compile=settings.compile,
        ).loss
        loss.backward()
        return loss.detach()

    sides = {"one": own, "cells": aligned, "cross-entropy": None}
    times = in_turn(
        {name: functools.partial(call, each) for name, each in sides.items()}, settings.rounds, hidden_ND.device, warm=2
    )
    return {
        "over_one": {name: over(times, name, "one") for name in sides},
        "milliseconds": {name: 1e3 * each for name, each in medians(times).items()},
        "entries_a_token": {"one": own.ids.shape[1], "cells": near.ids.shape[1]},
    }


def _samples(count: int, size: int, g: torch.Generator) -> SparseTargets:
    """Draw samples of `count` random teachers over `size` entries."""
    logits_NV = 4 * torch.randn(count, size, generator=g)
    drawn_NS = torch.multinomial(logits_NV.softmax(1), SAMPLES, replacement=True, generator=g)
    counts_NV = torch.zeros(count, size).scatter_add_(1, drawn_NS, torch.ones(count, SAMPLES))
    counts_NK, ids_NK = counts_NV.topk(int((counts_NV > 0).sum(1).max()), dim=1)
    none_N = torch.zeros(count)
    return SparseTargets(
        ids=ids_NK,
        logprobs=(counts_NK / SAMPLES).log().clamp_min(FLOOR),
        counts=counts_NK,
        tail=torch.zeros(count, 2),
        label_logprob=none_N - 1,
        logit_mean=none_N,
        logit_std=none_N,
        top_k=0,
        num_samples=SAMPLES,
        knots=(1.0,),
    )


if __name__ == "__main__":
    main(options(Settings))
