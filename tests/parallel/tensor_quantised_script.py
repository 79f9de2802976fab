"""Two or four ranks whose quantised layers are in parts: scales and values are those of one process."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from wrap_script import CPU, MICROS, batch

from kdtrain.models.head import split
from kdtrain.objective.loss import DistillationLoss
from kdtrain.parallel import tensor
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.parallelize import SingleProcess, parallelize, shard, sum_over_tensor_ranks
from kdtrain.precision import emulated
from kdtrain.precision.backends import Torchao, capability, make_recipe
from kdtrain.precision.emulated import FormatRecipe, WeightParts
from kdtrain.precision.linear import Emulated, convert
from kdtrain.precision.modes import Switch
from kdtrain.ranks import all_gather_object, process_group
from kdtrain.testing import tiny_model
from kdtrain.training.student import Student

LAYOUT = RankLayout()
RECIPES = {
    "fp8": make_recipe("fp8", "tensorwise", None, "max", False),
    "rowwise": make_recipe("fp8", "rowwise", None, "max", False),
    "blockwise": make_recipe("fp8", "blockwise", None, "max", False),
    "mxfp8": make_recipe("mxfp8", "tensorwise", None, "max", False),
    "mxfp4": make_recipe("mxfp4", "tensorwise", None, "max", False),
}
QUANTISED = 14
"""Layers of the student that are."""


def products() -> dict[str, Any]:
    """Return the back ends with each recipe."""
    found = {name: Emulated(recipe) for name, recipe in RECIPES.items()}
    for name in ("fp8", "rowwise"):
        if capability("fp8", "torchao", CPU, RECIPES[name]).works:
            found[f"torchao {name}"] = Torchao(RECIPES[name])
    return found


def results(product: Any, x: torch.Tensor, weight: torch.Tensor, towards: torch.Tensor, late: bool) -> Any:
    """Compute the three products; late: the first is not quantised."""
    x, weight = (each.clone().requires_grad_() for each in (x, weight))
    y = product(x, weight, torch.float32, late)
    return y.detach(), *torch.autograd.grad((y * towards).sum(), (x, weight))


@contextmanager
def scales_of_torchao() -> Iterator[list[torch.Tensor]]:
    """Yield the scales that torchao makes in the block."""
    from torchao.float8 import float8_scaling_utils

    found, make = [], float8_scaling_utils.tensor_to_scale
    with mock.patch.object(
        float8_scaling_utils, "tensor_to_scale", lambda *given: found.append(make(*given)) or found[-1]
    ):
        yield found


def products_of_parts_are_those_of_one_process() -> None:
    x, weight, towards = (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) for shape in SIZES)
    x[:, 3] *= 300  # of one part alone, in all three
    weight[200, 130] = towards[5, 70] = 500.0
    group, own = LAYOUT.tensor_mesh.get_group(), LAYOUT.tensor_rank
    for (name, backend), dimension, late in itertools.product(products().items(), (0, 1), (False, True)):
        product = backend.product(torch.nn.Identity(), *reversed(weight.shape))
        with scales_of_torchao() if "torchao" in name else nullcontext([]) as scales:
            y, dx, dw = results(product, x, weight, towards, late)
        part = product.across(WeightParts(LAYOUT.tensor_mesh, dimension))
        weights = weight.chunk(2, dimension)[own]
        own_x, own_towards = x.chunk(2, 1)[own], towards
        expected = y, dx.chunk(2, 1)[own], dw.chunk(2, 1)[own]
        if dimension == 0:
            own_x, own_towards = x, towards.chunk(2, 1)[own]
            expected = y.chunk(2, 1)[own], dx, dw.chunk(2)[own]
        with scales_of_torchao() if scales else nullcontext([]) as own_scales:
            found = results(part, own_x, weights, own_towards, late)
        dist.all_reduce(found[1 - dimension], group=group)
        bound = 5e-3 if name == "torchao rowwise" else 1e-5  # it multiplies to bf16
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= bound * other.norm(), (name, dimension, late)
        for one, other in zip(own_scales, scales, strict=True):
            assert torch.isin(one, other).all(), (name, dimension, late)


SIZES = ((48, 256), (512, 256), (48, 512))


def a_number_that_is_not_finite_in_one_part_is_seen_in_all() -> None:
    x = torch.ones(4, 32)
    for bad in (torch.nan, torch.inf):
        weight = torch.full((32, 32), bad if LAYOUT.tensor_rank else 1.0)
        part = Emulated(RECIPES["fp8"], parts=WeightParts(LAYOUT.tensor_mesh, 0))
        assert part(x, weight, torch.float32, False).isnan().all()


def stochastic_rounding_draws_the_same_for_whole_gradients_and_others_for_parts() -> None:
    gradient, recipe = torch.full((32, 64), 1.1), FormatRecipe("mx", gradient="e2m1", stochastic=True)
    for dimension, same in ((0, False), (1, True)):
        torch.manual_seed(5)
        parts = WeightParts(LAYOUT.tensor_mesh, dimension)
        rounded, _ = emulated.quantized_operand(gradient, recipe, "gradient", 1, torch.float32, parts)
        every = all_gather_object((rounded, torch.rand(())))
        assert (rounded != gradient).all() and torch.equal(every[0][1], every[1][1])
        agreeing = float((every[0][0] == every[1][0]).double().mean())
        share = float((every[0][0] == 1).double().mean())
        assert agreeing == 1 if same else abs(agreeing - share**2 - (1 - share) ** 2) < 4 * 0.5 / 2048**0.5


class Scales:
    """The scales of a student's operands in the order in which they were made, and its quantised products."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []
        self.products, self.operand, self.product = 0, emulated.quantized_operand, Emulated.__call__

    def quantise(self, values: torch.Tensor, recipe: Any, kind: str, *more: Any) -> Any:
        quantised = self.operand(values, recipe, kind, *more)
        self.found.append((kind, float(quantised[1])))
        return quantised

    def multiply(self, *operands: Any) -> torch.Tensor:
        self.products += 1
        return self.product(*operands)

    def of_step(self, wrapped: SingleProcess, numbers: range) -> None:
        """Accumulate a step."""
        multiply = mock.patch.object(Emulated, "__call__", lambda *operands: self.multiply(*operands))
        with mock.patch.object(emulated, "quantized_operand", self.quantise), multiply:
            for number in numbers:
                with wrapped.micro_batch(last=number == numbers[-1]):
                    wrapped(batch(number), 100.0).loss.backward()
            sum_over_tensor_ranks(wrapped.model, wrapped.layout)


