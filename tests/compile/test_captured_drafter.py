"""Drafters with a model: what they load and compute, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from pagespec import InvalidInputError
from pagespec.compile.captured_drafter import on_target_ids
from pagespec.compile.load.drafters import load_drafter
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import LoadedDrafter, LoadedModel, Shard
from pagespec.compile.passes.split_head import keep_rows, without_head
from tests.support.drafting import BLOCK_SIZE, NUM_BLOCKS, Drafting, step
from tests.support.models import VOCAB_SIZE, save_word_model, tiny_model

IDS = [(7 * i + 3) % VOCAB_SIZE for i in range(40)]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(tiny_model("llama"))


def draft_model(folder: Path, target: LoadedModel, **options: Any) -> LoadedDrafter:
    return load_drafter("draft_model", str(folder), target, **options)


def saved(folder: Path, arch: str = "llama", **overrides: Any) -> Any:
    model = tiny_model(arch, seed=1, **overrides)
    model.save_pretrained(folder)
    return model


def test_a_draft_model_computes_its_own_logits(tmp_path: Path, target: LoadedModel) -> None:
    model = saved(tmp_path, num_hidden_layers=1)
    drafting = Drafting(draft_model(tmp_path, target))
    expected = model(torch.tensor([IDS])).logits[0]
    first, second = drafting(IDS[:30]), drafting(IDS[30:], begin=30)
    assert first.hidden is None
    assert not drafting.captured.needs_hidden
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), expected)


def test_its_kv_has_a_tensor_per_attention_call(tmp_path: Path, target: LoadedModel) -> None:
    model = saved(tmp_path, num_hidden_layers=1)
    captured = Drafting(draft_model(tmp_path, target)).captured
    ((keys, values),) = captured.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    assert keys.shape[:2] == values.shape[:2] == (NUM_BLOCKS + 1, BLOCK_SIZE)
    assert keys.shape[2] == model.config.num_key_value_heads
    num_bytes = (keys.nbytes + values.nbytes) // (NUM_BLOCKS + 1)
    assert captured.bytes_per_block(BLOCK_SIZE) == num_bytes
    fp8 = replace(captured, kv_cache_dtype="fp8")
    assert fp8.allocate_kv(1, BLOCK_SIZE)[0][0].dtype == torch.uint8
    assert fp8.bytes_per_block(BLOCK_SIZE) < num_bytes


@pytest.mark.parametrize("compile", ["graph", "eager"])
def test_kv_is_also_computed_without_logits(
    tmp_path: Path, target: LoadedModel, compile: str
) -> None:
    saved(tmp_path, num_hidden_layers=2)
    captured = Drafting(draft_model(tmp_path, target), compile).captured
    whole, filled = (captured.allocate_kv(NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
    with torch.inference_mode():
        captured.bind(whole)(step(IDS, 0), None)
        captured.bind_fill(filled)(step(IDS, 0), None)
    for caches in zip(whole, filled, strict=True):
        for a, b in zip(*caches, strict=True):
            assert torch.equal(a[:NUM_BLOCKS], b[:NUM_BLOCKS])
            assert a.any()
    if compile == "graph":
        graph = captured.captured.graph
        assert graph is not None
        kept = [n.target for n in without_head(graph).__self__.graph.nodes]  # type: ignore[attr-defined]
        assert keep_rows not in kept
        assert keep_rows in [n.target for n in graph.graph.nodes]


def test_logits_have_the_ids_of_the_target() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    none = float("-inf")
    assert on_target_ids(logits, None, 3) is not None
    assert on_target_ids(logits, None, 2).tolist() == [[1.0, 2.0]]
    assert on_target_ids(logits, None, 5).tolist() == [[1.0, 2.0, 3.0, none, none]]
    ids = torch.tensor([4, 0, 2])
    assert on_target_ids(logits, ids, 5).tolist() == [[2.0, none, 3.0, none, 1.0]]


def test_heads_of_different_sizes_are_accepted_with_one_tokenizer(tmp_path: Path) -> None:
    save_word_model(tmp_path / "target")
    model = saved(tmp_path / "small", vocab_size=VOCAB_SIZE - 2, num_hidden_layers=1)
    PreTrainedTokenizerFast.from_pretrained(tmp_path / "target").save_pretrained(tmp_path / "small")
    target = load_model(tmp_path / "target")
    drafting = Drafting(draft_model(tmp_path / "small", target, max_model_len=64))
    logits = drafting([1, 2, VOCAB_SIZE - 1]).logits  # the last one is beyond the small model's ids
    assert logits.shape == (3, VOCAB_SIZE)
    assert logits[:, -2:].isneginf().all()
    expected = model(torch.tensor([[1, 2]])).logits[0]
    torch.testing.assert_close(logits[:2, :-2], expected)


def test_other_tokens_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    saved(tmp_path / "other", vocab_size=VOCAB_SIZE + 8)
    with pytest.raises(InvalidInputError, match=r"speculative_config.model = .* must have the "):
        draft_model(tmp_path / "other", target)
    save_word_model(tmp_path / "words")
    words = load_model(tmp_path / "words")
    changed = copy.deepcopy(words.tokenizer)
    changed.add_tokens(["one-more"])
    with pytest.raises(InvalidInputError, match="must have the target's tokenizer"):
        draft_model(tmp_path / "words", replace(words, tokenizer=changed))


def test_what_does_not_serve_the_target_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    saved(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(InvalidInputError, match="must support max_model_len = 100 tokens, not 64"):
        draft_model(tmp_path / "short", target, max_model_len=100)
    with pytest.raises(InvalidInputError, match="tensor_parallel_size = 2: must be 1"):
        draft_model(tmp_path / "short", replace(target, shard=Shard(0, 2)))
    saved(tmp_path / "states", "qwen3_5_text")
    loaded = draft_model(tmp_path / "states", target, max_model_len=64)
    with pytest.raises(InvalidInputError, match="must have attention only"):
        Drafting(loaded)
    with pytest.raises(InvalidInputError):
        draft_model(tmp_path / "missing", target)
