"""Where an attack is made, run and judged."""

import sys
from pathlib import Path

from tests.hostile import base
from tests.hostile.case import Case, Place, remove
from tests.hostile.judge import failures, tree
from tests.hostile.server import SECONDS, Done, Runner


class Bench:
    """The bench on which cases run: the base, the process that forks, and a folder for each case.

    The folder is removed when the case is right.
    """

    def __init__(self, folder: Path, seed: int = 0, seconds: float = SECONDS, keep: bool = False) -> None:
        self.folder, self.seed, self.keep = folder, seed, keep
        self.runner = Runner(folder, seconds)
        remove(folder / "base")
        self.sound = base.make(folder / "base", self.runner)
        self._number = 0

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def run(self, case: Case, cold: bool = False, shown: bool = False) -> tuple[Done, list[str]]:
        """Attack, run and judge; return how the command ended, and what is wrong with that."""
        self._number += 1
        root = self.folder / f"case-{self._number}"
        remove(root)
        place = Place(root, self.folder / "base", case.seed(self.seed))
        try:
            case.attack(place)
        except Exception as error:
            raise RuntimeError(f"the attack of {named(case)} failed") from error
        before = tree(root)
        done = self.runner(case.argv, place.here, _environment(root) | case.environment, cold or case.cold, **case.how)
        wrong = failures(case, done, place, before, self.sound)
        if shown and wrong:
            print(f"FAILED {named(case)} ({done.code}, {done.seconds:.1f} s)", *wrong, sep="\n    ", file=sys.stderr)
        if not (wrong and self.keep):
            remove(root)
        return done, wrong

    def same_cold(self, case: Case) -> bool:
        """Return True if the command ends the same in an interpreter of its own: exit code and line."""
        ends = []
        for cold in (False, True):
            done, _ = self.run(case, cold)
            line = next((line for line in done.stderr.splitlines() if line.startswith("kdtrain: ")), "")
            ends.append((done.code, line.replace(f"case-{self._number}", "")))
        return ends[0] == ends[1]


def _environment(root: Path) -> dict[str, str | None]:
    return {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}


def named(case: Case) -> str:
    """Name a case in reports, by family and name."""
    return f"{case.family}: {case.name}"
