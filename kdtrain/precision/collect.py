"""Numbers about tensors, for research into number formats: what a format does to the operands of chosen layers.

A step that collects runs one of its micro-batches once more, eagerly and with hooks on the layers, before it trains;
compiled graphs never see a hook, so that steps that do not collect are as fast as without this part. Of each layer's
weight, input ("activation") and output gradient it keeps the largest magnitude, the relative RMS error of being kept
in the run's format, the share of elements that the format clamps, the share that it turns into zero, and a histogram
of magnitudes by powers of two. Gradients are those of the eager pass: of the loss, before any clipping.

The file is replaced as a whole at each collection, so that a killed run leaves one that opens; one of another layout
is moved aside. Its layout:
`/LAYER/{weight,activation,gradient}/{step,mode,amax,error,saturated,flushed,zeros,histogram}`, one row a collection;
`/exponents` names the histogram's columns: e counts magnitudes in [2^e, 2^(e+1)), and the ends take what lies beyond.
"""

import fnmatch
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kdtrain.errors import UsageError
from kdtrain.files import published, set_aside
from kdtrain.precision.emulated import ELEMENTS, Recipe, mx_scale, quantized_operand

MOST_BYTES = 2**32
"""Of the file; it is copied at each collection."""
EXPONENTS = range(-40, 21)
"""Columns of the histograms."""
_TEXT = h5py.string_dtype()
_FLOATS = ("amax", "error", "saturated", "flushed", "zeros")


