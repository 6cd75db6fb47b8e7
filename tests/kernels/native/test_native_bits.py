"""The native kernels against a numpy model of their operations: every bit, on every processor.

AVX512 and AVX2 are two implementations of one order of operations (``vectors.h``). If the test
passes on a machine of each kind, both implementations give equal bits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library
from tests.kernels.native import native_model as model
from tests.support.paged import Shape, make_batch

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built")
FORMATS: list[calls.Format] = ["int4", "int4_float32", "int8"]
WORST_ROWS = 11  # more than a tile has, and an odd rest


def packed_linear(x: Tensor, values: Tensor, numbers: list[Tensor], format: calls.Format) -> Tensor:
    dtype = torch.float32 if format == "int4_float32" else torch.float16
    packed = calls.pack_values(values.to(torch.uint8), format != "int8")
    return calls.linear(
        x, packed, calls.pack_numbers(numbers, dtype), None, len(values), format, None
    )


def equal(found: Tensor, expected: model.Floats) -> bool:
    return bool((found.numpy().view(np.int32) == expected.view(np.int32)).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(50, 96), (64, 576), (33, 1536)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_linear(shape: tuple[int, int], num_rows: int, format: calls.Format) -> None:
    torch.manual_seed(0)
    num_outputs, num_inputs = shape
    is_int4 = format != "int8"
    values = torch.randint(16 if is_int4 else 256, shape)
    numbers = [
        torch.rand(num_outputs, num_inputs // 32),
        torch.randn(num_outputs, num_inputs // 32),
    ]
    if format != "int4_float32":
        numbers = [part.half().float() for part in numbers]
    x = torch.randn(num_rows, num_inputs) * torch.logspace(-20, 3, num_inputs)
    x[0, :32] = 0
    found = packed_linear(x, values, numbers if is_int4 else numbers[:1], format)
    whole = values.numpy() - (0 if is_int4 else 128)
    minima = numbers[1].numpy() if is_int4 else None
    assert equal(found, model.linear(x.numpy(), whole, numbers[0].numpy(), minima))


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("weights", ["largest", "smallest", "both"])
@pytest.mark.parametrize("inputs", ["positive", "negative", "both"])
def test_sums_of_the_largest_products_are_exact(
    format: calls.Format, weights: str, inputs: str
) -> None:
    """Inputs for which a 16-bit sum of byte multiplications would saturate."""
    torch.manual_seed(0)
    largest, zero = (15, 0) if format == "int4" else (255, 128)
    choices = {"largest": [largest], "smallest": [0], "both": [0, largest]}[weights]
    values = torch.tensor(choices)[torch.randint(len(choices), (48, 96))]
    signs = {"positive": [127.0], "negative": [-127.0], "both": [127.0, -127.0]}[inputs]
    x = torch.tensor(signs)[torch.randint(len(signs), (WORST_ROWS, 96))]
    numbers = [torch.ones(48, 3), torch.zeros(48, 3)][: 2 if format == "int4" else 1]
    found = packed_linear(x, values, numbers, format)
    assert torch.equal(found.double(), x.double() @ (values - zero).double().t())


@pytest.mark.parametrize("form", ["wide", "plus_one"])
@pytest.mark.parametrize("width", [576, 50, 7])
def test_norm(width: int, form: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, width), torch.randn(width)
    expected = model.rms_norm(x.numpy(), weight.numpy(), float(form == "plus_one"), 1e-5)
    assert equal(calls.rms_norm(x, weight, 1e-5, form), expected)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_over_all_exponents(kind: str) -> None:
    """Also where the exponential is subnormal, 0 or infinite."""
    torch.manual_seed(0)
    gate = torch.cat(
        [torch.linspace(-180, 180, 9_000), torch.randn(1_000), torch.tensor([0.0, -0.0])]
    )
    up = torch.randn(len(gate))
    expected = model.gated_activation(gate.numpy(), up.numpy(), kind != "silu")
    assert equal(calls.act_mul(gate[None], up[None], kind)[0], expected)


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (24, 20)])
def test_rotation(dim: int, rotary_dim: int, is_half: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 3, dim), torch.randn(5, 2, dim), torch.randn(5, 2, 16)
    cos, sin = torch.randn(2, 1, 5, rotary_dim // 2 if is_half else rotary_dim)
    inputs = RopeInputs(query, key, value, cos, sin, rotary_dim, None, None, 0.0, "wide")
    k_cache, v_cache = torch.zeros(2, 4, 2, dim), torch.zeros(2, 4, 2, 16)
    found = calls.norm_rope_store(inputs, k_cache, v_cache, torch.arange(5))
    tables = cos[0, :, None].numpy(), sin[0, :, None].numpy()
    assert equal(found, model.rotate(query.numpy(), *tables, rotary_dim))
    stored = k_cache.view(8, 2, dim)[:5].contiguous()
    assert equal(stored, model.rotate(key.numpy(), *tables, rotary_dim))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(hq=3, hkv=1, dk=64, dv=64),
        Shape(hq=4, hkv=2, dk=48, dv=80, window=20, softcap=3.0, has_sinks=True),
        Shape(hq=2, hkv=2, dk=128, dv=128, softcap=5.0),
        Shape(hq=2, hkv=1, dk=16, dv=16, window=5, has_sinks=True),
    ],
    ids=str,
)
def test_attention(shape: Shape) -> None:
    rows = [(0, 5), (17, 1), (30, 9), (99, 1)]
    batch = make_batch(rows, shape)
    ops.kv_store(*batch.store)
    found = calls.attention(*batch.attend)
    query, sinks, token = batch.attend[0].numpy(), batch.attend[10], 0
    for (start, n), (k, v) in zip(rows, batch.histories, strict=True):
        for place in range(start, start + n):
            for head in range(shape.hq):
                kv_head = head * shape.hkv // shape.hq
                expected = model.attention(
                    query[token, head],
                    k[:, kv_head].numpy(),
                    v[:, kv_head].numpy(),
                    place,
                    shape.dk**-0.5,
                    shape.window,
                    shape.softcap,
                    None if sinks is None else sinks[head].numpy(),
                )
                assert equal(found[token, head], expected), (place, head)
            token += 1
