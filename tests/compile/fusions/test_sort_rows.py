"""All attention calls of a graph share one order of the step's rows, computed once."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.fuse_rope_store import fuse_rope_attention, fuse_rope_store
from pagespec.compile.fusions.sort_rows import sort_rows
from pagespec.compile.passes import PassContext
from pagespec.kernels.arguments import AttentionParams, PagedKV, RopeInputs
from pagespec.kernels.attention import reference
from pagespec.kernels.attention.backend import AttentionBackend
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import capture_plain, generate


class Backend:
    """Attention in torch that records its arguments."""

    def __init__(self) -> None:
        self.sorted: list[tuple[Tensor, int]] = []
        self.told: list[tuple[Tensor, Tensor | None]] = []

    def longest_first(self, contexts: Tensor, num_kv_heads: int) -> Tensor:
        self.sorted.append((contexts.clone(), num_kv_heads))
        return contexts.argsort(descending=True, stable=True).int()

    def turned(
        self,
        inputs: RopeInputs,
        slots: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        order: Tensor | None = None,
    ) -> Tensor:
        self.told.append((kv.context_lens.clone(), order))
        query = fused.norm_rope_store(inputs, kv.k_cache, kv.v_cache, slots)
        return reference.paged_attention(query, kv, params)

    def made(self) -> AttentionBackend:
        return AttentionBackend(
            "triton",
            "",
            reference.paged_attention,
            fused.kv_store,
            self.turned,
            longest_first=self.longest_first,
        )


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    return capture_plain("gemma3_text", torch.float32)  # two layers


def graph_of(captured: CapturedModel, backend: AttentionBackend) -> tuple[GraphModule, PassContext]:
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    context = PassContext(captured.loaded.module, {}, attention=backend, specs=captured.specs)
    fuse_rope_store(gm, context)
    fuse_rope_attention(gm, context)
    return gm, context


def test_every_call_has_the_order_of_its_step(captured: CapturedModel) -> None:
    backend = Backend()
    gm, context = graph_of(captured, backend.made())
    gm.recompile()
    expected = generate(captured, gm)
    backend.told.clear()
    assert sort_rows(gm, context) == len(captured.specs) > 1
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(expected, generate(captured, gm), strict=True):
        assert torch.equal(a, b)
    assert len(backend.told) == len(backend.sorted) * len(captured.specs)
    heads = {spec.num_kv_heads for spec in captured.specs}
    for step, (contexts, num_kv_heads) in enumerate(backend.sorted):
        assert {num_kv_heads} == heads
        for layer in range(len(captured.specs)):
            lengths, order = backend.told[step * len(captured.specs) + layer]
            assert order is not None
            assert torch.equal(lengths, contexts)
            assert torch.equal(order.long(), contexts.argsort(descending=True, stable=True))


def test_a_backend_without_orders_is_given_none(captured: CapturedModel) -> None:
    backend = Backend()
    made = dataclasses.replace(backend.made(), longest_first=None)
    gm, context = graph_of(captured, made)
    assert sort_rows(gm, context) == 0
    gm.recompile()
    generate(captured, gm)
    assert backend.told
    assert all(order is None for _, order in backend.told)
