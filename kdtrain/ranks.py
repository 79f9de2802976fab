"""The ranks of a run, the device of each, and what they exchange.

torchrun names each process in the environment, and `process_group` joins them while a block runs. Tensors are reduced
over the default group (NCCL on GPUs); objects and decisions go over gloo. A single process exchanges nothing.

Work that one rank does for all (`on_main`), or each rank for itself (`raise_on_all_ranks`), such as packing a text, may
take hours, so no timeout fits the work itself. Instead a thread of each rank sends a heartbeat every few seconds while
the rank works, over a group with the timeout of any other exchange. A dead rank closes its connection and is noticed at
once; a rank that is stopped, cut off or never arrives, after the timeout. What it gives up: a rank whose work hangs, in
a read from a stuck file system for example, still sends its heartbeat.
"""

import math
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from kdtrain import faults
from kdtrain.errors import RunError, UsageError, reason
from kdtrain.process import is_main as is_main
from kdtrain.process import local_rank as local_rank
from kdtrain.process import rank as rank
from kdtrain.process import reported as reported
from kdtrain.process import world_size as world_size

T = TypeVar("T")

_BEAT = 10.0
"""Seconds between two heartbeats; at most a quarter of the timeout."""
_control: Any = None
"""The gloo group for objects; None for a single process."""
_timeout = timedelta(0)
"""How long a rank waits for another."""
_stop: tuple[int, float] | None = None
"""A signal that came before the ranks formed a group, and when."""
_STOP_WAIT = 10.0
"""Seconds that rank 0 waits for the others after such a signal."""


def pick_device(name: str) -> torch.device:
    """Return the device called `name`, and make it CUDA's current one; `auto` is this rank's, or the CPU without CUDA.

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
            shared = f"--device '{name}' is one device for {world_size()} ranks; use cuda, one device per rank"
            raise reported(UsageError(shared))
        device = torch.device("cuda", local_rank())
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        many = f", and this is process {local_rank() + 1} of its node" if world_size() > 1 else ""
        raise UsageError(
            f"--device '{name}' is not on this machine; it has {torch.cuda.device_count()} CUDA devices{many}"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def stop_when_joined(number: int) -> bool:
    """Keep the signal `number` until the ranks form a group, so that all stop alike.

    Returns False, and keeps nothing, for a single process, for ranks that are a group already, and for a second signal.
    """
    global _stop
    if world_size() == 1 or _control is not None or _stop is not None:
        return False
    _stop = number, time.monotonic()
    return True


@contextmanager
def process_group(device: torch.device, timeout: float) -> Iterator[None]:
    """Join the processes that torchrun has started into a group while the block runs; a single process has none.

    Args:
        device: the device of this rank.
        timeout: seconds that a rank waits for another in a collective, or for its heartbeat.

    Raises:
        UsageError: the environment names no address at which the ranks meet.
        RunError: another rank ended or did not arrive in time.
        KeyboardInterrupt: on every rank, if one received a signal before (`stop_when_joined`).
    """
    global _control, _timeout
    if world_size() == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    port = os.environ.get("MASTER_PORT", "")
    if not os.environ.get("MASTER_ADDR") or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        found = f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '')} and MASTER_PORT={port}"
        raise reported(UsageError(f"{found} in the environment name no host and port (1 to 65535); use torchrun"))
    faults.point("ranks.before-group")
    try:
        _timeout = timedelta(seconds=timeout)
        try:
            store, own, world = next(dist.rendezvous("env://", timeout=_timeout))
        except ValueError as error:
            raise UsageError(f"the environment does not name where the ranks meet ({error}); use torchrun") from error
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun keeps one store for all attempts (`--max-restarts`), in which gloo would find the addresses of
            # dead ranks
            store = dist.PrefixStore(_name_of_attempt(store, own, world, _timeout), store)
        dist.init_process_group(backend, store=store, rank=own, world_size=world, timeout=_timeout)
        _control = control_group()
        if number := all_reduce_max(_stop[0] if _stop else 0):
            raise KeyboardInterrupt(signal.Signals(number).name)
        yield
    except RuntimeError as error:
        if (gone := lost_rank(error)) is None:
            raise
        raise gone from error
    finally:
        _control = None
    dist.destroy_process_group()


def _name_of_attempt(store: dist.Store, number: int, world: int, timeout: timedelta) -> str:
    """Return a random name that rank 0 gives to each rank that asks; ignore stale requests of an earlier attempt.

    A count of attempts would not do: each node counts its own.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
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
        if missing and _stop is not None and time.monotonic() > _stop[1] + _STOP_WAIT:
            raise KeyboardInterrupt(signal.Signals(_stop[0]).name)
        if missing and time.monotonic() > deadline:
            raise RunError(f"rank 0 waited {timeout.total_seconds():g} s for rank {min(missing)} (--rank-timeout)")
    return own


@contextmanager
def _heartbeat(group: Any) -> Iterator[None]:
    """Run a block without a time limit; all ranks leave it together, when the last one is done.

    An error inside leaves the block after the exchange in flight; this rank then sends no more heartbeats.

    group: gloo, over all ranks; all ranks enter the block with it, and none uses it inside.

    Raises:
        RuntimeError: torch's; a rank ended, or was silent for the group's timeout.
    """
    every = min(_BEAT, _timeout.total_seconds() / 4)
    done = threading.Event()
    left = threading.Event()
    errors = []

    def beat() -> None:
        try:
            while True:
                working = not done.wait(every)
                if left.is_set() or not all_reduce_max(working, group):
                    return
        except Exception as error:  # raised again in the waiting thread
            errors.append(error)

    # a daemon, so that a second signal ends a process that waits for the others
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
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


