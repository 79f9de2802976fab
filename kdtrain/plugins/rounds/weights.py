"""The weights of the sampled reverse KL while a run trains: how far the student is from the one that wrote the text.

Measured at steps that the log shows, on the first micro-batch of a rank, by a forward of its own.
"""

from collections.abc import Mapping
from typing import Any, cast

from kdtrain.objective.batch import Batch
from kdtrain.plugins.rounds.loss import LARGEST
from kdtrain.training.observers import Observer, StepView


class Weights(Observer):
    """An observer of the importance weights, whose figures it adds to a step's numbers.

    The figures are the mean weight (1 in expectation), the effective share of the samples and the truncated share.

    every: steps between two measurements.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.found = dict[str, float]()

    def before_forward(self, step: StepView, batch: Batch) -> None:
        targets = batch.targets
        if step.micro_batch != 1 or step.number % self.every or targets is None or targets.policy is None:
            return
        mask_N = batch.loss_mask.flatten()
        own_N = step.student.label_logprobs(batch.tokens).flatten()
        if not mask_N.any():
            return
        weight_N = (own_N - targets.policy)[mask_N].double().exp()
        mean, truncated = weight_N.mean(), (weight_N > LARGEST).double().mean()
        named = {"weight": mean, "effective_samples": mean**2 / (weight_N**2).mean(), "truncated": truncated}
        self.found = {f"rollouts/{name}": float(value) for name, value in named.items()}

    def after_optimizer(self, step: StepView, metrics: Mapping[str, float], skipped: bool) -> None:
        cast(dict[str, Any], metrics).update(self.found)
        self.found = {}
