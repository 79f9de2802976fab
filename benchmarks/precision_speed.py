"""What switching costs while nothing switches: a step in bf16 through the switchable layer against one without it.

Two compiled students that are equal but for the layer take steps in turn, forward and backward, on the same tokens;
what counts is the median of the ratios of neighbours, because a machine's pace drifts. A measurement of the gap is two
forwards, one of them quantised; its price at the default interval is their time over that many steps.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import demo
import torch

from kdtrain.config import QuantizationConfig
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import read_spec
from kdtrain.precision.linear import Emulated, Switch, convert
from kdtrain.precision.products import Recipe

BATCH, LENGTH, VOCABULARY = 16, 256, 2048


def measure(pairs: int = 30) -> dict[str, Any]:
    """Both prices, as shares of a step."""
    tokens_BT = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    plain, switchable, switch = student(), student(), Switch()
    backend = Emulated(Recipe("mx", "e2m1", "e2m1"))
    convert(switchable.model, switch, backend, head=switchable.model.get_output_embeddings())
    steps = [step_of(each, tokens_BT) for each in (plain, switchable)]
    quantized = step_of(switchable, tokens_BT, switch)
    for each in (*steps, quantized):
        each(True)
        each(True)
    ratios, seconds = [], []
    for number in range(pairs):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {which: timed(steps[which]) for which in order}
        ratios.append(taken[1] / taken[0])
        seconds.append(taken[0])
    probes = [timed(steps[1], False) + timed(quantized, False) for _ in range(pairs // 3)]
    whole = [timed(quantized) for _ in range(pairs // 3)]
    every = QuantizationConfig().quant_probe_every
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": demo.cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "student": "stdlib-1m",
        "tokens_per_step": BATCH * LENGTH,
        "bf16_seconds": statistics.median(seconds),
        "switchable_over_plain": statistics.median(ratios),
        "quantized_seconds": statistics.median(whole),
        "probe_seconds": statistics.median(probes),
        "probe_share_quantized": statistics.median(probes) / every / statistics.median(whole),
        "probe_share_high": statistics.median(probes) / every / statistics.median(seconds),
        "probe_every": every,
    }


def student() -> SplitModel:
    """The student of the demo, on fresh weights."""
    spec = read_spec(str(demo.ROOT / "students" / "stdlib-1m.toml"))
    return split(load_student(spec, vocab_size=VOCABULARY, seed=0, device="cpu"))


def step_of(model: SplitModel, tokens_BT: torch.Tensor, switch: Switch | None = None) -> Callable[[bool], None]:
    """A compiled forward of a student, and its backward where asked for; quantised where there is a switch."""
    forward = torch.compile(model.forward, dynamic=False)

    def step(backward: bool) -> None:
        before = None if switch is None else switch.position
        if switch is not None:
            switch.position = "quantized"
        with torch.autocast("cpu", torch.bfloat16):
            hidden_BTD = forward(tokens_BT)
            logits_BTV = model.head(hidden_BTD)
        if backward:
            logits_BTV.float().logsumexp(-1).mean().backward()
            model.zero_grad(set_to_none=True)
        if switch is not None and before is not None:
            switch.position = before

    return step


def timed(step: Callable[[bool], None], backward: bool = True) -> float:
    """Seconds that a step takes."""
    started = time.perf_counter()
    step(backward)
    return time.perf_counter() - started
