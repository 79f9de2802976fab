"""The cost of several ranks: memory against the plan, bytes exchanged against the formula, two ranks against one.

`python -m benchmarks.performance.parallel [--only PART]` writes benchmarks/results/parallel.json, or the part of it
that was asked for: memory, "memory in ranks", exchange or throughput.

Memory: the real `kdtrain distill` in a fresh process, `SAVED` steps and a save after each, for each of `MEMORY`: from
the second step on the buffers of the last save are there, as in any longer run. Its peak is the process's high-water
mark (VmHWM). What Python and its libraries take is measured by the same command with a student of one layer of width
64, and taken off. The estimate is the plan's, made from the options alone.

glibc keeps freed blocks of up to 32 MiB for itself, because the size from which it gives them back grows with use, so
that the mark is that of its heap's waste too. It is measured with that size held at 1 MiB, which leaves what is alive.

Exchange: `kdtrain distill` in two gloo ranks, every collective of its training steps counted
(exchange_script.py), against `kdtrain.parallel.parallelize`. Exact, or the script ends with 1.

Throughput: the same student and batch in one process on one thread, in two ranks on a thread each, and in one process
on two threads; the second is what two ranks win, the third what the two cores give without ranks.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import RESULTS, write, write_spec
from kdtrain import cli
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.writer import write_cache
from kdtrain.data.packed import PackedRow
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec
from kdtrain.parallel import parallelize
from kdtrain.parallel.memory_plan import MemoryPlan, estimated, job_of
from kdtrain.precision.formats import formats_of
from kdtrain.teaching.teacher import Teacher
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

RESULT = RESULTS / "parallel.json"
GOAL = 0.2
"""How far an estimate may be from the measured peak, as a share of it."""
SEQ_LEN = 256


@dataclass(frozen=True)
class Case:
    """A run whose memory is measured."""

    student: dict[str, Any]
    vocab_size: int = 2048
    teacher: dict[str, Any] | None = None
    options: tuple[object, ...] = ()
    compile: bool = False


def llama(width: int, layers: int) -> dict[str, Any]:
    """Return the configuration of a Llama of a usual shape."""
    return {
        **{"model_type": "llama", "hidden_size": width, "intermediate_size": width * 43 // 16},
        **{"num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": width // 64},
        **{"max_position_embeddings": 1024, "tie_word_embeddings": True},
    }


GPT2 = {
    **{"model_type": "gpt2", "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 1024},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}

TINY = Case(llama(64, 1), options=("--batch-size", 1, "--precision", "fp32"))
MEMORY = {
    "weights": Case(llama(512, 8), options=("--batch-size", 2, "--precision", "fp32")),
    "activations": Case(llama(256, 6), options=("--batch-size", 16, "--precision", "fp32")),
    "bf16 and a large vocabulary": Case(
        llama(256, 4), vocab_size=32768, options=("--batch-size", 8, "--precision", "bf16")
    ),
    "activation checkpointing and accumulation": Case(
        GPT2,
        options=("--batch-size", 32, "--micro-batch-size", 16, "--precision", "bf16", "--activation-checkpointing"),
    ),
    "an online teacher": Case(llama(256, 4), teacher=llama(512, 8), options=("--batch-size", 8, "--precision", "fp32")),
}


class Folder:
    """Caches, teachers and students for the runs that are measured."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "text.txt").write_text("".join(f"{number} squared is {number**2}.\n" for number in range(40_000)))

    def argv(self, name: str, case: Case, steps: int = 2, cached: bool = True) -> list[str]:
        """Return the arguments of `kdtrain distill` for a case; make the files that they name.

        A cache is made only if `cached`.
        """
        spec = self.root / f"{name}.toml"
        write_spec(spec, self._tokenizer(case.vocab_size), case.student)
        data = ("--data", self.root / "text.txt", "--seq-len", SEQ_LEN, "--num-sequences", 32)
        source: tuple[object, ...] = (*data, "--validation-sequences", 4, "--num-workers", 0)
        if case.teacher is not None:
            source = ("--teacher", self._teacher(case), *source)
        elif cached:
            source = ("--cache", self._cache(case.vocab_size))
        words = (*source, "--student", spec, "--out", self.root / f"run-{name}", "--steps", steps, "--warmup-steps", 0)
        compiled = "--compile" if case.compile else "--no-compile"
        words = (*words, *case.options, compiled, "--log-to", "none", "--resume", "never", "--overwrite")
        return [str(word) for word in words]

    def _tokenizer(self, size: int) -> Path:
        path = self.root / f"tokenizer-{size}"
        if not path.exists():
            tiny_tokenizer(size).save_pretrained(path)
        return path

    def _teacher(self, case: Case) -> Path:
        path = self.root / "teacher"
        if not path.exists():
            config = {key: value for key, value in (case.teacher or {}).items() if key != "model_type"}
            write_model_folder(path, tiny_model("llama", case.vocab_size, **config), tiny_tokenizer(case.vocab_size))
        return path

    def _cache(self, size: int) -> Path:
        """Make a cache of random tokens with random distributions, unless it exists."""
        path = self.root / f"cache-{size}"
        if path.exists():
            return path
        random = np.random.RandomState(0)
        blank = np.zeros(SEQ_LEN, dtype=np.int32)

        def rows(number: int) -> list[PackedRow]:
            tokens = random.randint(0, size, (number, SEQ_LEN + 1)).astype(np.int32)
            return [PackedRow(row, np.ones(SEQ_LEN, dtype=bool), blank) for row in tokens]

        table = torch.randn(256, size, generator=torch.Generator().manual_seed(0))
        codec = CodecSpec(kind="sparse", vocab_size=size, top_k=12)
        settings = CacheSettings(codec=codec, seq_len=SEQ_LEN, tokenizer_size=size)
        teacher = lambda tokens_BT, _: table[tokens_BT % 256]  # noqa: E731
        splits = {"train": rows(64), "validation": rows(4)}
        write_cache(path, settings, splits, teacher=teacher, tokenizer=self._tokenizer(size), batch_size=4)
        return path


