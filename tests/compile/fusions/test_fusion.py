"""All fusion passes together, per architecture: the expected fusions are made, and no bit changes.

On a CPU a fused call runs the operations that it replaced, so the bits must be equal.
tests/kernels/fused/test_dispatch.py tests the Triton kernels behind the same calls.
"""

from __future__ import annotations

import pytest
import torch

from pagespec.compile.fx.nodes import calls
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import capture_plain, change_common_passes, fuse, generate
from tests.support.models import ARCHITECTURES

# (rope and store, norms, activations). A Llama layer: one, two (and one at the end), one. Gemma has
# four norms a layer, gpt2 and gpt_neox have LayerNorm; gpt_oss has an activation of its own;
# deepseek_v3 rotates interleaved pairs of a part of its keys only, and has two norms more a layer
# and a shared expert.
EXPECTED = {
    "llama": (2, 5, 2),
    "qwen3": (1, 3, 1),
    "qwen2": (2, 5, 2),
    "mistral": (1, 3, 1),
    "gemma2": (2, 9, 2),
    "gemma3_text": (2, 9, 2),
    "phi3": (1, 3, 1),
    "gpt2": (0, 0, 0),
    "gpt_neox": (1, 0, 0),
    "gpt_oss": (2, 5, 0),
    "qwen3_moe": (1, 3, 1),
    "deepseek_v3": (0, 9, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_finds_the_structure_and_changes_no_bit(arch: str, dtype: torch.dtype) -> None:
    captured = capture_plain(arch, dtype)
    plain = captured.graph
    assert plain is not None
    gm, counts = fuse(captured)
    assert tuple(counts.values()) == EXPECTED[arch]
    called = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert called.count(fused.norm_rope_store) == counts["rope"]
    assert called.count(fused.act_mul) == counts["activation"]
    assert called.count(fused.rms_norm) + called.count(fused.add_rms_norm) == counts["norm"]
    if counts["rope"]:
        assert torch.ops.pagespec.kv_store not in called
        assert not any(calls(node, "neg") for node in gm.graph.nodes)
    if counts["norm"]:
        assert not any(calls(node, "rsqrt") for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.target in (fused.norm_rope_store, fused.act_mul, fused.rms_norm):
            assert isinstance(node.meta["example_value"], torch.Tensor)
    expected, found = generate(captured, plain), generate(captured, gm)
    assert len(expected) == len(found)
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before, after)
    assert torch.cat(expected[: -2 * len(captured.specs)]).count_nonzero() > 0


def test_fuses_without_merged_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    change_common_passes(monkeypatch, "merge_linear")
    captured = capture_plain("qwen3", torch.float32)
    plain = captured.graph
    assert plain is not None
    gm, counts = fuse(captured)
    assert tuple(counts.values()) == EXPECTED["qwen3"]
    for before, after in zip(generate(captured, plain), generate(captured, gm), strict=True):
        assert torch.equal(before, after)
