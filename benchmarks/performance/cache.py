"""The cost and the fidelity of a cache: bytes a token, fidelity, speed of building, of encoding and of reading.

Building: the bare forwards over some sequences and the whole of `CacheBuilder.build`, files and digests included, which
is `cache-teacher` without what it does once, in turn; medians. A step: a compiled student fed by the reader in random
order, and fed one batch over and over, in turn.

On a GPU, teachers of 1 B and 8 B, the encoding on the device: bare is the transformers model in bf16, logits included,
and `asked` is the teacher as `cache-teacher` asks it, its layers compiled, logits in fp32. A build is a whole shard of
sequences. Bytes a token are those of a distribution that depends on the last token alone, at V = 128,256: a cache's
lists know all of them, and real text costs more. Reading is one thread in random order from warm files, batches on the
device.

On a CPU:

    V = ..., ...  a cache for each codec over each teacher: bytes a token by data set, temperature range, fidelity (all
                  from the manifest). Teachers: the shipped one (V = 2,048), synthetic ones of V = 32,000 and 151,936
                  that are like it (cache_material.py; what they have in common is in `teacher ...`)
    build         building over the bare forward, for the shipped teacher
    build-100m    the same for a random teacher of 109 million parameters
    read          on one thread, best of several passes over warm files, in order and at random, from one shard and from
                  many, against the same targets read as one uncompressed array
    step          a step of a student of a million parameters with the reader and without

A few hundred sequences make a cache, so that what a shard costs once is spread as in a real one; large vocabularies
and `dense` have fewer (`COUNTS`), and pay more for it. Run the timed figures on an idle machine.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import models
from benchmarks.harness.bench import Bench, Held, cached, codec_of, make_cache, teacher_of
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import CALLS, in_turn, medians, over, peak_of, timed, without_graphs
from benchmarks.performance import cache_material
from benchmarks.performance.cache_material import Material
from kdtrain.cache.format.codec import encode_sequences
from kdtrain.cache.format.manifest import CacheSettings, read_manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.write.writer import CacheBuilder, write_cache
from kdtrain.precision.modes import autocast
from kdtrain.teaching.local import LocalTeacher
from kdtrain.training.sources.source import Source

CPU = torch.device("cpu")


def building(
    rows: list[Any],
    forwards: Mapping[str, Callable[[torch.Tensor], Any]],
    teacher: Any,
    settings: CacheSettings,
    batch_size: int,
    rounds: int,
    device: torch.device,
) -> tuple[dict[str, list[float]], Callable[[], None]]:
    """Time each of `forwards`, and the builder, over `rows`, in turn; return the seconds and a function that builds."""
    tokens_nT = models.token_tensor(rows)[:, :-1]

    def every(forward: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        def go() -> None:
            for part_BT in tokens_nT.split(batch_size):
                forward(part_BT)

        return go

    def built() -> None:
        with tempfile.TemporaryDirectory() as folder:
            writer = CacheBuilder(Path(folder) / "built", settings, teacher=teacher, batch_size=batch_size)
            writer.build("train", rows)
            writer.close()

    sides = {name: every(forward) for name, forward in forwards.items()}
    return in_turn(sides | {"built": built}, rounds, device), built


def step_cost(bench: Bench, source: Source, rounds: int, steps: int, device: torch.device) -> dict[str, list[float]]:
    """Time a step with the reader and one with a single held batch, in turn of `steps` steps."""
    held = Held(source.read(np.arange(bench.batch)), source.facts)
    sides = {"read": bench.steps(source, shuffled=True), "held": bench.steps(held)}
    return in_turn(sides, rounds, device, calls=steps)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement on a GPU."""

    teachers: tuple[str, ...] = ("1b", "8b")
    student: str = "1b"
    length: int = 2048
    sequences: int = 64
    """In a cache that is read."""
    batch: int = 8
    """Sequences in a forward, and in a step of the student."""
    codecs: tuple[str, ...] = ("samples-50", "12", "50")
    dense_sequences: int = 2
    rounds: int = 11
    built: int = 512
    """Sequences of a build, with each of the first two codecs."""
    builds: int = 3
    """Rounds of builds."""


