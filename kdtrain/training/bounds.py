"""Whether a learned temperature has run to one of its bounds, said once.

A T on its bound is no longer learned: the loss wants it further away than it may go. `minimize` ends there by its
nature (docs/temperature.md). It is said when it is first seen, and again only after T had left that bound.
"""

from kdtrain.monitor.writers import Writers
from kdtrain.objective.temperature import Temperature


class BoundWatch:
    """Remembers the bound that was last named; a resumed run names it once more."""

    def __init__(self) -> None:
        self.named: str | None = None

    def look(self, temperature: Temperature, mode: str, step: int, writers: Writers) -> None:
        """Name a bound that T has come to sit on, on the terminal and in events.jsonl. Reads the device."""
        bound = temperature.at_bound()
        if bound is not None and bound != self.named:
            value = float(temperature.value().detach())
            text = f"the learned temperature sits on its {bound}, {value:.3f}: --temperature-mode {mode} found nothing"
            facts = {"bound": bound, "temperature": value, "mode": mode}
            writers.warning("temperature-bound", step, f"{text} inside the bounds", **facts)
        self.named = bound
