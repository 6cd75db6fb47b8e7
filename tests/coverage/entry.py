"""One entry of the sweep: build a tiny model, compare it with `generate`, record the outcome."""

from __future__ import annotations

import contextlib
import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from pagespec import InvalidInputError, UnsupportedModelError
from pagespec.compile.load.build_module import auto_class
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import LoadedModel, longest_context
from pagespec.compile.probe.probe import probe_with_reach
from pagespec.kernels.attention.attention_spec import AttentionSpec
from tests.coverage.tiny_config import MAX_POSITIONS, tiny_config
from tests.golden.harness import Condition, Subject, check, mixed_prompts, reference_of
from tests.support.models import random_model

OUTCOMES = ("equal", "refused", "not built", "wrong", "failed")
MAX_PARAMETERS = 20_000_000
_LENGTHS, _NUM_OUTPUTS = [1, 17, 40, 33, 48, 90, 5], [16, 16, 16, 12, 12, 6, 12]
_LONG_OUTPUTS = 3
# Pools of so few tokens that requests have to make room for one another.
_POOL_TOKENS, _LONGEST = 112, 104
HOSTILE = Condition(
    "all at once",
    {
        "block_size": 4,
        "num_blocks": _POOL_TOKENS // 4,
        "max_model_len": _LONGEST,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 16,
        "overlap": True,
        "state_interval": 8,
    },
    must_preempt=True,
    must_hit=True,
    must_chunk=True,
    num_rounds=2,
)
"""A small budget, a small pool, and the same prompts again, whose prefixes are cached then."""
BEYOND = (
    Condition("beyond", {"enable_prefix_caching": False}),
    Condition(
        "beyond, chunks, cache",
        {"max_num_batched_tokens": 60, "max_num_seqs": 16, "state_interval": 16},
        must_hit=True,
        must_chunk=True,
        num_rounds=2,
    ),
)
"""Of prompts longer than each integer of the config that a context can reach."""


@dataclass(frozen=True)
class Entry:
    """The result of one entry.

    Attributes:
        model_type: its name in the mapping. architecture: its class, if it was built.
        outcome: one of :data:`OUTCOMES`. reason: why it is not "equal".
        notes: features of its attention, recurrent layers, and experts.
        longest: tokens of the longest prompt.
    """

    model_type: str
    outcome: str
    reason: str = ""
    architecture: str = ""
    notes: str = ""
    longest: int = 0
    seconds: float = 0.0


def run_entry(model_type: str) -> Entry:
    """Build a model of the entry, load it, and run it under every condition."""
    begin = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        outcome, reason = _outcome(model_type, found)
    except Exception as error:
        outcome, reason = "failed", _line(error)
    return Entry(model_type, outcome, reason, seconds=time.perf_counter() - begin, **found)


def _outcome(model_type: str, found: dict[str, Any]) -> tuple[str, str]:
    try:
        model = built(tiny_config(model_type))
    except ImportError as error:
        return "refused", f"needs a package that is not there: {_line(error)}"
    except Exception as error:
        return "not built", _line(error)
    found["architecture"] = type(model).__name__
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 16}
    if longest_context(model.config) is None:
        settings["max_model_len"] = MAX_POSITIONS
    subject = Subject(model_type, model, **settings)
    try:
        loaded = load_model(copy.deepcopy(model), max_model_len=MAX_POSITIONS)
        specs, reach = probe_with_reach(loaded)
        subject.llm()  # what is refused only when it is traced
    except (InvalidInputError, UnsupportedModelError) as error:
        return "refused", _line(error)
    found["notes"] = notes_of(loaded, specs)
    longest = loaded.max_position_embeddings - _LONG_OUTPUTS
    beyond = sorted({t.value + 1 for t in reach.thresholds if t.value < longest})
    found["longest"] = max([*_LENGTHS, *beyond])
    # Nothing is forced or forbidden in greedy search but by the logits.
    model.generation_config = GenerationConfig(pad_token_id=0)
    with contextlib.suppress(ValueError):
        model.set_attn_implementation("eager")  # some sdpa paths leave softcaps out
    try:
        vocab_size = loaded.vocab_size
        usual = reference_of(model, mixed_prompts(_LENGTHS, vocab_size), _NUM_OUTPUTS)
        prompts = mixed_prompts(beyond, vocab_size)
        far = reference_of(model, prompts, [_LONG_OUTPUTS] * len(prompts))
    except Exception as error:
        return "not built", f"transformers' own generate fails: {_line(error)}"
    for condition in (HOSTILE, *BEYOND):
        reference = usual if condition is HOSTILE else far
        try:
            check(subject.run(condition, reference), condition)
        except AssertionError as error:
            return "wrong", _line(error)
    return "equal", ""


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """Raises ValueError if the model is not tiny."""
    with torch.device("meta"):
        empty = auto_class(config).from_config(config)
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters")
    return random_model(config)


def notes_of(loaded: LoadedModel, specs: list[AttentionSpec]) -> str:
    """Features of its attention, and whether it has recurrent layers and experts."""
    windows = {spec.window for spec in specs}
    found = {
        "sliding window": bool(windows - {0}),
        "full layers between": len(windows) > 1 and 0 in windows,
        "several windows": len(windows - {0}) > 1,
        "softcap": any(spec.softcap for spec in specs),
        "chunks": any(spec.chunk for spec in specs),
        "ALiBi": any(spec.alibi_slopes for spec in specs),
        "sinks": any(spec.has_sinks for spec in specs),
        "indexer": any(spec.num_chosen for spec in specs),
        "latent attention": any(spec.k_dim != spec.v_dim for spec in specs),
        "several head sizes": len({(spec.k_dim, spec.v_dim) for spec in specs}) > 1,
        "recurrent": bool(loaded.recurrent),
        "experts": any("experts" in name for name, _ in loaded.module.named_modules()),
    }
    return ", ".join(name for name, is_so in found.items() if is_so)


def _line(error: Exception) -> str:
    """The beginning of a message, on one line."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= 240 else text[:237] + "..."
    is_ours = isinstance(error, (AssertionError, InvalidInputError, UnsupportedModelError))
    return shown if is_ours else f"{type(error).__name__}: {shown}"
