"""Collecting tensor statistics: the effect of a number format on the operands of linear layers.

Before it trains, a step that collects runs its first micro-batch once more, eagerly and with hooks on the layers;
compiled graphs never see a hook, so other steps are as fast as without collecting. For each layer's weight, input
("activation") and output gradient it records the largest magnitude, the relative RMS error of rounding to the run's
format, the share of elements that the format clamps, the share that it turns into zero, and a histogram of magnitudes
by powers of two. Gradients are those of the eager pass: of the loss, before any clipping.

Each collection replaces the file as a whole, so that a killed run leaves one that opens; a file of another layout is
moved aside. The layout:
`/LAYER/{weight,activation,gradient}/{step,mode,amax,error,saturated,flushed,zeros,histogram}`, one row a collection;
`/exponents` names the histogram's columns: e counts magnitudes in [2^e, 2^(e+1)), and the two ends all beyond them.
On request `raw/STEP` beside them holds the numbers of the operand [rows, columns] as float32: all of them, or where
these are more than `RAW_ELEMENTS`, as many whole rows as fit, evenly spaced (row i * rows // kept for i < kept; of a
row that alone is longer, its beginning). Its attribute `shape` is that of the whole operand. Once the file has
`RAW_BYTES`, no further raw numbers are written, which is logged; statistics are.
"""

import fnmatch
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kdtrain.errors import UsageError, log
from kdtrain.objective.batch import Batch
from kdtrain.outputs import OutFolder
from kdtrain.training.observers import Observer, ObserverRequest, StepView

MOST_BYTES = 2**32
"""Of the file; it is copied at each collection."""
RAW_ELEMENTS = 2**16
"""Most raw numbers of one operand at one step."""
RAW_BYTES = 2**29
"""Size of the file from which no more raw numbers are written."""
EXPONENTS = range(-40, 21)
"""Columns of the histograms."""
_KINDS = {"step": np.dtype("i8"), "mode": h5py.string_dtype(), "histogram": np.dtype("i8")}
_KINDS |= dict.fromkeys(("amax", "error", "saturated", "flushed", "zeros"), np.dtype("f8"))
"""The data sets of an operand, and their types."""