SAVED, EACH = 4, ("--checkpoint-freq", "1")
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


def peak(folder: Folder, name: str, case: Case, **environment: str) -> float:
    """Return the high-water mark in bytes of `kdtrain distill` for a case, in a process of its own."""
    command = [sys.executable, "-m", "kdtrain", "distill", *folder.argv(name, case, SAVED), *EACH, "--json"]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout)["peak_memory_mb"] * 2**20


def estimate(folder: Folder, name: str, case: Case, student: str = "single", world: int = 1) -> MemoryPlan:
    """Estimate the plan of a case, with the needs of a rank; make the files of the case, but no cache."""
    config = cli.parse("distill", folder.argv(name, case, cached=False))
    device, length, sizes = torch.device("cpu"), config.data.seq_len, tuple[Any, ...]()
    mode = formats_of(config.precision, config.quantization, device).high
    if config.teacher is not None:
        teacher = Teacher.open(ModelSpec.read(config.teacher), device, mode)
        sizes = teacher.vocab_size, teacher.footprint(length)
    job = job_of(config, mode, device, ModelSpec.read(config.student), length, *sizes)
    assert job is not None
    return estimated(MemoryPlan(student, "none" if case.teacher is None else "replicate"), job, world)


def compared(plan: MemoryPlan, measured: float) -> dict[str, float]:
    """Return MiB by the plan and measured (in bytes), and the difference as a share of the measurement."""
    figures = {"estimated": round(plan.total / 2**20, 1), "measured": round(measured / 2**20, 1)}
    return figures | {"difference": round(plan.total / measured - 1, 3)}


def memory(folder: Folder, cases: dict[str, Case]) -> dict[str, Any]:
    """Measure MiB by case: estimated, measured, and the difference as a share of the measurement."""
    alive = peak(folder, "tiny", TINY, **RETURNING)
    rows = {}
    for name, case in cases.items():
        short = name.replace(" ", "-")
        plan = estimate(folder, short, case)
        measured = peak(folder, short, case, **RETURNING) - alive
        rows[name] = {
            **compared(plan, measured),
            "most at": plan.moment,
            "parts": {part: round(each / 2**20, 1) for part, each in plan.needs.items()},
        }
        print(name, rows[name], file=sys.stderr, flush=True)
    return {"baseline": round(alive / 2**20, 1), "goal": GOAL, "cases": rows}


IN_RANKS: dict[str, tuple[int, tuple[object, ...]]] = {
    "2 ranks, DDP": (2, ("--parallel", "ddp")),
    "2 ranks, FSDP2": (2, ("--parallel", "fsdp")),
    "2 ranks, FSDP2 and accumulation": (2, ("--micro-batch-size", 2, "--parallel", "fsdp")),
    "one process": (1, ()),
    "2 tensor ranks": (2, ("--tensor-parallel", 2)),
    "4 tensor ranks": (4, ("--tensor-parallel", 4)),
}
"""Ranks, and how they hold a student."""
EXCHANGED = Case(llama(64, 2))
THROUGHPUT = Case(llama(256, 4))


