"""Frozen weights in fewer bits: bf16, int8 or nf4.

`pack` replaces the linear layers of a model that are not trained, in place, by layers that hold

    bf16   the rounded numbers                                                    2 bytes a number
    int8   integers, and a scale for each row, by torchao                         1 byte
    nf4    4-bit codes, and a scale for 64 numbers, by bitsandbytes               0.56 bytes (arXiv 2305.14314)

and unpack them for each product, y = s (x W^T) and dx = (s dy) W: autograd keeps the packed weight from forward to
backward, where an ordinary product would keep the unpacked one. The scales s of int8 stay outside, because bf16 holds
all integers of a row exactly. The output head and the embeddings are held in bf16 in all three, and an embedding still
returns the format that it had, so that the residual stream keeps its own. Norms and biases do not change.

What it gives up: the time to unpack; experts that a model keeps as one three-dimensional parameter stay as they are;
packed weights are buffers, which FSDP2 would not shard.

Shape suffixes: D inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kdtrain.errors import UsageError
from kdtrain.imports import optional
from kdtrain.models.adapters import adapter_parts
from kdtrain.models.hub import ask

_BLOCK = 64
"""Numbers that share a scale in nf4."""


@dataclass(frozen=True)
class _Format:
    pack: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    """weight_OD -> the packed numbers, and the scales."""
    outline: Callable[[int, int], tuple[Tensor, Tensor | None]]
    """O, D -> empty tensors like those of `pack`, without any library."""
    unpack: Callable[[Tensor, Tensor | None, torch.Size, torch.dtype], tuple[Tensor, Tensor | None]]
    """What `pack` returned, [O, D] and a dtype -> the matrix in this dtype, and the scales [O] of its rows."""


def _pack_int8(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    quantization: Any = optional("torchao.quantization", "fp8", "int8")
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OD.float(), requires_grad=False)
    quantization.quantize_(layer, int8_config())
    packed: Any = layer.weight
    return packed.qdata, packed.scale.reshape(-1).float()


def _unpack_int8(
    packed_OD: Tensor, scale_O: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    assert scale_O is not None
    if dtype == torch.float16:  # sums of integers times activations would overflow
        return (packed_OD * scale_O[:, None]).to(dtype), None
    return packed_OD.to(dtype), scale_O


def _pack_nf4(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    functional: Any = optional("bitsandbytes.functional", "nf4", "nf4")
    packed, state = functional.quantize_4bit(
        weight_OD.float().contiguous(), blocksize=_BLOCK, quant_type="nf4", compress_statistics=False
    )
    return packed, state.absmax


def _unpack_nf4(
    packed: Tensor, scale: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    # the operator itself: the functions around it cannot be compiled
    unpack: Any = torch.ops.bitsandbytes.dequantize_4bit.default
    return unpack(packed, scale, _BLOCK, "nf4", shape, dtype), None


_FORMATS = {
    "bf16": _Format(
        lambda weight_OD: (weight_OD.to(torch.bfloat16), None),
        lambda rows, columns: (torch.empty(rows, columns, dtype=torch.bfloat16), None),
        lambda packed_OD, _, __, dtype: (packed_OD.to(dtype), None),
    ),
    "int8": _Format(
        _pack_int8,
        lambda rows, columns: (torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows)),
        _unpack_int8,
    ),
    "nf4": _Format(
        _pack_nf4,
        lambda rows, columns: (
            torch.empty(-(-rows * columns // 2), 1, dtype=torch.uint8),
            torch.empty(-(-rows * columns // _BLOCK)),
        ),
        _unpack_nf4,
    ),
}


class PackedLinear(nn.Module):
    """A linear layer that is not trained, in the place of an `nn.Linear` or of GPT-2's `Conv1D`.

    Args:
        layer: the layer whose weight it holds and whose bias it takes over.
        kind: bf16, int8 or nf4.
        device: of the packed weight.
        outline: hold the sizes alone.
    """

    packed: Tensor
    scale: Tensor | None

    def __init__(self, layer: nn.Linear | Conv1D, kind: str, device: torch.device, outline: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.transposed = isinstance(layer, Conv1D)
        weight_OD = layer.weight.detach().T if self.transposed else layer.weight.detach()
        self.shape = weight_OD.shape
        form = _FORMATS[kind]
        packed, scale = form.outline(*self.shape) if outline else form.pack(weight_OD.to(device).contiguous())
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().to(device), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The unpacked weight as the layer in whose place it stands has it, in fp32; a copy."""
        matrix_OD, scale_O = _FORMATS[self.kind].unpack(self.packed, self.scale, self.shape, torch.float32)
        weight_OD = matrix_OD if scale_O is None else matrix_OD * scale_O[:, None]
        return weight_OD.T if self.transposed else weight_OD

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., D] by the unpacked weight, [..., O], in the dtype of autocast, or else of x."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y: Tensor = _Product.apply(x, self.packed, self.scale, self.kind, self.shape, dtype)
        return y if self.bias is None else y + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scale: Tensor | None, kind: str, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.kind = kind
        ctx.shape = shape
        ctx.dtype = x.dtype
        matrix_OD, scale_O = _FORMATS[kind].unpack(packed, scale, shape, dtype)
        y = x.to(dtype) @ matrix_OD.T
        y = y if scale_O is None else y * scale_O
        return y if y.dtype == dtype else y.to(dtype)  # a cast to its own dtype has no gradient, compiled by torch 2.11

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        packed, scale = ctx.saved_tensors
        matrix_OD, scale_O = _FORMATS[ctx.kind].unpack(packed, scale, ctx.shape, dy.dtype)
        dy = dy if scale_O is None else (dy * scale_O).to(dy.dtype)
        return (dy @ matrix_OD).to(ctx.dtype), *(None,) * 5


