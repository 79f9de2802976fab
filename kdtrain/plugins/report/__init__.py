"""`kdtrain report`: one page about runs, to read and to send; without network, scripts or other files."""

from dataclasses import dataclass
from pathlib import Path

from kdtrain.cli import register_command
from kdtrain.config.values import Printed, option, refuse
from kdtrain.imports import optional


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

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(not self.runs, "no run to report on; give the folders of runs, such as runs/*")
        refuse(self.out.suffix not in (".html", ".htm"), f"--out {self.out} must end in .html")


@register_command("report", ReportConfig)
def main(config: ReportConfig) -> int:
    """Write the page.

    Raises:
        UsageError: a folder is not a run, there is no matplotlib, the file is there, or the page would be too large.
        RunError: the page cannot be written.
    """
    optional("matplotlib", "plot", "report")
    from kdtrain.plugins.report.page import write

    return write(config)