class Collector(Observer):
    """An observer that collects from the layers whose names match, every so many steps; rank 0 writes.

    Args:
        path: the HDF5 file; rows of an earlier part of the run are kept.
        options: the `CollectConfig`, what to collect and when.
        run: the run; errors are those of its format.

    Raises:
        UsageError: no linear layer has such a name.
    """

    def __init__(self, path: Path, options: Any, run: ObserverRequest) -> None:
        linear = {name: each for name, each in run.model.named_modules() if isinstance(each, nn.Linear | Conv1D)}
        pattern = options.collect_tensors or ""
        self.layers = {name: each for name, each in linear.items() if fnmatch.fnmatchcase(name, pattern)}
        if not self.layers:
            some = ", ".join(list(linear)[:3])
            raise UsageError(f"--collect-tensors '{pattern}' matches no linear layer; there are {some}, ...")
        self.path = path
        self.out = OutFolder(path.parent)
        self.options = options
        self.recipe = run.recipe
        self.dtype = run.dtype
        self.main = run.main
        self._logged: set[str] = set()

    def before_forward(self, step: StepView, batch: Batch) -> None:
        """Collect from the first micro-batch of a step, if it is due."""
        if step.micro_batch == 1 and step.number % self.options.collect_every == 0:
            with _watched(self.layers) as seen:
                step.run_eagerly(batch)
            if self.main:
                self.write(step.number, step.student.present_mode, seen)

    def write(self, step: int, mode: str, seen: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add the operands of each layer at `step`."""
        cut: list[str] = []
        with self._replacing() as file:
            if "exponents" not in file:
                file["exponents"] = np.array(EXPONENTS)
            for group, kind, tensor in (
                (file.require_group(f"{layer}/{kind}"), kind, tensor)
                for layer, tensors in seen.items()
                for kind, tensor in tensors.items()
            ):
                values = statistics(tensor, kind, self.recipe, self.dtype)
                for name, value in {"step": step, "mode": mode, **values}.items():
                    _append(group, name, value)
                if self.options.collect_raw and file.id.get_filesize() < RAW_BYTES:
                    cut += [group.name] if _write_raw(group, step, tensor) else []
                elif self.options.collect_raw:
                    size = f"{RAW_BYTES / 2**20:,.0f} MiB"
                    self._warn_once(f"has {size}: from step {step} on no raw numbers are added, only statistics")
        if cut:
            more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
            limit = f"holds {RAW_ELEMENTS:,} raw numbers at most of each operand"
            self._warn_once(f"{limit}, in whole rows that are evenly spaced: {cut[0]}{more} are cut")

    def _warn_once(self, text: str) -> None:
        kind = text.partition(" ")[0]
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s %s", self.path, text)

    def rewound(self, step: int) -> None:
        """Drop the rows of later steps, which are collected again."""
        if not self.main or not self.path.exists():
            return
        with self._replacing() as file:
            for group in _groups(file):
                kept = int(np.searchsorted(group["step"][:], step, side="right"))
                for dataset in group.values():
                    if isinstance(dataset, h5py.Dataset):
                        dataset.resize(kept, axis=0)
                for name in [name for name in group.get("raw", ()) if int(name) > step]:
                    del group["raw"][name]

    @contextmanager
    def _replacing(self) -> Iterator[h5py.File]:
        if self.path.exists() and not _is_ours(self.path):
            aside = self.out.set_aside(self.path.name, "old")
            log.warning("%s has another layout than kdtrain writes, and was moved to %s", self.path, aside)
        with self.out.published(self.path.name, "precision.collect") as hidden:
            if self.path.exists():
                shutil.copyfile(self.path, hidden)
            with h5py.File(hidden, "a") as file:
                yield file


def statistics(values: Tensor, kind: str, recipe: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Measure the effect of a format on one operand [rows, columns] of a product that sums over its columns.

    kind: weight, activation or gradient. Errors are those of `recipe`, or of `dtype` without a recipe.
    """
    exact = values.detach().float()
    magnitude = exact.abs()
    kept = exact.to(dtype).float()
    reach = torch.finfo(dtype).max
    if recipe is not None:  # by the choice of scales no element of fp8 is clamped
        kept, reach = recipe.rounded(exact, kind)
    power = float(exact.double().square().mean())
    columns = torch.log2(magnitude[magnitude > 0]).floor().clamp(EXPONENTS[0], EXPONENTS[-1])
    return {
        "amax": float(magnitude.max()),
        "error": (float((kept - exact).double().square().mean()) / power) ** 0.5 if power > 0 else 0.0,
        "saturated": float((magnitude > reach).float().mean()),
        "flushed": float(((kept == 0) & (magnitude > 0)).float().mean()),
        "zeros": float((magnitude == 0).float().mean()),
        "histogram": torch.histc(columns, len(EXPONENTS), EXPONENTS[0], EXPONENTS[-1] + 1).long().cpu().numpy(),
    }


@contextmanager
def _watched(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Record the operands of `layers` while the block runs: forwards and backwards fill in the dictionary."""
    seen: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    names = {layer: name for name, layer in layers.items()}
    sharded = {each for each in names if hasattr(each.get_parameter("weight"), "full_tensor")}

    def forward(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight = module.get_parameter("weight").detach()
        weight = weight.clone() if module in sharded else weight  # FSDP2 frees the gathered weight after the forward
        kept = {"weight": weight.T if isinstance(module, Conv1D) else weight, "activation": _rows(inputs[0])}
        seen[names[module]] |= kept

    def backward(module: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        seen[names[module]]["gradient"] = _rows(outputs[0])

    handles = [each.register_forward_pre_hook(forward) for each in names]
    handles += [each.register_full_backward_hook(backward) for each in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rows(tensor: Tensor) -> Tensor:
    return rearrange(tensor.detach(), "... d -> (...) d")


def _append(group: h5py.Group, name: str, value: Any) -> None:
    if name not in group:
        shape = np.shape(value)
        group.create_dataset(name, (0, *shape), _KINDS[name], maxshape=(None, *shape), chunks=(64, *shape))
    group[name].resize(len(group[name]) + 1, axis=0)
    group[name][-1] = value


def _write_raw(group: h5py.Group, step: int, operand: Tensor) -> bool:
    """Store an operand [rows, columns] of a step, within the bounds; return True if it is cut."""
    rows, columns = operand.shape
    kept = min(rows, max(1, RAW_ELEMENTS // columns))
    picked = torch.arange(kept, device=operand.device) * rows // kept
    numbers = operand.detach()[picked, :RAW_ELEMENTS].float().cpu().numpy()
    group.create_dataset(f"raw/{step:08d}", data=numbers, dtype="f4").attrs["shape"] = (rows, columns)
    return bool(numbers.size < operand.numel())


def _groups(file: h5py.File) -> list[h5py.Group]:
    """List the groups of the file, one for each operand of each layer."""
    return [group for name, layer in file.items() if name != "exponents" for group in layer.values()]


def _is_ours(path: Path) -> bool:
    """Return True if a file has this module's layout, so that rows can be appended: a run may come from elsewhere."""
    size = path.stat().st_size
    if not path.is_file() or size > MOST_BYTES:
        return False
    try:
        with h5py.File(path) as file:
            linked = file.visititems_links(lambda name, link: None if isinstance(link, h5py.HardLink) else name)
            return not linked and all(_has_rows(group, size) for group in _groups(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # the errors of HDF5 and h5py
        return False


def _has_rows(group: h5py.Group, size: int) -> bool:
    rows = len(group["step"])
    raw = group.get("raw", {}).items()
    if group.keys() - {"raw"} != {*_KINDS} or rows * 8 > size:
        return False
    for name, kind in _KINDS.items():
        data = group[name]
        inner = (len(EXPONENTS),) if name == "histogram" else ()
        form = data.shape, data.maxshape, data.chunks, data.id.get_create_plist().get_nfilters()
        if form != ((rows, *inner), (None, *inner), (64, *inner), 0) or data.dtype != kind:
            return False
        if h5py.check_string_dtype(data.dtype) != h5py.check_string_dtype(kind):
            return False
    return all(
        name.isdecimal() and (data.ndim, data.dtype, data.external, data.is_virtual) == (2, "f4", None, False)
        for name, data in raw
    )
