"""Attention that quantises its output, on a GPU.

The result must be bit-identical to that of the kernel that quantises stored outputs: alone, before
the matmul that reads it, and in whole engines.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import LLM, SamplingParams
from pagespec.kernels.attention.triton_backend import TritonBackend
from pagespec.kernels.fused.e4m3_groups import QuantizedRows
from pagespec.kernels.fused.quantize_rows import quantize_rows
from pagespec.kernels.matmul.quantized.quantized_weight import quantize_fp8
from pagespec.kernels.registry import registry
from tests.kernels.attention.rope_prologue import Case
from tests.kernels.attention.test_decode_gpu import ROWS, stored
from tests.support.hopper import has_hopper_kernels
from tests.support.models import tiny_model
from tests.support.paged import Rows, Shape, bundled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no instruction converts e4m3",
    ),
]

BF16 = torch.bfloat16
SHAPES = [
    Shape(hq=32, hkv=8, dk=128, dv=128, dtype=BF16),
    Shape(hq=14, hkv=2, dk=128, dv=128, block_size=64, softcap=5.0, has_sinks=True, dtype=BF16),
    Shape(hq=8, hkv=4, dk=256, dv=256, window=100, block_size=32, dtype=BF16),
    Shape(hq=8, hkv=1, dk=192, dv=128, dtype=torch.float16),
    Shape(hq=4, hkv=2, dk=256, dv=256),
    Shape(hq=32, hkv=8, dk=128, dv=128, dtype=BF16, is_e4m3=True),
    Shape(hq=8, hkv=4, dk=256, dv=256, block_size=128, dtype=BF16, is_e4m3=True),
]
SOME: dict[str, Rows] = ROWS | {
    "one": [(900, 1)],
    "many": [(n, 1) for n in (0, 15, 127, 511, 2047)] * 60,
    "long": [(5000, 1)],
}


def check(found: QuantizedRows, plain: Tensor, case: object) -> None:
    expected = quantize_rows(plain.flatten(1))
    for part, other in zip(found, expected, strict=True):
        assert part.dtype == other.dtype
        assert torch.equal(part.view(torch.uint8), other.view(torch.uint8)), case


@pytest.mark.parametrize("by_gluon", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_are_those_of_stored_outputs(shape: Shape, by_gluon: bool) -> None:
    """Decode of one segment and of many, Hopper's prefill and the one for all GPUs, padding."""
    is_other = shape.is_e4m3 or shape.dtype == torch.float32 or not has_hopper_kernels()
    if by_gluon and is_other:
        pytest.skip("by the Triton kernel alone")
    backend = TritonBackend()
    with registry().changed(without=() if by_gluon else ("prefill_attention",)):
        for name, rows in SOME.items():
            for num_padding in (0, 3):
                arguments = bundled(*stored(rows, shape, num_padding=num_padding).attend)
                check(backend.attend_quantized(*arguments), backend.attend(*arguments), name)


