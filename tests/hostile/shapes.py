"""Data sets and tensors of other types and shapes than the format's: HDF5 of shards, safetensors of weights."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.hostile import seal
from tests.hostile.case import Cases, Place, curried

PLAIN = ("tokens", "loss_mask", "segments", "ids", "numbers")
LISTS = ("dictionary/context_row", "dictionary/candidates", "dictionary/common", "dictionary/tail_weights")
WEIGHTS = "model/model.safetensors"
CHECKPOINT = "run/checkpoints/step-00000004/shard-00001-00001.safetensors"
Remake = Callable[[h5py.File, str], None]
Header = dict[str, Any]


def cases() -> Cases:
    """List cases of every data set in every shape, then of the headers of safetensors files."""
    found = Cases("shapes")
    for number, name in enumerate((*PLAIN, *LISTS)):
        for offset, (kind, remake) in enumerate(_REMAKES.items()):
            command = ("evaluate", "distill", "verify")[(number + offset) % 7 // 3]
            if kind in ("narrower", "wider") and name in LISTS[::2]:
                continue  # they have one axis, and were shortened and lengthened
            if name in PLAIN[1:3] and offset % 2:
                continue  # masks and segments are alike
            # whether verify looks into shards whose digests are right is its own affair, and lists have no fixed length
            longer = name in LISTS[1:3] and kind in ("longer", "shorter")
            ends = "either" if command == "verify" or longer else "refused"
            found.add(f"{name} {kind}", command, in_shards(remake, name), ends=ends)
    for name, value in _ATTRIBUTES.items():
        own = name in ("split", "first_sequence", "sequences")
        ends = "either" if own else "refused"
        found.add(f"attribute {name} is {value}", "evaluate", in_shards(_attribute(value), name), ends=ends, same=own)
    found.add("one more data set", "evaluate", in_shards(_extra, "more"))
    found.add("one more group", "distill", in_shards(lambda file, name: file.create_group(name), "more"))
    found.add("no dictionary", "evaluate", in_shards(_without, "dictionary"))
    found.add("dictionary is a data set", "distill", in_shards(_instead(np.zeros(9)), "dictionary"))
    found.add("dictionary has one more", "evaluate", in_shards(_extra, "dictionary/more"))
    found.add("nothing in it", "distill", in_shards(_all_gone, ""))
    found.add("user block", "evaluate", _user_block, ends="either", same=True)
    found.add("train is validation", "distill", _swapped, ends="either")
    for kind, damage in _HEADERS.items():
        found.add(f"weights: {kind}", "model", in_tensors(WEIGHTS, damage))
        if kind not in _CHANGES_WEIGHTS:
            command = ("export", "resume", "inspect checkpoint")[len(kind) % 3]
            ends = "either" if command.startswith("inspect") else "refused"
            found.add(f"checkpoint: {kind}", command, in_tensors(CHECKPOINT, damage), ends=ends)
    for kind, places in _PLACES.items():
        found.add(f"parts: {kind}", "export", in_tensors(CHECKPOINT, _placed(places)), ends="either")
    return found


@curried
def in_shards(place: Place, remake: Remake, name: str) -> None:
    """Change the first shards of train and of validation."""
    for shard in ("train-00000", "validation-00000"):
        with place.shard(shard) as file:
            remake(file, name)


def write_as(file: h5py.File, name: str, values: np.ndarray, **more: Any) -> None:
    """Put other values in the place of a data set, with its filters; chunks: one sequence, or all of a list."""
    old = file[name]
    plist = old.id.get_create_plist().copy()
    if not values.ndim:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    else:
        whole = tuple(max(1, size) for size in values.shape)
        chunk = whole if name.startswith("dictionary") else (min(whole[0], old.chunks[0]), *whole[1:])
        plist.set_chunk(more.get("chunks", chunk))
    for position in reversed(range(plist.get_nfilters())):
        if plist.get_filter(position)[0] in more.get("without", ()):
            plist.remove_filter(plist.get_filter(position)[0])
    kind = h5py.h5t.py_create(values.dtype, logical=True)
    del file[name]
    if values.dtype != old.dtype:
        plist.set_fill_value(np.zeros((), values.dtype))
    new = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(values.shape), plist)
    h5py.Dataset(new)[...] = values


def _values(change: Callable[[np.ndarray], np.ndarray]) -> Remake:
    return lambda file, name: write_as(file, name, change(file[name][()]))


def _plainly(**options: Any) -> Remake:
    def remake(file: h5py.File, name: str) -> None:
        values = file[name][()]
        del file[name]
        chunks = {"chunks": values.shape} if options else {}
        file.create_dataset(name, data=values, **options, **chunks)

    return remake


def _without(file: h5py.File, name: str) -> None:
    del file[name]


def _instead(value: Any) -> Remake:
    """Put something else in the place of a data set, made of what it was."""

    def remake(file: h5py.File, name: str) -> None:
        made = value(file[name]) if callable(value) else value
        del file[name]
        file[name] = made

    return remake


def _unwritten(file: h5py.File, name: str) -> None:
    """Give a data set its right shape and no chunk, without a fill value."""
    old = file[name]
    plist = old.id.get_create_plist().copy()
    plist.set_fill_value(np.zeros((), old.dtype))
    kind, space = old.id.get_type(), old.id.get_space().copy()
    del file[name]
    h5py.h5d.create(file.id, name.encode(), kind, space, plist)


_REMAKES: dict[str, Remake] = {
    "missing": _without,
    "group": lambda file, name: (_without(file, name), file.create_group(name)),
    "of signed bytes": _values(lambda values: values.astype(np.int8)),
    "of doubles": _values(lambda values: values.astype(np.float64)),
    "of big endian": _values(
        lambda values: values.astype(values.dtype.newbyteorder(">") if values.dtype.itemsize > 1 else ">u2")
    ),
    "of texts": _instead(lambda old: np.array(["a text"] * len(old), h5py.string_dtype())),
    "of pairs": _instead(lambda old: np.zeros(old.shape, [("a", "<u2"), ("b", "<f8")])),
    "scalar": _instead(7),
    "null": _instead(lambda old: h5py.Empty(old.dtype)),
    "one axis more": _values(lambda values: values[..., None]),
    "one axis less": _values(lambda values: values.reshape(-1) if values.ndim > 1 else values[:1].reshape(())),
    "longer": _values(lambda values: np.concatenate([values, values[-1:]])),
    "shorter": _values(lambda values: values[:-1]),
    "narrower": _values(lambda values: values[..., :-1]),
    "wider": _values(lambda values: np.concatenate([values, values[..., -1:]], -1)),
    "without a row": _values(lambda values: values[:0]),
    "in one piece": _plainly(),
    "by gzip": _plainly(compression="gzip"),
    "without a checksum": lambda file, name: write_as(
        file, name, file[name][()], without=(h5py.h5z.FILTER_FLETCHER32,)
    ),
    "never written": _unwritten,
}

_ATTRIBUTES: dict[str, Any] = {
    "seq_len": 16,
    "codec": "dense",
    "head": 5,
    "num_samples": 0,
    "vocab_size": 299,
    "knots": np.array([1.0, np.nan]),
    "format_version": 1,
    "split": "test",
    "first_sequence": 7,
    "sequences": 99,
}


def _attribute(value: Any) -> Remake:
    return lambda file, name: file.attrs.__setitem__(name, value)


def _extra(file: h5py.File, name: str) -> None:
    file[name] = np.zeros((16, 4), np.uint16)


def _all_gone(file: h5py.File, name: str) -> None:
    for each in list(file):
        del file[each]


def _user_block(place: Place) -> None:
    for path in sorted(place.path("cache/shards").glob("*.h5")):
        content = path.read_bytes()
        path.unlink()
        with h5py.File(path, "w", userblock_size=512):
            pass
        path.write_bytes(path.read_bytes()[:512] + content)
    seal.cache(place.path("cache"))


def _swapped(place: Place) -> None:
    path = place.path("cache/shards/train-00001.h5")
    path.write_bytes(place.path("cache/shards/validation-00000.h5").read_bytes())
    seal.cache(place.path("cache"))


def header_of(path: Path) -> tuple[Header, bytes]:
    """Read the header of a safetensors file, and the bytes behind it."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_safetensors(path: Path, header: Header | bytes, data: bytes, size: int | None = None) -> None:
    """Write a safetensors file; `size` is what it states as the size of its header."""
    spelled = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(spelled) if size is None else size) + spelled + data)


