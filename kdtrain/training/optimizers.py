"""Optimizers: what a step needs of one, the parameter groups, and the registry by which a package adds its own.

An optimizer of `torch.optim` needs three things more. `guarded_step` decides on the device whether anything is updated,
because a step with a non-finite loss or gradient must leave weights, moments and step counters bitwise unchanged.
`slots` names the tensors that it keeps for a parameter, by which a checkpoint is checked before it is loaded.
`state_bytes` tells the memory plan their size. The state lies where torch has it, in `optimizer.state[parameter]`: a
checkpoint holds it by the names of parameters.

`FusedAdamW` is the default (arXiv 1711.05101). Its kernel handles overflows of mixed precision (`found_inf`, which
`torch.amp.GradScaler` sets), so that the host never waits and no NaN is multiplied by zero on its way to a weight.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from kdtrain.config.choices import OPTIMIZERS
from kdtrain.config.sections import OptimizerConfig
from kdtrain.training.student import Student

Groups = list[dict[str, Any]]
"""Parameter groups of `torch.optim`, each also with `role` (hidden: matrices of the layers; head: the output head;
other: embeddings, norms, biases; temperature; projections: of the hidden-state loss), its `weight_decay`, and `peak`,
its peak learning rate relative to that of `OptimizerConfig`."""


class Optimizer(Protocol):
    """An optimizer of `torch.optim` as a step uses it."""

    state_bytes: ClassVar[float]
    """The largest size of the state of one trained number, in bytes: 8 for two fp32 moments."""
    scales: ClassVar[bool]
    """Whether `guarded_step` takes a `scale` on a GPU, which saves two passes over the gradients."""
    param_groups: Groups
    """Those of the constructor; a step sets `lr` of each."""
    state: Any
    """The tensors of each parameter, by name."""

    def guarded_step(self, found_inf: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Update where `found_inf` is 0, and change nothing where it is 1.

        scale: on the device, divides each gradient; None: the gradients are as they must be.
        """
        ...

    def slots(self, parameter: nn.Parameter) -> dict[str, torch.Size]:
        """Return names and shapes of the fp32 tensors in the state of `parameter`."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        ...


Maker = TypeVar("Maker", bound=Callable[[Groups, OptimizerConfig], Any])


def register_optimizer(name: str, *, help: str = "") -> Callable[[Maker], Maker]:
    """Return a decorator that makes a class of optimizers the one that `--optimizer NAME` takes.

    It is called with the parameter groups and the section of options, and has what `Optimizer` lists.

    Args:
        name: as users write it.
        help: its line in `--help`; by default the first of the docstring.
    """
    return OPTIMIZERS.registers(name, help)


@register_optimizer("adamw")
class FusedAdamW(torch.optim.AdamW):
    """Fused AdamW, whose kernel divides the gradients and skips a step."""

    state_bytes: ClassVar[float] = 8.0
    scales: ClassVar[bool] = True

    def __init__(self, groups: Groups, options: OptimizerConfig) -> None:
        super().__init__(groups, lr=options.peak_lr, betas=options.betas, fused=True)

    def guarded_step(self, found_inf: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Update as `Optimizer` states. The first call creates the moments as zeros."""
        self.found_inf, self.grad_scale = found_inf, scale
        try:
            self.step()
        finally:
            del self.found_inf, self.grad_scale

    def slots(self, parameter: nn.Parameter) -> dict[str, torch.Size]:
        """Return the shapes of two moments, and of the number of steps."""
        return {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size()}


def make_optimizer(student: Student, config: OptimizerConfig, temperature_lr: float) -> Optimizer:
    """Make the optimizer of `config`, with weight decay on the model's matrices only.

    The temperature has a rate of its own.
    """
    embeddings = {id(each.weight) for each in student.model.modules() if isinstance(each, nn.Embedding)}
    head = getattr(student.get_output_embeddings(), "weight", None)
    roles: dict[str, list[nn.Parameter]] = {"hidden": [], "head": [], "other": []}
    for parameter in student.model.parameters():
        if parameter.requires_grad:
            role = "other"
            if parameter.ndim >= 2 and id(parameter) not in embeddings:
                role = "head" if parameter is head else "hidden"
            roles[role].append(parameter)
    roles["temperature"] = list(student.temperature.parameters())
    roles["projections"] = [] if student.hidden_loss is None else list(student.hidden_loss.parameters())
    groups: Groups = [
        {
            "params": part,
            "role": role,
            "weight_decay": config.weight_decay if role in ("hidden", "head") else 0.0,
            "peak": temperature_lr / config.peak_lr if role == "temperature" else 1.0,
        }
        for role, parameters in roles.items()
        for part in _of_one_mesh(parameters)
    ]
    optimizer: Optimizer = OPTIMIZERS.get(config.optimizer)(groups, config)
    return optimizer


def _of_one_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters by the mesh over which they are sharded: one kernel takes the parameters of one mesh."""
    found: dict[Any, list[nn.Parameter]] = {}
    for each in parameters:
        found.setdefault(getattr(each, "device_mesh", None), []).append(each)
    return [*found.values()]
