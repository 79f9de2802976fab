"""`kdtrain plot` and `kdtrain report`: the curves of runs as a figure, or on a page with all else that is known."""

from kdtrain.errors import UsageError, printable
from kdtrain.imports import optional
from kdtrain.outputs import OutFolder
from kdtrain.plugins.papers import PlotConfig, ReportConfig
from kdtrain.plugins.papers.groups import Group, read_groups, refuse_existing
from kdtrain.registry import nearest


def main(config: PlotConfig) -> int:
    """Write the figure, and print what it shows.

    UsageError, RunError: as `draw`.
    """
    curves = [f"{group.name}: {group.seeds}" for group in draw(config)]
    config.show([f"{config.out}: {', '.join(curves)}"], {"figure": str(config.out), "curves": curves})
    return 0


def report(config: ReportConfig) -> int:
    """Write the page.

    Raises:
        UsageError: a folder is not a run, there is no matplotlib, the file is there, or the page would be too large.
        RunError: the page cannot be written.
    """
    optional("matplotlib", "plot", "report")
    from kdtrain.plugins.papers.page import write

    return write(config)


def draw(config: PlotConfig) -> list[Group]:
    """Write the figure; return the runs that it shows.

    Raises:
        UsageError: a folder is not a run, none of them has a number, there is no matplotlib, or the file is there.
        RunError: the figure cannot be written.
    """
    refuse_existing(config.out, config.overwrite)
    groups = read_groups(config.runs)
    optional("matplotlib", "plot", "plot")
    from kdtrain.plugins.papers import figures

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
    with OutFolder(config.out.parent).published(config.out.name, "plot") as path:
        kind = config.out.suffix[1:]
        salt = config.out.stem
        figures.save(figure, path, dpi=300, kind=kind, salt=salt, bbox_inches="tight", pad_inches=0.03)
    return groups