def test_of_zeros_and_of_small_outputs() -> None:
    """Values of any size, some of them zeros, in all but one head."""
    batch = stored(ROWS["mixed"], SHAPES[0])
    query, kv, params = bundled(*batch.attend)
    sizes = 10.0 ** torch.linspace(-38, 4, 8, device="cuda")
    sizes[3] = 0
    v_cache = (kv.v_cache.float().nan_to_num() * sizes[:, None]).to(BF16)
    backend, arguments = TritonBackend(), (query, kv._replace(v_cache=v_cache), params)
    check(backend.attend_quantized(*arguments), backend.attend(*arguments), "sizes")


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_of_norm_rotation_and_store(shape: Shape) -> None:
    """In one launch for few rows, in two for more; whatever is stored is stored alike."""
    decode = [(n, 1) for n in (0, 14, 15, 127, 511, 2047)]
    for rows, num_padding in ((decode[-1:], 0), (decode, 2), (decode * 20, 1)):
        case, backend = Case(shape, rows, num_padding=num_padding, device="cuda"), TritonBackend()

        def quantizing(*arguments: Any, backend: TritonBackend = backend) -> Any:
            return backend.fused_rope_attention_quantized(*arguments)

        expected, found = case.one(backend.fused_rope_attention), case.one(quantizing)
        check(found[0], expected[0], len(rows))  # type: ignore[arg-type]
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(mine[:-1].view(torch.uint8), theirs[:-1].view(torch.uint8))


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("is_e4m3", [False, True])
def test_norms_add_up_their_squares_in_one_order(is_e4m3: bool, quantizes: bool) -> None:
    """In one launch and in two. Of 10 million numbers, for another order changes 3 of a million."""
    shape = Shape(hq=32, hkv=8, dk=128, dv=128, dtype=BF16, is_e4m3=is_e4m3)
    case = Case(shape, [(n, 1) for n in range(64)], num_padding=0, device="cuda")
    backend = TritonBackend()
    attend = backend.fused_rope_attention_quantized if quantizes else backend.fused_rope_attention
    for _ in range(30):
        for part in case.inputs[:3]:
            part.normal_()
        found, expected = case.one(attend), case.two()  # type: ignore[arg-type]
        if quantizes:
            check(found[0], expected[0], "outputs")  # type: ignore[arg-type]
        else:
            assert torch.equal(found[0], expected[0])
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(mine[:-1].view(torch.uint8), theirs[:-1].view(torch.uint8))


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
def test_a_captured_chain_waits_for_its_rows(num_rows: int) -> None:
    """The following matmul starts before attention has ended."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    backend = TritonBackend()
    rows: Rows = [(700 + 3 * n, 1) for n in range(num_rows)]
    query, *rest = bundled(*stored(rows, SHAPES[0], num_padding=0).attend)
    weight = dispatch_fp8.pack(quantize_fp8(torch.randn(4096, 4096, device="cuda")))

    def chain(query: Tensor) -> Tensor:
        for _ in range(4):
            quantized = backend.attend_quantized(query, *rest)
            out = dispatch_fp8.linear_of_rows(quantized, BF16, 2, *weight, None)
            query = out.view(query.shape)
        return query

    def apart(query: Tensor) -> Tensor:
        for _ in range(4):
            outputs = backend.attend(query, *rest).flatten(1)
            torch.cuda.synchronize()
            query = dispatch_fp8.linear(outputs, *weight).view(query.shape)
            torch.cuda.synchronize()
        return query

    given = torch.empty_like(query)
    given.copy_(query)
    chain(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(given)
    for seed in range(10):
        torch.manual_seed(seed)
        given.copy_(torch.randn(given.shape, device="cuda"))
        graph.replay()
        assert torch.equal(out, apart(given.clone())), seed
    assert out.isfinite().all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_an_engine_answers_as_with_a_kernel_of_its_own(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagespec.compile import captured_model

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = tiny_model("qwen3", head_dim=128, num_key_value_heads=2, vocab_size=512, **sizes)
    folder = Path(tempfile.mkdtemp())
    model.config.dtype = BF16
    model.config.save_pretrained(folder)
    passes = captured_model.gpu_passes
    fused: list[int] = []

    def generate() -> list[Any]:
        llm = LLM(
            str(folder), device="cuda", dtype="bfloat16", quantization="fp8", load_format="dummy",
            max_model_len=512, max_num_batched_tokens=128, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
        prompts = [[*range(3, 3 + n)] for n in (3, 40, 200, 1, 90)]
        found = []
        for output in llm.generate(prompts, params, use_tqdm=False):
            tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
            assert entries is not None
            logprobs = [entry[t].logprob for entry, t in zip(entries, tokens, strict=True)]
            found.append((list(tokens), logprobs))
        return found

    def noted() -> dict[str, Any]:
        found = passes()
        fuse = found["fuse_attention_quantize"]

        def counted(*arguments: Any) -> int:
            fused.append(fuse(*arguments))
            return fused[-1]

        return found | {"fuse_attention_quantize": counted}

    def without() -> dict[str, Any]:
        return {name: p for name, p in passes().items() if name != "fuse_attention_quantize"}

    monkeypatch.setattr(captured_model, "gpu_passes", noted)
    joined = generate()
    assert fused
    assert all(count == model.config.num_hidden_layers for count in fused)
    monkeypatch.setattr(captured_model, "gpu_passes", without)
    assert generate() == joined
