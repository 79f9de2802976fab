"""Who the ranks of a run are, which device each computes on, and what they agree on.

torchrun says in the environment who a process is. `ranks` makes them a group for as long as a block runs. Tensors
are reduced over the group of the device's own kind; words and decisions go over others of gloo. What a rank does for
itself or for all (`on_main`, `together`) may take as long as it must, while it gives signs of life (`waiting`). One
process without torchrun is a world of one, and pays nothing.

Waiting for ranks that work for as long as they must, and not for ranks that are silent.

What one rank does for all, packing a text say, may take hours, so that no limit fits the work itself. Instead a thread
of each rank says every few seconds whether the rank is still at work. The words go over a group with the timeout of any
other exchange: who is dead closes its connection and is noticed at once, who is stopped, cut off, or never comes, after
the timeout. What it gives up: a rank whose threads live while its work stands still, in a read from a file system that
does not answer say, counts as one at work.
"""

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kdtrain.errors import RunError, UsageError, reason


@contextmanager
def heartbeat(group: Any, every: float) -> Iterator[None]:
    """A block that takes each rank as long as it must; all leave it together, when the last one is at its end.

    An error inside leaves it as soon as the turn in flight is over; the others then hear nothing more of this rank.

    Args:
        group: of gloo, over all ranks, which all of them enter the block with and none uses inside.
        every: seconds between two signs of life, well under the group's timeout.

    Raises:
        RuntimeError: torch's; a rank is gone, or was silent for the group's timeout.
    """
    done, left, errors = threading.Event(), threading.Event(), []

    def tell() -> None:
        try:
            while True:
                working = not done.wait(every)
                if left.is_set() or not _any(working, group):
                    return
        except Exception as error:  # it is raised again in the thread that waits
            errors.append(error)

    # a daemon, so that a second signal ends a process that waits for the others' turns
    thread = threading.Thread(target=tell, name="at-work", daemon=True)
    thread.start()
    try:
        yield
        done.set()
        thread.join()
    except BaseException:
        left.set()
        done.set()
        thread.join()  # a process that ends with an exchange in flight aborts
        raise
    if errors:
        raise errors[0]


def _any(own: bool, group: Any) -> bool:
    """Whether any rank says yes."""
    said = torch.tensor(int(own))
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    return bool(said)


T = TypeVar("T")
E = TypeVar("E", bound=Exception)

_BEAT = 10.0
"""Seconds between two signs of life of a rank at work; a quarter of a shorter timeout."""
_words: Any = None
"""The group that words go over, while there are several ranks."""
_timeout = timedelta(0)
"""How long a rank may be silent."""


def rank() -> int:
    """The number of this process among all, from 0."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """How many processes the run has."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """The number of this process among those of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def is_main() -> bool:
    """Whether this is rank 0, which alone prints, and writes what there is one of."""
    return rank() == 0


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is this rank's CUDA device, the first one for a process alone, else the CPU.

    Raises:
        UsageError: the name is not a device, this machine does not have it, or several ranks would share it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise reported(UsageError(f"--device '{name}' is unknown; use auto, cpu, cuda or cuda:N")) from None
    if device.type not in ("cpu", "cuda"):
        raise reported(UsageError(f"--device '{name}' is not supported; use auto, cpu, cuda or cuda:N"))
    if device.type == "cuda" and world_size() > 1:
        if device.index is not None:
            shared = f"--device '{name}' is one device for {world_size()} ranks; use cuda, and each has its own"
            raise reported(UsageError(shared))
        device = torch.device("cuda", local_rank())
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        many = f", and this is process {local_rank() + 1} of its node" if world_size() > 1 else ""
        raise UsageError(
            f"--device '{name}' is not on this machine; it has {torch.cuda.device_count()} CUDA devices{many}"
        )
    return device


def refuse_many_processes() -> None:
    """Refuse to be one of several processes, for what one process does.

    Raises:
        UsageError: torchrun or another launcher says that there are more.
    """
    if world_size() > 1:
        only = "started as one of several processes, and only one is supported; leave torchrun out"
        raise reported(UsageError(only))


