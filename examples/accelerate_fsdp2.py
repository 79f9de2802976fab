"""Distillation from a cache by accelerate with FSDP2: every rank holds a shard of the student.

Needs GPUs: on CPUs accelerate leaves its FSDP plugin out and copies the student to every rank.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py CACHE MODEL [STEPS]
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import kdtrain as kd


def main(cache_folder: str, model_folder: str, steps: int = 10) -> list[float]:
    """Train for `steps` steps; the losses, nats per token, means over the tokens of all ranks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    layer = type(max((each for each in model.modules() if isinstance(each, torch.nn.ModuleList)), key=len)[0]).__name__
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layer]
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        raise SystemExit("accelerate shards over several GPUs only: start this by torchrun on a machine with them")
    student = kd.Student(model, kd.DistillationLoss(alpha=0.9)).train()  # a number is the same on all ranks
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    loader = DataLoader(kd.Cache(cache_folder)["train"], batch_size=4, collate_fn=kd.collate)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        tokens = accelerator.gather(batch["loss_mask"].sum()).sum()
        output = student(**batch, num_items_in_batch=tokens)
        # FSDP takes the mean of gradients over ranks, and this loss is a sum over them
        accelerator.backward(output.loss * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(output.loss.detach()).sum().item())
    accelerator.print("losses", *losses)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