TINY = Sizes(("tiny",), "tiny", 32, 8, 4, ("samples-8", "4"), 1, 2, 8, 2)

GOALS: tuple[Goal, ...] = ()


def run(options: Options) -> int:
    """Measure, and write cache.json."""
    if options.on_cpu:
        return _on_cpu(options)
    sizes = TINY if options.tiny else Sizes()
    record = Record("cache", options, vars(sizes) | {"calls": CALLS, "compile": options.compile})
    for name, kind in itertools.product(sizes.teachers, sizes.codecs[:2]):
        with without_graphs():
            record.measure(f"build-{name}-{kind}", functools.partial(_building, options, sizes, name, kind))
    for kind in sizes.codecs:
        spec = codec_of(kind, models.vocabulary(sizes.student))
        record.measure(f"encode-{kind}", functools.partial(_encoding, options, sizes, spec))
        record.measure(f"read-{kind}", functools.partial(_reading, options, sizes, spec, sizes.sequences))
    dense = codec_of("dense", models.vocabulary(sizes.student))
    record.measure("read-dense", lambda: _reading(options, sizes, dense, sizes.dense_sequences))
    for kind in sizes.codecs:
        with without_graphs():
            record.measure(f"step-{kind}", functools.partial(_step, options, sizes, kind))
    return record.finish()


def _building(options: Options, sizes: Sizes, name: str, kind: str) -> dict[str, Any]:
    device, rows = options.device, models.text(sizes.built, sizes.length)
    teacher = models.make_teacher(name, device)
    mode = "bf16" if device.type == "cuda" else "fp32"
    asked = teacher_of(teacher, mode, options.compile).logits
    spec = codec_of(kind, models.vocabulary(name))
    settings = CacheSettings(
        codec=spec, seq_len=sizes.length, tokenizer_size=spec.vocab_size, sequences={"train": None}
    )

    def bare(tokens_BT: torch.Tensor) -> None:
        with torch.no_grad(), autocast(mode, device):
            teacher.model(input_ids=tokens_BT.to(device), use_cache=False)

    forwards = {"bare": bare, "asked": lambda tokens_BT: asked(tokens_BT, None)}
    times, built = building(rows, forwards, asked, settings, sizes.batch, sizes.builds, device)
    number = len(rows) * sizes.length
    return {
        "tokens": number,
        "seconds": times,
        "tokens_a_second": number / medians(times)["built"],
        "forward_tflops": number * models.forward_flops(name, sizes.length) / medians(times)["bare"] / 1e12,
        "built_over_bare": 1 / over(times, "built", "bare"),
        "built_over_asked": 1 / over(times, "built", "asked"),
        **peak_of(built, device),
    }


def _encoding(options: Options, sizes: Sizes, spec: CodecSpec) -> dict[str, Any]:
    """Measure the encoding of one batch, which ends on the host, in tokens a second."""
    device = options.device
    tokens_BT1 = models.token_tensor(models.text(sizes.batch, sizes.length))
    logits_BTV = models.CheapTeacher(spec.vocab_size, device)(tokens_BT1[:, :-1], None)
    labels_BT = tokens_BT1[:, 1:]

    def encode() -> Any:
        return encode_sequences(logits_BTV, labels_BT, spec, seed=0, split="train", first=0)

    seconds = medians(in_turn({"encode": encode}, sizes.rounds, device, calls=CALLS))["encode"]
    return {"tokens_a_second": labels_BT.numel() / seconds, **peak_of(encode, device)}


def _reading(options: Options, sizes: Sizes, spec: CodecSpec, sequences: int) -> dict[str, Any]:
    """Measure a cache of a cheap teacher: bytes a token on disk, and tokens a second to the device."""
    there = _cache(options, sizes, spec, sequences)
    source = cached(there, options.device)
    order = np.random.RandomState(0).permutation(len(source))
    batch = min(sizes.batch, sequences)
    parts = [order[start : start + batch] for start in range(0, len(order) - batch + 1, batch)]

    def read() -> None:
        for part in parts:
            source.read(part)

    seconds = medians(in_turn({"read": read}, sizes.rounds, options.device, calls=CALLS))["read"]
    return {
        "bytes_a_token": read_manifest(there).bytes_per_token,
        "tokens_a_second": len(parts) * batch * sizes.length / seconds,
    }


