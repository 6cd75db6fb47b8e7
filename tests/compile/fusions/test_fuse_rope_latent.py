"""Norm and rotation are fused into the write of latents and the absorbed query.

No bit changes, and near misses are unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from pagespec import LLM, SamplingParams
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.fuse_rope_latent import fuse_rope_latent
from pagespec.compile.fx.nodes import calls
from pagespec.compile.passes import PassContext
from pagespec.kernels.mla import dispatch as mla
from tests.support.captures import capture_plain, first, generate, use_gpu_passes
from tests.support.driving import hf_greedy
from tests.support.models import tiny_model

lower_gpu = pytest.importorskip("pagespec.compile.lowering.lower_gpu")


def fused(
    captured: CapturedModel, change: Callable[[GraphModule], None] | None = None
) -> tuple[GraphModule, int]:
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    if change is not None:
        change(gm)
    count = fuse_rope_latent(gm, PassContext(captured.loaded.module, {}))
    gm.graph.lint()
    gm.recompile()
    return gm, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joins_both_calls_of_each_layer_and_changes_no_bit(dtype: torch.dtype) -> None:
    captured = capture_plain("deepseek_v2", dtype)
    gm, count = fused(captured)
    assert count == 4
    called = [node.target for node in gm.graph.nodes]
    assert called.count(mla.norm_rope_store_latent) == called.count(mla.rope_latent_query) == 2
    assert not {mla.store_latent, mla.latent_query}.intersection(called)
    assert not any(calls(node, "stack", "cat") for node in gm.graph.nodes)
    assert captured.graph is not None
    before, after = generate(captured, captured.graph), generate(captured, gm)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("arch", ["deepseek_v3", "minicpm3"])
def test_rotations_in_halves_keep_their_calls(arch: str) -> None:
    assert fused(capture_plain(arch, torch.bfloat16))[1] == 0


def _stack(gm: GraphModule) -> Node:
    return first(gm, "stack")  # of a query; the key has the second


def _parts_swapped(gm: GraphModule) -> None:
    node = _stack(gm)
    node.args = ((node.args[0][1], node.args[0][0]), -1)  # type: ignore[index]


def _another_sum(gm: GraphModule) -> None:
    node = _stack(gm).args[0][1]  # type: ignore[index]
    node.args = (node.args[0], node.args[0])


def _half_of_another_pair(gm: GraphModule) -> None:
    _stack(gm).args[0][0].args[0].args[0].args = (  # type: ignore[index]
        _stack(gm).args[0][0].args[0].args[0].args[0],  # type: ignore[index]
        (Ellipsis, 1),
    )


def _parts_of_other_queries(gm: GraphModule) -> None:
    node = first(gm, "cat")
    node.args = ((node.args[0][1], node.args[0][1]),)  # type: ignore[index]


def _table_of_each_head(gm: GraphModule) -> None:
    node = first(gm, "stack").args[0][0].args[0].args[1]  # type: ignore[index]
    node.args = (node.args[0], 2)


@pytest.mark.parametrize(
    ("change", "num_left"),
    [
        (_parts_swapped, 3),
        (_another_sum, 3),
        (_half_of_another_pair, 3),
        (_parts_of_other_queries, 3),
        (_table_of_each_head, 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_quite_the_pattern_is_left_alone(
    change: Callable[[GraphModule], None], num_left: int
) -> None:
    captured = capture_plain("deepseek_v2", torch.bfloat16)
    assert fused(captured, change)[1] == num_left


def _query_written_in_place(gm: GraphModule) -> None:
    node = first(gm, "cat").args[0][0]  # type: ignore[index]
    with gm.graph.inserting_after(first(gm, "stack")):
        gm.graph.call_method("mul_", (node, 2.0))


def test_a_query_that_is_written_keeps_its_call() -> None:
    assert fused(capture_plain("deepseek_v2", torch.bfloat16), _query_written_in_place)[1] < 4


def test_tokens_behind_the_passes_for_a_gpu_are_those_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_gpu_passes(monkeypatch)
    model = tiny_model("deepseek_v2")
    llm = LLM(model, device="cpu", max_model_len=512, max_num_seqs=4)
    captured = llm._runner.captured
    assert captured.rewrites["fuse_rope_latent"] == 4
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [40, 3, 2], [7] * 33]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == hf_greedy(model, prompt, 8)
