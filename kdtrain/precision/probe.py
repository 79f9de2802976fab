"""What a device can do in few bits, and which back end a run gets: asked by a small product, not by a version."""

from dataclasses import dataclass

import torch

from kdtrain.errors import UsageError
from kdtrain.precision.backends import (
    Torchao,
    TransformerEngine,
    why_not_real,
    why_not_torchao,
    why_not_transformer_engine,
)
from kdtrain.precision.linear import Backend, Emulated
from kdtrain.precision.modes import has_bf16
from kdtrain.precision.mx import ScalingControl
from kdtrain.precision.products import Recipe, Scaling

QUANTIZED = ("fp8", "mxfp8", "mxfp4")
"""The modes whose linear layers are quantised."""
_RECIPES: dict[str, tuple[str, ...]] = {
    "torchao": ("tensorwise", "current", "rowwise"),
    "transformer-engine": ("tensorwise", "current", "blockwise"),
    "emulated": ("tensorwise", "current", "rowwise", "blockwise"),
}
_ORDER = ("torchao", "transformer-engine", "emulated")
"""In which `auto` asks: torchao compiles with the model, keeps no state, and works with every wrapper."""


@dataclass(frozen=True)
class Capability:
    """What one back end can do for one mode on one device."""

    mode: str
    backend: str
    works: bool
    real: bool
    """Whether products are faster than the high mode's; else they are emulated."""
    reason: str | None
    """Why it does not work, or is not real."""

    def __str__(self) -> str:
        verdict = ("real" if self.real else "emulated") if self.works else "no"
        return verdict if self.reason is None else f"{verdict}: {self.reason}"


def capabilities(device: torch.device) -> list[Capability]:
    """Every mode and back end on `device`."""
    emulates = "values are rounded in fp32, products are the high mode's"
    table = [capability("fp8", backend, device) for backend in _ORDER]
    table += [Capability(mode, "emulated", True, False, emulates) for mode in QUANTIZED[1:]]
    return table


def capability(mode: str, backend: str, device: torch.device, recipe: Recipe | None = None) -> Capability:
    """What `backend` can do for `mode` on `device`, by the plain recipe when none is given."""
    if backend == "emulated":
        return Capability(mode, backend, True, False, "values are rounded in fp32, products are the high mode's")
    if mode != "fp8":
        return Capability(mode, backend, False, False, f"{backend} has no {mode} that trains here")
    why_not = why_not_torchao if backend == "torchao" else why_not_transformer_engine
    reason = why_not(device) or _why_not_a_product(make_backend(backend, recipe or Recipe("tensorwise")), device)
    if reason is not None:
        return Capability(mode, backend, False, False, reason)
    unreal = why_not_real(device)
    return Capability(mode, backend, True, unreal is None, unreal)


@dataclass(frozen=True)
class Choice:
    """The quantised products of a run."""

    mode: str
    name: str
    backend: Backend
    real: bool
    line: str
    """What was chosen, for the log."""


def choose(mode: str, wanted: str, recipe: Recipe, scaling: str, device: torch.device) -> Choice | str:
    """The back end for `mode`, or why there is none.

    wanted: `auto` takes the first that is real, else emulation. scaling: the recipe by its option's name.

    Raises:
        UsageError: a back end was named that has no such recipe.
    """
    refuse_recipe(mode, wanted, recipe, scaling)
    asked: list[str] = []
    for name in [each for each in _ORDER if _knows(each, mode, recipe, scaling)] if wanted == "auto" else [wanted]:
        found = capability(mode, name, device, recipe)
        if found.works and (found.real or wanted != "auto" or name == "emulated"):
            kind = "real" if found.real else "emulated" if name == "emulated" else "not faster here"
            why = f" ({'; '.join(asked)})" if asked else ""
            return Choice(mode, name, make_backend(name, recipe), found.real, f"{mode} by {name}, {kind}{why}")
        asked.append(f"{name}: {found.reason}")
    return "; ".join(asked)


def make_recipe(mode: str, scaling: str, form: str | None, control: ScalingControl, stochastic: bool) -> Recipe:
    """The recipe of a mode: elements are by default what its scaling is usually run with.

    form: hybrid (e4m3, and e5m2 for gradients), e4m3 or e5m2, of the modes of 8 bits. Hybrid goes with one scale a
    tensor, whose gradients need the range; finer scales go with e4m3.
    """
    if mode == "mxfp4":
        return Recipe("mx", "e2m1", "e2m1", control, stochastic)
    tensorwise = mode == "fp8" and scaling in ("tensorwise", "current")
    form = form or ("hybrid" if tensorwise else "e4m3")
    elements = {"hybrid": ("e4m3", "e5m2"), "e4m3": ("e4m3", "e4m3"), "e5m2": ("e5m2", "e5m2")}[form]
    kind: Scaling = "mx" if mode == "mxfp8" else "tensorwise" if tensorwise else "rowwise"
    kind = "blockwise" if mode == "fp8" and scaling == "blockwise" else kind
    return Recipe(kind, *elements, control, stochastic)


def make_backend(name: str, recipe: Recipe) -> Backend:
    """The back end called `name`."""
    if name == "torchao":
        return Torchao(recipe)
    return TransformerEngine(recipe) if name == "transformer-engine" else Emulated(recipe)


def refuse_recipe(mode: str, backend: str, recipe: Recipe, scaling: str) -> None:
    """Raise a `UsageError` where a named back end cannot do what was asked of it."""
    if backend in ("auto", "emulated"):
        return
    if mode != "fp8":
        raise UsageError(f"--fp8-backend {backend} has no {mode}; leave it out, {mode} is emulated everywhere")
    if scaling not in _RECIPES[backend]:
        raise UsageError(f"--fp8-backend {backend} has no --fp8-recipe {scaling}; use {', '.join(_RECIPES[backend])}")
    if recipe.forward == "e5m2":
        raise UsageError(
            f"--fp8-backend {backend} has no pure e5m2; use --fp8-format hybrid, or --fp8-backend emulated"
        )
    if recipe.stochastic:
        raise UsageError(f"--fp8-backend {backend} does not round stochastically; use --fp8-backend emulated")


def _knows(backend: str, mode: str, recipe: Recipe, scaling: str) -> bool:
    try:
        refuse_recipe(mode, backend, recipe, scaling)
    except UsageError:
        return False
    return True


def _why_not_a_product(backend: Backend, device: torch.device) -> str | None:
    """What goes wrong in a small product and its backward, or None."""
    layer = torch.nn.Linear(128, 128, bias=False, device=device)
    x = torch.ones(16, 128, device=device, requires_grad=True)
    dtype = torch.bfloat16 if has_bf16(device) else torch.float32
    try:
        with torch.enable_grad():
            backend.product(layer, 128, 128)(x, layer.weight, dtype, False).float().sum().backward()
    except Exception as error:
        return " ".join(f"a small product fails: {type(error).__name__}: {error}".split())[:160]
    return None