def _cache(options: Options, sizes: Sizes, spec: CodecSpec, sequences: int) -> Path:
    there = options.scratch / "caches" / f"{spec.kind}-{spec.top_k}-{spec.num_samples}"
    teacher = models.CheapTeacher(spec.vocab_size, options.device)
    make_cache(there, models.text(sequences, sizes.length), teacher, spec, sizes.length, 2)
    return there


def _step(options: Options, sizes: Sizes, kind: str) -> dict[str, Any]:
    """Measure by how much a step is longer with the reader than without."""
    device, vocab = options.device, models.vocabulary(sizes.student)
    source = cached(_cache(options, sizes, codec_of(kind, vocab), sizes.sequences), device)
    student = models.make_student(sizes.student, device)
    bench = Bench(student, options, vocab_size=vocab, seq_len=sizes.length, batch=sizes.batch)
    times = step_cost(bench, source, sizes.rounds, CALLS, device)
    return {"seconds": times, "cost": over(times, "read", "held") - 1}


CODECS: dict[str, dict[str, Any]] = {
    "top-k 12": {"kind": "sparse", "top_k": 12},
    "top-k 50": {"kind": "sparse", "top_k": 50},
    "samples 50": {"kind": "sparse", "num_samples": 50},
    "top-k 8 + samples 24": {"kind": "sparse", "top_k": 8, "num_samples": 24},
    "dense": {"kind": "dense"},
}
COUNTS = {2_048: (512, 128, 16), 32_000: (128, 32, 4), 151_936: (64, 12, 2)}
"""Sequences to train on, by vocabulary: of the codec of the goal, of the other sparse ones, of `dense`."""
SEQ_LEN = 512


def _on_cpu(options: Options) -> int:
    record = Record("cache", options, {"seq_len": SEQ_LEN})
    shipped = functools.lru_cache(1)(lambda number: cache_material.shipped(number, SEQ_LEN))

    def material(vocab_size: int, number: int) -> Material:
        model, name = shipped(number), f"teacher synthetic-{vocab_size}"
        record.measure(f"teacher {model.name}", lambda: model.facts)
        if vocab_size == model.vocab_size:
            return model
        made = cache_material.synthetic(vocab_size, number, model, record.figures.get(name))
        record.measure(name, lambda: made.facts)
        return made

    def kept(vocab_size: int, codec: str, number: int) -> dict[str, Any]:
        return _kept(material(vocab_size, number), CODECS[codec])

    def build_large(text: Material) -> dict[str, Any]:
        teacher = models.make_teacher("100m-teacher", CPU)
        asked = replace(text, name="random-100m", teacher=LocalTeacher.of(teacher).logits)
        return {"parameters": sum(each.numel() for each in teacher.parameters()), **_build(asked, 4)}

    for vocab, counts in COUNTS.items():
        for codec, number in zip(CODECS, (counts[0], *[counts[1]] * 3, counts[2]), strict=True):
            record.measure(f"V = {vocab}, {codec}", functools.partial(kept, vocab, codec, number))
    record.measure("build", lambda: _build(shipped(128), 16))
    record.measure("build-100m", lambda: build_large(shipped(16)))
    with tempfile.TemporaryDirectory() as scratch, without_graphs():
        record.measure("step", lambda: _small_step(options, shipped(256), Path(scratch)))
        record.measure("read", lambda: _read(shipped(512), Path(scratch)))  # leaves torch with one thread
    return record.finish()


def _settings(material: Material, codec: dict[str, Any] = CODECS["top-k 12"], per_shard: int = 512) -> CacheSettings:
    return CacheSettings(
        codec=CodecSpec(vocab_size=material.vocab_size, **codec),
        seq_len=material.seq_len,
        tokenizer_size=material.vocab_size,
        sequences_per_shard=per_shard,
        sequences={split_name: len(part) for split_name, part in material.rows.items()},
    )


