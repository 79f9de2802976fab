"""What a cache costs and what it keeps: bytes a token, fidelity, speed of building and of reading.

`python benchmarks/cache.py [SECTION ...] [--again] [--quick] [--result FILE]` measures the sections named, or all, and
writes each into benchmarks/results/cache.json as soon as it is done; one that stands there already is passed over, so
that a run which was stopped goes on. Sections:

    bytes        a cache for each codec over each teacher: bytes a token by data set, temperature range, fidelity (all
                 from the manifest). Teachers: the shipped one (V = 2,048), synthetic ones of V = 32,000 and 151,936
                 that are like it (cache_material.py; what they have in common is in `teachers`)
    build        building over the bare forward, for the shipped teacher
    build-100m   the same for a random teacher of 100 million parameters
    read         reading, in order and at random, against an uncompressed array
    step         a training step with the reader and without

A few hundred sequences make a cache, so that what a shard costs once is spread as in a real one; large vocabularies
and `dense` have fewer (`sequences`), and pay more for it. The timed sections want a machine of their own.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import cache_material
import cache_speed
import torch
from cache_material import Material

from kdtrain.cache.writer import write_cache

RESULT = Path(__file__).parent / "results" / "cache.json"
CODECS: dict[str, dict[str, Any]] = {
    "top-k 12": {"kind": "sparse", "top_k": 12},
    "top-k 50": {"kind": "sparse", "top_k": 50},
    "samples 50": {"kind": "sparse", "num_samples": 50},
    "top-k 8 + samples 24": {"kind": "sparse", "top_k": 8, "num_samples": 24},
    "dense": {"kind": "dense"},
}
SECTIONS = ("bytes", "build", "build-100m", "read", "step")
# Sequences to train on, by vocabulary: of the codec of the goal, of the other sparse ones, of `dense`.
SIZES = {2_048: (512, 128, 16), 32_000: (128, 32, 4), 151_936: (64, 12, 2)}
SEQ_LEN = 512


class Bench:
    """Sections and what they found so far."""

    def __init__(self, result: Path, again: bool, quick: bool) -> None:
        self.path, self.again, self.quick = result, again, quick
        self.found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        self.length = 64 if quick else SEQ_LEN
        self.sizes = {2_048: (8, 8, 4), 4_000: (4, 4, 2)} if quick else SIZES
        self._shipped: Material | None = None

    def shipped(self, number: int) -> Material:
        """The shipped teacher and so many sequences."""
        if self._shipped is None or len(self._shipped.rows["train"]) != number:
            self._shipped = cache_material.shipped(number, self.length)
        return self._shipped

    def run(self, section: str) -> None:
        """Measure a section and keep what it found."""
        if section == "bytes":
            self._bytes()
            return
        if section in self.found and not self.again:
            return
        number = 8 if self.quick else 512
        with tempfile.TemporaryDirectory() as scratch:
            self._keep(section, self._timed(section, number, Path(scratch)))

    def _timed(self, section: str, number: int, scratch: Path) -> dict[str, Any]:
        codec, turns = CODECS["top-k 12"], 1 if self.quick else 5
        if section == "build":
            return cache_speed.building(self.shipped(number // 4), codec, 16, turns)
        if section == "build-100m":
            large, size = cache_speed.large_teacher(self.shipped(16))
            return {"parameters": size, **cache_speed.building(large, codec, 4, turns)}
        if section == "read":
            return cache_speed.reading(self.shipped(number), codec, scratch)
        material = self.shipped(max(16, number // 2))
        write_cache(scratch / "c", cache_speed.settings_for(material, codec), material.rows, teacher=material.teacher)
        return cache_speed.step_cost(scratch / "c", 4 if self.quick else 20, turns)

    def _bytes(self) -> None:
        for vocab_size, counts in self.sizes.items():
            for name, codec in CODECS.items():
                key = f"V = {vocab_size}"
                known = self.found.get("caches", {}).get(key, {})
                if name in known and not self.again:
                    continue
                number = counts[list(CODECS).index(name) and (2 if codec["kind"] == "dense" else 1)]
                material = self._material(vocab_size, number)
                print(f"{material.name}: {name}", file=sys.stderr)
                self._keep("caches", {**self.found.get("caches", {}), key: {**known, name: _cache(material, codec)}})

    def _material(self, vocab_size: int, number: int) -> Material:
        shipped = self.shipped(number)
        teachers = self.found.get("teachers", {})
        if shipped.name not in teachers:
            teachers = {**teachers, shipped.name: shipped.facts}
        if vocab_size == shipped.vocab_size:
            made = shipped
        else:
            known = teachers.get(f"synthetic-{vocab_size}")
            made = cache_material.synthetic(vocab_size, number, shipped, known)
            teachers = {**teachers, made.name: made.facts}
        self._keep("teachers", teachers)
        return made

    def _keep(self, name: str, value: Any) -> None:
        self.found["conditions"] = {
            "seq_len": self.length,
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
        self.found[name] = value
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def _cache(material: Material, codec: dict[str, Any]) -> dict[str, Any]:
    settings = cache_speed.settings_for(material, codec)
    batch = 16 if material.vocab_size < 10_000 else 1
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_cache(folder, settings, material.rows, teacher=material.teacher, batch_size=batch)
    return {
        "sequences": {name: split["sequences"] for name, split in manifest.splits.items()},
        "bytes_per_token": manifest.bytes_per_token,
        "temperature_range": manifest.temperature_range,
        "fidelity": {key: value for key, value in (manifest.fidelity or {}).items() if key.startswith("T=")},
    }


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--again", action="store_true", help="measure what stands in the result already, too")
    parser.add_argument("--quick", action="store_true", help="a few short sequences, small vocabularies")
    parser.add_argument("--result", type=Path, help="where to write (with --quick: nowhere if left out)")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory() as scratch:
        result = options.result or (Path(scratch) / "quick.json" if options.quick else RESULT)
        bench = Bench(result, options.again, options.quick)
        for section in options.sections or SECTIONS:
            bench.run(section)
        print(json.dumps(bench.found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
