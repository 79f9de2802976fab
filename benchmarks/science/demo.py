"""The published demonstration: `kdtrain demo` with three seeds, as a record, pictures and a table in docs/measured.md.

Three seeds of the default settings are the published result: `benchmarks/results`, `benchmarks/figures` and the table
in docs/measured.md, which `python -m benchmarks.tables demo` writes as well. Any other demo is in its own folder. If
interrupted, the same command resumes.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables
from benchmarks.harness import FIGURES, RESULTS, write
from benchmarks.harness.command import environment, options, stop
from kdtrain.commands.demo import OBJECTIVES, Settings, run
from kdtrain.commands.demo_pictures import draw_demo
from kdtrain.commands.demo_table import show
from kdtrain.errors import RunError, UsageError
from kdtrain.training.signals import interruptible

RESULT = RESULTS / "demo.json"
PUBLISHED_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Distil the shipped teacher into a small student, and show what it gained over cross-entropy."""

    seeds: int = PUBLISHED_SEEDS
    """Pairs of students, one of each kind, that differ in their seed."""
    out: Path = Path("runs/demo")
    """The folder of the demo: cache, runs, and what is not published."""
    settings: Settings = dataclasses.field(default_factory=Settings)


def main(demo: Demo) -> None:
    """Run the demo, or what is left of it, and show the table and where the pictures are."""
    if demo.seeds < 1:
        stop(2, f"--seeds {demo.seeds} makes no student; give at least 1")
    try:
        with interruptible():
            result = run(demo.out, demo.settings, demo.seeds)
    except (UsageError, RunError) as error:
        stop(2 if isinstance(error, UsageError) else 1, str(error))
    except KeyboardInterrupt:
        stop(1, "stopped; run the same command to resume")
    result |= {"environment": environment(demo.out / f"{next(iter(OBJECTIVES))}-0")}
    file, folder = places(demo)
    write(file, result)
    pictures = draw_demo(json.loads(file.read_text()), folder)
    if file == RESULT:
        tables.fill_page("demo")
    show(result)
    print(f"result: {file}\npictures: {', '.join(map(str, pictures))}")


def places(demo: Demo) -> tuple[Path, Path]:
    """The file of the result and the folder of the pictures: the published ones, or those of this demo alone."""
    published = demo.settings == Settings() and demo.seeds >= PUBLISHED_SEEDS
    return (RESULT, FIGURES) if published else (demo.out / "demo.json", demo.out)


if __name__ == "__main__":
    main(options(Demo))
