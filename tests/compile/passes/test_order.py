"""The order of passes follows from the constraints that each pass declares."""

from __future__ import annotations

import random

import pytest

from pagespec.compile.passes import _PASSES, COMMON_PASSES, cpu_passes, gpu_passes, in_order

COMMON = (
    "cleanup write_as_real write_as_linear cache_latents share_heads merge_linear bind_collectives"
)
NATIVE = "fuse_rope_store fuse_norm fuse_activation fuse_rope_cos_sin lower_cpu replay_native"
GPU = (
    "fuse_rope_store fuse_rope_attention fuse_rope_latent fuse_norm fuse_gated_norm fuse_router "
    "fuse_expert_sort combine_experts fuse_route_rows fuse_activation fuse_rope_cos_sin "
    "fuse_wide_linear lower_gpu fuse_norm_linear fuse_quantize fuse_attention_quantize sort_rows "
    "fuse_all_reduce_norm fuse_row_parallel fuse_combine_norm"
)


def test_the_order_of_each_run() -> None:
    assert " ".join(COMMON_PASSES) == COMMON
    assert list(cpu_passes(False)) == ["lower_cpu"]
    assert " ".join(cpu_passes(True)) == NATIVE


def test_the_order_on_a_gpu() -> None:
    pytest.importorskip("triton")
    assert " ".join(gpu_passes()) == GPU


def test_what_is_declared_holds_however_passes_are_listed() -> None:
    after = {name: entry.after for name, entry in _PASSES.items()}
    assert {earlier for names in after.values() for earlier in names} <= after.keys()
    for seed in range(20):
        names = list(after)
        random.Random(seed).shuffle(names)
        order = in_order({name: after[name] for name in names})
        assert sorted(order) == sorted(after)
        for name, earlier in after.items():
            assert all(order.index(other) < order.index(name) for other in earlier)


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="no order of a, b"):
        in_order({"c": (), "a": ("b",), "b": ("a",)})
