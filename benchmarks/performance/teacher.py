"""The shipped teacher's recipe, trained for as long as the section allows, by the command that made it.

`teachers/make_teacher.py` is called twice: for a few steps, which tell the pace of this card, and for as many as the
time allows, by the recipe with its warm-up and decay stretched to the whole. It then compares both teachers on the
validation text of this machine and publishes the new one only if its loss is lower. The tokenizer stays the one that
ships. Text is the standard library of the interpreter that runs this, so that the shipped teacher's loss may differ
from its card's.

Tiny: the recipe for two steps of two sequences, in a folder of its own; nothing is compared, nothing is published.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import missing
from benchmarks.harness.record import Goal, Options, Record
from kdtrain import cli
from kdtrain.monitor.record import RunRecord
from teachers import make_teacher


@dataclass(frozen=True)
class Sizes:
    """The length of the training."""

    batch: int = 64
    trial: int = 150
    """Steps that tell the pace."""
    seconds: float = 240.0
    """Of training; the rest of the section goes to starting, compiling and evaluating."""


GOALS = (Goal("validation loss less that of the teacher that ships, nats", "trained.gain", most=-1e-4),)


def run(options: Options) -> int:
    """Train, and write teacher.json."""
    sizes = Sizes()
    record = Record("teacher", options, vars(sizes) | {"recipe": make_teacher.RECIPE}, GOALS)
    if (reason := missing("h5py", "hdf5plugin")) is not None:
        record.put("missing", {"missing": reason})
        return record.finish()
    trained = _tiny if options.tiny else _trained
    record.measure("trained", lambda: trained(options, sizes), needs=0 if options.tiny else sizes.seconds)
    return record.finish()


def _pace(run: Path) -> float:
    """Return the tokens a second at the end of a run."""
    return [line["tok/s"] for line in RunRecord.read(run).steps if line.get("tok/s")][-1]


def _trained(options: Options, sizes: Sizes) -> dict[str, Any]:
    size = ("--batch-size", str(sizes.batch), "--keep-tokenizer")
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        words = ("--run", f"{folder}/trial", "--steps", str(sizes.trial), *size)
        pace = _pace(make_teacher.train(make_teacher._parser().parse_args(words)))
    steps = int(sizes.seconds * pace / (sizes.batch * make_teacher.SEQ_LEN))
    words = ("--run", str(options.scratch / "teacher-run"), "--steps", str(steps), *size, "--if-better")
    command = [sys.executable, "-m", "teachers.make_teacher", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    verdict = json.loads(done.stdout.splitlines()[-1])
    return {"steps": steps, "tokens_a_second": pace, **verdict, "gain": verdict["made_loss"] - verdict["shipped_loss"]}


def _tiny(options: Options, _: Sizes) -> dict[str, Any]:
    """Run the training alone, on short sequences, in this process."""
    folder = tempfile.TemporaryDirectory(dir=options.scratch)
    words = ("--run", f"{folder.name}/run", "--steps", "2", "--batch-size", "2", "--keep-tokenizer")
    before, make_teacher.kdtrain = make_teacher.kdtrain, lambda *each: _in_process([*each], options)
    try:
        with folder:
            made = make_teacher.train(make_teacher._parser().parse_args(words))
            return {"steps": 2, "tokens_a_second": _pace(made)}
    finally:
        make_teacher.kdtrain = before


def _in_process(words: list[str], options: Options) -> dict[str, Any]:
    """Run `kdtrain WORDS --json` without another interpreter."""
    for flag, value in (("--seq-len", "32"), ("--validation-sequences", "2")):
        words[words.index(flag) + 1] = value
    words += ["--json", "--num-sequences", "4", "--device", options.device.type]
    words += [] if options.compile else ["--no-compile"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main(words)
    result: dict[str, Any] = json.loads(shown.getvalue())
    return result
