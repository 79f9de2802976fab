"""What becomes of commands that are given what a stranger made? Each attack is run, judged and counted.

`make torture`, or `python -m tests.hostile [--only FAMILY] [--case NAME] [--few N] [--cold N]`.

Caches, runs, checkpoints, model folders, specs, data and environments are attacked in the ways of `families`, with
all digests made anew where there are any, and the real command is run on each: in a fork of a process that has
everything imported (`--cold N`: N of them in an interpreter of their own as well, which has to end the same). It has 20
seconds and 4 GiB and may end with exit code 1 or 2 and one line on stderr, or with 0 and a right result. It may change
nothing but the folder it was told to write, remove nothing of the user's, and leave no process. The result is
benchmarks/results/torture-hostile.json.
"""

import argparse
import contextlib
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, write
from benchmarks.harness.machine import cpu_model
from tests.hostile import families
from tests.hostile.bench import Bench, named
from tests.hostile.case import Case
from tests.hostile.server import MEMORY, SECONDS, Done

RESULT = RESULTS / "torture-hostile.json"


def main() -> int:
    """Run the cases; 0 when all of them ended as they should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one family")
    parser.add_argument("--case", help="cases whose name holds this")
    parser.add_argument("--cold", type=int, default=0, help="so many in an interpreter of their own as well")
    parser.add_argument("--few", type=int, help="so many of each family")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of a command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="names alone")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave what failed there")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    cases = [each for each in families.all_cases() if options.only in (None, each.family)]
    cases = [each for each in cases if options.case is None or options.case in named(each)]
    cases = cases if options.few is None else families.sample(cases, options.few)
    if options.list:
        print("\n".join(map(named, cases)))
        return 0
    started = time.monotonic()
    with (
        _folder(options.keep) as folder,
        Bench(folder, options.seed, options.seconds, options.keep is not None) as bench,
    ):
        ended = [(case, *bench.run(case, shown=True)) for case in cases]
        cold = sorted(cases, key=lambda case: case.seed(1))[: options.cold]
        differing = [named(case) for case in cold if not bench.same_cold(case)]
    record = _record(ended, differing, options, time.monotonic() - started)
    if options.out != RESULT or (options.only is None and options.case is None and options.few is None):
        write(options.out, record)
    print(json.dumps({name: value for name, value in record.items() if name != "failed"}, indent=1))
    return int(bool(record["failures"] or differing))


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def _record(
    ended: list[tuple[Case, Done, list[str]]], differing: list[str], options: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    failed = [(case, done, wrong) for case, done, wrong in ended if wrong]
    verdicts = Counter("hung" if done.hung else f"exit {done.code}" for _, done, _ in ended)
    return {
        "cases": len(ended),
        "families": dict(Counter(case.family for case, _, _ in ended)),
        "verdicts": dict(sorted(verdicts.items())),
        "failures": len(failed),
        "failures_by_family": dict(Counter(case.family for case, _, _ in failed)),
        "failures_by_kind": dict(Counter(phrase.partition(":")[0] for _, _, wrong in failed for phrase in wrong)),
        "slowest_s": max(done.seconds for _, done, _ in ended),
        "largest_mib": max(done.memory for _, done, _ in ended) // 2**20,
        "cold": options.cold,
        "cold_that_differ": differing,
        "limits": {"seconds": options.seconds, "memory_gib": MEMORY // 2**30},
        "seed": options.seed,
        "seconds": round(seconds),
        "environment": {
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "h5py")},
            "cpu": cpu_model(),
        },
        "failed": [
            {
                "case": named(case),
                "command": f"kdtrain {' '.join(case.argv)}"[:500],
                "code": done.code,
                "seconds": done.seconds,
                "wrong": wrong,
                "stderr": (done.stderr.splitlines() or [""])[-1][:300],
            }
            for case, done, wrong in failed
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
