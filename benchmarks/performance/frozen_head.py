"""The objective alone with a trained and with a frozen output head: `python -m benchmarks.performance.frozen_head`.

Seconds of loss and gradients, the least of five, and the peak memory above the inputs; each side in a process of its
own, because a peak is that of a process. It prints them; `benchmarks/results/lora.json` holds them beside the students.
"""

import json
import multiprocessing
import time
from typing import Any

import torch

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import DistillationLoss
from kdtrain.ranks import peak_memory_mb


def main() -> None:
    """Measure at a small and at a large vocabulary."""
    for vocabulary in (2048, 151_936):
        print(json.dumps(head(vocabulary, 896, 256)))


def head(vocabulary: int, width: int, tokens: int) -> dict[str, Any]:
    """Measure seconds and peak memory of loss and gradients with a trained and with a frozen output head."""
    sides = {}
    for name, trained in (("trained", True), ("frozen", False)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sides[name] = pool.apply(_side, (vocabulary, width, tokens, trained))
    return {"vocabulary": vocabulary, "width": width, "tokens": tokens, **sides}


def _side(vocabulary: int, width: int, tokens: int, trained: bool) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).requires_grad_(trained)
    hidden = torch.randn(tokens, width, device=device, dtype=kind, requires_grad=True)
    labels, mask = (
        torch.randint(vocabulary, (tokens,), device=device),
        torch.ones(tokens, dtype=torch.bool, device=device),
    )
    loss, before, seconds = DistillationLoss(alpha=0.0), peak_memory_mb(device), []
    for _ in range(6):
        begun = time.perf_counter()
        output = loss(hidden, HeadPart(weight), labels, mask, None, vocab_size=vocabulary, normalizer=float(tokens))
        output.loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        weight.grad = hidden.grad = None
    return {"seconds": min(seconds[1:]), "peak_mb_above_its_inputs": peak_memory_mb(device) - before}


if __name__ == "__main__":
    main()