@contextmanager
def process_group(device: torch.device, timeout: float) -> Iterator[None]:
    """Let the processes that torchrun has started be one group while the block runs; nothing for a process alone.

    Args:
        device: what this rank computes on.
        timeout: seconds that a rank waits for another one in a collective, or for its sign of life.

    Raises:
        UsageError: the environment does not say where the ranks meet.
        RunError: another rank is gone, or did not come in time.
    """
    global _words, _timeout
    if world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    port = os.environ.get("MASTER_PORT", "")
    if not os.environ.get("MASTER_ADDR") or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        found = f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '')} and MASTER_PORT={port}"
        raise reported(UsageError(f"{found} in the environment name no host and port (1 to 65535); use torchrun"))
    try:
        _timeout = timedelta(seconds=timeout)
        store, number, world = _own_store(_timeout)
        dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=_timeout)
        _words = control_group()
        yield
    except RuntimeError as error:
        if (gone := lost_rank(error)) is None:
            raise
        raise gone from error
    finally:
        _words = None
    dist.destroy_process_group()


def _own_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Where the ranks of this try find each other, the number of this one, and how many there are.

    torchrun keeps one store for all tries (`--max-restarts`), in which gloo would look up the addresses of the dead.
    """
    try:
        store, number, world = next(dist.rendezvous("env://", timeout=timeout))
    except ValueError as error:
        raise UsageError(f"the environment does not say where the ranks meet ({error}); use torchrun") from error
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return store, number, world
    return dist.PrefixStore(_name_of_try(store, number, world, timeout), store), number, world


def _name_of_try(store: dist.Store, number: int, world: int, timeout: timedelta) -> str:
    """A name that rank 0 makes up, told to each rank that asks; what ranks of an earlier try asked hurts nobody.

    Nodes count tries each for themselves, so that a number would not do.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if number:
        store.set(f"kdtrain/ask/{number}", own)
        store.wait([f"kdtrain/answer/{own}"], timeout)
        name = store.get(f"kdtrain/answer/{own}").decode()
        store.set(f"kdtrain/heard/{name}/{number}", "yes")
        return name
    missing = set(range(1, world))
    while missing:
        for each in missing:
            if store.check([f"kdtrain/ask/{each}"]):
                store.set(f"kdtrain/answer/{store.get(f'kdtrain/ask/{each}').decode()}", own)
        time.sleep(0.02)
        missing = {each for each in missing if not store.check([f"kdtrain/heard/{own}/{each}"])}
        if missing and time.monotonic() > deadline:
            raise RunError(f"rank 0 waited {timeout.total_seconds():g} s for rank {min(missing)} (--rank-timeout)")
    return own


def control_group() -> Any:
    """Another group for words over all ranks, for a thread of its own; None for a process alone.

    Every rank must call it, in the same order as its other collectives.
    """
    return dist.new_group(backend="gloo", timeout=_timeout) if _initialized() else None


def on_main(action: Callable[[], T], words: Any = None) -> T:
    """What `action` gives on rank 0, which alone does it, on every rank; a `UsageError` or `RunError` likewise.

    Args:
        action: gives something that JSON can hold; it may take hours, but must not exchange anything between ranks.
        words: the group; the main thread's own when None.
    """
    if not _many():
        return action()
    group = words or _words
    own: dict[str, Any] = {}
    failed: Exception | None = None
    with _at_work(group):
        try:
            own = {"result": action()} if is_main() else {}
        except (UsageError, RunError, OSError) as error:
            own, failed = _said(error), error
    said = _broadcast(json.dumps(own) if is_main() else None, group)
    if failed is not None:
        raise failed
    return own["result"] if is_main() else _understood(json.loads(said))


