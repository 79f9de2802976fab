"""Runs for a paper or a page: `sweep` makes them, `compare`, `plot` and `report` show them, `demo` does it all once.

A sweep is made of words of other commands, each run in a process of its own; what is shown is read from the folders of
runs. Nothing here is needed to train.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdtrain.cli import register_module
from kdtrain.config.values import Printed, option

_Conflicts = Iterator[tuple[object, str]]


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Printed):
    """Train arms times seeds of a TOML file over caches that they share, and show the table.

    The same command resumes an interrupted sweep; a run that ended badly is a result of its arm.
    """

    file: Path = option(positional=True, reads="file")
    """The TOML file: seeds, [caches.NAME], [common], [arms.NAME] and [test]."""
    out: Path | None = None
    """The folder of caches and runs; by default the file's name without .toml."""
    at_once: int = option(1, least=1)
    """Runs beside each other, each with its share of the cores."""
    dry_run: bool = False
    """List the commands, which of them are done, and the time and disk of the others; run none."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Printed):
    """Show runs side by side: options that differ, losses, calibration and cost, held against the seeds' spread."""

    runs: tuple[Path, ...] = option((), positional=True, reads="path")
    """Folders of runs, or of sweeps; the others are compared with the first."""
    format: Literal["text", "markdown", "latex", "csv"] = "text"
    """text: everything; markdown, latex (with booktabs): a paper's table; csv: all numbers with their intervals."""
    columns: tuple[str, ...] = option((), several=",", shown="NAME,NAME")
    """Numbers to show, such as test_loss,test_kl; a wrong name lists them."""
    digits: int = option(4, least=0, most=12)
    """Digits of losses behind the point; percentages have two fewer."""
    transpose: bool = False
    """Swap rows and columns."""
    caption: str | None = option(None, text=True)
    """Caption, in LaTeX, of a table that floats."""
    label: str | None = option(None, needs="caption")
    """What \\ref calls it."""

    def conflicts(self) -> _Conflicts:
        yield not self.runs, "no run to compare; give the folders of runs, such as runs/*"
        yield self.json and self.format != "text", f"--json and --format {self.format} exclude each other; give one"
        shaped = self.transpose or self.digits != 4
        yield shaped and (self.json or self.format == "csv"), "--digits and --transpose are for tables; leave them out"
        yield self.caption and self.format != "latex", "--caption is for --format latex"


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Printed):
    """Draw the curves of runs into a figure, with switches and rollbacks marked."""

    runs: tuple[Path, ...] = option((), positional=True, reads="path")
    """Folders of runs; those that differ in the seed alone share a colour, with their mean as a strong line."""
    out: Path
    """The figure to write: a name that ends in .png, .svg or .pdf."""
    x: Literal["tokens", "steps", "minutes"] = "tokens"
    """The horizontal axis; minutes are those of optimizer steps."""
    y: str = "validation/loss"
    """Numbers of metrics.jsonl, several joined with a comma, a panel each; temperature and precision are known too."""
    overwrite: bool = False
    """Replace a file that is already there."""

    def conflicts(self) -> _Conflicts:
        yield not self.runs, "no run to plot; give the folders of runs, such as runs/*"
        ending = f"--out {self.out} ends in none of .png, .svg and .pdf; the ending chooses the format"
        yield self.out.suffix not in (".png", ".svg", ".pdf"), ending


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Printed):
    """Write one page about runs, to read and to send: what was run, what differs, curves, samples, cost, limits."""

    runs: tuple[Path, ...] = option((), positional=True, reads="path")
    """Folders of runs; the others are compared with the first."""
    out: Path
    """The page to write, a name that ends in .html; it needs no network and no other file."""
    title: str = "Runs of kdtrain"
    """Its title."""
    overwrite: bool = False
    """Replace a file that is already there."""

    def conflicts(self) -> _Conflicts:
        yield not self.runs, "no run to report on; give the folders of runs, such as runs/*"
        yield self.out.suffix not in (".html", ".htm"), f"--out {self.out} must end in .html"


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Printed):
    """Distil the teacher that ships into a small student, and show what it gains over cross-entropy.

    Four to eight minutes on two cores, without a network. The same command resumes an interrupted one.
    """

    quick: bool = False
    """A smaller demo, of under two minutes."""
    seeds: int = option(1, least=1)
    """Pairs of students, one with and one without distillation, that differ in their seed."""
    out: Path = Path("runs/demo")
    """The folder of the demo: cache, runs, record and pictures."""


register_module("sweep", SweepConfig, f"{__name__}.sweep", resumes=True)
register_module("compare", CompareConfig, f"{__name__}.compare")
register_module("plot", PlotConfig, f"{__name__}.plot")
register_module("report", ReportConfig, f"{__name__}.plot:report")
register_module("demo", DemoConfig, f"{__name__}.demo", models=True, resumes=True, alone=True)
