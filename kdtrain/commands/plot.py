"""`kdtrain plot`: the curves of runs as a figure for a paper or a page."""

import os
from pathlib import Path
from typing import Any

from kdtrain.config import PlotConfig
from kdtrain.errors import UsageError, printable, writing
from kdtrain.files import published
from kdtrain.monitor.runs import grouped, read_runs
from kdtrain.registry import nearest
from kdtrain.tables import show


def main(config: PlotConfig) -> int:
    """Write the figure.

    Raises:
        UsageError: a folder is not a run, none of them has a number, there is no matplotlib, or the file is there.
        RunError: the figure cannot be written.
    """
    refuse_existing(config.out, config.overwrite)
    groups = grouped(read_runs(config.runs))
    figures = drawing("plot")
    known = {name for group in groups for run in group.runs for line in run.record.metrics for name in line} - {"step"}
    names = [name.strip() for name in config.y.split(",")]
    for name in names:
        if figures.NAMES.get(name, name) not in known:
            raise UsageError(
                f"--y {printable(name)[:80]} is in no metrics.jsonl of these runs; {nearest(name, sorted(known)[:60])}"
            )
    if len(names) > 12:
        raise UsageError(f"--y names {len(names)} numbers; a figure has at most 12 panels")
    figure = figures.draw(groups, config.x, names)
    with writing(config.out), published(config.out, "plot") as path:
        figures.save(
            figure,
            path,
            dpi=300,
            kind=config.out.suffix[1:],
            salt=config.out.stem,
            bbox_inches="tight",
            pad_inches=0.03,
        )
    curves = [f"{group.name}: {group.seeds}" for group in groups]
    show("plot", {"figure": str(config.out), "curves": curves}, config.json)
    return 0


def drawing(command: str) -> Any:
    """The module that draws. UsageError: there is no matplotlib."""
    try:
        from kdtrain.monitor import figures
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UsageError(f"{command} needs matplotlib, which is not installed; pip install 'kdtrain[plot]'") from None
    return figures


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Refuse to write over a file unasked, over anything else at all, and where there is no folder."""
    if os.path.lexists(out) and (not overwrite or not out.is_file() or out.is_symlink()):
        what = "is there already; name another file, or add --overwrite" if out.is_file() else "is not a file"
        raise UsageError(f"--out {out} {what}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; make it")
