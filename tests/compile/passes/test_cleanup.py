"""No-op calls are removed, so that later passes see the nodes behind them."""

from __future__ import annotations

import pytest
import torch

from pagespec import LLM
from pagespec.compile.fx.nodes import is_ours
from pagespec.compile.inductor.regions import is_opaque
from tests.support.captures import use_gpu_passes
from tests.support.models import tiny_model

lower_gpu = pytest.importorskip("pagespec.compile.lowering.lower_gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "arch",
    [
        "glm_moe_dsa",
        *(
            pytest.param(arch, marks=pytest.mark.nightly)
            for arch in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk2", "hy_v4")
        ),
    ],
)
def test_no_matmul_is_left_to_the_library(
    arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their routers multiply ``x.type(float32)`` and ``weight.type(float32)``. Of a float32 model
    both are nothing, but the weight was no constant then, and its matmul cuBLAS's, which chooses an
    order of summation by the number of rows: GLM-5's bits followed the schedule on a GPU."""
    use_gpu_passes(monkeypatch)
    llm = LLM(tiny_model(arch).to(dtype), device="cpu", max_model_len=64)
    graph = llm._runner.captured.graph
    calls = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
    assert [str(node) for node in calls if is_opaque(node) and not is_ours(node)] == []