def quantised(shape: str, kind: str, sequence: bool = True, position: str = "quantized") -> SingleProcess:
    """Make a student in one process (`single`) or over tensor ranks, of which the layers were made switchable."""
    model, switch = split(tiny_model(shape, 300, seed=3)), Switch(position)
    done = convert(model.model, switch, Emulated(RECIPES["fp8"]), head=model.model.get_output_embeddings())
    assert len(done.quantized) in (QUANTISED, 12)  # phi has no gate
    layout = RankLayout() if kind == "single" else LAYOUT
    if kind != "single":
        tensor.apply(model, LAYOUT, CPU, vocab_size=300, sequence=sequence)
    if kind == "fsdp":
        shard(model, LAYOUT.mesh)
    student = Student(model, DistillationLoss(alpha=0.9, temperature=2.0), vocab_size=300, switch=switch)
    return parallelize(student, "single" if layout.data_size == 1 else kind, layout)


def a_step_makes_as_many_quantised_products_in_each_layout_with_the_scales_of_one_process() -> None:
    first = LAYOUT.data_rank * MICROS
    for shape, sequence in (("llama", True), ("phi", False)):
        layers = QUANTISED if shape == "llama" else 12
        for kind in ("tensor",) if LAYOUT.data_size == 1 else ("ddp", "fsdp"):
            seen, expected = Scales(), Scales()
            seen.of_step(quantised(shape, kind, sequence), range(first, first + MICROS))
            expected.of_step(quantised(shape, "single"), range(first, first + MICROS))
            assert seen.products == expected.products == layers * MICROS
            assert [each for each, _ in seen.found] == [each for each, _ in expected.found]
            pairs = list(zip(seen.found, expected.found, strict=True))
            assert all(one == other for one, other in pairs if one[0] == "weight"), (shape, kind)
            apart = max(abs(one[1] / other[1] - 1) for one, other in pairs)
            assert apart < 1e-3, (shape, kind, apart)


PROMISES = (
    products_of_parts_are_those_of_one_process,
    a_number_that_is_not_finite_in_one_part_is_seen_in_all,
    stochastic_rounding_draws_the_same_for_whole_gradients_and_others_for_parts,
    a_step_makes_as_many_quantised_products_in_each_layout_with_the_scales_of_one_process,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(CPU, 300):
        LAYOUT = RankLayout.of_ranks(CPU, tensor=2)
        for promise in PROMISES:
            promise()
            if dist.get_rank() == 0:
                print(promise.__name__, flush=True)
