"""The tables of docs/scaling.md and its study, from formulas: `python -m benchmarks.performance.scaling` fills them.

Nothing is measured here; what parallel.py has measured is shown beside its estimates. Speeds are published ones
(`Machine`), the bytes of a step are `kdtrain.parallel.parallelize`'s, which tests count, and the bytes of a cached
token and the reader's speed are measured (benchmarks/results/cache.json).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables
from benchmarks.harness import RESULTS, ROOT
from kdtrain.parallel import parallelize

MEASURED = RESULTS / "parallel.json"
CACHE = RESULTS / "cache.json"
PAGES = [ROOT / "docs" / "scaling.md", ROOT / "benchmarks" / "performance" / "scaling.md"]


@dataclass(frozen=True)
class Machine:
    """A node of eight H100 SXM on InfiniBand NDR; sources in scaling.md."""

    flops: float = 989e12
    """bf16, dense, a second and GPU."""
    used: float = 0.4
    """The share of them that training reaches."""
    memory: float = 80e9
    node: int = 8
    inside: float = 450e9
    """NVLink, bytes a second and direction of a GPU."""
    outside: float = 50e9
    """InfiniBand, bytes a second and direction of a GPU."""
    reached: float = 0.8
    """The share of a link's speed that a collective reaches."""

    def link(self, gpus: int) -> float:
        """Return the bytes a second that a GPU sends in a ring of `gpus` neighbouring ones."""
        return self.reached * (self.inside if gpus <= self.node else self.outside)


@dataclass(frozen=True)
class Model:
    """A transformer as the formulas see it."""

    name: str
    in_layers: float
    root: float
    layers: int

    @property
    def parameters(self) -> float:
        return self.in_layers + self.root


STUDENTS = (
    Model("0.6 B (28 layers, V = 151,936, D = 1,024, tied)", 440e6, 156e6, 28),
    Model("1.7 B (28 layers, V = 151,936, D = 2,048, tied)", 1.41e9, 311e6, 28),
    Model("8 B (32 layers, V = 128,256, D = 4,096)", 6.98e9, 1.05e9, 32),
)
TEACHERS = {"8 B": 8.0e9, "32 B": 32.8e9, "70 B": 70.6e9}
GPUS = (8, 32, 128, 512, 1024)
TOKENS = 4 * 2**20
"""Tokens of a step over all GPUs."""
MICRO = 16_384
"""Tokens of a micro-batch at most."""
DRAWN, KEPT = "samples 50", "top-k 12"
"""Two codecs of cache.json: the default, and a top-k."""
SEQ_LEN, SHARD = 4096, 512


def micro_batches(gpus: int) -> int:
    """Return the number of micro-batches of a step on a GPU."""
    return max(1, math.ceil(TOKENS / gpus / MICRO))


def exchanged(model: Model, how: str, gpus: int, micros: int, sharing: int | None = None) -> parallelize.Traffic:
    """Return the traffic of a step in bf16."""
    if how == "ddp":
        return parallelize.ddp([[round(model.parameters)]])
    layer = [[round(model.in_layers / model.layers)]]
    sharing = sharing or gpus
    layers, root = [layer] * model.layers, [[round(model.root)]]
    replicas = gpus // sharing
    return parallelize.fsdp(layers, root, sharing=sharing, replicas=replicas, micro_batches=micros, gathered=2)