def refuse_weights(kind: str, option: str, device: torch.device) -> None:
    """Raise a UsageError, which begins with the option, if this format is not to be had on the device."""
    what = f"{option} {kind}"
    if kind == "int8":
        optional("torchao", "fp8", what)
    elif kind == "nf4":
        if device.type != "cuda":
            raise UsageError(f"{what} needs a CUDA device, and this runs on {device}; use int8, or leave it out")
        optional("bitsandbytes", "nf4", what)


def pack(
    model: PreTrainedModel, kind: str, *, fused: bool, device: torch.device | None = None, outline: bool = False
) -> None:
    """Hold the weights of a model that are not trained in fewer bits, in place.

    Args:
        kind: bf16, int8 or nf4.
        fused: the output head's weight is used by itself (`SplitModel.fused`); else head and embeddings do not change.
        device: where the whole model is afterwards; by default where it is.
        outline: for a plan of memory; the numbers are lost.
    """
    if kind == "nf4":
        optional("bitsandbytes", "nf4", "nf4")  # registers the operator of `_unpack_nf4`
    head = model.get_output_embeddings()
    parts = adapter_parts(model)
    device = device or model.device
    narrow: dict[int, nn.Parameter] = {}  # tied weights stay so
    for name, layer in [*model.named_modules()]:
        if layer is head or isinstance(layer, nn.Embedding):
            weight: Any = layer.weight
            if fused and not weight.requires_grad and weight.dtype == torch.float32:
                new = nn.Parameter(weight.detach().to(torch.bfloat16), requires_grad=False)
                layer.weight = narrow.setdefault(id(weight), new)
                if isinstance(layer, nn.Embedding):
                    layer.register_forward_hook(lambda module, inputs, embedded: embedded.float())
        elif type(layer) in (nn.Linear, Conv1D) and layer not in parts and not layer.weight.requires_grad:
            model.set_submodule(name, PackedLinear(layer, kind, device, outline))  # type: ignore[arg-type]
    if not outline:
        model.to(device)  # type: ignore[arg-type]


def is_packed(model: nn.Module) -> bool:
    """Return whether `pack` has changed a model."""
    return any(isinstance(each, PackedLinear) for each in model.modules())


def whole_size(model: nn.Module) -> int:
    """Count the numbers of a model's weights, packed or not; a tied weight counts once."""
    layers = (each for each in model.modules() if isinstance(each, PackedLinear))
    return sum(each.numel() for each in model.parameters()) + sum(prod(each.shape) for each in layers)


def frozen_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's weights that are not trained."""
    packed = (each for layer in model.modules() if isinstance(layer, PackedLinear) for each in layer.buffers())
    return sum(each.nbytes for each in (*packed, *(each for each in model.parameters() if not each.requires_grad)))


def int8_config() -> Any:
    """Return torchao's options for int8 weights: symmetric, a scale a row; no setting of the compiler changes."""
    quantization: Any = optional("torchao.quantization", "fp8", "int8")
    return quantization.Int8WeightOnlyConfig(version=2, set_inductor_config=False)


def quantize_folder(whole: Path, out: Path, most: str) -> None:
    """Write the int8 form of the model in the folder `whole` into `out`, in files of at most `most` ("5GB").

    UsageError: torchao is missing or refuses the model.
    """
    optional("torchao", "fp8", "--quantize int8")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    def quantize() -> None:
        options: Any = {"quantization_config": TorchAoConfig(int8_config()), "dtype": "auto"}
        model: Any = AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=False, **options)
        model.save_pretrained(out, max_shard_size=most)

    ask(str(whole), quantize)
