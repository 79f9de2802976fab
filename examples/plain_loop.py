"""Distillation from a cache in a plain PyTorch loop, with a temperature that is learned.

python examples/plain_loop.py CACHE MODEL [STEPS]
"""

import sys
from itertools import islice

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import kdtrain as kd


def main(cache_folder: str, model_folder: str, steps: int = 20) -> list[float]:
    """Train for `steps` steps; the losses, nats per token."""
    torch.manual_seed(0)
    cache = kd.Cache(cache_folder)
    loader = DataLoader(cache["train"], batch_size=8, shuffle=True, drop_last=True, collate_fn=kd.collate)
    temperature = kd.LikelihoodTemperature(start=1.0, bounds=cache.temperature_range)
    loss = kd.DistillationLoss(divergence="forward-kl", alpha=0.9, temperature=temperature)
    student = kd.Student(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), loss).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    losses = []
    for batch in islice((batch for _ in range(steps) for batch in loader), steps):
        output = student(**batch)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
        print(f"loss {losses[-1]:.4f} ce {output.ce / output.tokens:.4f} T {temperature.value().item():.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
