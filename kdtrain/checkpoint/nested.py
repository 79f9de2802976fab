"""Checkpoints of any training: a nested state of tensors and plain values, published whole and verified before use.

`CheckpointStore` is `Store` for your own training loop. A state is nested as `state_dict()` returns it: dicts, lists
and tuples of tensors, numbers, strings, booleans and None. Tensors go into safetensors files, everything else into
JSON; nothing is pickled. A tensor is named by its path in the state, `model/layers.0.weight`: keys are joined by `/`,
and what would make two paths equal or a name unreadable is escaped (`_escaped`). Tensors that share memory are loaded
as separate tensors.

In a group of ranks one of them saves, with whole tensors; all may load.

What it gives up: keys are strings or integers, dicts are nested at most 20 deep, everything but the tensors takes at
most 32 MiB and a million entries, and a state is loaded whole, on the CPU.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.sealed import read_state
from kdtrain.checkpoint.shards import DTYPES
from kdtrain.checkpoint.store import Store, load
from kdtrain.checkpoint.tiers import Keep
from kdtrain.errors import RunError, UsageError, as_path, as_whole

_TENSOR, _MAPPING, _TUPLE = "tensor", "mapping", "tuple"
T = TypeVar("T")


class CheckpointStore:
    """Checkpoints in a folder, with links to the `latest` and the `best` one; old ones are pruned by tier.

    Args:
        folder: created by the first save.
        keep: how many checkpoints of each tier are kept.

    >>> import tempfile, torch
    >>> store = CheckpointStore(tempfile.mkdtemp())
    >>> for step, loss in ((1, 2.0), (2, 1.5), (3, 1.7)):
    ...     path = store.save(step, {"model": {"w": torch.full((2,), float(step))}, "step": step}, {"loss": loss})
    >>> path.name
    'step-00000003'
    >>> store.load("best")
    {'model': {'w': tensor([2., 2.])}, 'step': 2}
    """

    def __init__(self, folder: Path | str, keep: Keep | None = None) -> None:
        self._store = Store(as_path(folder, "folder"), keep or Keep())

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        name: str | None = None,
        protected: Collection[str] = (),
    ) -> Path:
        """Publish `state` under the name of its step, or as `name`, then prune.

        metrics: numbers stored with it; the state with the lowest `loss` is the best one. protected: names that are not
        pruned whatever their tier, such as a `PrecisionController.buffer_names()`.

        Raises:
            UsageError: the state holds something other than tensors and plain values, or is too large or nested too
                deep to be loaded again; or the name is not one of a checkpoint, such as one with a slash.
            RunError: the disk is full or cannot be written. Earlier checkpoints are intact.
        """
        tensors: dict[str, torch.Tensor] = {}
        name = name or tiers.name_of("rolling", as_whole(step, "step"))
        linked = self._store.linked("best")
        best = None
        if linked is not None and self._store.problem(linked) is None:
            best = read_state(self._store.path(linked)).get("metrics", {}).get("loss")
            best = None if best is None else float(best)
        try:
            tree = {"tree": _flatten(state, (), tensors), "metrics": dict(metrics or {})}
        except RecursionError:
            raise UsageError("the state is nested too deep: at most 20 dicts inside each other can be saved") from None
        path = _alone(lambda: self._store.save(name, step, tensors, tree, alone=True))
        loss = (metrics or {}).get("loss")
        if loss is not None and not math.isnan(loss) and (best is None or loss < best):
            self._store.link("best", name)
        self._store.prune(protected)
        return path

    def load(self, wanted: str = "latest") -> Any:
        """Load the state of a checkpoint: `latest` (the newest that verifies), `best`, or a name.

        Raises:
            UsageError: no checkpoint has that name.
            RunError: it is damaged.
        """
        checkpoint = _alone(lambda: load(self._store.choose(wanted, loads=True)))
        try:
            return _unflatten(checkpoint.state["tree"], checkpoint.tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"checkpoint {checkpoint.name} was not written by CheckpointStore: {error!r}") from error

    def names(self) -> list[str]:
        """Return the names of published checkpoints, oldest first, whether they verify or not."""
        return self._store.names()


def _alone(action: Callable[[], T]) -> T:
    """Call `action` without PyTorch's warning that this process is in no group: here none is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        return action()


def _flatten(value: Any, path: tuple[Any, ...], tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as JSON; an object with one key stands for a tensor, a dict or a tuple."""
    where = f"the state's entry '{'.'.join(map(str, path))}'"
    if isinstance(value, DTensor):
        raise UsageError(f"{where} is a shard of a tensor; gather the state first")
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES:
            raise UsageError(f"{where} has the dtype {value.dtype}, which safetensors files do not have; convert it")
        name = "/".join(map(_escaped, path))
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str | int)]:
            raise UsageError(f"the state's key {wrong[0]!r} is not a string or an integer")
        return {_MAPPING: [[key, _flatten(each, (*path, key), tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        items = [_flatten(each, (*path, number), tensors) for number, each in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"{where} is a {type(value).__name__}; only tensors and plain values can be saved")


def _escaped(key: str | int) -> str:
    """Return a key as a part of a tensor's name: different for different keys, also for 1 and "1", never ambiguous.

    An integer begins with #. Of a string, /, % and #, and what the header of a safetensors file cannot hold, become %
    and four digits for each character; an empty one becomes %.
    """
    if isinstance(key, int):
        return f"#{int(key)}"
    odd = r"[%/#\x00-\x1f\x7f\ud800-\udfff]|^__(?=metadata__$)|^$"
    return re.sub(odd, lambda found: "".join(f"%{ord(each):04x}" for each in found[0]) or "%", key)


def _unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == _TENSOR:
        return tensors[inside]
    if kind == _TUPLE:
        return tuple(_unflatten(each, tensors) for each in inside)
    return {key: _unflatten(each, tensors) for key, each in inside}
