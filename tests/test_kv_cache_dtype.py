"""``kv_cache_dtype``: memory, rejected values, and the bytes per token of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.compile.kv_cache import allocate_kv_caches, kv_bytes_per_block
from pagespec.engine.config import EngineConfig
from pagespec.errors import InvalidInputError
from pagespec.kernels import e4m3
from pagespec.kernels.attention.attention_spec import AttentionSpec
from pagespec.kernels.fused.dispatch import kv_store
from tests.support.models import save_word_model

SPECS = [AttentionSpec(call, 4, 2, 64, 48, 1.0) for call in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_a_block_takes_what_is_counted(dtype: torch.dtype) -> None:
    caches = allocate_kv_caches(SPECS, 5, 16, dtype, "cpu")
    num_bytes = sum(cache.nbytes for pair in caches for cache in pair)
    assert num_bytes == 6 * kv_bytes_per_block(dtype, SPECS, 16)


def test_a_budget_holds_more_blocks(tmp_path: Path, free_memory: Callable[[int], None]) -> None:
    folder = save_word_model(tmp_path)
    free_memory(1 << 20)
    num_blocks = {
        kind: LLM(folder, device="cpu", kv_cache_dtype=kind, max_num_seqs=4096).num_blocks
        for kind in ("auto", "fp8")
    }
    # Heads of 8: 12 bytes in place of 32.
    assert 32 / 12 * num_blocks["auto"] <= num_blocks["fp8"] <= 32 / 12 * (num_blocks["auto"] + 2)


def test_a_token_is_stored_by_itself() -> None:
    """Its bytes depend on no other token, head or step; nothing else is written."""
    key, value = torch.randn(5, 2, 64), torch.randn(5, 2, 48) * 1e-3
    key[3, 1] = 0
    [(k_cache, v_cache)] = allocate_kv_caches(SPECS[:1], 3, 4, torch.uint8, "cpu")
    kv_store(key, value, k_cache, v_cache, torch.tensor([3, 4, 5, 6, 9]))
    for token, slot in enumerate([3, 4, 5, 6, 9]):
        for x, cache in ((key, k_cache), (value, v_cache)):
            for head in range(2):
                row = cache.view(-1, *cache.shape[2:])[slot, head]
                assert torch.equal(row, e4m3.encode_rows(x[token, head]))
                error = (e4m3.decode_rows(row) - x[token, head]).abs()
                assert bool(
                    (error <= x[token, head].abs() / 16 + x[token, head].abs().max() / 2**17).all()
                )
    assert not k_cache.view(16, -1)[[0, 1, 2, 7, 8, 10, 11]].any()


def test_not_a_number_stays_one() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0], [1.0, 2.0, 3.0]])
    decoded = e4m3.decode_rows(e4m3.encode_rows(x))
    assert decoded[0].isnan().all()
    assert not decoded[1].isfinite().any()
    assert decoded[2].isfinite().all()


@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_every_way_to_run_gives_the_tokens(tmp_path: Path, compile: str) -> None:
    folder = save_word_model(tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=8)
    answers = [
        LLM(folder, device="cpu", kv_cache_dtype="fp8", num_blocks=8, compile=way)
        .generate([[5, 9, 7, 3]], sampling)[0]
        .outputs[0]
        .token_ids
        for way in ("graph", compile)
    ]
    assert answers[0] == answers[1]


def test_refused() -> None:
    with pytest.raises(InvalidInputError, match="must be one of auto, fp8"):
        EngineConfig(kv_cache_dtype="int8")
