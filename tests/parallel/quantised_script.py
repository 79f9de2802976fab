"""Two ranks that train a quantised student by the command's options: what a step gathers under FSDP2, and learns."""

import json
import os
import tempfile
from pathlib import Path

import torch
from wrap_script import Counted

from kdtrain import cli
from kdtrain.commands.build_run import build_run
from kdtrain.commands.dry_run import timed_steps
from kdtrain.parallel.parallelize import fsdp
from kdtrain.precision.linear import layers_of
from kdtrain.ranks import on_main, process_group
from kdtrain.testing import SHAPES, tiny_tokenizer

OPTIONS = (
    *("--student", "student.toml", "--data", "text.txt", "--seq-len", "32", "--num-workers", "0"),
    *("--batch-size", "4", "--steps", "3", "--lr", "1e-2", "--warmup-steps", "0", "--no-compile", "--no-tensorboard"),
    # in bf16 where it is not quantised, whatever the processor
    *("--precision", "mxfp8", "--time-resume", "--quant-rule", "loss", "--quant-loss-threshold", "99"),
)


def folder() -> str:
    """A student and its text."""
    root = Path(tempfile.mkdtemp())
    tiny_tokenizer(300).save_pretrained(root / "tokenizer")
    entries = [f"{key} = {json.dumps(value)}\n" for key, value in SHAPES["llama"].items()]
    (root / "student.toml").write_text(f"tokenizer = 'tokenizer'\n\n[config]\n{''.join(entries)}")
    (root / "text.txt").write_text("".join(f"{n} squared is {n * n}, and its half is {n / 2}.\n" for n in range(400)))
    return str(root)


def main() -> None:
    losses = {}
    os.chdir(on_main(folder))
    for kind in ("ddp", "fsdp"):
        built = build_run(cli.parse("distill", [*OPTIONS, "--out", kind, "--parallel", kind]), resuming=False)
        built.open()
        with Counted() as seen:
            losses[kind] = [each.numbers["loss"] for each in timed_steps(built.trainer, 3)]
        assert built.trainer.student.present_mode == "mxfp8"
        student = built.trainer.student.model
    layers = [[each.shape for each in layer.parameters()] for layer in layers_of(student)]
    inside = {id(each) for layer in layers_of(student) for each in layer.parameters()}
    root = [each.shape for each in student.parameters() if id(each) not in inside]
    expected = fsdp(layers, root, sharing=2, micro_batches=3, gathered=2)
    assert sum(seen.calls["allgather_base"]) == expected.all_gather, (seen.calls, expected)
    assert torch.allclose(torch.tensor(losses["fsdp"]), torch.tensor(losses["ddp"]), rtol=1e-2), losses
    assert losses["ddp"][0] - losses["ddp"][2] > 0.1, losses  # it learns


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), 300):
        main()
