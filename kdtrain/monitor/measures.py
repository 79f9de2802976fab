"""The numbers of a run: what each is called, in which unit, how it is written, and which way is better.

And the table of what `evaluate` measured, which may be of anyone's runs.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kdtrain.errors import printable
from kdtrain.monitor.record import as_finite
from kdtrain.tables import Part, Table, duration, loss_text, number, short, size

_MOST = 64
"""Most evaluations of a table."""


@dataclass(frozen=True)
class Measure:
    """The label and the format of a number of a run."""

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
        """The name at the head of a paper's column: with its split but for test, its unit and the better way."""
        arrow = {min: " ↓", max: " ↑"}.get(self.best, "")  # type: ignore[arg-type]
        return self.label.removeprefix("test: ").replace(":", "") + arrow

    def shown(self, value: float, digits: int = 4) -> str:
        """Return a value without its unit; `digits` are a loss's after the point, a percentage has two fewer."""
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
    """Return the measure for a number of `EVALUATED` of a validation or test."""
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


def text_of(found: Mapping[str, Any]) -> str:
    """Describe the text of an evaluation, and the teacher that read it too."""
    text = f"the cache {str(found['cache'])[:12]}" if found.get("cache") else found.get("data")
    beside = f", beside {found['teacher']}" if found.get("teacher") else ""
    return printable(f"{found.get('sequences')} sequences of the {found.get('split')} split of {text}{beside}")[:160]


def tested(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text, teacher and checkpoint that the test numbers of runs are of."""
    texts, steps = sorted(set(map(text_of, found))), {str(each.get("checkpoint")) for each in found}
    if found:
        at = min(steps) if len(steps) == 1 else "the checkpoint that was best then"
        yield f"test: {texts[0]}; of each student {printable(at)[:60]}"
    if len(texts) > 1:
        yield "the students were tested on different texts: their test numbers do not compare"


def evaluations(found: Iterable[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield the last numbers of `evaluate` for each checkpoint and text: a column each, beyond three a row each."""
    unique = {f"{each.get('student')} {each.get('checkpoint')} {text_of(each)}": each for each in found}
    last = list(unique.values())[-_MOST:]
    order = ["student", "checkpoint", "split", "cache", "data", "teacher", "sequences", "date", *EVALUATED]
    known = {name for each in last for name, value in each.items() if isinstance(value, str | int | float)} - {"step"}
    lines = []
    for name in (each for each in (*order, *sorted(known - {*order})) if each in known):
        measure, cut = EVALUATED.get(name, Measure(name.replace("_", " "), number)), 12 if name == "cache" else 60
        lines.append([measure.label])
        for value in (each.get(name) for each in last):
            text = "-" if (finite := as_finite(value)) is None else measure.shown(finite)
            lines[-1].append(printable(value[:cut]) if isinstance(value, str) else text)
    if lines and len(last) > 3:
        same = [line for line in lines[1:] if len({*line[1:]}) == 1]
        header, *rows = zip(*(line for line in lines if line not in same), strict=True)
        yield Table([textwrap.fill(each, 12) for each in header], rows, left=("student", "checkpoint"))
        if same:
            yield f"\nall: {'; '.join(f'{name} {value}' for name, value, *_ in same)}"
    elif lines:
        yield Table(lines[0], lines[1:], left=lines[0])