def _first(header: Header) -> Header:
    """Return the entry of the first tensor of more than one axis."""
    return next(entry for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) > 1)


def _entry(**values: Any) -> Callable[[Header], Header]:
    return lambda header: (_first(header).update(values), header)[1]


def _moved(start: int, stop: int) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        old = _first(header)["data_offsets"]
        _first(header)["data_offsets"] = [old[0] + start, old[1] + stop]
        return header

    return change


def _overlapping(header: Header) -> Header:
    first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
    start, (begins, ends) = first["data_offsets"][0], second["data_offsets"]
    second["data_offsets"] = [start, start + ends - begins]
    return header


def _lost(header: Header) -> Header:
    lost = _first(header)
    return {name: entry for name, entry in header.items() if entry is not lost}


def _transposed(header: Header) -> Header:
    """Transpose a tensor whose axes differ: the change would show in no other."""
    shaped = (entry for name, entry in header.items() if name != "__metadata__")
    entry = next(entry for entry in shaped if entry["shape"] != entry["shape"][::-1])
    entry["shape"] = entry["shape"][::-1]
    return header


_HEADERS: dict[str, Callable[[Header], Header | bytes]] = {
    "type that is none": _entry(dtype="F99"),
    "type of half the size": _entry(dtype="F16"),
    "type is a number": _entry(dtype=32),
    "shape of another product": _entry(shape=[7, 7]),
    "negative shape": _entry(shape=[-300, -32]),
    "shape of fractions": _entry(shape=[300.0, 32.0]),
    "shape is a text": _entry(shape="300x32"),
    "huge shape": _entry(shape=[2**40, 2**40]),
    "shape beyond 64 bits": _entry(shape=[2**70, 32]),
    "ten thousand axes": _entry(shape=[1] * 10_000),
    "transposed": _transposed,
    "offsets beyond the end": _moved(10**9, 10**9),
    "offsets that end before they begin": _moved(64, -64),
    "negative offsets": _entry(data_offsets=[-64, -32]),
    "offsets that are shared": _overlapping,
    "offsets of one number": _entry(data_offsets=[0]),
    "tensor missing": _lost,
    "entries are null": lambda header: dict.fromkeys(header),
    "entries are lists": lambda header: {name: [] for name in header},
    "header is a list": lambda header: b"[1, 2, 3]",
    "header is empty": lambda header: b"{}",
    "header is not JSON": lambda header: b"{'a': 1}",
    "header is not UTF-8": lambda header: b"\xff\xfe" * 20,
    "header nested deep": lambda header: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "metadata is a number": lambda header: header | {"__metadata__": 5},
    "metadata nested": lambda header: header | {"__metadata__": {"format": {"a": 1}}},
}
_CHANGES_WEIGHTS = ("metadata is a number",)


