"""Attention that quantises its output, under Triton's interpreter.

The result must be bit-identical to that of the kernel that quantises stored outputs.
test_quantized_results_gpu.py runs on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from pagespec.kernels.arguments import AttentionParams
from pagespec.kernels.attention import launch
from pagespec.kernels.attention.tiling import choose_tiling
from pagespec.kernels.attention.triton_backend import TritonBackend
from pagespec.kernels.fused.e4m3_groups import QuantizedRows
from pagespec.kernels.fused.quantize_rows import quantize_rows
from tests.kernels.attention.rope_prologue import Case
from tests.kernels.attention.test_decode import ROWS, SMALL, stored
from tests.kernels.attention.test_e4m3_tiles import _without_assembly  # noqa: F401 (a fixture)
from tests.support.paged import Shape, bundled, poisoned_memory

BF16 = torch.bfloat16
SHAPES = [
    Shape(hq=6, hkv=2, dk=128, dv=128, softcap=3.0, has_sinks=True, dtype=BF16),
    Shape(hq=2, hkv=1, dk=256, dv=256, window=40, dtype=BF16),
    Shape(hq=3, hkv=1, dk=192, dv=128, dtype=torch.float16),
    Shape(hq=2, hkv=2, dk=128, dv=256),
    Shape(hq=2, hkv=1, dk=128, dv=128, dtype=BF16, is_e4m3=True),
]


def check(found: QuantizedRows, plain: torch.Tensor) -> None:
    for part, expected in zip(found, quantize_rows(plain.flatten(1)), strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part, expected)


def quantized(arguments: Any, tiling: Any) -> QuantizedRows:
    query, kv, params = arguments
    with poisoned_memory("cpu"):
        rows = launch.quantized_like(query, kv.v_cache)
        assert rows.scales.isnan().all()
        launch.paged_attention(query, kv, params, tiling=tiling, rows=rows)
    return rows


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_are_those_of_stored_outputs(shape: Shape, rows: list[tuple[int, int]]) -> None:
    """Contexts of one segment and of several; whole heads in a program, and halves of them."""
    arguments = bundled(*stored(rows, shape).attend)
    parts = choose_tiling(shape.dtype, shape.dk, shape.dv).prefill_parts
    for tiling in (SMALL, replace(SMALL, unsplit_from=1, prefill_parts=parts)):
        plain = launch.paged_attention(*arguments, tiling=tiling)
        assert plain.count_nonzero() > 0
        check(quantized(arguments, tiling), plain)


def test_of_padding_are_zeros_with_their_scale() -> None:
    batch = stored([(10, 1), (30, 9)], SHAPES[0])
    values, scales = quantized(bundled(*batch.attend), SMALL)
    assert (values[batch.num_tokens :] == 0).all()
    assert (scales[:, batch.num_tokens :] == torch.finfo(torch.float32).tiny).all()
    query, kv, params = bundled(*batch.attend)
    none = kv._replace(
        query_starts=kv.query_starts[:1],
        context_lens=kv.context_lens[:0],
        table_rows=kv.table_rows[:0],
    )
    check(quantized((query, none, params), SMALL), torch.zeros(len(query), 6, 128))


def test_of_norm_rotation_and_store_in_one_launch_and_in_two() -> None:
    for rows, num_padding in (([(10, 1), (100, 1)], 1), ([(10, 3), (100, 1)], 0)):
        case = Case(SHAPES[0], rows, num_padding=num_padding)
        backend = TritonBackend()

        def call(*arguments: Any, backend: TritonBackend = backend) -> Any:
            return backend.fused_rope_attention_quantized(*arguments)

        expected, found = case.one(backend.fused_rope_attention), case.one(call)
        check(found[0], expected[0])  # type: ignore[arg-type]
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(mine[:-1].nan_to_num(), theirs[:-1].nan_to_num())


def test_heads_that_share_a_group_are_refused() -> None:
    query, kv, params = bundled(*stored(ROWS["decode"], Shape(dk=64, dv=64)).attend)
    with pytest.raises(ValueError, match="heads of 64 values"):
        TritonBackend().attend_quantized(query, kv, AttentionParams(*params))
