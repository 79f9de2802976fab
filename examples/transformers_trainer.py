"""Distillation from a cache by transformers.Trainer, in one process or under torchrun.

The loss of a step is the mean over the unmasked tokens of all micro-batches and ranks, as `kdtrain distill` takes it;
with the same order of the data, optimizer and schedule, as here, the steps are the same as well.

python examples/transformers_trainer.py CACHE MODEL [STEPS]
torchrun --nproc-per-node 2 examples/transformers_trainer.py CACHE MODEL [STEPS]
"""

import os
import sys
import tempfile

import torch
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import kdtrain as kd
from kdtrain.data import order

BATCH, SEED = 8, 0


def main(cache_folder: str, model_folder: str, steps: int = 10) -> list[float]:
    """Train for `steps` steps; the losses, nats per token."""
    data = kd.Cache(cache_folder)["train"]
    rows = [row for step in range(steps) for row in order.batch(SEED, step * BATCH, BATCH, len(data)).tolist()]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    student = kd.Student(model, kd.DistillationLoss(alpha=0.9))
    options = TrainingArguments(
        **{"output_dir": tempfile.mkdtemp(), "max_steps": steps, "logging_steps": 1, "report_to": "none", "seed": SEED},
        **{"per_device_train_batch_size": BATCH // int(os.environ.get("WORLD_SIZE", 1)), "use_cpu": True},
        **{"learning_rate": 1e-3, "lr_scheduler_type": "constant", "adam_beta2": 0.95, "weight_decay": 0.0},
        **{"train_sampling_strategy": "sequential", "save_strategy": "no", "disable_tqdm": True},
    )
    trainer = Trainer(model=student, args=options, train_dataset=Subset(data, rows), data_collator=kd.collate)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print("losses", *losses)
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
