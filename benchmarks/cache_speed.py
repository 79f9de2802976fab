"""How fast a cache is built and read: the timed sections of benchmarks/cache.py.

Building: tokens a second of `CacheWriter.build`, which is `cache-teacher` without what it does once (loading, and at
the end fidelity, index and manifest), over those of the same forwards alone; both in turns, medians. Reading: on one
thread, best of several passes over warm files, in the order of the file and in random order, from one shard and from
many, against the same targets read as one uncompressed array. A step: a compiled student of a million parameters fed
by the reader, and fed the same batch over and over, in turns.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_material import Material
from transformers import LlamaConfig, LlamaForCausalLM

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.manifest import CacheSettings
from kdtrain.cache.reader import CacheReader
from kdtrain.cache.writer import CacheWriter, write_cache
from kdtrain.commands.common import ask
from kdtrain.config import ObjectiveConfig, PrecisionConfig
from kdtrain.models.head import split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import read_spec
from kdtrain.objective.temperature import build_temperature
from kdtrain.training.data import CachedSource, Feed
from kdtrain.training.student import DistillStep

STUDENT = Path(__file__).parents[1] / "students" / "stdlib-1m.toml"
CPU = torch.device("cpu")


def settings_for(material: Material, codec: dict[str, Any], per_shard: int = 512) -> CacheSettings:
    """The settings of a cache of `material`."""
    return CacheSettings(
        codec=CodecSpec(vocab_size=material.vocab_size, **codec),
        seq_len=material.seq_len,
        tokenizer_size=material.vocab_size,
        sequences_per_shard=per_shard,
        sequences={split_name: len(part) for split_name, part in material.rows.items()},
    )


def large_teacher(material: Material) -> tuple[Material, int]:
    """The same text with a random teacher of 100 million parameters, and how many it has."""
    shape = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 13, "num_attention_heads": 12}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=material.vocab_size, **shape)).eval()
    size = sum(weight.numel() for weight in model.parameters())
    return replace(material, name="random-100m", teacher=ask(split(model), CPU, "fp32")), size


def building(material: Material, codec: dict[str, Any], batch_size: int, turns: int) -> dict[str, Any]:
    """Tokens a second of the bare forward and of the builder, in turns."""
    rows = material.rows["train"]
    tokens = torch.from_numpy(np.stack([row.tokens[:-1] for row in rows]).astype(np.int64))
    times: dict[str, list[float]] = {"bare": [], "built": []}

    def bare() -> None:
        with torch.no_grad():
            for start in range(0, len(tokens), batch_size):
                material.teacher(tokens[start : start + batch_size], None)

    def built() -> None:
        with tempfile.TemporaryDirectory() as folder:
            settings = settings_for(material, codec)
            writer = CacheWriter(folder, settings, teacher=material.teacher, batch_size=batch_size)
            writer.build("train", rows)
            writer.close()

    material.teacher(tokens[:1], None)
    for _ in range(turns):
        for name, run in (("bare", bare), ("built", built)):
            times[name].append(_seconds(run))
    number = tokens.numel()
    middle = {name: statistics.median(each) for name, each in times.items()}
    return {
        "teacher": material.name,
        "tokens": number,
        "batch_size": batch_size,
        "threads": torch.get_num_threads(),
        "bare_forward_tokens_per_second": number / middle["bare"],
        "build_tokens_per_second": number / middle["built"],
        "share_of_bare_forward": middle["bare"] / middle["built"],
        "seconds": times,
    }


def reading(material: Material, codec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tokens a second and core, from one shard and from sixteen, and of an uncompressed array."""
    torch.set_num_threads(1)
    number, length = len(material.rows["train"]), material.seq_len
    orders = {"sequential": np.arange(number), "random": np.random.RandomState(0).permutation(number)}
    found: dict[str, Any] = {}
    for shards in (1, 16):
        there = folder / str(shards)
        settings = settings_for(material, codec, per_shard=-(-number // shards))
        write_cache(there, settings, material.rows, teacher=material.teacher)
        reader = CacheReader(there, "train")
        for name, order in orders.items():
            rate = _best(lambda part, reader=reader: reader.read(part), order, length)
            found[f"{name}, {shards} shard{'s' * (shards > 1)}"] = rate
    entry = sum(each[:length].nbytes for each in vars(reader.read([0]).targets).values() if torch.is_tensor(each))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        plain = np.memmap(file.name, np.uint8, "w+", shape=(number, entry))
        plain[:] = 1
        found["uncompressed ceiling, random"] = _best(lambda part: plain[np.asarray(part)], orders["random"], length)
    return {"sequences": number, "batch": 16, "threads": 1, "tokens_per_second_and_core": found}


def step_cost(folder: Path, steps: int, turns: int) -> dict[str, Any]:
    """Seconds a step with the reader and with one batch held, in turns."""
    reader = CacheReader(folder, "train")
    source = CachedSource(reader, CPU, reader.manifest.vocab_size)
    held = _Held(source)
    run = _stepper(reader)
    order = np.random.RandomState(0).permutation(len(reader))
    found: dict[str, list[float]] = {"with_reader": [], "without": []}
    for turn in range(turns + 1):
        for name, each in (("with_reader", source), ("without", held)):
            feed = Feed(each, lambda step: np.take(order, range(16 * step, 16 * step + 16), mode="wrap"), 16)
            ends = []
            for batches in itertools.islice(feed.steps(), steps):
                for batch in batches:
                    run(batch)
                ends.append(time.perf_counter())
            found[name] += np.diff(ends).tolist() if turn else []  # the first turn compiles
    middle = {name: statistics.median(times) for name, times in found.items()}
    single = _best(lambda part: source.read(part), order[: 16 * (len(order) // 16)], 1)
    return {
        "student": STUDENT.stem,
        "threads": torch.get_num_threads(),
        "steps": len(found["without"]),
        "seconds_a_step": middle,
        "cost": middle["with_reader"] / middle["without"] - 1,
        "reading_a_batch_alone_over_step": 16 / single / middle["without"],
    }


class _Held:
    """A source that gives one batch for ever."""

    overlaps = True

    def __init__(self, source: CachedSource) -> None:
        self._batch, self._number = source.read(np.arange(16)), len(source)

    def __len__(self) -> int:
        return self._number

    def read(self, _: np.ndarray) -> Any:
        return self._batch


def _stepper(reader: CacheReader) -> Callable[[Any], None]:
    manifest = reader.manifest
    student = split(load_student(read_spec(str(STUDENT)), vocab_size=manifest.vocab_size, seed=0, device="cpu"))
    module = DistillStep(
        student,
        build_temperature("fixed", start=2.0, minimum=1.0, maximum=4.0),
        ObjectiveConfig(),
        PrecisionConfig(),
        vocab_size=manifest.vocab_size,
        seq_len=manifest.settings.seq_len,
        has_teacher=True,
        mode="fp32",
        device=CPU,
        document_mask=False,
        compile=True,
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        loss, _ = module(batch, float(batch.loss_mask.sum()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _best(read: Callable[[np.ndarray], Any], order: np.ndarray, length: int, passes: int = 7) -> float:
    parts = [order[start : start + 16] for start in range(0, len(order), 16)]
    return len(order) * length / min(_seconds(lambda: [read(part) for part in parts]) for _ in range(passes))
