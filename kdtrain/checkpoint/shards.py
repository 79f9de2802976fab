"""The tensors of a checkpoint as safetensors files, written and read through torch.distributed.checkpoint (DCP).

DCP plans the writing: each of several processes writes the parts it holds, and a checkpoint is read whole by one
process or resharded for another number of processes. DCP's own formats hold a pickle beside the tensors; these files do
not: each gives the place of its parts in its header, as DCP's safetensors reader expects.

The writer is our own because DCP's builds a whole file in memory and holds the interpreter lock meanwhile (2.5 s for 1
GiB), which would stop the training loop. This one streams and hashes, and releases the lock for both. Without a process
group it does not communicate.
"""

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from kdtrain import faults
from kdtrain.checkpoint.tiers import SUFFIX
from kdtrain.errors import RunError, reason
from kdtrain.ranks import local, with_local

MAX_BYTES = 2**30
"""Most bytes of a file; a larger tensor has its own file."""

Like = Callable[[str, torch.Size], torch.Tensor | None]

_CHUNK = 2**22
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class EntryError(Exception):
    """An entry could not be written: holds its name, the cause, and its `errors.reason`."""

    def __init__(self, entry: str, cause: str, reason: str) -> None:
        super().__init__(entry, cause, reason)  # all three: other processes get a pickle of the error
        self.entry, self.cause, self.reason = entry, cause, reason


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], group: Any = None, *, alone: bool = False
) -> dict[str, tuple[int, str]]:
    """Write `tensors` into `folder`, flushed to the disk; return size in bytes and SHA-256 of each file.

    Only the first process gets these; the others get an empty dict.

    Args:
        folder: exists, and is the same on every process.
        tensors: by name, of any shape and any dtype of safetensors, on any device; also DTensors if a process group is
            initialised. Every process passes the same names.
        group: the process group that exchanges the plans; by default the default group.
        alone: this process writes by itself, whatever group it is in.

    Raises:
        EntryError: names the tensor that could not be written.
    """
    writer = _Writer(folder)
    try:
        alone = alone or not distributed.is_initialized()
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return writer.files


def read(folder: Path, like: Like | None = None) -> dict[str, torch.Tensor]:
    """Read all tensors of `folder`, on the CPU: whole, or the part that this rank needs.

    Args:
        like: a tensor's name and shape -> a DTensor with the sharding to load it with, or None for the whole tensor.

    Raises:
        RunError: a file is not a safetensors file, or its parts do not make up whole tensors.
    """
    try:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        entries = reader.read_metadata().state_dict_metadata
        tensors = {}
        for name, entry in entries.items():
            assert isinstance(entry, TensorStorageMetadata)
            pattern = None if like is None else like(name, entry.size)
            size = entry.size if pattern is None else local(pattern).shape
            own = torch.empty(size, dtype=entry.properties.dtype)
            tensors[name] = own if pattern is None else with_local(pattern, own)
        if tensors:
            dcp.load(tensors, storage_reader=reader, planner=_WholePlanner(), no_dist=True)
    except MemoryError:
        raise
    except (Exception, CheckpointException) as error:  # which is a BaseException
        # A header may hold anything, and DCP raises many kinds of errors.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise _unreadable(folder, cause) from None
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in `folder`, from the headers alone. RunError: `read` would refuse one."""
    try:
        return set(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except MemoryError:
        raise
    except Exception as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, cause: BaseException) -> RunError:
    first = next(iter(str(cause).splitlines()), type(cause).__name__)
    return RunError(f"checkpoint {folder} cannot be read: {first}")


class _WholePlanner(dcp.DefaultLoadPlanner):
    """Refuses to leave a part of a tensor unread, as DCP does silently if a shard is missing."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        found: dict[str, int] = {}
        for item in plan.items:
            found[item.dest_index.fqn] = found.get(item.dest_index.fqn, 0) + item.lengths.numel()
        for name, tensor in self.state_dict.items():
            wanted = local(tensor).numel()
            if found.get(name, 0) != wanted and wanted:
                raise ValueError(f"{name} is not complete")
        return plan


class _Writer(StorageWriter):
    """Writes the part of this process as files `shard-PROCESS-NUMBER.safetensors`; the first process gets `files`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, tuple[int, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, each with the number of its process, counted from 1."""
        return [dataclasses.replace(plan, storage_data=number) for number, plan in enumerate(plans, 1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the entries of this process, one file after the other."""
        results = []
        for number, items in enumerate(_split(plan.items), 1):
            name = f"shard-{plan.storage_data:05d}-{number:05d}{SUFFIX}"
            size, digest = _write_file(self.folder / name, items, planner)
            results += [WriteResult(item.index, _bytes(item), (name, size, digest)) for item in items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collect the files of all processes."""
        self.files = {result.storage_data[0]: result.storage_data[1:] for each in results for result in each}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Return True: any folder is valid."""
        return True


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _split(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield `items` in files: wide types first, so that each tensor lies at a multiple of its item size."""
    files: list[list[WriteItem]] = []
    size = 0
    for item in sorted(items, key=lambda item: (-item.tensor_data.properties.dtype.itemsize, item.index.fqn)):  # type: ignore[union-attr]
        size += _bytes(item)
        if not files or size > MAX_BYTES:
            files.append([])
            size = _bytes(item)
        files[-1].append(item)
    yield from files


def _write_file(path: Path, items: list[WriteItem], planner: SavePlanner) -> tuple[int, str]:
    """Write and flush one safetensors file; return its size in bytes and its SHA-256."""
    digest = hashlib.sha256()
    entry = "header"
    try:
        with open(path, "wb") as file:
            for name, data in _contents(items, planner):
                entry = name
                for start in range(0, len(data), _CHUNK):
                    chunk = data[start : start + _CHUNK]
                    faults.point("checkpoint.write", len(chunk))
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()  # so that the error names the entry that does not fit, not a later one
            size = file.tell()
            os.fsync(file.fileno())
    except OSError as error:
        raise EntryError(f"{entry} in {path.name}", error.strerror or str(error), reason(error)) from None
    return size, digest.hexdigest()


def _contents(items: list[WriteItem], planner: SavePlanner) -> Iterator[tuple[str, memoryview]]:
    """Yield the header, with the place of each part in its tensor under DCP's key, and the bytes of each tensor.

    A copy from a GPU lives only while it is used.
    """
    entries: dict[str, Any] = {}
    places = {}
    offset = 0
    for item in items:
        assert item.tensor_data is not None
        chunk, dtype, name = item.tensor_data.chunk, item.tensor_data.properties.dtype, item.index.fqn
        end = offset + _bytes(item)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(chunk.sizes), "data_offsets": [offset, end]}
        places[name] = {"saved_offsets": list(chunk.offsets)}
        offset = end
    described = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    header = json.dumps({"__metadata__": described, **entries}).encode()
    header += b" " * (-len(header) % 8)
    yield "header", memoryview(struct.pack("<Q", len(header)) + header)
    for item in items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield item.index.fqn, flat.numpy().data