def seconds(machine: Machine, model: Model, how: str, gpus: int) -> tuple[float, float]:
    """Return (computing, exchanging) seconds of a step: the step takes between their maximum and their sum."""
    computing = 6 * model.parameters * TOKENS / gpus / (machine.flops * machine.used)
    micros = micro_batches(gpus)
    if how == "hybrid":
        part = exchanged(model, "fsdp", gpus, micros, machine.node)
        inside = parallelize.Traffic(all_gather=part.all_gather, reduce_scatter=part.reduce_scatter)
        between = parallelize.Traffic(all_reduce=part.all_reduce).sent(1, gpus // machine.node)
        # the eight rings between the nodes, one a GPU of each, run at the same time over a link of their own
        return computing, inside.sent(machine.node) / machine.link(machine.node) + between / machine.link(gpus)
    bytes_sent = exchanged(model, how, gpus, micros).sent(gpus, gpus)
    return computing, bytes_sent / machine.link(gpus)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bytes_table() -> str:
    """Tabulate the bytes that a GPU of 8 sends in a step."""
    rows = []
    for model in STUDENTS:
        for how in ("ddp", "fsdp"):
            sent = [exchanged(model, how, 8, micros).sent(8, 8) / 1e9 for micros in (1, 4, 16)]
            rows.append([model.name, how.upper() + ("2" if how == "fsdp" else ""), *(f"{each:.1f}" for each in sent)])
    return table(["student", "", "1 micro-batch", "4 micro-batches", "16 micro-batches"], rows)


def time_table() -> str:
    """Tabulate predicted step times."""
    machine, rows = Machine(), []
    for model in STUDENTS:
        for how in ("ddp", "fsdp", "hybrid"):
            cells = []
            for gpus in GPUS:
                if how == "hybrid" and gpus <= machine.node:
                    cells.append("as FSDP2")
                    continue
                if how == "ddp" and 16 * model.parameters > machine.memory:
                    cells.append("does not fit")
                    continue
                computing, exchanging = seconds(machine, model, how, gpus)
                cells.append(f"{max(computing, exchanging):.3f} to {computing + exchanging:.3f}")
            name = {"ddp": "DDP", "fsdp": "FSDP2", "hybrid": "FSDP2, shards of 8"}[how]
            rows.append([model.name if how == "ddp" else "", name, *cells])
    head = ["student", "", *(f"{gpus:,} GPUs" for gpus in GPUS)]
    parts = ["", "micro-batches a step", *(str(micro_batches(gpus)) for gpus in GPUS)]
    return table(head, [parts, *rows])


def share_table() -> str:
    """Tabulate the share of a step that is computing, where nothing overlaps."""
    machine, cells = Machine(), []
    for gpus in GPUS:
        ways = ("ddp", "fsdp" if gpus <= machine.node else "hybrid")
        shares = []
        for model in STUDENTS:
            computing, exchanging = min((seconds(machine, model, how, gpus) for how in ways), key=sum)
            shares.append(computing / (computing + exchanging))
        assert max(shares) - min(shares) < 0.01
        cells.append(f"{min(shares):.0%}")
    return table([f"{gpus:,} GPUs" for gpus in GPUS], [cells])


def message_table() -> str:
    """Tabulate the MB that each rank holds of one layer in bf16: the smallest message of an all-gather."""
    rows = [
        [model.name, *(f"{2 * model.in_layers / model.layers / gpus / 1e6:.2f}" for gpus in GPUS)] for model in STUDENTS
    ]
    return table(["student", *(f"{gpus:,} GPUs" for gpus in GPUS)], rows)


def cached_bytes(codec: str, vocab_size: int) -> float:
    """Return the bytes a token of a codec, measured."""
    figure = json.loads(CACHE.read_text())["figures"][f"V = {vocab_size}, {codec}"]
    return float(figure["bytes_per_token"]["total"])


def cache_table() -> str:
    """Tabulate the size of caches."""
    vocabularies = (2_048, 151_936)
    sizes = {f"{codec}, V = {vocab:,}": cached_bytes(codec, vocab) for codec in (DRAWN, KEPT) for vocab in vocabularies}
    rows = []
    for name, size in {**sizes, "dense fp16, V = 151,936": 2.0 * 151_936}.items():
        tokens = (100e9, 1e12)
        shards = [f"{math.ceil(count / SEQ_LEN / SHARD):,}" for count in tokens]
        rows.append([name, f"{size:,.2f}", *(f"{count * size / 1e12:,.1f}" for count in tokens), *shards])
    head = ["codec", "bytes per token", "100 B tokens, TB", "1 T tokens, TB", "shards of 100 B", "shards of 1 T"]
    return table(head, rows)


def read_table() -> str:
    """Tabulate what the trainer reads a second at a vocabulary of 151,936, and the cores that decode it."""
    machine, rows = Machine(), []
    reading = json.loads(CACHE.read_text())["figures"]["read"]["tokens_per_second_and_core"]
    for model in STUDENTS:
        for gpus in (8, 128, 1024):
            rate = TOKENS / seconds(machine, model, "ddp", gpus)[0]
            cells = [f"{rate / 1e6:.2f}"]
            for codec in (DRAWN, KEPT):
                cores = rate / reading[codec]["random, 16 shards"] / gpus
                cells += [f"{rate * cached_bytes(codec, 151_936) / 1e6:,.0f}", f"{cores:.3f}"]
            rows.append([model.name if gpus == 8 else "", f"{gpus:,}", *cells])
    units = [f"{unit}, {codec}" for codec in (DRAWN, KEPT) for unit in ("MB/s", "cores a GPU")]
    return table(["student", "GPUs", "M tokens/s", *units], rows)


def teacher_table() -> str:
    """Tabulate the days that the teacher's forward takes."""
    machine, rows = Machine(), []
    for name, parameters in TEACHERS.items():
        cells = []
        for gpus in (8, 64, 512):
            rate = gpus * machine.flops * machine.used / (2 * parameters)
            cells += [f"{100e9 / rate / 86400:.2f}", f"{1e12 / rate / 86400:.1f}"]
        rows.append([name, *cells])
    head = ["teacher", *(f"{gpus} GPUs, {size}" for gpus in (8, 64, 512) for size in ("100 B", "1 T"))]
    return table(head, rows)


def _beside(each: dict[str, float | None]) -> list[str]:
    """Return the cells of MiB by the plan, measured, and the difference.

    A run may not have been measured since the plan changed.
    """
    measured = (
        ["not yet", "-"] if each["measured"] is None else [f"{each['measured']:,.0f}", f"{each['difference']:+.1%}"]
    )
    return [f"{each['estimated']:,.0f}", *measured]


def memory_table() -> str:
    """Tabulate the MiB of five runs by the plan, and measured."""
    cases = json.loads(MEASURED.read_text())["memory"]["cases"]
    rows = [[name, *_beside(each), each["most at"]] for name, each in cases.items()]
    return table(["run", "plan", "measured", "plan against measured", "most at"], rows)


def ranks_table() -> str:
    """Tabulate the MiB of a rank by the plan, and measured."""
    rows = [[name, *_beside(each)] for name, each in json.loads(MEASURED.read_text())["memory in ranks"].items()]
    return table(["a rank's memory, 26 M parameters, fp32", "plan", "measured", "plan against measured"], rows)


def throughput_table() -> str:
    """Tabulate the tokens a second of one process and of two ranks."""
    found = json.loads(MEASURED.read_text())["throughput"]["tokens a second"]
    one = next(iter(found.values()))
    rows = [[name, f"{rate:,.0f}", f"{rate / one:.2f}"] for name, rate in found.items()]
    return table(["a machine of two cores", "tokens/s", "over the first"], rows)


def exchange_table() -> str:
    """Tabulate calls and bytes of a step on two ranks."""
    rows = []
    for each in json.loads(MEASURED.read_text())["exchange"]:
        said = [
            ", ".join(f"{name} {calls} x, {size:,} B" for name, (calls, size) in sorted(each[side].items()))
            for side in ("counted", "formula")
        ]
        way = {"ddp": "DDP", "fsdp": "FSDP2"}[each["how"]]
        rows.append([f"{way}, {each['precision']}", str(each["micro-batches"]), *said])
    return table(["", "micro-batches", "counted", "formula"], rows)


TABLES = {
    "memory": memory_table,
    "ranks": ranks_table,
    "throughput": throughput_table,
    "exchange": exchange_table,
    "bytes": bytes_table,
    "time": time_table,
    "share": share_table,
    "message": message_table,
    "cache": cache_table,
    "read": read_table,
    "teacher": teacher_table,
}


def filled() -> dict[Path, str]:
    """Return the pages, with every table made anew."""
    return tables.placed({name: make() for name, make in TABLES.items()}, PAGES)


def main() -> int:
    """Write the tables into the pages."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for page, text in filled().items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
