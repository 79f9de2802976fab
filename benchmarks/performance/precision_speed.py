"""The cost of a switchable layer while nothing switches, and of a measurement of the gap.

`python -m benchmarks.performance.precision_speed [--out FOLDER]` writes benchmarks/results/precision-speed.json.

Compiled students that are equal but for the switchable layer take steps in turn in bf16, forward and backward, on the
same tokens. Equal students differ by some percent for where their memory lies, so that there are three of each kind,
and the result is the mean over all pairs of the median ratio of steps of the same turn, because a machine's speed
drifts; the largest ratio between equal ones is recorded, too. The gap is measured inside a real run on a small cache:
steps that measure it and steps that do not, in turn, in mxfp4 and in the fallback; the median difference, over the
default interval, is its price.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, STUDENT, TEACHER, models, write
from benchmarks.harness.command import kdtrain
from benchmarks.harness.machine import cpu_model
from benchmarks.harness.timing import in_turn, over
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import MonitorConfig, PrecisionConfig, QuantizationConfig
from kdtrain.models.head import SplitModel
from kdtrain.precision.emulated import FormatRecipe
from kdtrain.precision.linear import Emulated, convert
from kdtrain.precision.modes import Switch
from kdtrain.run.trial import timed_steps, trial_run
from kdtrain.training.signals import StopRequest

BATCH, LENGTH, VOCABULARY = 8, 256, 2048
EACH = 3
CPU = torch.device("cpu")


def main() -> None:
    """Make a small cache, measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/precision/speed"), help="the folder of cache and run")
    out = parser.parse_args().out
    text = f"--data stdlib --seq-len {LENGTH} --num-sequences 64 --validation-sequences 128 --top-k 16"
    kdtrain("cache-teacher", "--teacher", TEACHER, *text.split(), "--out", f"{out / 'cache'}")
    write(RESULTS / "precision-speed.json", measure(out / "cache"))


def measure(cache: Path, pairs: int = 30) -> dict[str, Any]:
    """Measure both prices, as shares of a step.

    cache: has sequences of `LENGTH` tokens, at least 3 * `BATCH` of them.
    """
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "student": "stdlib-1m",
        "tokens_per_step": BATCH * LENGTH,
        "pairs": pairs,
        **layer(pairs),
        **gap(cache, pairs),
    }


def layer(pairs: int) -> dict[str, float]:
    """Measure a step in bf16 through the switchable layer, over one without it."""
    tokens_BT = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    students = [models.make_student("demo", CPU) for _ in range(2 * EACH)]
    for each in students[1::2]:
        convert(
            each.model, Switch(), Emulated(FormatRecipe("mx", "e2m1", "e2m1")), head=each.model.get_output_embeddings()
        )
    taken = [step_of(each, tokens_BT) for each in students]
    times = in_turn({str(number): step for number, step in enumerate(taken)}, pairs, CPU, warm=2)

    def ratio(one: int, other: int) -> float:
        return over(times, str(one), str(other))

    plain, switchable = range(0, 2 * EACH, 2), range(1, 2 * EACH, 2)
    equal = [ratio(one, other) for kind in (plain, switchable) for one in kind for other in kind]
    return {
        "bf16_seconds": statistics.median(times["0"]),
        "switchable_over_plain": statistics.geometric_mean(ratio(one, other) for one in switchable for other in plain),
        "largest_ratio_of_equals": max(equal),
    }


def gap(cache: Path, pairs: int) -> dict[str, Any]:
    """Measure the price of the gap, in a run that is quantised and in one that is in its fallback."""
    config = DistillConfig(
        student=STUDENT,
        out=cache.parent / "run",
        cache=cache,
        batch_size=BATCH,
        precision=PrecisionConfig(precision="mxfp4"),
        quantization=QuantizationConfig(time_resume=True),
        monitor=MonitorConfig(log_to="none"),
    )
    every, found = config.quantization.quant_probe_every, {"probe_every": config.quantization.quant_probe_every}
    with trial_run(config) as built:
        run = built.trainer
        assert run.state.adaptive is not None
        run.stepper.warm_up(StopRequest())
        for position, name in (("quantized", "quantized"), ("high", "fallback")):
            run.state.adaptive.switch.position = position
            with_it, without = [], []
            for number in range(2 * pairs + 4):
                probing = (number + number // 2) % 2 == 0  # in turns, and each first as often as second
                run.state.adaptive.wants_gap = lambda step, probing=probing: probing
                (with_it if probing else without).append(timed_steps(run, 1)[0][0])
            step, probe = (statistics.median(each[2:]) for each in (without, with_it))
            found |= {f"{name}_seconds": step, f"probe_share_{name}": (probe - step) / every / step}
    return found


def step_of(model: SplitModel, tokens_BT: torch.Tensor) -> Callable[[], None]:
    """Compile the forward of a student in bf16; return a function that runs it and its backward."""
    forward = torch.compile(model.forward, dynamic=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits_BTV = model.head(forward(tokens_BT))
        logits_BTV.float().logsumexp(-1).mean().backward()
        model.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