def all_gather_object(word: T, words: Any = None) -> list[T]:
    """What each rank says, by rank: something that JSON can hold. Every rank must call it."""
    if not _many():
        return [word]
    said = json.dumps(word).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    group = words or _words
    dist.all_gather(sizes, torch.tensor([len(said)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.tensor(list(said.ljust(longest)), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]


@contextmanager
def raise_on_all_ranks(words: Any = None) -> Iterator[None]:
    """A block that each rank runs for itself, without collectives: an error on one is raised on all.

    Raises:
        UsageError, RunError: with the rank that it is of.
    """
    if not _many():
        yield
        return
    own: Exception | None = None
    with _at_work(words or _words):
        try:
            yield
        except (UsageError, RunError, OSError) as error:
            own = error
    said = all_gather_object(None if own is None else _said(own), words)
    failed = [number for number, each in enumerate(said) if each is not None]
    if not failed:
        return
    if own is not None and rank() == failed[0]:
        raise own
    _understood(said[failed[0]] or {})


def all_reduce_max(number: int) -> int:
    """The largest of the numbers that the ranks say. Every rank must call it."""
    if not _many():
        return number
    said = torch.tensor(number)
    dist.all_reduce(said, dist.ReduceOp.MAX, group=_words)
    return int(said)


def agreed_max(tensor: torch.Tensor) -> torch.Tensor:
    """The largest value of `tensor` over all ranks, entry by entry; the tensor itself where there is one process.

    Nothing waits for it on the host. Every rank must call it, in the same order as its other collectives.
    """
    if not _initialized():
        return tensor
    agreed = tensor.clone()
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, entry by entry, as `agreed_max` gives the largest."""
    if not _initialized():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM)
    return total


def reported(error: E) -> E:
    """`error`, which every rank raises for the same reason, as one that rank 0 alone says."""
    error.told = not is_main()  # type: ignore[attr-defined]
    return error


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that lies here, sharing its memory; all of it where it is not cut up over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(like: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A tensor cut up like `like`, whose part here is `own`, on whatever device that lies."""
    return DTensor(own, like._spec, requires_grad=False) if isinstance(like, DTensor) else own


def lost_rank(error: BaseException | None) -> RunError | None:
    """What to say where `error` is that of a collective without one of its ranks; None where it is anything else."""
    if not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return None
    if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
        return None
    found = RunError(
        f"rank {rank()} lost another rank, whose own message says why ({_first_line(error)}); "
        "published checkpoints are intact, and the same command goes on"
    )
    found.not_the_cause = True  # type: ignore[attr-defined]
    return found


def was_told(error: BaseException) -> bool:
    """Whether an error is another rank's, which says it itself."""
    return bool(getattr(error, "told", False))


def _at_work(group: Any) -> AbstractContextManager[None]:
    return heartbeat(group, min(_BEAT, _timeout.total_seconds() / 4))


def _many() -> bool:
    return world_size() > 1 and _words is not None


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _broadcast(text: str | None, group: Any) -> str:
    content = b"" if text is None else text.encode()
    size = torch.tensor([len(content)])
    dist.broadcast(size, 0, group=group)
    body = torch.tensor(list(content), dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(body, 0, group=group)
    return bytes(body.tolist()).decode()


def _said(error: Exception) -> dict[str, Any]:
    text = f"{error.filename or ''}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
    return {"usage": isinstance(error, UsageError), "error": text, "reason": reason(error)}


def _understood(said: dict[str, Any]) -> Any:
    if "error" not in said:
        return said["result"]
    error = UsageError(said["error"]) if said["usage"] else RunError(said["error"], reason=said["reason"])
    error.told = True  # type: ignore[union-attr]
    raise error


_LOST = re.compile(r"gloo|nccl|connection (?:closed|reset|refused)|timed out|by peer", re.IGNORECASE)
"""torch has no one kind of error for it."""


def _first_line(error: BaseException) -> str:
    first = " ".join(str(error).splitlines()[0].split()) if str(error) else type(error).__name__
    return re.sub(r"^\[[^]]*\]\s*", "", first).split(". ")[0][:200]


def memory_mb(device: torch.device) -> float:
    """What this process holds now in MiB: of a GPU's memory (cached blocks too), or resident on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 2**20
    return resident_mb()


def resident_mb() -> float:
    """What this process holds of the machine's memory now, in MiB; 0 if unknown."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages.exists() else 0.0


def peak_memory_mb(device: torch.device) -> float:
    """The high-water mark in MiB: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        # not ru_maxrss: that one survives an exec, so that it may be the peak of the process we were started by
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 1024  # type: ignore[index]
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS and in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
