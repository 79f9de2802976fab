"""Alpha by withheld text in a `transformers.Trainer`, which has no withheld text of its own."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from kdtrain.cache.read.reader import collate
from kdtrain.errors import UsageError
from kdtrain.training.withheld import interval, spread


class AlphaCallback(TrainerCallback):
    """Measures the alpha of a `Student` by withheld rows, before the first step and every few steps.

    The rows are read once, and kept on the student's device. It works in one process and under DDP, where each rank
    measures its part of them.

    Args:
        rows: items of a data set that the Trainer does not train on, such as `cache["validation"]`; evenly spaced ones
            with about 8,192 unmasked tokens together are taken.
        every: steps between two measurements; by default as few as cost about 2 % of the time.
        collate: makes a batch of items.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        every: int | None = None,
        collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]] = collate,
    ) -> None:
        if not len(rows):
            raise UsageError("AlphaCallback has no rows; give it a data set that nothing trains on")
        self.every, self.collate = every, collate

        def count(part: range) -> int:
            return sum(int(rows[at]["loss_mask"].sum()) for at in part)

        found = spread(range(len(rows)), len(rows[0]["loss_mask"]), count)
        assert found is not None
        self.rows = [rows[at] for at in found[0]]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Choose how often to measure, and measure; a run that resumes has its last measurement in the checkpoint."""
        length = len(self.rows[0]["loss_mask"])
        size = args.per_device_eval_batch_size
        step_tokens = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size * length
        self.every = self.every or interval(len(self.rows) * length, step_tokens)
        parts = range(0, len(self.rows), size)[args.process_index :: args.world_size]
        made = [self.collate(self.rows[at : at + size]) for at in parts]
        self.batches = [{name: each.to(model.device) for name, each in batch.items()} for batch in made]
        if not (state.global_step and model.loss.alpha.measured):
            model.measure(self.batches, passes=state.epoch or 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure alpha, where due."""
        if self.every and state.global_step and state.global_step % self.every == 0:
            model.measure(self.batches, passes=state.epoch or 0.0)