@curried
def in_tensors(place: Place, name: str, damage: Callable[[Header], Header | bytes]) -> None:
    """Replace the header of a safetensors file; a run is sealed again."""
    header, data = header_of(place.path(name))
    write_safetensors(place.path(name), damage(header), data)
    if name == CHECKPOINT:
        place.seal_run()


def _placed(places: Callable[[dict[str, Any]], Any]) -> Callable[[Header], Header]:
    """Move the parts of tensors to other places."""

    def change(header: Header) -> Header:
        metadata = header["__metadata__"]
        told = places(json.loads(metadata["DCP_SHARDING_INFO"]))
        metadata["DCP_SHARDING_INFO"] = told if isinstance(told, str) else json.dumps(told)
        return header

    return change


def _offsets(change: Callable[[list[int]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda info: {name: {"saved_offsets": change(each["saved_offsets"])} for name, each in info.items()}


_PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "not JSON": lambda info: "not JSON",
    "a list": lambda info: [1, 2],
    "null": lambda info: None,
    "of nothing": lambda info: {},
    "negative": _offsets(lambda old: [-1] * len(old)),
    "far out": _offsets(lambda old: [2**40] * len(old)),
    "of other axes": _offsets(lambda old: [0] * 9),
    "texts": _offsets(lambda old: "0,0"),
    "of others": lambda info: {f"{name}x": each for name, each in info.items()},
    "nested deep": lambda info: "[" * 50_000 + "]" * 50_000,
}
