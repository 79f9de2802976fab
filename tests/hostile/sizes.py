"""Sizes: what a few bytes say is large, and what is large."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from tests.hostile.case import Cases, Place, changed, curried, in_json, in_spec, in_state
from tests.hostile.shapes import LISTS, PLAIN, WEIGHTS, header_of, in_shards, write_safetensors

HUGE = 10**12


def cases() -> Cases:
    """List cases of declared sizes in shards, manifests, configurations and headers, and of long files."""
    found = Cases("sizes")
    for name in (*PLAIN, *LISTS):
        found.add(f"{name} of 80 GB", "evaluate", in_shards(_declared(8 * 10**10), name))
        found.add(f"{name} of a petabyte", "distill", in_shards(_declared(10**15), name))
        found.add(f"{name} in chunks of 4 GB", "evaluate", in_shards(_chunked, name))
    found.add("bomb", "evaluate", in_shards(_bomb, "dictionary/common"))
    found.add("attribute of 60 MB", "evaluate", in_shards(_large_attribute, "tokens"), ends="either", same=True)
    found.add("20,000 groups", "evaluate", in_shards(_many, "tokens"))
    found.add("groups 5,000 deep", "verify", in_shards(_deep, "more"), ends="either")
    found.add("groups 5,000 deep", "evaluate", in_shards(_deep, "more"))
    for name, change in _SETTINGS.items():
        for command in ("evaluate", "distill", "inspect"):
            # inspect shows what a manifest says; the rest of the cache is not its matter
            ends = "either" if command == "inspect" or "tokenizer" in name else "refused"
            found.add(f"manifest says {name}", command, changed("settings", change), ends=ends)
    for name, change in _MANIFEST.items():
        for command in ("verify", "distill"):
            found.add(f"manifest has {name}", command, changed("manifest", change), ends="either")
    for each in ("manifest", "settings", "shards/train-00000", "tokenizer/tokenizer"):
        name = f"cache/{each}.json"
        found.add(f"{name} of 1 TB", "verify", _holes(name), resealed=False)
        found.add(f"{name} of 1 TB", "repair", _holes(name), resealed=False)
        found.add(f"{name} of 300 MB", "distill", _long(name), resealed=False, ends="either")
    files = ("config.toml", "environment.json", "metrics.jsonl", "events.jsonl", "checkpoints/step-00000004/state.json")
    for name in (f"run/{each}" for each in files):
        for command in ("inspect run", "resume"):
            found.add(f"{name} of 1 TB", command, _holes(name), resealed=False, ends="either")
            found.add(f"{name} of 300 MB", command, _long(name), resealed=False, ends="either")
    for name in ("student.toml", "model/config.json", "model/tokenizer.json", "model/generation_config.json"):
        command = "distill" if name == "student.toml" else "model"
        ends = "either" if "generation" in name else "refused"
        found.add(f"{name} of 1 TB", command, _holes(name), ends=ends)
        found.add(f"{name} of 300 MB", command, _long(name), ends=ends)
    for command in ("chat", "logprobs"):
        found.add(f"{command}.jsonl is one line of 300 MB", command, _long(f"{command}.jsonl"))
    for name, value in _MODEL.items():
        # rotary positions need no memory, so that any number of them is a model
        ends = "either" if name == "max_position_embeddings" else "refused"
        found.add(f"student with {name}", "distill", in_spec(name, value), ends=ends)
        found.add(f"model with {name}", "model", in_json("model/config.json", name, value), ends=ends)
        found.add(
            f"checkpoint's student with {name}", "export", in_state(f"student.architecture.{name}", value), ends=ends
        )
    for name, size in (("2^62", 2**62), ("2^64 - 1", 2**64 - 1), ("100 MB", 10**8), ("nothing", 0)):
        found.add(f"weights with a header of {name}", "model", _header(size))
    return found


def _declared(size: int) -> Callable[[h5py.File, str], None]:
    """Declare as many rows as `size` bytes need, and write none of them."""

    def remake(file: h5py.File, name: str) -> None:
        old = file[name]
        row = old.dtype.itemsize * int(np.prod(old.shape[1:]))
        shape = (size // row, *old.shape[1:])
        plist, kind = old.id.get_create_plist().copy(), old.id.get_type()
        plist.set_chunk((min(shape[0], 1024), *old.shape[1:]))
        del file[name]
        h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), plist)

    return remake


def _chunked(file: h5py.File, name: str) -> None:
    old = file[name]
    plist, kind, shape = old.id.get_create_plist().copy(), old.id.get_type(), old.shape
    row = old.dtype.itemsize * int(np.prod(old.shape[1:]))
    whole = (max(shape[0], 2**32 // row - 1), *shape[1:])
    plist.set_chunk(whole)
    del file[name]
    space = h5py.h5s.create_simple(shape, (h5py.h5s.UNLIMITED,) * len(shape))
    h5py.h5d.create(file.id, name.encode(), kind, space, plist)


def _bomb(file: h5py.File, name: str) -> None:
    """Put two gigabytes of zeros in a few kilobytes."""
    del file[name]
    data = file.create_dataset(name, (2**30,), np.uint16, chunks=(2**24,), compression="gzip", compression_opts=9)
    packed = zlib.compress(bytes(2**25), 9)
    for start in range(0, 2**30, 2**24):
        data.id.write_direct_chunk((start,), packed)


def _large_attribute(file: h5py.File, name: str) -> None:
    file[name].attrs["more"] = "a"
    group = file[name].attrs
    group.create("large", np.zeros(6_000, np.float64))  # 64 KB is the most that an object header holds
    for number in range(200):
        group.create(f"large {number}", np.zeros(6_000, np.float64))


def _many(file: h5py.File, name: str) -> None:
    for number in range(20_000):
        file.create_group(f"more-{number}")


def _deep(file: h5py.File, name: str) -> None:
    file.create_group("/".join(["a"] * 5_000))


_SETTINGS: dict[str, Callable[[dict[str, Any]], None]] = {
    "seq_len 10^12": lambda record: record.update(seq_len=HUGE),
    "vocabulary of 4 billion": lambda record: (
        record["codec"].update(vocab_size=2**32 - 2),
        record.update(vocab_size=2**32 - 2),
    ),
    "head as large as the vocabulary": lambda record: record["codec"].update(top_k=300),
    "a million knots": lambda record: record["codec"].update(
        knots=[1.5 + (10**6 - n) / 10**6 for n in range(10**6)] + [1.0, 0.5]
    ),
    "shards of 10^12": lambda record: record.update(sequences_per_shard=HUGE),
    "a tokenizer of 10^12": lambda record: record.update(tokenizer_size=HUGE),
}


_MANIFEST: dict[str, Callable[[dict[str, Any]], None]] = {
    "10^12 sequences": lambda record: record["splits"]["train"].update(sequences=HUGE),
    "10^12 sequences in a shard": lambda record: record["splits"]["train"]["shards"][0].update(sequences=HUGE),
    "a shard 100,000 times": lambda record: record["splits"]["train"]["shards"].extend(
        record["splits"]["train"]["shards"] * 50_000
    ),
    "10,000 splits": lambda record: record["splits"].update(
        {f"split{n}": record["splits"]["train"] for n in range(10_000)}
    ),
    "a shard of 2^63 bytes": lambda record: record["splits"]["train"]["shards"][0].update(bytes=2**63),
    "100,000 tokenizer files": lambda record: record["tokenizer_files"].update(
        {f"f{n}": "0" * 64 for n in range(100_000)}
    ),
}


@curried
def _holes(place: Place, name: str) -> None:
    """Make a file of 1 TB that takes no space."""
    with open(place.write(name, "{"), "r+b") as file:
        file.truncate(10**12)


@curried
def _long(place: Place, name: str) -> None:
    """Write 300 MB that begin as a file of its kind does."""
    content = place.path(name).read_text()
    begun = content.rstrip().removesuffix("}") if name.endswith(".json") else content.splitlines()[0][:-1]
    if name.endswith(".toml"):
        begun = "name = '''"
    with open(place.write(name, begun), "a") as file:
        if name.endswith(".json"):
            file.write(', "more": "')
        for _ in range(300):
            file.write("a" * 10**6)
        if name.endswith(".json"):
            file.write('"}')


_MODEL: dict[str, Any] = {
    "vocab_size": HUGE,
    "hidden_size": 4 * 10**9,
    "intermediate_size": HUGE,
    "num_hidden_layers": 10**9,
    "num_attention_heads": 10**9,
    "max_position_embeddings": HUGE,
    "head_dim": 10**9,
}


@curried
def _header(place: Place, size: int) -> None:
    header, data = header_of(path := place.path(WEIGHTS))
    write_safetensors(path, json.dumps(header).encode(), data, size)
