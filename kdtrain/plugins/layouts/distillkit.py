"""DistillKit's packed parquet: bit-packed ids, and log-probabilities as exact values with a curve for the rest.

The coding stands in no column: it is in a YAML file of the compressor, which has to be given, and which must fit the
bytes. A position of the newer layout has two byte strings. `bytepacked_indices`: k ids of b = ceil(log2 d) bits, the
most significant bit first. `compressed_logprobs`, one after the other and in the machine's (little) byte order:

- the `exact_k` first values in `exact_dtype`;
- one coefficient a term in `term_dtype`, if `polynomial_terms` are given: the other k - exact_k values are about
  sum_i c_i f_i(x) with x = 0, 1, .. (with `normalize_t`: 0 .. 1) and f_i a power, `sqrt` or `exp`;
- for each of `residual_bins`: a scale in `scale_dtype`, and for the next `num_elements` of those values what is to be
  added, as whole numbers of `element_bits` bits, moved by half their range, times the scale; of one bit: -1 or 1.

With `delta_encoding` all values but the first are differences to the one before. The older layout has the columns
`packed_indices` (64-bit words with floor(64 / b) ids each, the first in the lowest bits), `exact_values` and `coeffs`,
with x = 1, 2, .. and the powers 0, -1, .. (0, 1, .. without `invert_polynomial`) and, with `with_sqrt_term`, sqrt.

Arithmetic is in the dtypes of the file, as its makers decode it: the fit errs by far more than its rounding, but so the
numbers agree with theirs.

Entry i is about token i + 1 in all sets known; `attention_mask` numbers the documents of a packed row from 1, and the
teacher saw each of them alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.files import read_text, typed
from kdtrain.imports import optional
from kdtrain.plugins.layouts.layout import MOST_ENTRIES, Layout, Record, register_layout
from kdtrain.plugins.layouts.options import ImportConfig

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Few = Annotated[int, Meta(ge=0, le=2**16)]
_TERMS = 64
_FIT = 2**24
"""Products of coefficients and terms that are held at once."""


class _Bin(msgspec.Struct, forbid_unknown_fields=True):
    scale_dtype: Dtype
    element_bits: Annotated[int, Meta(ge=1, le=64)]
    num_elements: Annotated[int, Meta(ge=1, le=2**16)]


class Compressor(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The compressor's settings, under their own names."""

    d: Size
    k: Annotated[int, Meta(ge=1, le=2**16)]
    exact_k: Few
    exact_dtype: Dtype = "float32"
    polynomial_terms: (
        Annotated[list[Annotated[int, Meta(ge=-_TERMS, le=_TERMS)] | Literal["sqrt", "exp"]], Meta(max_length=_TERMS)]
        | None
    ) = None
    term_dtype: Dtype = "float32"
    residual_bins: Annotated[list[_Bin], Meta(max_length=256)] = []
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False


