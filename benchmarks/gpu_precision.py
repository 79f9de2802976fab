"""fp8 on a GPU that has it: whole training steps of a student by torchao and TransformerEngine, against bf16.

For each back end and recipe that works on the device: the loss of the first step against that of bf16 (numerics), the
median time of a compiled step, tokens a second, and peak memory. What does not work is listed with its reason, and MX
formats, which are emulated everywhere, are timed as what they are. Needs a CUDA device; writes
`results/gpu-precision.json`.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import demo
import torch

from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec
from kdtrain.precision.linear import Switch, convert
from kdtrain.precision.probe import Choice, capabilities, choose, make_recipe

RESULT = Path("benchmarks/results/gpu-precision.json")
VOCABULARY, BATCH, LENGTH = 32_000, 8, 2048
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
KINDS = (
    ("fp8", "torchao", "tensorwise"),
    ("fp8", "torchao", "rowwise"),
    ("fp8", "transformer-engine", "current"),
    ("fp8", "transformer-engine", "blockwise"),
    ("mxfp8", "emulated", "tensorwise"),
    ("mxfp4", "emulated", "tensorwise"),
)


def main() -> None:
    """Measure every kind, and write the record after each, so that what is cut short is not lost."""
    os.chdir(demo.ROOT)
    device = torch.device("cuda")
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "tokens_per_step": BATCH * LENGTH,
        "capabilities": {f"{each.mode} by {each.backend}": str(each) for each in capabilities(device)},
        "bf16": measure(None, device),
    }
    for mode, backend, scaling in KINDS:
        found = choose(mode, backend, make_recipe(mode, scaling, None, "max", False), scaling, device)
        name = f"{mode} by {backend}, {scaling}"
        record[name] = measure(found, device) if isinstance(found, Choice) else {"why_not": found}
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
        print(name, record[name], flush=True)


def measure(choice: Choice | None, device: torch.device, steps: int = 20) -> dict[str, Any]:
    """One student, trained for a few steps on the same tokens."""
    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats(device)
    model = student(device)
    layers = "none"
    if choice is not None:
        head = model.model.get_output_embeddings()
        layers = str(convert(model.model, Switch("quantized"), choice.backend, head=head))
    forward = torch.compile(model.forward, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens_BT = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)).to(device)
    losses, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits_BTV = model.head(forward(tokens_BT[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    middle = statistics.median(seconds[steps // 2 :])
    return {
        "layers": layers,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_seconds": middle,
        "tokens_per_second": BATCH * LENGTH / middle,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
    }


def student(device: torch.device) -> SplitModel:
    """A student of 0.7 billion parameters on fresh weights."""
    spec = ModelSpec(name="bench-0.7b", config=SHAPE, init="scratch")
    return split(load_student(spec, vocab_size=VOCABULARY, seed=0, device=str(device)))


if __name__ == "__main__":
    main()
