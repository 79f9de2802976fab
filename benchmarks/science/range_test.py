"""A range test of the learning rate, beside what `kdtrain find-lr` suggests and the best of seven whole runs.

`python -m benchmarks.science.range_test CACHE [--alpha 0] [--steps 200] [--seed 0]` prints what it suggests for the
student of the demo. The seven runs are `kdtrain sweep benchmarks/science/find_lr.toml`, on whose cache it stands.

The range test (Smith, arXiv 1506.01186, as in fastai) raises the rate of AdamW from 1e-6 to 1 in one short run without
warm-up, and suggests where the loss falls fastest, or a tenth of the rate where it is lowest. It sees neither warm-up
nor what a rate does after more than a few steps.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import kdtrain as kd
from benchmarks.harness import STUDENT
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec

BATCH = 8
"""Sequences in a step."""


def main() -> None:
    """Run one test, and print its suggestions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--alpha", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    found = range_test(**vars(parser.parse_args()))
    print(json.dumps({name: found[name] for name in ("steepest", "tenth_of_lowest")}))


def range_test(cache: Path, alpha: float, steps: int, seed: int) -> dict[str, Any]:
    """Run a fresh student whose rate rises from 1e-6 to 1; return rates, losses, and what readers of them suggest."""
    torch.manual_seed(seed)
    data = kd.Cache(str(cache))
    model = load_student(ModelSpec.read(STUDENT), vocab_size=data.manifest.vocab_size, seed=seed, device="cpu")
    student = kd.Student(model, kd.DistillationLoss(alpha=alpha)).train()
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    loader = DataLoader(data["train"], BATCH, shuffle=True, drop_last=True, collate_fn=kd.collate)
    batches = (batch for _ in range(steps) for batch in loader)
    tried, losses = [1e-6 ** (1 - step / (steps - 1)) for step in range(steps)], list[float]()
    for rate, batch in zip(tried, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = student(**batch).loss
        if not torch.isfinite(loss) or (losses and loss > 4 * min(losses)):
            break
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"lr": tried[: len(losses)], "loss": losses, **read_range(tried, losses)}


def read_range(tried: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    """Return fastai's suggestions: where the smoothed loss falls fastest, and a tenth of the rate where it is least."""
    smooth, average = list[float](), 0.0
    for number, loss in enumerate(losses, 1):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98**number))
    slopes = [after - before for before, after in pairwise(smooth)]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    return {"steepest": tried[steepest], "tenth_of_lowest": tried[smooth.index(min(smooth))] / 10}


if __name__ == "__main__":
    main()
