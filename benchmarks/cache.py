"""What a cache costs and what it keeps: bytes a token, fidelity, speed of building and of reading.

`python benchmarks/cache.py [--quick] [--teacher SPEC]` writes benchmarks/results/cache.json (not with --quick).

Sizes and fidelity are those of the manifests of real builds: over the shipped teacher (V = 2,048, stdlib text), and
over synthetic teachers of V = 32,000 and 151,936 whose logits are `scale * (log unigram + noise of the token just
read + noise of the position)`, unigrams being Zipf-shaped and the scale set so that the mean mass of the 12 most
likely entries is the shipped teacher's; tokens are drawn from the teacher's own distribution at each position. Build
speed is tokens a second of `cache-teacher`'s builder over that of the same forwards alone; reading is timed in wall
time, best of several passes, against the same bytes read as one uncompressed array.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.provenance import CacheSettings, Manifest
from kdtrain.cache.reader import CacheReader
from kdtrain.cache.writer import write_cache
from kdtrain.config import DataConfig
from kdtrain.models.loading import load_tokenizer
from kdtrain.models.spec import read_spec
from kdtrain.stages.common import ask, open_teacher, rows

RESULT = Path(__file__).parent / "results" / "cache.json"
CODECS: dict[str, dict[str, Any]] = {
    "head 12": {"kind": "sparse", "head": 12},
    "head 50": {"kind": "sparse", "head": 50},
    "draws 50": {"kind": "sparse", "draws": 50},
    "head 8 + draws 24": {"kind": "sparse", "head": 8, "draws": 24},
    "dense": {"kind": "dense"},
}
Teacher = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A packed row."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray


@dataclass(frozen=True)
class Material:
    """A teacher and its text."""

    name: str
    vocab_size: int
    seq_len: int
    rows: dict[str, list[Any]]
    teacher: Teacher


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default=str(Path(__file__).parents[1] / "teachers" / "stdlib-5m.toml"))
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="a few short sequences, V up to 4,000, no result file")
    options = parser.parse_args()
    number, length = (8, 64) if options.quick else (options.sequences, 512)
    sizes = (4_000,) if options.quick else (32_000, 151_936)
    with tempfile.TemporaryDirectory() as scratch:
        shipped = _shipped(options.teacher, number, length)
        mass = _head_mass(shipped)
        materials = [shipped, *(_synthetic(v, max(2, number // 16), length, mass) for v in sizes)]
        result = {
            "conditions": _conditions(number, length),
            "head_mass_12": mass,
            "caches": {material.name: _caches(material, Path(scratch)) for material in materials},
            "building": _building(shipped, Path(scratch)),
            "reading": _reading(Path(scratch) / f"{shipped.name}-head 12"),
        }
    print(json.dumps(result, indent=1))
    if not options.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _conditions(number: int, length: int) -> dict[str, Any]:
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    return {"sequences": number, "seq_len": length, "torch": torch.__version__, "threads": threads, "load": load}


def _shipped(spec_name: str, number: int, length: int) -> Material:
    spec = read_spec(spec_name)
    cpu, tokenizer = torch.device("cpu"), load_tokenizer(spec)
    model = open_teacher(spec, cpu, "fp32")
    data = DataConfig(data="stdlib", seq_len=length)
    parts = {split: list(rows(data, split, tokenizer, n)) for split, n in _wanted(number)}
    teacher = ask(model, cpu, "fp32")
    width = teacher(torch.zeros(1, 2, dtype=torch.int64), None).shape[-1]
    return Material(spec.name, width, length, parts, teacher)


def _wanted(number: int) -> list[tuple[str, int]]:
    return [("train", number), ("validation", max(2, number // 16))]


def _head_mass(material: Material) -> float:
    tokens = torch.from_numpy(material.rows["validation"][0].tokens[:-1].astype(np.int64))[None]
    return float(material.teacher(tokens, None).softmax(-1).topk(12).values.sum(-1).mean())


class _Zipf:
    """The synthetic teacher: logits are a pure function of token and position in the stream."""

    def __init__(self, vocab_size: int, mass: float) -> None:
        self.unigram_V = -1.1 * torch.arange(2.0, vocab_size + 2).log()
        self.scale = 1.0
        low, high = 0.1, 10.0
        for _ in range(20):
            self.scale = (low + high) / 2
            found = self.logits(torch.arange(32) % vocab_size).softmax(-1).topk(12).values.sum(-1).mean()
            low, high = (self.scale, high) if found < mass else (low, self.scale)

    def one(self, token: int, position: int) -> torch.Tensor:
        """[V] at one position, after one token."""
        size, seeds = len(self.unigram_V), (token, 10**6 * (position + 1) + token)
        noises = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return self.scale * (self.unigram_V + noises[0] + noises[1])

    def logits(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T, V] for a sequence."""
        return torch.stack([self.one(token, t) for t, token in enumerate(tokens_T.tolist())])


