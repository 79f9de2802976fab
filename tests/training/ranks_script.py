"""One rank's part of a step: `ranks_script.py OUT` writes the step's gradients, cut in several ways, by gloo.

The test imports `gradients` from here for the same step in one process.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from kdtrain.config import ObjectiveConfig
from kdtrain.models.head import split
from kdtrain.objective.batch import Batch
from kdtrain.objective.hidden import plan_hidden_loss
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.targets import DenseTargets
from kdtrain.objective.temperature import build_temperature
from kdtrain.teaching.local import LocalTeacher
from kdtrain.testing import tiny_model
from kdtrain.training.student import Student

VOCABULARY, SEQ_LEN, SEQUENCES = 300, 8, 8
CASES = [("forward-kl", "minimize"), ("jsd", "adversarial"), ("reverse-kl", "likelihood")]


def gradients(divergence: str, mode: str, rank: int, world: int, micro: int) -> dict[str, torch.Tensor]:
    """The gradient of the step's mean over its unmasked tokens, added up over micro-batches and ranks."""
    teacher = split(tiny_model("llama", VOCABULARY, seed=1, hidden_size=48).eval())
    student = split(tiny_model("llama", VOCABULARY, seed=3))
    objective = ObjectiveConfig(divergence=divergence, temperature_mode=mode, hidden_loss="mse")
    plan = plan_hidden_loss(objective, student, LocalTeacher.of(teacher), seed=0)
    assert plan is not None
    temperature = build_temperature(mode, start=2.0, minimum=0.5, maximum=4.0, total_steps=10, ramp_steps=0)
    step = Student(
        student,
        DistillationLoss(divergence=divergence, temperature=temperature),
        vocab_size=VOCABULARY,
        hidden_loss=plan,
        hidden_weight=objective.hidden_weight,
        layers=plan.student_layers,
    ).train()
    full, tokens = float(SEQUENCES * SEQ_LEN), torch.zeros(())
    share = SEQUENCES // world
    for start in range(rank * share, (rank + 1) * share, micro):
        output = step(_batch(teacher, plan.teacher_layers, slice(start, start + micro)), full)
        output.loss.backward()
        tokens += output.tokens
    found = {name: each.grad for name, each in step.named_parameters() if each.grad is not None}
    if world > 1:
        for each in (tokens, *found.values()):
            dist.all_reduce(each)
    return {name: each * (full / tokens) for name, each in found.items()} | {"tokens": tokens}


def _batch(teacher, layers, rows: slice) -> Batch:
    """Some of the step's sequences; the masks leave none of the tokens of two of them, and all of one."""
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, SEQ_LEN + 1), generator=g)[rows]
    kept = torch.tensor([0.5, 0.0, 0.9, 0.1, 0.0, 1.1, 0.3, 0.6])[:, None]
    mask = (torch.rand(SEQUENCES, SEQ_LEN, generator=g) < kept)[rows]
    with torch.no_grad():
        hidden, states = teacher(tokens[:, :-1], None, layers)
        targets = DenseTargets.from_logits(5 * teacher.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    segments = torch.zeros(len(tokens), SEQ_LEN, dtype=torch.int64)
    return Batch(tokens, mask, segments, targets, tuple(each.flatten(0, 1) for each in states))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for divergence, mode in CASES:
        for micro in (1, 2, 4):
            found = gradients(divergence, mode, rank, world, micro)
            if rank == 0:
                save_file(found, Path(sys.argv[1]) / f"{divergence}-{micro}.safetensors")
    dist.destroy_process_group()
