"""Building caches at the pace of the teacher, and reading them: teachers of 1 B and 8 B, the encoding on the device.

Three ways to go through the same sequences take turns: the bare forward of the transformers model in bf16, logits
included; the teacher as `cache-teacher` asks it, logits in fp32; and the whole of `CacheWriter.build`, files and
digests included. The encoding alone stands beside them.

Bytes a token are those of a distribution as peaked as a trained model's over random entries at V = 128,256: the ids of
real text cost less. Reading is one thread in random order from warm files, batches on the device; its share of a step
is what a step of the 1 B student takes longer with the reader than with one batch held on the device, in turn.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_sections import models
from gpu_sections.common import Goal, Options, Record
from gpu_sections.measuring import in_turn, medians, over, peak_of, without_graphs
from gpu_sections.runs import Bench, Held, cached, write
from kdtrain.cache.codec import CodecSpec, encode_sequences
from kdtrain.cache.manifest import CacheSettings, read_manifest
from kdtrain.cache.writer import CacheWriter
from kdtrain.commands.common import ask
from kdtrain.precision.modes import autocast


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    teachers: tuple[str, ...] = ("1b", "8b")
    student: str = "1b"
    length: int = 2048
    sequences: int = 64
    batch: int = 8
    """Sequences in a forward, and in a step of the student."""
    top_k: int = 12
    kept: tuple[int, ...] = (12, 50)
    dense_sequences: int = 2
    rounds: int = 5
    steps_a_turn: int = 4


TINY = Sizes(("tiny",), "tiny", 32, 8, 4, 4, (4,), 1, 2, 2)

GOALS: tuple[Goal, ...] = ()


def run(options: Options) -> int:
    """Measure, and write cache.json."""
    sizes = TINY if options.tiny else Sizes()
    record = Record("cache", options, vars(sizes) | {"compile": options.compile})
    folder = options.scratch / "caches"
    for name in sizes.teachers:
        record.measure(f"build-{name}", lambda name=name: _building(options, sizes, name))
    record.measure("encode", lambda: _encoding(options, sizes))
    for kept in sizes.kept:
        spec = CodecSpec(kind="sparse", vocab_size=models.vocabulary(sizes.student), top_k=kept)
        record.measure(f"read-{kept}", lambda spec=spec: _reading(options, sizes, spec, sizes.sequences, folder))
    dense = CodecSpec(kind="dense", vocab_size=models.vocabulary(sizes.student))
    record.measure("read-dense", lambda: _reading(options, sizes, dense, sizes.dense_sequences, folder))
    with without_graphs():
        record.measure("step", lambda: _step(options, sizes, folder))
    return record.finish()


def _building(options: Options, sizes: Sizes, name: str) -> dict[str, Any]:
    device, rows = options.device, models.text(sizes.sequences, sizes.length)
    teacher = models.make_teacher(name, device)
    mode = "bf16" if device.type == "cuda" else "fp32"
    asked = ask(teacher, device, mode)
    tokens_nT = models.token_tensor(rows)[:, :-1]
    spec = CodecSpec(kind="sparse", vocab_size=models.vocabulary(name), top_k=sizes.head)

    def every(forward: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        def go() -> None:
            for start in range(0, len(tokens_nT), sizes.batch):
                forward(tokens_nT[start : start + sizes.batch])

        return go

    def bare(tokens_BT: torch.Tensor) -> None:
        with torch.no_grad(), autocast(mode, device):
            teacher.model(input_ids=tokens_BT.to(device), use_cache=False)

    def built() -> None:
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            settings = _settings(spec, sizes.length)
            writer = CacheWriter(Path(folder) / "built", settings, teacher=asked, batch_size=sizes.batch)
            writer.build("train", rows)
            writer.close()

    sides = {"bare": every(bare), "asked": every(lambda tokens_BT: asked(tokens_BT, None)), "built": built}
    times = in_turn(sides, sizes.rounds, device)
    number = tokens_nT.numel()
    return {
        "tokens": number,
        "seconds": times,
        "tokens_a_second": {side: number / each for side, each in medians(times).items()},
        "forward_tflops": number * models.forward_flops(name, sizes.length) / medians(times)["bare"] / 1e12,
        "built_over_bare": 1 / over(times, "built", "bare"),
        "built_over_asked": 1 / over(times, "built", "asked"),
        "memory": peak_of(built, device),
    }


def _encoding(options: Options, sizes: Sizes) -> dict[str, Any]:
    """Tokens a second of the encoding of one batch, which ends on the host, by entries kept."""
    device, vocab = options.device, models.vocabulary(sizes.student)
    tokens_BT1 = models.token_tensor(models.text(sizes.batch, sizes.length))
    logits_BTV = models.CheapTeacher(vocab, device)(tokens_BT1[:, :-1], None)
    labels_BT = tokens_BT1[:, 1:]

    def encode(kept: int) -> Callable[[], Any]:
        spec = CodecSpec(kind="sparse", vocab_size=vocab, top_k=kept)
        return lambda: encode_sequences(logits_BTV, labels_BT, spec, seed=0, split="train", first=0)

    sides = {str(kept): encode(kept) for kept in sizes.kept}
    times = in_turn(sides, sizes.rounds, device)
    return {
        "tokens_a_second": {side: labels_BT.numel() / each for side, each in medians(times).items()},
        "memory": {side: peak_of(run, device) for side, run in sides.items()},
    }


def _reading(options: Options, sizes: Sizes, spec: CodecSpec, sequences: int, folder: Path) -> dict[str, Any]:
    """Bytes a token on disk, and tokens a second to the device, of a cache of a cheap teacher."""
    there = _cache(options, sizes, spec, sequences, folder)
    source = cached(there, options.device)
    order = np.random.RandomState(0).permutation(len(source))
    batch = min(sizes.batch, sequences)
    parts = [order[start : start + batch] for start in range(0, len(order) - batch + 1, batch)]

    def read() -> None:
        for part in parts:
            source.read(part)

    seconds = medians(in_turn({"read": read}, sizes.rounds, options.device))["read"]
    manifest = read_manifest(there)
    return {
        "bytes_a_token": manifest.bytes_per_token,
        "tokens_a_second": len(parts) * batch * sizes.length / seconds,
    }


def _cache(options: Options, sizes: Sizes, spec: CodecSpec, sequences: int, folder: Path) -> Path:
    there = folder / f"{spec.kind}-{spec.top_k}"
    teacher = models.CheapTeacher(spec.vocab_size, options.device)
    write(there, models.text(sequences, sizes.length), teacher, spec, sizes.length, 2)
    return there


def _step(options: Options, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """By how much a step is longer with the reader than without, for the largest number of entries kept."""
    device, kept = options.device, max(sizes.kept)
    spec = CodecSpec(kind="sparse", vocab_size=models.vocabulary(sizes.student), top_k=kept)
    source = cached(_cache(options, sizes, spec, sizes.sequences, folder), device)
    student = models.make_student(sizes.student, device)
    bench = Bench(
        student, options, vocab_size=models.vocabulary(sizes.student), seq_len=sizes.length, batch=sizes.batch
    )

    def turn(step: Callable[[], Any]) -> Callable[[], None]:
        def go() -> None:
            for _ in range(sizes.steps_a_turn):
                step()

        return go

    held = Held(source.read(np.arange(sizes.batch)))
    sides = {"read": turn(bench.steps(source)), "held": turn(bench.steps(held))}
    times = in_turn(sides, sizes.rounds, device)
    return {"kept": kept, "seconds_a_turn": times, "cost": over(times, "read", "held") - 1}


def _settings(spec: CodecSpec, seq_len: int) -> CacheSettings:
    return CacheSettings(codec=spec, seq_len=seq_len, tokenizer_size=spec.vocab_size, sequences={"train": None})
