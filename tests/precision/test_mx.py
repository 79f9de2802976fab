"""MX and fp8 formats, emulated: their errors, their grids, and blocks of odd content."""

import math

import pytest
import torch

from kdtrain.precision.emulated import ELEMENTS, quantize_fp8, quantize_mx, round_to

E4M3, E5M2, E2M1 = ELEMENTS["e4m3"], ELEMENTS["e5m2"], ELEMENTS["e2m1"]
CONTROLS = ("max", "max_minus_1")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(quantized: torch.Tensor, values: torch.Tensor) -> float:
    return float(((quantized - values).double().square().mean() / values.double().square().mean()).sqrt())


@pytest.mark.parametrize(
    "element, control, expected",
    [
        ("e4m3", "max", 0.0293),
        ("e2m1", "max", 0.1149),
        ("e4m3", "max_minus_1", 0.0266),
        ("e2m1", "max_minus_1", 0.1442),
    ],
)
def test_the_relative_rms_error_of_normal_numbers_is_the_published_one(element, control, expected):
    values = normal(8192, 512)
    error = relative_error(quantize_mx(values, ELEMENTS[element], 1, control), values)
    assert error == pytest.approx(expected, abs=1.5e-4)


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_rounding_is_that_of_torchs_own_formats_within_their_range(name, dtype):
    element = ELEMENTS[name]
    values = torch.cat([normal(20_000, seed=i) * 10.0**i for i in range(-9, 4)]).clamp(
        -element.largest, element.largest
    )
    assert torch.equal(round_to(values, element), values.to(dtype).float())


def test_e2m1_has_its_eight_magnitudes_and_ties_go_to_the_even_one():
    values = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.0, -0.26])
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -0.5])
    assert torch.equal(round_to(values, E2M1), expected)


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1])
def test_a_value_that_is_too_large_is_clamped_and_nan_stays(element):
    rounded = round_to(torch.tensor([1e30, -1e30, math.inf, math.nan]), element)
    assert rounded[:3].tolist() == [element.largest, -element.largest, element.largest]
    assert rounded[3].isnan()


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1])
def test_stochastic_rounding_is_right_on_average_and_stays_on_the_grid(element):
    torch.manual_seed(0)
    values = torch.linspace(-element.largest, element.largest, 37).repeat(20_000, 1)
    rounded = round_to(values, element, stochastic=True)
    assert torch.equal(round_to(rounded, element), rounded)
    spread = rounded.std(0).clamp(min=1e-9) / math.sqrt(len(values))
    assert ((rounded.mean(0) - values[0]).abs() <= 5 * spread + 1e-6 * element.largest).all()


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_the_scale_of_a_block_is_a_power_of_two_and_the_block_scales_with_it(name, control):
    values = normal(64, 64)
    for factor in (2.0**-40, 2.0**-3, 2.0**31):
        scaled = quantize_mx(values * factor, ELEMENTS[name], 1, control)
        assert torch.equal(scaled, quantize_mx(values, ELEMENTS[name], 1, control) * factor)


@pytest.mark.parametrize("name", ELEMENTS)
def test_max_minus_1_clamps_nothing(name):
    values = normal(512, 32)
    quantized = quantize_mx(values, ELEMENTS[name], 1, "max_minus_1")
    largest = values.abs().amax(1)
    half_step = 2.0 ** -(ELEMENTS[name].mantissa_bits + 1)
    at_largest = quantized.abs().amax(1)
    assert (at_largest >= largest * (1 - half_step)).all()


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_blocks_of_odd_content_round_as_documented(name, control):
    element = ELEMENTS[name]
    values = torch.stack([normal(32)] * 6)
    values[1] = 0
    values[2, 5] = math.inf
    values[3, 7] = math.nan
    values[4] = 1e-45
    values[5] *= 2.0**-120
    quantized = quantize_mx(values, element, 1, control)
    assert torch.isfinite(quantized[0]).all() and torch.equal(
        quantized[0], quantize_mx(values[:1], element, 1, control)[0]
    )
    assert (quantized[1] == 0).all()
    assert quantized[2].isnan().all() and quantized[3].isnan().all()
    assert (quantized[4] == 0).all()
    assert torch.isfinite(quantized[5]).all()


def test_numbers_near_the_largest_of_fp32_survive_every_control():
    values = torch.full((1, 32), 1.5 * 2.0**127)
    for control in CONTROLS:
        assert torch.isfinite(quantize_mx(values, E4M3, 1, control)).all(), control


@pytest.mark.parametrize("axis", [0, 1])
def test_a_narrow_last_block_rounds_like_one_padded_with_zeros(axis):
    values = normal(45, 45)
    whole = torch.zeros(64, 64)
    whole[:45, :45] = values
    quantized = quantize_mx(values, E4M3, axis)
    assert torch.equal(quantized, quantize_mx(whole, E4M3, axis)[:45, :45])


@pytest.mark.parametrize("quantize", [lambda v: quantize_mx(v, E2M1, 1), lambda v: quantize_fp8(v, E4M3, (1, 128))[0]])
@pytest.mark.parametrize("columns", [40, 344])
def test_compiled_code_gives_the_numbers_of_eager_code_where_the_last_tile_is_narrow(quantize, columns):
    def operand(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return quantize(one * other).to(torch.bfloat16)

    torch.compiler.reset()
    values = normal(64, columns), normal(64, columns, seed=1)
    assert torch.equal(torch.compile(operand, dynamic=False, fullgraph=True)(*values), operand(*values))


def test_blocks_lie_along_the_given_axis():
    values = normal(64, 96)
    assert torch.equal(quantize_mx(values, E2M1, 0), quantize_mx(values.T.contiguous(), E2M1, 1).T)


@pytest.mark.parametrize("tile", [None, (1, 300), (1, 128), (128, 1), (128, 128)])
def test_fp8_scales_a_tensor_a_row_or_a_tile(tile):
    values = normal(200, 300) * 7
    quantized, scale = quantize_fp8(values, E4M3, tile)
    assert (scale is None) == (tile is not None)
    quantized = quantized if scale is None else quantized * scale
    assert relative_error(quantized, values) == pytest.approx(0.0265, abs=3e-4)
    outlier = values.clone()
    outlier[0, 0] = 1e7
    quantized, scale = quantize_fp8(outlier, E4M3, tile)
    quantized = quantized if scale is None else quantized * scale
    untouched = quantized[150:, 150:] - values[150:, 150:]
    assert (untouched.abs().max() > 1) == (tile is None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("tile", [None, (1, 128)])
def test_a_non_finite_fp8_tile_is_nan_and_one_of_zeros_is_zero(bad, tile):
    values = normal(2, 128)
    values[0, 3] = bad
    quantized, _ = quantize_fp8(values, E4M3, tile)
    assert quantized[0].isnan().all()
    zeros, scale = quantize_fp8(torch.zeros(2, 128), E4M3, tile)
    assert ((zeros if scale is None else zeros * scale) == 0).all()