class Collector:
    """Collects from the layers whose names match, every so many steps.

    Args:
        path: the HDF5 file; rows of an earlier part of the run are kept. None where another rank writes it.
        model: whose linear layers are meant.
        pattern: shell pattern of their names, such as `*.mlp.*`.
        every: steps between collections.
        recipe: the format that errors are measured in; None where the run has none.
        dtype: of the products where there is no recipe.

    Raises:
        UsageError: no linear layer has such a name.
    """

    def __init__(
        self, path: Path | None, model: nn.Module, pattern: str, every: int, recipe: Recipe | None, dtype: torch.dtype
    ) -> None:
        linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)}
        self.layers = {name: each for name, each in linear.items() if fnmatch.fnmatchcase(name, pattern)}
        if not self.layers:
            some = ", ".join(list(linear)[:3])
            raise UsageError(f"--collect-tensors '{pattern}' matches no linear layer; there are {some}, ...")
        self.path, self.every, self.recipe, self.dtype = path, every, recipe, dtype

    def collect(self, step: int, mode: str, run_eagerly: Callable[[], None]) -> bool:
        """Collect at `step` if it is due; whether it was.

        run_eagerly: a forward and backward of one micro-batch in eager mode; what it leaves in gradients is the
        caller's to clear.
        """
        if step % self.every:
            return False
        if self.path is None:
            run_eagerly()
            return True
        with _watched(self.layers) as seen:
            run_eagerly()
        self._append(step, mode, {name: self._rows(tensors) for name, tensors in seen.items()})
        return True

    def forget_after(self, step: int) -> None:
        """Drop the rows of later steps, which a run that resumes at `step` makes again."""
        if self.path is None or not self.path.exists():
            return
        with self._replacing() as file:
            for layer in _groups(file):
                kept = int(np.searchsorted(layer["step"][:], step, side="right"))
                for dataset in layer.values():
                    dataset.resize(kept, axis=0)

    def _rows(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        return {kind: statistics(tensor, kind, self.recipe, self.dtype) for kind, tensor in tensors.items()}

    def _append(self, step: int, mode: str, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        with self._replacing() as file:
            if "exponents" not in file:
                file["exponents"] = np.array(EXPONENTS)
            for layer, kinds in rows.items():
                for kind, values in kinds.items():
                    group = file.require_group(f"{layer}/{kind}")
                    for name, value in {"step": step, "mode": mode, **values}.items():
                        _append(group, name, value)

    @contextmanager
    def _replacing(self) -> Iterator[h5py.File]:
        assert self.path is not None
        if self.path.exists() and not _is_ours(self.path):
            aside = set_aside(self.path.parent, self.path.name, "old")
            said = "%s has another layout than kdtrain writes, and was moved to %s"
            logging.getLogger("kdtrain").warning(said, self.path, aside)
        with published(self.path, "precision.collect") as hidden:
            if self.path.exists():
                shutil.copyfile(self.path, hidden)
            with h5py.File(hidden, "a" if self.path.exists() else "w") as file:
                yield file


def statistics(values: Tensor, kind: str, recipe: Recipe | None, dtype: torch.dtype) -> dict[str, Any]:
    """What a format does to one operand [rows, columns], summed over along its columns.

    kind: weight, activation or gradient. Errors are those of `recipe`, or of `dtype` where that is None.
    """
    exact = values.detach().float()
    magnitude, kept = exact.abs(), _kept(exact, kind, recipe, dtype)
    power = float(exact.double().square().mean())
    columns = torch.log2(magnitude[magnitude > 0]).floor().clamp(EXPONENTS[0], EXPONENTS[-1])
    return {
        "amax": float(magnitude.max()),
        "error": (float((kept - exact).double().square().mean()) / power) ** 0.5 if power > 0 else 0.0,
        "saturated": float((magnitude > _reach(exact, kind, recipe, dtype)).float().mean()),
        "flushed": float(((kept == 0) & (magnitude > 0)).float().mean()),
        "zeros": float((magnitude == 0).float().mean()),
        "histogram": torch.histc(columns, len(EXPONENTS), EXPONENTS[0], EXPONENTS[-1] + 1).long().cpu().numpy(),
    }


def _kept(exact: Tensor, kind: str, recipe: Recipe | None, dtype: torch.dtype) -> Tensor:
    if recipe is None:
        return exact.to(dtype).float()
    quantized, scale = quantized_operand(exact, recipe, kind, 1, torch.float32)
    return quantized if scale is None else quantized * scale


def _reach(exact: Tensor, kind: str, recipe: Recipe | None, dtype: torch.dtype) -> Tensor | float:
    """The largest magnitude that each element can keep; scales of fp8 are made so that none is beyond."""
    if recipe is None:
        return torch.finfo(dtype).max
    if recipe.scaling != "mx":
        return float("inf")
    element = ELEMENTS[recipe.gradient if kind == "gradient" else recipe.forward]
    return element.largest * mx_scale(exact, element, 1, recipe.control)


@contextmanager
def _watched(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, dict[str, Tensor]]]:
    """The operands of `layers`, filled in by forwards and backwards in the block."""
    seen: dict[str, dict[str, Tensor]] = {}
    handles = []

    def watch(name: str, layer: nn.Module) -> None:
        cut_up = hasattr(layer.get_parameter("weight"), "full_tensor")
        seen[name] = {}

        def forward(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            weight = module.get_parameter("weight").detach()
            weight = weight.clone() if cut_up else weight  # what FSDP2 gathers is gone behind the forward
            seen[name]["weight"] = weight.T if isinstance(module, Conv1D) else weight
            seen[name]["activation"] = _rows(inputs[0])

        def backward(module: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
            seen[name]["gradient"] = _rows(outputs[0])

        handles.append(layer.register_forward_pre_hook(forward))
        handles.append(layer.register_full_backward_hook(backward))

    for name, layer in layers.items():
        watch(name, layer)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rows(tensor: Tensor) -> Tensor:
    return rearrange(tensor.detach(), "... d -> (...) d")


def _append(group: h5py.Group, name: str, value: Any) -> None:
    if name not in group:
        kind = _TEXT if name == "mode" else "f8" if name in _FLOATS else "i8"
        shape = np.shape(value)
        group.create_dataset(name, (0, *shape), kind, maxshape=(None, *shape), chunks=(64, *shape))
    group[name].resize(len(group[name]) + 1, axis=0)
    group[name][-1] = value


def _is_ours(path: Path) -> bool:
    """Whether a file has this module's layout, so that its rows can be changed: a run may have been downloaded."""
    size = path.stat().st_size
    if not path.is_file() or size > MOST_BYTES:
        return False
    try:
        with h5py.File(path) as file:
            linked = file.visititems_links(lambda name, link: None if isinstance(link, h5py.HardLink) else name)
            groups = (kind for name, layer in file.items() if name != "exponents" for kind in layer.values())
            return not linked and all(_has_rows(group, size) for group in groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # all that HDF5 and h5py raise
        return False


def _has_rows(group: h5py.Group, size: int) -> bool:
    rows = len(group["step"])
    return group.keys() == {"step", "mode", *_FLOATS, "histogram"} and all(
        (data.shape, data.maxshape, data.chunks) == ((rows, *inner), (None, *inner), (64, *inner))
        and h5py.check_string_dtype(data.dtype) == (h5py.check_string_dtype(_TEXT) if name == "mode" else None)
        and (name == "mode" or data.dtype == ("f8" if name in _FLOATS else "i8"))
        and data.id.get_create_plist().get_nfilters() == 0
        and rows * 8 <= size
        for name, data in group.items()
        for inner in [(len(EXPONENTS),) if name == "histogram" else ()]
    )


def _groups(file: h5py.File) -> Iterator[h5py.Group]:
    """The groups that hold rows."""
    found: list[h5py.Group] = []
    file.visititems(lambda name, each: found.append(each) if isinstance(each, h5py.Group) and "step" in each else None)
    yield from found
