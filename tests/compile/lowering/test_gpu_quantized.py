"""FP8 matmuls of a GPU in a graph: the chosen calls, and their results against a CPU's."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.errors import UnsupportedModelError
from pagespec.kernels import e4m3
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.matmul.cpu import expanded as cpu_expanded
from tests.support.captures import generate, graph_cache, use_gpu_passes
from tests.support.quantized_files import write_quantized

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)


def rounded_rows(x: Tensor) -> Tensor:
    """Rows rounded as a GPU's kernels round them."""
    made = []
    for part in x.split(128, -1):
        scale = e4m3.scale_for(part.abs().amax(-1, keepdim=True))
        made.append(e4m3.decode(e4m3.encode(part / scale)) * (scale * e4m3.DECODED_UNIT))
    return torch.cat(made, -1)


def captured_from(folder: Path, **settings: Any) -> CapturedModel:
    loaded = load_model(str(folder), **settings)
    return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


@pytest.mark.parametrize("layout", ["fp8 blocks", "fp8 channels"])
def test_lowered_for_a_gpu(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers; the last one's down projection is not quantised."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    write_quantized(tmp_path, layout)
    linear = cpu_expanded.linear_fp8

    def rounding_rows(x: Tensor, *rest: Any) -> Tensor:
        return linear(rounded_rows(x), *rest)

    monkeypatch.setattr(cpu_expanded, "linear_fp8", rounding_rows)
    on_cpu = captured_from(tmp_path)
    use_gpu_passes(monkeypatch, has_sweeps=True)
    captured = captured_from(tmp_path)
    assert captured.graph is not None
    assert on_cpu.graph is not None
    assert captured.weight_formats == on_cpu.weight_formats
    assert captured.float32_matrices == on_cpu.float32_matrices
    called = Counter(n.target for n in captured.graph.graph.nodes if n.op == "call_function")
    # Queries, keys and values behind the first norm; an MLP; then the others again, and a gate and
    # up without their down projection.
    assert called[dispatch_fp8.norm_linear] == 1
    assert called[dispatch_fp8.add_norm_linear] == 3
    assert called[dispatch_fp8.linear] == 2  # the outputs of attention
    assert captured.rewrites["fuse_quantize"] == 5
    assert called[fused.act_mul] == 1
    expected, found = generate(on_cpu, on_cpu.graph), generate(captured, captured.graph)
    for a, b in zip(expected, found, strict=True):
        # Where sums have another order, some rows are rounded the other way.
        assert (a - b).norm() <= 1e-2 * a.norm()


def test_a_stand_in_that_something_else_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(tmp_path, "fp8 blocks")
    use_gpu_passes(monkeypatch, has_sweeps=True)
    from pagespec.compile.lowering import lower_gpu

    monkeypatch.setattr(lower_gpu.QuantizedCalls, "__call__", lambda *_, **__: None)
    with pytest.raises(UnsupportedModelError, match="read by more than its linear layer"):
        captured_from(tmp_path)


def test_random_weights_are_made_fp8(tmp_path: Path) -> None:
    """Those of the plain dummy model, all but the head's."""
    from pagespec.kernels.matmul.quantized.quantized_weight import quantize_fp8
    from tests.support.models import tiny_model

    tiny_model("llama").config.save_pretrained(tmp_path)
    plain = load_model(str(tmp_path), load_format="dummy")
    loaded = load_model(str(tmp_path), load_format="dummy", quantization="fp8")
    assert loaded.quantization == "fp8 e4m3 in blocks of 128 x 128, made at load"
    weights = dict(plain.module.named_parameters())
    assert len(loaded.quantized) == 2 * 7
    for name, held in loaded.quantized.items():
        assert held is not None
        for part, expected in zip(held, quantize_fp8(weights[name]), strict=True):
            assert torch.equal(part, expected)
    for name, parameter in loaded.module.named_parameters():
        if name not in loaded.quantized:
            assert torch.equal(parameter, weights[name])


def test_integers_are_lowered_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_capability: Callable[[str], None]
) -> None:
    """In float32, where nothing is rounded."""
    from pagespec.kernels.matmul.quantized import dispatch_int4

    write_quantized(tmp_path, "gptq asymmetric", num_hidden_layers=1)
    cpu_capability("DEFAULT")
    on_cpu = captured_from(tmp_path)
    use_gpu_passes(monkeypatch, has_sweeps=True)
    captured = captured_from(tmp_path)
    assert captured.graph is not None
    assert on_cpu.graph is not None
    assert captured.weight_formats == on_cpu.weight_formats
    called = Counter(n.target for n in captured.graph.graph.nodes if n.op == "call_function")
    assert called[dispatch_int4.linear_silu_mul] == 1
    # Queries, keys and values in one; outputs of attention; down projection.
    assert called[dispatch_int4.linear] == 3
    expected, found = generate(on_cpu, on_cpu.graph), generate(captured, captured.graph)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
