"""Observers of steps: when they are called, and that looking changes nothing."""

import torch

from kdtrain.training.observers import Observer


class Diary(Observer):
    """An observer that records every call, and runs each first batch of a step once more, with hooks on a module."""

    def __init__(self):
        self.calls, self.eager = [], []

    def before_step(self, step):
        self.calls.append(f"step {step.number}")

    def before_forward(self, step, batch):
        self.calls.append(f"forward {step.micro_batch}")
        if step.micro_batch == 1:
            norm = step.student.model.model.get_submodule("model.norm")
            handle = norm.register_forward_hook(lambda *_: self.eager.append(step.number))
            step.run_eagerly(batch)
            handle.remove()

    def after_forward(self, step, output):
        self.calls.append("made")

    def before_backward(self, step, output):
        self.calls.append("backward")

    def after_backward(self, step):
        assert all(each.grad is not None for each in step.student.model.parameters())

    def before_optimizer(self, step):
        self.calls.append("update")

    def after_optimizer(self, step, metrics, skipped):
        self.calls.append(f"{'skipped' if skipped else 'taken'} {metrics['tokens'] > 0}")

    def rewound(self, step):
        self.calls.append(f"rewound {step}")


def test_observers_are_called_around_each_part_of_a_step_and_change_nothing(workshop):
    tensors = {}
    for name, observers in (("plain", []), ("observed", [diary := Diary()])):
        with workshop.run(
            name, train=workshop.source(12), steps=2, micro_batch_size=2, model={"attention_dropout": 0.3}
        ) as run:
            run.stepper.observers += observers
            run.fit()
            tensors[name] = run.state.tensors()
    assert all(torch.equal(tensor, tensors["plain"][name]) for name, tensor in tensors["observed"].items())
    micro = ["made", "backward"]
    step = ["forward 1", *micro, "forward 2", *micro, "update", "taken True"]
    assert diary.calls == ["step 1", *step, "step 2", *step]
    assert diary.eager == [1, 2]


def test_observers_see_a_skipped_step_and_a_rollback(workshop, fault):
    fault("train.loss:nan:4-5")
    options = {"checkpoint_freq": 1, "max_skips": 1, "nan_hooks": "off"}
    with workshop.run(train=workshop.source(40), **options) as run:
        run.stepper.observers.append(diary := Diary())
        run.fit()
    assert [call for call in diary.calls if call.startswith(("skipped", "rewound"))] == [
        *("skipped True", "skipped True", "rewound 2")
    ]
