"""The part of a run that quantises adaptively: the controller, and the student's switch."""

from typing import Any

from kdtrain.precision.controller import Controller
from kdtrain.precision.linear import Position, Switch


class Adaptive:
    """The controller of a run and its switch.

    Args:
        controller: what decides.
        switch: of the student's layers.
        fallback: the position that the switch has in the fallback.
    """

    def __init__(self, controller: Controller, switch: Switch, fallback: Position) -> None:
        self.controller = controller
        self.switch = switch
        self.fallback = fallback
        self.gap: float | None = None
        self.switch_to(controller.mode)

    @property
    def positions(self) -> tuple[Position, Position]:
        """The two positions that the run switches between: quantised, and the fallback's."""
        return "quantized", self.fallback

    def switch_to(self, mode: str) -> None:
        """Put the switch where `mode` is what runs: the policy's quantised mode, or its fallback."""
        self.switch.position = "quantized" if mode == self.controller.policy.quantized else self.fallback

    def state_dict(self) -> dict[str, Any]:
        """The controller's memory."""
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, in its mode."""
        self.controller.load_state_dict(state)
        self.switch_to(self.controller.mode)