def _synthetic(vocab_size: int, number: int, length: int, mass: float) -> Material:
    zipf, choose = _Zipf(vocab_size, mass), torch.Generator().manual_seed(0)

    def make(count: int) -> Iterator[Row]:
        for _ in range(count):
            tokens = [0]
            for t in range(length):
                chance_V = zipf.one(tokens[-1], t).softmax(-1)
                tokens.append(int(torch.multinomial(chance_V, 1, generator=choose)))
            yield Row(np.array(tokens, np.int32), np.ones(length, bool), np.zeros(length, np.int32))

    def teacher(tokens_BT: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        return torch.stack([zipf.logits(row) for row in tokens_BT])

    parts = {split: list(make(count)) for split, count in _wanted(number)}
    return Material(f"zipf-{vocab_size}", vocab_size, length, parts, teacher)


def _build(material: Material, codec: dict[str, Any], folder: Path) -> Manifest:
    spec = CodecSpec(vocab_size=material.vocab_size, **codec)
    facts = {"codec": spec, "seq_len": material.seq_len, "tokenizer_size": material.vocab_size}
    settings = CacheSettings(**facts, sequences={split: len(part) for split, part in material.rows.items()})
    batch = 16 if material.vocab_size < 10_000 else 1
    return write_cache(folder, settings, material.rows, teacher=material.teacher, batch_size=batch)


def _caches(material: Material, scratch: Path) -> dict[str, Any]:
    found = {}
    for name, codec in CODECS.items():
        print(f"{material.name}: {name}", file=sys.stderr)
        manifest = _build(material, codec, scratch / f"{material.name}-{name}")
        found[name] = {
            "bytes_per_token": manifest.bytes_per_token,
            "temperature_range": manifest.temperature_range,
            "fidelity": {key: value for key, value in (manifest.fidelity or {}).items() if key.startswith("T=")},
        }
    return found


def _building(material: Material, scratch: Path) -> dict[str, float]:
    tokens = [torch.from_numpy(row.tokens[:-1].astype(np.int64)) for part in material.rows.values() for row in part]
    started = time.perf_counter()
    with torch.no_grad():
        for start in range(0, len(tokens), 16):
            material.teacher(torch.stack(tokens[start : start + 16]), None)
    bare = time.perf_counter() - started
    started = time.perf_counter()
    _build(material, CODECS["head 12"], scratch / "timed")
    built, number = time.perf_counter() - started, len(tokens) * material.seq_len
    return {
        "bare_forward_tokens_per_second": number / bare,
        "build_tokens_per_second": number / built,
        "share": bare / built,
    }


def _reading(folder: Path) -> dict[str, Any]:
    reader = CacheReader(folder, "train")
    number, length = len(reader), reader.manifest.settings.seq_len
    orders = {"sequential": np.arange(number), "random": np.random.RandomState(0).permutation(number)}
    reader.read([0])
    found: dict[str, Any] = {
        name: _best(lambda part: reader.read(part), order, length) for name, order in orders.items()
    }
    entry = sum(tensor[:length].nbytes for tensor in vars(reader.read([0]).targets).values() if torch.is_tensor(tensor))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        plain = np.memmap(file.name, np.uint8, "w+", shape=(number, entry))
        plain[:] = 1
        found["uncompressed_ceiling"] = _best(lambda part: plain[np.asarray(part)], orders["random"], length)
    return {name: {"tokens_per_second": value} for name, value in found.items()}


def _best(read: Callable[[np.ndarray], Any], order: np.ndarray, length: int, passes: int = 5) -> float:
    batches = [order[start : start + 16] for start in range(0, len(order), 16)]
    fastest = float("inf")
    for _ in range(passes):
        started = time.perf_counter()
        for batch in batches:
            read(batch)
        fastest = min(fastest, time.perf_counter() - started)
    return len(order) * length / fastest


if __name__ == "__main__":
    sys.exit(main())
