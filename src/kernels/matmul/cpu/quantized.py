"""CPU matmuls with 4-bit, 8-bit or float16 weights that are never expanded to float32.

A decode step of few rows takes the time of reading the weights, so fewer bytes give more tokens per
second. Where :mod:`...native` can be built, it multiplies weights with groups of 32 inputs
(:class:`Int4Weight`, :class:`Int8Weight`) with the values in the file (:func:`pack_native`).
Elsewhere two torch operations replace it. Both sum in float32. They are used where a row has the
same bits whatever the number of rows, which a trial determines once per shape
(:func:`is_row_invariant`).

- 4 bits: ``(value - 8) * scale + zero``. Scales, zero points, rows and results are rounded to
  bfloat16 (8 bits of mantissa); only for that dtype does the operation have vector code.
- float16, for all other weights: rows and results stay float32. It also serves formats that the
  native kernels do not support.

Weights of SmolLM2-135M, one thread of a Zen 4 with AVX512, microseconds; float32 is packed as in
:mod:`.invariant`. The weight stays in the cache, so arithmetic takes all the time:

===========  ====  =====  =======
weight       rows  4 bit  float32
===========  ====  =====  =======
3072 x 576   1     112    154
3072 x 576   4     203    190
3072 x 576   16    796    598
3072 x 576   512   26780  19578
576 x 1536   1     50     63
576 x 1536   16    331    268
===========  ====  =====  =======

So these weights pay off with few rows and weights that come from memory: five bits per weight
    instead of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import row_trial
from ...native import calls as native
from ..quantized.quantized_weight import GROUP, Int4Weight, Int8Weight, QuantizedWeight

_OUTPUT_UNIT = 16
_MIDDLE = 8
_CAPABILITIES = ("AVX2", "AVX512")
# FBGEMM's AVX2 kernels process up to 6 rows at a time. The kernels for 1 and 2 rows, which also
# process the remaining rows of larger numbers, have another order of summation.
_MOST_AVX2_ROWS = 6
_FEWEST_AVX2_ROWS = 3
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 33)  # libraries switch kernels


def reason_against() -> str | None:
    """The reason why this machine and this torch cannot multiply in this form, or None."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _CAPABILITIES:
        return f"needs a processor with AVX2 or AVX512; torch found {capability}"
    names = ("_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
    if not all(hasattr(torch.ops.aten, name) for name in names):
        return "needs torch's _weight_int4pack_mm_for_cpu"
    if not hasattr(torch.ops.quantized, "linear_dynamic_fp16"):
        return "needs torch's quantized::linear_dynamic_fp16"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "needs a torch that was built with FBGEMM"
    return None


def fits_int4(weight: QuantizedWeight | None) -> bool:
    """Whether torch's operation supports a weight of this form and shape."""
    return isinstance(weight, Int4Weight) and len(weight.values) % _OUTPUT_UNIT == 0


def pack_int4(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """The values, and the scales and zero points, in the layout that :func:`linear_int4` reads."""
    values = weight.unpacked().int()
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    zeros = weight.minima + _MIDDLE * weight.scales
    pairs = torch.stack((weight.scales.t(), zeros.t()), -1)
    return packed, pairs.to(torch.bfloat16).contiguous()


def native_format(weight: Int4Weight | Int8Weight) -> native.Format:
    """The form of a weight for :func:`.native.calls.linear`.

    The weight keeps its values. Scales and minima are float16 if float16 represents all of them, as
    in most files; else float32. 8-bit weights, whose scales are float16 in files, always use
    float16.
    """
    if isinstance(weight, Int8Weight):
        return "int8"
    numbers = (weight.scales, weight.minima)
    is_exact = all(torch.equal(part.half().float(), part) for part in numbers)
    return "int4" if is_exact else "int4_float32"


def pack_native(weight: Int4Weight | Int8Weight, format: native.Format) -> tuple[Tensor, Tensor]:
    """Values, scales and minima of a weight for :func:`.native.calls.linear`, in a format that
    represents all of them (:func:`native_format`)."""
    numbers = [weight.scales]
    if isinstance(weight, Int4Weight):
        numbers.append(weight.minima)
    dtype = torch.float32 if format == "int4_float32" else torch.float16
    values = native.pack_values(weight.unpacked(), format != "int8")
    return values, native.pack_numbers(numbers, dtype)


def linear_int4(x: Tensor, values: Tensor, scales_and_zeros: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a weight ``[N, K]`` from :func:`pack_int4`.

    Args:
        x: ``[..., K]``, float32. bias: ``[N]`` or None.

    Returns:
        ``[..., N]``, float32.
    """
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, values, GROUP, scales_and_zeros)
    out = out.to(x.dtype)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], out.shape[1])


def pack_float16(weight: Tensor) -> Tensor:
    """A copy of ``weight [N, K]``, float32, for :func:`linear_float16`: an FBGEMM object, not a
    tensor. Values beyond float16's largest are clamped to it."""
    packed: Tensor = torch.ops.quantized.linear_prepack_fp16(weight.detach(), None)
    return packed


def linear_float16(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a weight ``[N, K]`` from :func:`pack_float16`; everything else is float32.

    Args:
        x: ``[..., K]``, float32. bias: ``[N]`` or None.

    Returns:
        ``[..., N]``, float32.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    num_rows = len(rows)
    missing = _FEWEST_AVX2_ROWS - num_rows % _MOST_AVX2_ROWS
    if 0 < missing < _FEWEST_AVX2_ROWS and torch.backends.cpu.get_cpu_capability() == "AVX2":
        rows = torch.cat((rows, rows[-1:].expand(missing, -1)))
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, packed)[:num_rows]
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], out.shape[1])


def is_row_invariant(
    multiply: Callable[[Tensor], Tensor], num_inputs: int, threads: Sequence[int] = ()
) -> bool:
    """Whether rows ``[M, K]`` get the same bits from ``multiply`` in groups of many sizes, with
    every number of threads (:func:`..row_trial.holds_with_all`)."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(_ROW_COUNTS), num_inputs, generator=generator)
    return row_trial.is_row_invariant(multiply, rows, _ROW_COUNTS, row_trial.MANY_ELEMENTS, threads)
