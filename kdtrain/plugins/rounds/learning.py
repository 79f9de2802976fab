"""How a run in rounds learns: the seconds of each step, and the weights of the sampled reverse KL, which tell how far
the student is from the one that wrote the text.

The weights are measured at steps that the log shows, by forwards of their own, over the tokens that the loss weights:
with a top-k those outside of it.
"""

import time
from collections.abc import Mapping
from typing import Any, cast

import torch

from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets
from kdtrain.plugins.rounds.loss import LARGEST, inside
from kdtrain.ranks import all_reduce_sum
from kdtrain.training.observers import Observer, StepView


class Learning(Observer):
    """An observer that adds to a step's numbers its seconds, and figures of its importance weights.

    These are the mean weight (1 in expectation), the effective share of the samples and the truncated share.

    every: steps between two measurements of the weights; None: the loss has none.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every

    def before_step(self, step: StepView) -> None:
        self.began = time.monotonic()
        self.sums = torch.zeros(4, dtype=torch.float64, device=step.student.device)

    def before_forward(self, step: StepView, batch: Batch) -> None:
        targets = batch.targets
        if self.every is None or step.number % self.every or not isinstance(targets, SparseTargets):
            return
        if targets.policy is None:
            return
        weighted_N = batch.loss_mask.flatten()
        if targets.top_k:
            weighted_N = weighted_N & ~inside(targets, batch.tokens[:, 1:].flatten())
        own_N = step.student.label_logprobs(batch.tokens).flatten()
        weight_N = (own_N - targets.policy)[weighted_N].double().exp()
        each = (torch.ones_like(weight_N), weight_N, weight_N**2, (weight_N > LARGEST).double())
        self.sums += torch.stack([values.sum() for values in each])

    def after_optimizer(self, step: StepView, metrics: Mapping[str, float], skipped: bool) -> None:
        found = {}
        if self.every is not None and step.number % self.every == 0:
            count, total, squares, truncated = all_reduce_sum(self.sums).tolist()
            if count:
                named = {"weight": total, "effective_samples": total**2 / squares, "truncated": truncated}
                found = {name: value / count for name, value in named.items()}
        found["learning_s"] = time.monotonic() - self.began
        cast(dict[str, Any], metrics).update({f"rollouts/{name}": value for name, value in found.items()})
