"""Ranks that train a quantised student by the command's options: what a step gathers under FSDP2, and learns.

Two ranks, or four: tensor ranks too. The products that are quantised are counted in every layout.
"""

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from wrap_script import Counted

from kdtrain import cli
from kdtrain.models.head import layers_of
from kdtrain.parallel.parallelize import fsdp
from kdtrain.precision.formats import formats_of
from kdtrain.precision.linear import Emulated
from kdtrain.ranks import on_main, process_group, world_size
from kdtrain.run import recipe as module
from kdtrain.run.build import build
from kdtrain.run.trial import gigabytes_sent, timed_steps
from kdtrain.testing import SHAPES, tiny_tokenizer

OPTIONS = (
    *("--student", "student.toml", "--data", "text.txt", "--seq-len", "32", "--num-workers", "0"),
    *("--batch-size", "4", "--steps", "3", "--lr", "1e-2", "--warmup-steps", "0", "--no-compile", "--log-to", "none"),
    # in bf16 where it is not quantised, whatever the processor
    *("--precision", "mxfp8", "--time-resume", "--quant-rule", "loss", "--quant-loss-threshold", "99"),
)


def folder() -> str:
    """Write a student and its text to a folder."""
    root = Path(tempfile.mkdtemp())
    tiny_tokenizer(300).save_pretrained(root / "tokenizer")
    config = SHAPES["llama"] | {"vocab_size": 300, "head_dim": 32}  # two parts of whole blocks
    entries = [f"{key} = {json.dumps(value)}\n" for key, value in config.items()]
    (root / "student.toml").write_text(f"tokenizer = 'tokenizer'\n\n[config]\n{''.join(entries)}")
    (root / "text.txt").write_text("".join(f"{n} squared is {n * n}, and its half is {n / 2}.\n" for n in range(400)))
    return str(root)


def as_hardware(*given: Any) -> Any:
    """Make the formats of a run, whose emulation passes for a back end with hardware support."""
    formats = formats_of(*given)
    assert formats.choice is not None
    return replace(formats, choice=replace(formats.choice, real=True))


LAYERS = 14
"""Linear layers of the student that are quantised."""


LAYOUTS = {
    2: {
        "ddp": (("--parallel", "ddp"), formats_of, 0),
        "fsdp": (("--parallel", "fsdp"), formats_of, 4),
        "fsdp-2": (("--parallel", "fsdp"), as_hardware, 2),
        "tensor": (("--tensor-parallel", "2"), formats_of, 0),
    },
    4: {
        "ddp": (("--parallel", "ddp"), formats_of, 0),
        "tensor-ddp": (("--tensor-parallel", "2", "--parallel", "ddp"), formats_of, 0),
        "tensor-fsdp": (("--tensor-parallel", "2", "--parallel", "fsdp"), formats_of, 0),
    },
}
"""Options by number of ranks, formats, and the bytes of a gathered number where what is gathered is compared."""


def main() -> None:
    losses, multiply = {}, Emulated.__call__
    os.chdir(on_main(folder))
    for name, (how, formats, gathered) in LAYOUTS[world_size()].items():
        with mock.patch.object(module, "formats_of", formats):
            config = cli.parse("distill", [*OPTIONS, "--out", name, *how])
            built = build(module.resolve(config, torch.device("cpu"), ExitStack(), Path("none")))
        built.open()
        counted = mock.Mock(wraps=multiply)
        with Counted() as seen, mock.patch.object(Emulated, "__call__", lambda *given: counted(*given)):  # noqa: B023
            losses[name] = torch.tensor([numbers["loss"] for _, numbers in timed_steps(built.trainer, 3)])
        micros = built.trainer.stepper.micros
        assert counted.call_count == LAYERS * micros * 3 and built.trainer.student.present_mode == "mxfp8", name
        if gathered:
            student = built.trainer.student.model
            layers = [[each.shape for each in layer.parameters()] for layer in layers_of(student)]
            inside = {id(each) for layer in layers_of(student) for each in layer.parameters()}
            root = [each.shape for each in student.parameters() if id(each) not in inside]
            expected = fsdp(layers, root, sharing=2, micro_batches=3, gathered=gathered)
            assert sum(seen.calls["allgather_base"]) == expected.all_gather, (gathered, seen.calls, expected)
        if name == "fsdp":  # what --dry-run says of a step
            step = fsdp(layers, root, sharing=2, micro_batches=micros, gathered=gathered)
            assert gigabytes_sent(student, built.recipe, micros) == step.sent(2) / 1e9
    for name, each in losses.items():
        assert torch.allclose(each, losses["ddp"], rtol=1e-5 if name == "fsdp" else 1e-2), losses
    assert losses["ddp"][0] - losses["ddp"][2] > 0.1, losses  # it learns


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), 300):
        main()