def control_group() -> Any:
    """Make a gloo group over all ranks, for the objects of one thread; return None for a single process.

    Every rank must call it, in the same order as its other collectives.
    """
    return dist.new_group(backend="gloo", timeout=_timeout) if _initialized() else None


def device_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Make a mesh of all ranks, whose groups wait for a rank as long as all others do. Every rank must call it."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        limit_wait(group)
    return mesh


def limit_wait(group: Any) -> Any:
    """Return a group of a mesh, made to wait as long as the group of all ranks: torch has it wait half an hour."""
    if _timeout:
        _set_pg_timeout(_timeout, group)  # torch has no public way
    return group


def on_main(action: Callable[[], T], group: Any = None) -> T:
    """Call `action` on rank 0; every rank returns its result, or raises its `UsageError` or `RunError`.

    Args:
        action: may take hours, but must not communicate with other ranks.
        group: gloo, over all ranks; by default the main thread's.
    """
    result: list[Any] = [None]
    with raise_on_all_ranks(group):
        if is_main() or not _many():
            result = [action()]
    if _many():
        dist.broadcast_object_list(result, 0, group or _control)
    return result[0]


def all_gather_object(own: T, group: Any = None) -> list[T]:
    """Return the objects of all ranks, by rank. Every rank must call it."""
    if not _many():
        return [own]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, own, group or _control)
    return found


@contextmanager
def raise_on_all_ranks(group: Any = None) -> Iterator[None]:
    """Run a block on each rank for itself, without collectives; raise an error of one rank on all.

    group: gloo, over all ranks; by default the main thread's.

    Raises:
        UsageError, RunError: the error of the first rank that has one.
    """
    if not _many():
        yield
        return
    own: Exception | None = None
    with _heartbeat(group or _control):
        try:
            yield
        except (UsageError, RunError, OSError) as error:
            own = error
    found = all_gather_object(own and _for_others(own), group)
    first = next((number for number, each in enumerate(found) if each is not None), None)
    if first is not None:
        raise (own if first == rank() else found[first])  # type: ignore[misc]


def all_reduce_max(number: int, group: Any = None) -> int:
    """Return the largest of the ranks' numbers. Every rank must call it."""
    if not _many():
        return number
    return int(agreed_max(torch.tensor(int(number)), group or _control))


def agreed_max(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the largest value of `tensor` over all ranks, or the ranks of `group`, entry by entry.

    For a single process `tensor` itself. Does not block the host. Every rank must call it, in the same order as its
    other collectives.
    """
    return _all_reduce(tensor, dist.ReduceOp.MAX, group)


def all_reduce_sum(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the sum of `tensor` over ranks, entry by entry; otherwise as `agreed_max`."""
    return _all_reduce(tensor, dist.ReduceOp.SUM, group)


def _all_reduce(tensor: torch.Tensor, operation: Any, group: Any) -> torch.Tensor:
    if not _initialized():
        return tensor
    result = tensor.clone()
    dist.all_reduce(result, operation, group)
    return result


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of `tensor` on this rank, sharing its memory; the whole if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(like: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded like `like`, whose part on this rank is `own`, on any device."""
    return DTensor(own, like._spec, requires_grad=False) if isinstance(like, DTensor) else own


def copies(tensor: torch.Tensor) -> int:
    """Return how many copies of a sharded tensor the ranks hold; 0 if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0
    cut = (
        size for size, each in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if not each.is_replicate()
    )
    return world_size() // math.prod(cut)


def lost_rank(error: BaseException | None) -> RunError | None:
    """Return the error to raise if a collective failed with `error` because a rank ended; None for any other error."""
    if not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return None
    if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
        return None
    first = " ".join(str(error).splitlines()[0].split()) if str(error) else type(error).__name__
    cause = re.sub(r"^\[[^]]*\]\s*", "", first).split(". ")[0][:200]
    found = RunError(
        f"rank {rank()} lost another rank, whose own message names the cause ({cause}); "
        "published checkpoints are intact, and the same command resumes the run"
    )
    found.not_the_cause = True  # type: ignore[attr-defined]
    return found


def _many() -> bool:
    return world_size() > 1 and _control is not None


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _for_others(error: Exception) -> Exception:
    """Return `error` of this rank as the other ranks raise it; this rank prints it."""
    if isinstance(error, UsageError):  # some of its subclasses cannot be pickled
        copy: Exception = UsageError(str(error))
    else:
        text = f"{error.filename or ''}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        copy = RunError(text, reason=reason(error))
    copy.reported = True  # type: ignore[attr-defined]
    return copy


_LOST = re.compile(r"gloo|nccl|connection (?:closed|reset|refused)|timed out|by peer", re.IGNORECASE)
"""What torch's messages about a lost rank contain; they share no type."""


def memory_mb(device: torch.device) -> float:
    """Return the MiB of memory of this process: reserved on a GPU (cached too), resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 2**20
    return resident_mb()


def resident_mb() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory in MiB: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # not ru_maxrss, which survives an exec and may be the peak of the parent process
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def free_everywhere(device: torch.device, given: float | None) -> float | None:
    """Return the least free memory of any rank, in bytes, so that all make the same plan; every rank must call it.

    given: GiB to plan with instead.
    """
    known = [each for each in all_gather_object(free_memory(device, given)) if each is not None]
    return min(known, default=None)


def free_memory(device: torch.device, given: float | None) -> float | None:
    """Return the bytes that are free for a rank; None if unknown.

    given: GiB to plan with instead. The ranks of a node share the memory that Linux can give without swapping, or that
    the control group has left, whichever is less.
    """
    if given is not None:
        return given * 2**30
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = []
    group = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            free.append(max(float(limit) - float(used), 0.0))
    except OSError:
        pass
    return min(free) / int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if free else None
