"""Indexers are recognised by their computation, and rejected if it is not a top-k indexer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagespec import UnsupportedModelError
from pagespec.compile.captured_model import capture_model
from pagespec.compile.kv_cache import allocate_kv_caches, kv_bytes_per_block
from pagespec.compile.load.load import load_model
from pagespec.compile.model import indexers, scores
from pagespec.compile.model.current_step import IndexCall
from pagespec.compile.probe.call_recorder import IndexRecorder, MaskMarker
from pagespec.compile.probe.probe import probe_model
from tests.support.captures import graph_cache
from tests.support.models import tiny_model
from tests.support.tiny_configs import SPARSE, TOPK


@pytest.mark.parametrize("arch", SPARSE)
def test_calls_know_what_is_chosen_for_them(arch: str) -> None:
    loaded = load_model(tiny_model(arch))
    specs = probe_model(loaded)
    of_keys = [(spec.index_dim, spec.index_dtype) for spec in specs]
    own = (16, "float32")
    # The last layer of three sees what the second chose.
    assert of_keys == ([own, own, (0, "")] if len(specs) == 3 else [own, own])
    assert all(spec.num_chosen == TOPK for spec in specs)


def test_equal_indexers_are_traced_with_few_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def trace_part(*args: Any) -> Any:
        traced.append(args)
        return scores.trace_part(*args)

    monkeypatch.setattr(indexers, "trace_part", trace_part)
    probe_model(load_model(tiny_model("deepseek_v32", num_hidden_layers=3)))
    assert len(traced) == 3 + 1


def test_index_keys_are_stored_in_the_blocks() -> None:
    loaded = load_model(tiny_model("glm_moe_dsa"))
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    assert all(spec.is_latent for spec in captured.specs)
    for dtype in (torch.float32, torch.uint8):
        caches = allocate_kv_caches(captured.specs, 5, 16, dtype, "cpu")
        assert [len(call) for call in caches] == [2, 2, 1]
        assert [call[-1].dtype for call in caches[:2]] == [torch.float32] * 2
        num_bytes = sum(cache.nbytes for call in caches for cache in call)
        assert num_bytes == 6 * kv_bytes_per_block(dtype, captured.specs, 16)


def test_only_the_part_of_a_head_is_known_as_a_mask() -> None:
    mask = torch.zeros(1, 1, 3, 3).as_subclass(MaskMarker)
    part = mask[:, 0, :, :]
    assert isinstance(part, MaskMarker)
    assert part.whole is mask
    for at in [0, (slice(None), torch.tensor([0, 0])), (slice(None), 0)]:
        other = mask[at]
        assert isinstance(other, MaskMarker)
        assert other.whole is None


class _Indexer(nn.Module):
    """Replaces an indexer of DeepSeek-V3.2: its keys are the first elements of its input."""

    def __init__(self, num_heads: int, num_dims: int) -> None:
        super().__init__()
        self.layer_idx = 0
        self.num_heads = num_heads
        self.proj = nn.Linear(48, num_heads * num_dims)
        self.weigh = nn.Linear(48, num_heads)

    def scores(self, products: Tensor, weights: Tensor) -> Tensor:
        return torch.matmul(weights.unsqueeze(-2), F.relu(products * 0.5)).squeeze(-2)

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + mask

    def choice(self, scores: Tensor) -> Tensor:
        return scores.topk(min(7, scores.shape[-1]), dim=-1).indices

    def forward(
        self,
        hidden: Tensor,
        _residual: Tensor,
        _rope: Any,
        mask: Tensor,
        _positions: Any,
        cache: Any = None,
        past_key_values: Any = None,  # its name before transformers 5.24
    ) -> Tensor:
        query = self.proj(hidden).unflatten(-1, (self.num_heads, -1))
        keys = hidden[..., : query.shape[-1]]
        cache = past_key_values if cache is None else cache
        if cache is not None:
            keys = cache.update_indexer(keys, self.layer_idx)
        products = torch.matmul(query.float(), keys.float().unsqueeze(1).transpose(-1, -2))
        scores = self.scores(products, self.weigh(hidden))
        return self.choice(self.masked(scores, mask)).int()


class _WithSigmoid(_Indexer):
    def scores(self, products: Tensor, weights: Tensor) -> Tensor:
        return torch.matmul(weights.unsqueeze(-2), products.sigmoid()).squeeze(-2)


class _OfOneHead(_Indexer):
    def scores(self, products: Tensor, _weights: Tensor) -> Tensor:
        return F.relu(products)[:, :, 0]


class _WithBias(_Indexer):
    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + mask * 0.5


class _OfLowest(_Indexer):
    def choice(self, scores: Tensor) -> Tensor:
        return scores.topk(min(7, scores.shape[-1]), dim=-1, largest=False).indices


class _OfHalf(_Indexer):
    def choice(self, scores: Tensor) -> Tensor:
        return scores.topk(scores.shape[-1] // 2, dim=-1).indices


class _OfAll(_Indexer):
    def choice(self, scores: Tensor) -> Tensor:
        return scores.topk(scores.shape[-1], dim=-1).indices


class _OfHalfAtMost(_Indexer):
    def choice(self, scores: Tensor) -> Tensor:
        return scores.topk(min(12, scores.shape[-1] // 2), dim=-1).indices


class _Shifted(_Indexer):
    def choice(self, scores: Tensor) -> Tensor:
        return super().choice(scores) // 2


def _with_indexer(kind: type[_Indexer]) -> PreTrainedModel:
    model = tiny_model("deepseek_v32")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.indexer = kind(3, 8).eval()
        layer.self_attn.indexer.layer_idx = number
    return model


def test_an_indexer_of_no_model_here_is_known() -> None:
    specs = probe_model(load_model(_with_indexer(_Indexer)))
    assert [(spec.num_chosen, spec.index_dim) for spec in specs] == [(7, 8)] * 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_WithSigmoid, "applies 'sigmoid' to queries times keys, not relu"),
        (_OfOneHead, "scores from 'getitem'"),
        (_WithBias, "a mask from 'add'"),
        (_OfLowest, "a choice of 7 in another form"),
        (_OfHalf, "takes 8 of 17 keys and 8388606"),
        (_OfAll, "takes 17 of 17 keys and 16777213"),
        (_OfHalfAtMost, "takes 8 of 17 keys and 12"),
        (_Shifted, "a result of 'floordiv'"),
    ],
)
def test_another_computation_is_refused(kind: type[_Indexer], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} selects .* {reason}"):
        probe_model(load_model(_with_indexer(kind)))


def test_a_choice_that_is_changed_is_refused() -> None:
    model = tiny_model("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda _, __, chosen: chosen.flip(-1))
    with pytest.raises(UnsupportedModelError, match="no indexer's choice"):
        probe_model(load_model(model))


def _recorder() -> IndexRecorder:
    return IndexRecorder(UnsupportedModelError, 4)


def _call(num_tokens: int = 4, mask: Any = None) -> IndexCall:
    query = torch.zeros(num_tokens, 2, 8)
    return IndexCall(query, query[:, 0], query[:, :, 0], mask, 1.0, 3)


def test_calls_out_of_place_are_refused() -> None:
    module = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="for the 4 tokens of a pass"):
        _recorder().choose(module, _call(5))
    recorder = _recorder()
    recorder.choose(module, _call())
    with pytest.raises(UnsupportedModelError, match="two indexers"):
        recorder.choose(nn.Identity(), _call())
    with pytest.raises(UnsupportedModelError, match="does not get its indexer's selection"):
        recorder.attend(0, None)
    recorder = _recorder()
    chosen = recorder.choose(module, _call())
    assert recorder.attend(0, chosen)["num_chosen"] == 3
    assert recorder.attend(1, chosen) == {"num_chosen": 3}
    with pytest.raises(UnsupportedModelError, match="Identity runs more than once"):
        recorder.choose(module, _call())


def test_an_indexer_sees_what_attention_sees() -> None:
    marker = torch.zeros(1, 1, 4, 4).as_subclass(MaskMarker)
    recorder = _recorder()
    assert recorder.mask() is None
    recorder.choose(nn.Identity(), _call(mask=marker[:, 0, :, :]))
    assert recorder.mask() is marker
    for mask in (None, marker, marker[:, 0, :, :2], torch.zeros(1, 4, 4)):
        recorder = _recorder()
        recorder.choose(nn.Identity(), _call(mask=mask))
        with pytest.raises(UnsupportedModelError, match="a mask of its own"):
            recorder.mask()
