"""Attention functions are replaced for one thread inside a block, and restored afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pagespec import UnsupportedModelError
from pagespec.compile.load.load import load_model
from pagespec.compile.model.attention import attention_implementation
from pagespec.compile.model.current_step import Functions
from pagespec.compile.model.forward import PackedForward
from pagespec.compile.model.local_calls import LOCAL
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.probe.probe_pass import ProbePass
from tests.coverage.entry import built
from tests.coverage.tiny_config import tiny_config

# Attention written out, with ALiBi and with a mask of its own; an indexer; recurrences; positions
# that are counted inside; the interface alone.
ARCHITECTURES = ("bloom", "gpt_neo", "deepseek_v32", "lfm2", "bart", "llama")


def _model(arch: str) -> PreTrainedModel:
    return built(tiny_config(arch))


def _ids(num_tokens: int = 6) -> Tensor:
    return torch.arange(num_tokens)


def _state_of(model: PreTrainedModel) -> dict[str, Any]:
    """All state that a block may change and a caller can observe."""
    homes = {type(part).__module__ for part in model.modules()}
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        # Dynamo adds names with underscores.
        "globals": {
            (home, name): value
            for home in homes
            for name, value in vars(sys.modules[home]).items()
            if not name.startswith("__")
        },
        "configs": [
            part.config._attn_implementation for part in model.modules() if hasattr(part, "config")
        ],
        "forwards": [name for name, part in model.named_modules() if "forward" in vars(part)],
        "hooks": sum(
            len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()
        ),
    }


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("functions", [
    LOCAL,
    LOCAL._replace(attention=_fails),
    LOCAL._replace(recurrence=_fails),
    LOCAL._replace(choose=_fails),
    LOCAL._replace(mask=_fails),
])  # fmt: skip
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_is_as_it_was_after_an_error(arch: str, functions: Functions) -> None:
    model = _model(arch)
    before = _state_of(model)
    ids = _ids().unsqueeze(0)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with (  # noqa: PT012
            pytest.raises(RuntimeError, match="in the middle"),
            attention_implementation(model, functions),
        ):
            assert _state_of(model) != before
            PackedForward(model)(ids, ids, ids[0])
            raise RuntimeError("in the middle")
        assert _state_of(model) == before
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


class _TwoSoftmaxes(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, *rest = self.inner(*args, **kwargs)
        return (out.softmax(-1).softmax(-1), *rest)


def _softmaxes_twice(model: PreTrainedModel) -> None:
    block = model.transformer.h[1]
    block.self_attention = _TwoSoftmaxes(block.self_attention)


def _indexer_fails(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.indexer.forward = _fails


def _embedding_fails(model: PreTrainedModel) -> None:
    model.get_input_embeddings().forward = _fails


@pytest.mark.parametrize(
    ("arch", "change"),
    [
        ("bloom", _softmaxes_twice),
        ("bloom", _embedding_fails),
        ("deepseek_v32", _indexer_fails),
        ("lfm2", _embedding_fails),
        ("llama", _embedding_fails),
    ],
)
def test_all_is_as_it_was_after_a_refusal(
    arch: str, change: Callable[[PreTrainedModel], None]
) -> None:
    model = _model(arch)
    change(model)
    loaded = load_model(model, max_model_len=64)
    before = _state_of(loaded.module)
    with pytest.raises(UnsupportedModelError):
        probe_model(loaded)
    assert _state_of(loaded.module) == before


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_threads_call_functions_of_their_own(arch: str) -> None:
    first, second = (
        ProbePass(load_model(_model(name), max_model_len=64)) for name in ("llama", arch)
    )
    ids, positions = _ids(), torch.arange(6)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with torch.inference_mode(), second.stand_in():
                second.results(ids, positions)
        except BaseException as error:
            errors.append(error)

    with torch.inference_mode(), first.stand_in():
        expected = first.results(ids, positions)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        results = first.results(ids, positions)
    assert not errors
    assert len(results) == len(expected) > 1
    assert all(map(torch.equal, results, expected))
