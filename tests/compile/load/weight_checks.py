"""Helpers that write an engine's weights through its weight map and check its answers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagespec import LLM, SamplingParams
from pagespec.compile.weights import Place, WeightMap
from tests.support.models import VOCAB_SIZE

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 40,
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "generation_config": "vllm",
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
FLOATS = ("float32", "bfloat16", "float16")
PROMPTS = [
    {"prompt_token_ids": [(7 * i * i + 3 * k) % (VOCAB_SIZE - 2) + 1 for i in range(n)]}
    for k, n in enumerate((1, 19, 9))
]


def engine(folder: Path | str, **options: Any) -> LLM:
    return LLM(str(folder), **{**ENGINE, **options})


def answers(llm: LLM) -> list[Any]:
    """Tokens with their log-probabilities, whose float64 numbers have all bits of the logits."""
    results = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        [
            (token, sorted((i, one.logprob) for i, one in step.items()))
            for token, step in zip(r.outputs[0].token_ids, r.outputs[0].logprobs, strict=True)
        ]
        for r in results
    ]


def map_of(llm: LLM) -> WeightMap:
    found: WeightMap = llm._runner.captured.weights
    return found


def held_by(llm: LLM) -> list[Tensor]:
    """The constants that the graph reads, or the parameters if there is no graph."""
    captured = llm._runner.captured
    if captured.graph is None:
        return list(captured.loaded.module.parameters())
    return [source[1] for source in captured.sources if source[0] == "constant"]


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    plain = plain.to_dense() if plain.is_mkldnn else plain
    return plain.contiguous().reshape(-1).view(torch.uint8).clone()


def write_each(llm: LLM, groups: Iterable[dict[str, Tensor]]) -> None:
    """Write the groups in order. Only memory at the located places may change, and some must."""
    weights, constants = map_of(llm), held_by(llm)
    before = {id(tensor): bits(tensor) for tensor in constants}
    for group in groups:
        places = [place for name in group for place in weights.locate(name)]
        storages = [place.storage for place in places]
        if not storages:
            continue  # no part of it is this rank's
        named = {id(tensor) for tensor in constants if any(_shares(tensor, s) for s in storages)}
        plain = [place for place in places if place.transform[-1] in FLOATS]
        outside = [_outside(place.storage, plain) for place in plain]
        weights.write_all(group)
        for place, kept in zip(plain, outside, strict=True):
            assert torch.equal(_outside(place.storage, plain), kept), f"beyond the slice {place[1]}"
        after = {id(tensor): bits(tensor) for tensor in constants}
        moved = {key for key in after if not torch.equal(before[key], after[key])}
        assert moved, f"writing {sorted(group)} changed nothing"
        assert moved <= named, f"writing {sorted(group)} changed places that are not named"
        before = after


def _outside(storage: Tensor, places: Iterable[Place]) -> Tensor:
    """The bits of a storage, with zeros in the slices of its located places."""
    rest = storage.detach().clone()
    for place in places:
        if place.storage is storage:
            rest[place.slice] = 0
    return bits(rest)


def _shares(one: Tensor, other: Tensor) -> bool:
    if one.is_mkldnn or other.is_mkldnn:
        return one is other
    return _memory(one).start < _memory(other).stop and _memory(other).start < _memory(one).stop


def _memory(tensor: Tensor) -> range:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