def _kept(material: Material, codec: dict[str, Any]) -> dict[str, Any]:
    batch = 16 if material.vocab_size < 10_000 else 1
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(material, codec)
        manifest = write_cache(folder, settings, material.rows, teacher=material.teacher, batch_size=batch)
    return {
        "sequences": {name: split["sequences"] for name, split in manifest.splits.items()},
        "bytes_per_token": manifest.bytes_per_token,
        "temperature_range": manifest.temperature_range,
        "fidelity": {key: value for key, value in (manifest.fidelity or {}).items() if key.startswith("T=")},
    }


def _build(material: Material, batch_size: int, rounds: int = 5) -> dict[str, Any]:
    """Measure the bare forward and the builder, in tokens a second."""
    rows, teacher = material.rows["train"], material.teacher
    forwards = {"bare": lambda tokens_BT: teacher(tokens_BT, None)}
    times, _ = building(rows, forwards, teacher, _settings(material), batch_size, rounds, CPU)
    number, middle = len(rows) * material.seq_len, medians(times)
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


def _read(material: Material, folder: Path) -> dict[str, Any]:
    """Measure reading by codec, from one shard and from sixteen, in tokens a second and core.

    A ceiling is reading top-k 12 uncompressed.
    """
    torch.set_num_threads(1)
    number, length = len(material.rows["train"]), material.seq_len
    orders = {"sequential": np.arange(number), "random": np.random.RandomState(0).permutation(number)}
    found: dict[str, Any] = {}
    for codec in ("samples 50", "top-k 12"):
        found[codec] = {}
        for shards in (1, 16):
            there = folder / f"{codec.replace(' ', '-')}-{shards}"
            settings = _settings(material, CODECS[codec], per_shard=-(-number // shards))
            write_cache(there, settings, material.rows, teacher=material.teacher)
            reader = CacheReader(there, "train")
            for name, order in orders.items():
                rate = _best(reader.read, order, length)
                found[codec][f"{name}, {shards} shard{'s' if shards > 1 else ''}"] = rate
    entry = sum(each[:length].nbytes for each in vars(reader.read([0]).targets).values() if torch.is_tensor(each))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        plain = np.memmap(file.name, np.uint8, "w+", shape=(number, entry))
        plain[:] = 1
        found["uncompressed ceiling, random"] = _best(lambda part: plain[np.asarray(part)], orders["random"], length)
    return {"sequences": number, "batch": 16, "threads": 1, "tokens_per_second_and_core": found}


def _best(read: Callable[[np.ndarray], Any], order: np.ndarray, length: int, passes: int = 7) -> float:
    """Return the tokens a second of the best of several passes."""
    parts = [order[start : start + 16] for start in range(0, len(order), 16)]
    return len(order) * length / min(timed(lambda: [read(part) for part in parts], CPU) for _ in range(passes))


def _small_step(options: Options, material: Material, folder: Path) -> dict[str, Any]:
    """Time a step of the demo's student, with the reader and with one batch held, in seconds."""
    write_cache(folder / "c", _settings(material), material.rows, teacher=material.teacher)
    source, rounds, steps = cached(folder / "c", CPU), 5, 20
    shape = {"vocab_size": material.vocab_size, "seq_len": material.seq_len, "batch": 16}
    bench = Bench(models.make_student("demo", CPU), options, **shape, mode="fp32", lr=1e-4)
    times = medians(step_cost(bench, source, rounds, steps, CPU))
    order = np.random.RandomState(0).permutation(len(source))
    alone = 16 / _best(source.read, order[: 16 * (len(order) // 16)], 1)
    return {
        "student": "demo",
        "threads": torch.get_num_threads(),
        "steps": rounds * steps,
        "seconds_a_step": {"with_reader": times["read"], "without": times["held"]},
        "cost": times["read"] / times["held"] - 1,
        "reading_a_batch_alone_over_step": alone / times["held"],
    }
