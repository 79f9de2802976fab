"""The numbers of a run: what each is called, in which unit, how it is written, and which way is better."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kdtrain.tables import duration, loss_text, short, size


@dataclass(frozen=True)
class Measure:
    """How a number of a run is shown."""

    label: str
    """With its unit at the end."""
    text: Callable[[float], str] | None = None
    """None: with digits, a share in %."""
    by_token: bool = False
    """Whether it is of tokens, so that those of two tokenizers do not compare."""
    best: Callable[[Iterable[float]], float] | None = None
    """`min` or `max`: differences are held against the spread of seeds, and the best is marked."""

    @property
    def head(self) -> str:
        """Its name at the head of a paper's column: with its split but for test, its unit and the better way."""
        arrow = {min: " ↓", max: " ↑"}.get(self.best, "")  # type: ignore[arg-type]
        return self.label.removeprefix("test: ").replace(":", "") + arrow

    def shown(self, value: float, digits: int = 4) -> str:
        """A value without its unit; `digits` are those of a loss behind the point, a percentage has two fewer."""
        if self.text is not None:
            return self.text(value)
        share = self.label.endswith("%")
        return loss_text(100 * value, max(digits - 2, 0)) if share else loss_text(value, digits)


EVALUATED = {
    "loss": Measure("loss, nats", by_token=True, best=min),
    "bits_per_byte": Measure("bits per byte", best=min),
    "teacher_loss": Measure("the teacher's loss, nats", by_token=True),
    "teacher_bits_per_byte": Measure("the teacher's bits per byte"),
    "kl": Measure("KL to the teacher, nats", by_token=True, best=min),
    "kl_error": Measure("standard error of that KL, at most, nats"),
    "agreement": Measure("agreement with the teacher, %", by_token=True, best=max),
    "acceptance": Measure("acceptance by the teacher, %", by_token=True, best=max),
    "accuracy": Measure("accuracy, %", by_token=True, best=max),
    "ece": Measure("ECE (15 bins), %", best=min),
    "last_word": Measure("last word right, %", best=max),
    "teacher_last_word": Measure("the teacher's last word right, %"),
    "compared": Measure("tokens compared with the teacher's, %"),
    "entropy_kept": Measure("entropy that the cells keep, %"),
}
"""What `evaluate` measures, by its names."""


def _of(split: str, name: str) -> Measure:
    """A number of `EVALUATED` of a validation or test."""
    return replace(EVALUATED[name], label=f"{split}: {EVALUATED[name].label}")


LAST = {"last_validation_loss": "loss", "teacher_validation_loss": "teacher_loss"} | {
    name: name for name in ("teacher_bits_per_byte", "kl", "compared", "accuracy", "ece")
}
MEASURES = {
    "best_validation_loss": _of("best validation", "loss"),
    "bits_per_byte": _of("best validation", "bits_per_byte"),
    **{key: _of("last validation", name) for key, name in LAST.items()},
    "entropy_kept": EVALUATED["entropy_kept"],
    **{f"test_{name}": _of("test", name) for name in EVALUATED},
    "test_gap_closed": Measure("test: gap to the teacher closed, %", best=max),
    "last_training_loss": Measure("training loss (average), last, nats", by_token=True),
    "temperature": Measure("temperature T, last"),
    "alpha_mean": Measure("alpha, mean"),
    "alpha_last": Measure("alpha, last"),
    "parameters": Measure("parameters", short),
    "tokens": Measure("tokens", short),
    "seconds": Measure("time of its steps", duration),
    "tokens_per_second": Measure("tokens/s (median)", short),
    "peak_memory_mb": Measure("peak memory", size),
    "quantized_share": Measure("steps quantised, %"),
    **{
        name: Measure(name.replace("_", " "), short)
        for name in ("rollbacks", "skipped_steps", "switches", "resumes", "warnings")
    },
}
"""The numbers of a run, in the order of a table."""