class OldCompressor(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings of the older compressor."""

    vocab_size: Size
    k: Annotated[int, Meta(ge=1, le=2**16)]
    exact_k: Few
    polynomial_degree: Annotated[int, Meta(ge=0, le=_TERMS)]
    invert_polynomial: bool = True
    with_sqrt_term: bool = False
    term_dtype: Dtype = "float32"


def read_compressor(path: Path) -> Compressor | OldCompressor:
    """Read the settings in a YAML file.

    They stand alone, or under `logprob_compressor` or `legacy_logit_compression` (a run's file has these under
    `teacher`). UsageError: names the file and what is wrong.
    """
    yaml: Any = optional("yaml", "data", f"--compressor {path}")
    try:
        text = read_text(path)
        # An alias may stand for a list of aliases, and a small file then for a huge one; no compressor has one.
        if any(isinstance(each, yaml.AliasToken) for each in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ValueError("it has an alias")
        found = yaml.safe_load(text)
        for key in ("teacher", "logprob_compressor", "legacy_logit_compression"):
            if isinstance(found, dict) and isinstance(found.get(key), dict):
                found = found[key]
        if isinstance(found, dict) and ("vocab_size" in found or "polynomial_degree" in found):
            settings: Compressor | OldCompressor = typed(found, OldCompressor)
        else:
            settings = typed(found, Compressor)
            covered = sum(each.num_elements for each in settings.residual_bins)
            if covered > settings.k - settings.exact_k:
                raise ValueError(f"residual_bins have {covered} elements, k - exact_k is less")
        if settings.exact_k > settings.k:
            raise ValueError(f"exact_k {settings.exact_k} is more than k {settings.k}")
        return settings
    except OSError as error:
        raise UsageError(f"--compressor {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"--compressor {path} is not a compressor of DistillKit: {reason}") from None


@register_layout("distillkit")
class DistillKit(Layout):
    """DistillKit's packed parquet, with the YAML of its compressor"""

    def __init__(self, options: ImportConfig) -> None:
        super().__init__(options)
        self.refuse_given("ids_column", "logprobs_column")
        assert options.compressor is not None, "the options need it"
        self.settings = read_compressor(options.compressor)
        old = isinstance(self.settings, OldCompressor)
        entries = ("packed_indices", "exact_values", "coeffs") if old else ("compressed_logprobs", "bytepacked_indices")
        self.entries = dict.fromkeys(entries, 2)
        if self.segments is None:
            self.segments = "attention_mask"
            self.optional = frozenset({"attention_mask"})
        size = self.settings.vocab_size if isinstance(self.settings, OldCompressor) else self.settings.d
        self.vocab_size = size
        self.top_k = self.settings.k
        self.bits = max(1, (size - 1).bit_length())
        self._curve = _curve(self.settings)

    @property
    def facts(self) -> dict[str, Any]:
        """The compressor's settings."""
        return {"compressor": msgspec.to_builtins(self.settings)}

    def decode(self, record: Record, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Decode the entries of a record, as `Layout.decode` promises."""
        positions = len(record[next(iter(self.entries))].lengths)
        if positions * self.settings.k > MOST_ENTRIES:
            raise UsageError(f"{where}: {positions:,} positions of {self.settings.k:,} entries are too many for a row")
        if isinstance(self.settings, OldCompressor):
            return self._decode_old(record, where, self.settings)
        settings = self.settings
        packed_mB = _matrix(record, "bytepacked_indices", where, -(-settings.k * self.bits // 8), np.uint8)
        ids_mK = unpack_bits(packed_mB, self.bits, settings.k)
        coded_mB = torch.from_numpy(_matrix(record, "compressed_logprobs", where, coded_bytes(settings), np.uint8))
        return ids_mK, decode_logprobs(coded_mB, settings, self._curve).double().numpy()

    def _decode_old(self, record: Record, where: str, settings: OldCompressor) -> tuple[np.ndarray, np.ndarray]:
        each = 64 // self.bits
        words_mW = _matrix(record, "packed_indices", where, -(-settings.k // each), np.int64).view(np.uint64)
        shifts_E = np.arange(each, dtype=np.uint64) * np.uint64(self.bits)
        ids_mWE = (words_mW[:, :, None] >> shifts_E) & np.uint64(2**self.bits - 1)
        ids_mK = ids_mWE.reshape(len(words_mW), -1)[:, : settings.k].astype(np.int64)
        exact_mK = _matrix(record, "exact_values", where, settings.exact_k, np.float32)
        terms = self._curve.shape[1] if settings.exact_k < settings.k else 0
        coefficients_mF = _matrix(record, "coeffs", where, terms, np.float32)
        values_mK = torch.from_numpy(exact_mK)
        if terms:
            values_mK = torch.cat([values_mK, fit(self._curve, torch.from_numpy(coefficients_mF))], -1)
        return ids_mK, values_mK.double().numpy()


def coded_bytes(settings: Compressor) -> int:
    """Return the number of bytes of one position in `compressed_logprobs`."""
    size = settings.exact_k * _dtype(settings.exact_dtype).itemsize
    size += len(settings.polynomial_terms or []) * _dtype(settings.term_dtype).itemsize
    for each in settings.residual_bins:
        size += _dtype(each.scale_dtype).itemsize + -(-each.num_elements * each.element_bits // 8)
    return size


def decode_logprobs(coded_mB: Tensor, settings: Compressor, curve_RF: Tensor) -> Tensor:
    """Decode the values [m, K] of m positions from their bytes.

    curve_RF: the terms at each of the R approximate values.
    """
    taken = 0
    rest = settings.k - settings.exact_k
    out = _dtype(settings.exact_dtype)

    def take(number: int, dtype: torch.dtype) -> Tensor:
        nonlocal taken
        part = coded_mB[:, taken : taken + number * dtype.itemsize]
        taken += number * dtype.itemsize
        return part.contiguous().view(dtype)

    exact_mE = take(settings.exact_k, out)
    fit_mR = None
    if settings.polynomial_terms:
        coefficients_mF = take(len(settings.polynomial_terms), _dtype(settings.term_dtype))
        fit_mR = fit(curve_RF, coefficients_mF)
    residual_mR = torch.zeros(len(coded_mB), rest)
    first = 0
    for each in settings.residual_bins:
        scale_m1 = take(1, _dtype(each.scale_dtype))
        packed = take(-(-each.num_elements * each.element_bits // 8), torch.uint8)
        whole_mJ = torch.from_numpy(unpack_bits(packed.numpy(), each.element_bits, each.num_elements))
        half = 2 ** (each.element_bits - 1)
        steps_mJ = 2.0 * whole_mJ.float() - 1.0 if each.element_bits == 1 else (whole_mJ - half).float()
        residual_mR[:, first : first + each.num_elements] = steps_mJ * scale_m1
        first += each.num_elements
    assert taken == coded_mB.shape[1]
    approximate_mR = residual_mR.to(out) if fit_mR is None else fit_mR + residual_mR.to(out)
    values_mK = torch.cat([exact_mE, approximate_mR], -1)
    return values_mK.float().cumsum(-1).to(out) if settings.delta_encoding else values_mK


def fit(curve_RF: Tensor, coefficients_mF: Tensor) -> Tensor:
    """Sum the terms of each fit [m, R], some positions at a time."""
    parts_mF = coefficients_mF.split(max(1, _FIT // max(1, curve_RF.numel())))
    return torch.cat([(curve_RF * part_mF[:, None]).sum(-1) for part_mF in parts_mF])


def unpack_bits(packed_mB: np.ndarray, bits: int, number: int) -> np.ndarray:
    """Unpack rows of uint8 to int64 [m, number]: whole numbers of `bits` bits, the most significant first."""
    wide = np.unpackbits(packed_mB, axis=1)[:, : number * bits].reshape(len(packed_mB), number, bits)
    found = np.zeros((len(packed_mB), number), np.int64)
    for bit in range(bits):
        found = (found << 1) | wide[:, :, bit]
    return found


def _curve(settings: Compressor | OldCompressor) -> Tensor:
    """Evaluate each term at each of the k - exact_k approximate values, [R, F]."""
    number = settings.k - settings.exact_k
    if isinstance(settings, OldCompressor):
        points_R = torch.arange(number, dtype=torch.float32) + 1
        sign = -1 if settings.invert_polynomial else 1
        terms: Sequence[int | str] = [sign * power for power in range(settings.polynomial_degree + 1)]
        terms = [*terms, "sqrt"] if settings.with_sqrt_term else terms
    else:
        dtype = _dtype(settings.term_dtype)
        points_R = torch.linspace(0, 1, number, dtype=dtype) if settings.normalize_t else torch.arange(number).to(dtype)
        terms = settings.polynomial_terms or []
    known = {"sqrt": torch.sqrt, "exp": torch.exp}
    columns = [points_R**term if isinstance(term, int) else known[term](points_R) for term in terms]
    return torch.stack(columns, -1) if columns else points_R.new_zeros(number, 0)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _matrix(record: Record, name: str, where: str, width: int, dtype: Any) -> np.ndarray:
    """Return the numbers of a field, [m, width] of a dtype.

    UsageError: the settings stand for another width, or these are not such numbers.
    """
    values, lengths = record[name]
    if (others := lengths[lengths != width]).size:
        raise UsageError(
            f"{where}: a position has {others[0]} numbers in {name}, the compressor's settings stand for {width}: give "
            "the YAML with which the set was made"
        )
    if len(values) and np.dtype(dtype).kind != "f" and values.dtype.kind != "i":
        raise UsageError(f"{where}: {name} does not hold whole numbers")
    if len(values) and dtype == np.uint8 and not 0 <= values.min() <= values.max() <= 255:
        raise UsageError(f"{where}: {name} holds {values.max()}, which is not a byte")
    return values.astype(dtype).reshape(len(lengths), width)
