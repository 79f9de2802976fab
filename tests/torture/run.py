"""Does a run that is broken off end with the same bits? Every way of breaking it off, and kills at random times.

`make torture`, or `python -m tests.torture.run [--selection] [--format lora] [--kills 50] [--seed 0] [--out FILE]`.

The command `kdtrain distill` is started in a fork of this process, broken off as resume_matrix.py says, and started
again until it ends by itself. Then its newest checkpoint is compared with that of an undisturbed run: every
tensor with `torch.equal`, every number of its state, and each line of metrics.jsonl but for what a clock decides. A
fault that did not fire is an error. Random kills: SIGKILL after a random time, over and over, until the run ends by
itself. The result is benchmarks/results/torture-run.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, write, write_spec
from kdtrain.checkpoint.store import Store, load
from kdtrain.monitor.progress import bar
from kdtrain.monitor.record import RunRecord
from kdtrain.testing import SHAPES, tiny_model
from tests.torture import forks
from tests.torture import resume_matrix as matrix
from tests.torture.forks import command, fired, said

RESULT = RESULTS / "torture-run.json"
CLOCK = (
    *("tok/s", "tok/s_last", "eta_h", "data_wait_s"),
    *("memory_resident_mb", "memory_growth_mb", "checkpoint_age", "clipped_share"),
)


def main() -> int:
    """Run the matrix and the kills; 0 when every run ended equal and every fault fired."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--selection", action="store_true", help="each place with each way, over a few options")
    parser.add_argument("--format", choices=matrix.FORMATS | matrix.ADAPTERS, help="the cases of this format alone")
    parser.add_argument("--kills", type=int, default=50, help="kills at random times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    out = options.out.resolve()
    cases = matrix.selection() if options.selection else [*matrix.every_case(), *matrix.adapters()]
    cases = [case for case in cases if options.format in (None, case.format)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        _materials(layers=1 if options.selection else 2)
        wholes = Wholes()
        found = [_case(case, wholes) for case in _shown(cases, "case")]
        given = [case.options for case in cases]
        killed, kills = _random_kills(random.Random(options.seed), options.kills, given, wholes)
    differ = [each for each in [*found, *killed] if each["differs"]]
    result = {
        "cases": len(cases),
        "faults_fired": sum(each["fired"] for each in found),
        "faults_that_did_not_fire": sum(each["wanted"] - each["fired"] for each in found),
        "random_kills": kills,
        "runs_that_differ": len(differ),
        "differences": differ,
        "seconds": round(time.monotonic() - started),
        "torch": torch.__version__,
        "seed": options.seed,
    }
    write(out, result)
    print(json.dumps(result, indent=1))
    return int(bool(differ or result["faults_that_did_not_fire"]))


class Wholes:
    """The undisturbed runs, one for each set of options, made when they are asked for."""

    def __init__(self) -> None:
        self.seconds: dict[matrix.Options, float] = {}

    def __call__(self, options: matrix.Options) -> Path:
        folder = Path("whole-" + "-".join(map(str, options)))
        if options not in self.seconds:
            started = time.monotonic()
            ended = command(matrix.argv(options, str(folder)), [matrix.SPIKE] if options[2] else [])
            assert ended == 0, f"{folder} ended with {ended}: {said()}"
            self.seconds[options] = time.monotonic() - started
        return folder


def _case(case: matrix.Case, wholes: Wholes) -> dict[str, Any]:
    """Break a run off, finish it, and say in what it differs from the whole one."""
    whole, run, hit = wholes(case.options), Path(case.name), 0
    lasting = [matrix.SPIKE] if case.rollback else []
    for fault in case.faults():
        command(matrix.argv(case.options, str(run)), [*lasting, fault])
        hit += fault.split(":")[0] in fired()
    ended = command(matrix.argv(case.options, str(run)), lasting)
    differs = [f"ended with {ended}: {said()}"] if ended else difference(run, whole)
    shutil.rmtree(run, ignore_errors=True)
    return {"run": case.name, "wanted": len(case.faults()), "fired": hit, "differs": differs}


def _random_kills(
    choose: random.Random, kills: int, every: list[matrix.Options], wholes: Wholes
) -> tuple[list[dict[str, Any]], int]:
    """Kill runs of random ones of `every` options after random times until `kills` have hit; return the differences."""
    found, killed, number = [], 0, 0
    while killed < kills:
        options, number = choose.choice(every), number + 1
        whole, run = wholes(options), Path(f"killed-{number}")
        lasting = [matrix.SPIKE] if options[2] else []
        for _ in range(20):
            ended = command(matrix.argv(options, str(run)), lasting, choose.uniform(0.0, wholes.seconds[options]))
            if ended != -signal.SIGKILL:
                break
            killed += 1
        else:
            ended = command(matrix.argv(options, str(run)), lasting)
        differs = [f"ended with {ended}: {said()}"] if ended else difference(run, whole)
        found.append({"run": f"{run} {options}", "differs": differs})
        shutil.rmtree(run, ignore_errors=True)
    return found, killed


def difference(run: Path, whole: Path) -> list[str]:
    """List what is not equal in the newest checkpoints and metrics of two runs."""
    ours, theirs = _newest(run), _newest(whole)
    if ours.name != theirs.name:
        return [f"newest checkpoint {ours.name} instead of {theirs.name}"]
    names = ours.tensors.keys() ^ theirs.tensors.keys()
    found = [f"tensor {name} is in one only" for name in names]
    shared = ours.tensors.keys() & theirs.tensors.keys()
    found += [name for name in sorted(shared) if not torch.equal(ours.tensors[name], theirs.tensors[name])]
    ours.state["options"]["run"]["out"] = theirs.state["options"]["run"].get("out")
    found += [f"state {key}" for key in theirs.state if key != "options" and ours.state.get(key) != theirs.state[key]]
    return found + ([] if _metrics(run) == _metrics(whole) else ["metrics.jsonl"])


def _newest(run: Path) -> Any:
    store = Store(run / "checkpoints")
    name, _ = store.newest_valid()
    assert name is not None, f"{run} holds no checkpoint"
    return load(store.folder / name)


def _metrics(run: Path) -> list[str]:
    """Return each line without its times, as text: a NaN is not equal to itself."""
    found = RunRecord.read(run).metrics
    return [repr({name: value for name, value in line.items() if name not in CLOCK}) for line in found]


def _materials(layers: int) -> None:
    """Make a tiny teacher that is far from even, a student with dropout, and a cache of 40 sequences."""
    teacher = tiny_model("llama", 300, seed=1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    forks.materials(teacher)
    write_spec(Path("student.toml"), "teacher", SHAPES["gpt2"] | {"resid_pdrop": 0.1, "n_layer": layers})
    size = ("--num-sequences", "40", "--validation-sequences", str(matrix.VALIDATION))
    ended = command(["cache-teacher", "--teacher", "teacher", "--out", "cache", *forks.TEXT, *size, "--top-k", "12"])
    assert ended == 0, said()


def _shown(cases: list[matrix.Case], unit: str) -> Any:
    with bar("torture", len(cases), unit=unit) as shown:
        for number, case in enumerate(cases):
            yield case
            shown.update(number + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