def launch(words: list[str], world: int, threads: int, **environment: str) -> str:
    """Start a command once a rank, and return what rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": f"{threads}", "WORLD_SIZE": f"{world}"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", **environment}
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{world}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [each.communicate() for each in started]
    if any(each.returncode for each in started):
        raise SystemExit("\n".join(err for _, err in said))
    return said[0][0]


def memory_in_ranks(folder: Folder) -> dict[str, Any]:
    """Measure MiB of a rank, estimated and measured (rank 0's), for a student of 26 M parameters in fp32."""

    def measured(name: str, case: Case, world: int) -> float:
        words = ["-m", "kdtrain", "distill", *folder.argv(name, case, SAVED), *EACH, "--json"]
        return json.loads(launch(words, world, 1, **RETURNING))["peak_memory_mb"]

    @functools.cache
    def baseline(world: int) -> float:
        return measured("tiny-ranks", replace(TINY, options=("--batch-size", world, "--precision", "fp32")), world)

    rows = {}
    for name, (world, _) in IN_RANKS.items():
        found = measured("ranks", in_ranks(name), world) - baseline(world)
        plan = estimate_in_ranks(folder, name)
        rows[name] = {**compared(plan, found * 2**20), "most at": plan.moment}
        print(name, rows[name], file=sys.stderr, flush=True)
    return rows


def in_ranks(name: str) -> Case:
    """Return one of the runs whose memory is measured in ranks."""
    return Case(llama(512, 8), options=("--batch-size", 8, *IN_RANKS[name][1], "--precision", "fp32"))


def estimate_in_ranks(folder: Folder, name: str) -> MemoryPlan:
    """Estimate the plan of one of `IN_RANKS`."""
    world, options = IN_RANKS[name]
    how = "single"
    if "--parallel" in options:
        how = str(options[-1])
    return estimate(folder, "ranks", in_ranks(name), how, 1 if how == "single" else world)


def exchange(folder: Folder, world: int = 2) -> list[dict[str, Any]]:
    """Count calls and bytes of a step, and compare them with the formula."""
    model = load_student(
        ModelSpec(name="x", config=EXCHANGED.student, init="scratch"), vocab_size=2048, seed=0, device="cpu"
    )
    layers = [[list(each.shape) for each in layer.parameters()] for layer in model.model.layers]
    inside = {id(each) for each in model.model.layers.parameters()}
    root = [list(each.shape) for each in model.parameters() if id(each) not in inside]
    rows = []
    for how, precision, micros in itertools.product(("ddp", "fsdp"), ("fp32", "bf16"), (1, 3)):
        batch = ("--batch-size", world * micros, "--micro-batch-size", 1, "--precision", precision, "--parallel", how)
        case = replace(EXCHANGED, options=batch)
        counts = folder.root / "counts.json"
        words = folder.argv("exchanged", case, steps=3)
        script = ("-m", "benchmarks.performance.exchange_script", str(counts), "distill")
        launch([*script, *words, "--eval-freq", "3"], world, 1)
        # the last: DDP puts its buckets in order in the first, and later ones are all alike
        counted = json.loads(counts.read_text())[-1]
        if how == "ddp":
            expected = {"all_reduce": [1, int(parallelize.ddp([*root, *itertools.chain(*layers)]).all_reduce)]}
        else:
            gathered = 2 if precision == "bf16" else 4
            found = parallelize.fsdp(layers, root, sharing=world, micro_batches=micros, gathered=gathered)
            calls = {"all_gather": micros * (2 * len(layers) + 1), "reduce_scatter": len(layers) + 1}  # the root once
            expected = {name: [number, int(getattr(found, name))] for name, number in calls.items()}
        numbers = counted.pop("numbers", [0, 0])
        row = {"how": how, "precision": precision, "micro-batches": micros, "counted": counted, "formula": expected}
        rows.append({**row, "exact": counted == expected, "numbers that ranks agree on": numbers})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def throughput(folder: Folder, steps: int = 30) -> dict[str, Any]:
    """Measure the tokens a second of one process, of two ranks, and of one process with two threads."""
    rates = {}
    for name, world, threads in (
        ("one process, one thread", 1, 1),
        ("two ranks, a thread each", 2, 1),
        ("one process, two threads", 1, 2),
    ):
        options = ("--batch-size", 16, "--precision", "fp32", "--eval-freq", steps, "--checkpoint-freq", 1000)
        case = replace(THROUGHPUT, options=options)
        words = ["-m", "kdtrain", "distill", *folder.argv("throughput", case, steps), "--json"]
        rates[name] = json.loads(launch(words, world, threads))["tokens_per_second"]
        print(name, rates[name], file=sys.stderr, flush=True)
    one, two, threads_two = rates.values()
    ratios = {"two ranks over one": round(two / one, 3), "two threads over one": round(threads_two / one, 3)}
    return {"tokens a second": rates, **ratios, "cores": os.cpu_count(), "steps": steps}


def main() -> int:
    """Measure; 1 where an estimate misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=("memory", "memory in ranks", "exchange", "throughput"), help="one part, the others left"
    )
    options = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name))
        parts = {"memory": lambda: memory(folder, MEMORY), "exchange": lambda: exchange(folder)}
        parts["memory in ranks"] = lambda: memory_in_ranks(folder)
        parts["throughput"] = lambda: throughput(folder)
        for part, measure in parts.items():
            if options.only in (None, part):
                result[part] = measure()
    write(RESULT, result)
    within = [abs(each["difference"]) <= GOAL for each in result.get("memory", {}).get("cases", {}).values()]
    return int(not all([*within, *(row["exact"] for row in result.get("exchange", []))]))


if __name__ == "__main__":
    sys.exit(main())
