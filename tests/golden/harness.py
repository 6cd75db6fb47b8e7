"""Golden runs: compare the engine with `transformers.generate`, which serves one prompt at a time.

Sampling is greedy. A run returns a `GoldenRow`: the number of different tokens, the largest error
of the logits, and counts of preemptions, cache hits and chunks. The counts show that a hostile
condition (a tiny pool, say) had its effect.
"""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec import build as build_module
from pagespec.compile.load import load
from pagespec.compile.probe import probe
from pagespec.engine.invariants import check_plan, check_state
from pagespec.engine.plan import StepPlan
from spec import replay
from tests.support.captures import graph_cache

MAX_RELATIVE_ERROR = 1e-4


@dataclass(frozen=True)
class Reference:
    """Results of `generate`: prompts, output ids, and the logits of each output."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    logits: list[torch.Tensor]  # per prompt: [num_outputs, vocab_size]


@dataclass
class GoldenRow:
    """One architecture under one condition."""

    model: str
    condition: str
    num_prompts: int
    num_tokens: int = 0
    num_wrong_tokens: int = 0
    max_relative_error: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0
    num_mixed_steps: int = 0
    num_steps: int = 0
    trace: replay.Verdict | None = None

    HEADER = (
        "model            condition       prompts tokens wrong  max rel err "
        "preempted  cached  chunks  mixed  steps  trace"
    )

    def __str__(self) -> str:
        return (
            f"{self.model:<16} {self.condition:<15} {self.num_prompts:>7} {self.num_tokens:>6} "
            f"{self.num_wrong_tokens:>5}  {self.max_relative_error:>11.2e} "
            f"{self.num_preemptions:>9} {self.num_cached_tokens:>7} {self.num_chunks:>7} "
            f"{self.num_mixed_steps:>6} {self.num_steps:>6}  {self._trace_word()}"
        )

    def _trace_word(self) -> str:
        if self.trace is None:
            return "none"
        return self.trace.property_id or "accepted"


@dataclass(frozen=True)
class Condition:
    """Engine settings, and the events that must occur under them."""

    name: str
    settings: dict[str, Any]
    must_preempt: bool = False
    must_hit: bool = False
    must_chunk: bool = False
    num_rounds: int = 1


def conditions(longest: int, *, pool_tokens: int) -> list[Condition]:
    """The plain condition, then the hostile ones.

    Args:
        longest: tokens of the longest request, prompt and output.
        pool_tokens: KV slots of the pool that is too small; at least ``longest``.
    """
    off = {"enable_prefix_caching": False}
    return [
        Condition("plain", {**off}),
        Condition(
            "tiny pool",
            {**off, "block_size": 4, "num_blocks": -(-pool_tokens // 4), "max_model_len": longest},
            must_preempt=True,
        ),
        Condition(
            "tiny pool+cache",
            {"block_size": 2, "num_blocks": -(-pool_tokens // 2), "max_model_len": longest},
            must_preempt=True,
            must_hit=True,
            num_rounds=2,
        ),
        Condition(
            "overlap",
            {
                "overlap": True,
                "block_size": 4,
                "num_blocks": -(-pool_tokens // 4),
                "max_model_len": longest,
            },
            must_preempt=True,
        ),
        Condition(
            "budget 16",
            {**off, "max_num_batched_tokens": 16, "max_num_seqs": 16},
            must_chunk=True,
        ),
        Condition("shared prefix", {"max_num_batched_tokens": 64}, must_hit=True, num_rounds=2),
        Condition("blocks of 1", {"block_size": 1}, num_rounds=1),
        Condition("blocks of 16", {"block_size": 16}, num_rounds=1),
        Condition("blocks of 256", {"block_size": 256}, num_rounds=1),
    ]


def mixed_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts; every other one begins with the same tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, vocab_size) for _ in range(max(lengths))]
    prompts = []
    for i, length in enumerate(lengths):
        num_shared = 3 * length // 4 if i % 2 else 0
        tail = [rng.randrange(2, vocab_size) for _ in range(length - num_shared)]
        prompts.append(shared[:num_shared] + tail)
    return prompts


def reference_of(
    model: PreTrainedModel, prompts: list[list[int]], num_outputs: list[int]
) -> Reference:
    outputs, logits = [], []
    for prompt, count in zip(prompts, num_outputs, strict=True):
        device = model.device
        generated = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        outputs.append(generated.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(generated.logits).float().cpu())
    return Reference(prompts, outputs, logits)


@dataclass
class Watcher:
    """Records every step of a golden run and checks the structural properties."""

    row: GoldenRow
    llm: LLM | None = None
    logits: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def __call__(self, plan: StepPlan, logits: torch.Tensor) -> None:
        if self.llm is not None:
            check_state(self.llm.engine.scheduler)
            check_plan(self.llm.engine.scheduler, plan)
        self.row.num_steps += 1
        self.row.num_preemptions += len(plan.preempted)
        self.row.num_chunks += sum(not sampled for sampled in plan.num_samples)
        kinds = {n == 1 for n in plan.num_tokens}
        self.row.num_mixed_steps += len(kinds) == 2
        sampled_rows = [row for row in plan.rows() if row[3]]
        for (request, start, num_tokens, _), row_logits in zip(
            sampled_rows, logits.float().cpu(), strict=True
        ):
            index = start + num_tokens - request.num_prompt_tokens
            self.logits[request.request_id, index] = row_logits.clone()


class Subject:
    """A model under test. It is loaded, probed and captured once, for engines with any settings:
    the captured graph does not depend on pools and budgets."""

    def __init__(self, name: str, model: PreTrainedModel | str, **settings: Any) -> None:
        self.name = name
        self._model = model if isinstance(model, str) else copy.deepcopy(model)
        self._settings = settings
        self._cache: dict[str, Any] = {}

    def _once(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "capture_model" and not isinstance(self._model, str):
                kwargs["graph_cache"] = graph_cache()  # no other subject has this model
            if name == "load_model" and "max_model_len" in self._settings:
                # For a model without a longest context: the same value for all conditions.
                kwargs["max_model_len"] = self._settings["max_model_len"]
            if name not in self._cache:
                self._cache[name] = function(*args, **kwargs)
            return self._cache[name]

        return call

    def llm(self, **settings: Any) -> LLM:
        places = ((load, "load_model"), (probe, "probe_model"), (build_module, "capture_model"))
        with pytest.MonkeyPatch.context() as patch:
            for module, name in places:
                patch.setattr(module, name, self._once(name, getattr(module, name)))
            return LLM(self._model, **{**self._settings, **settings})

    def run(self, condition: Condition, reference: Reference) -> GoldenRow:
        watcher = Watcher(GoldenRow(self.name, condition.name, len(reference.prompts)))
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            llm = self.llm(on_logits=watcher, trace=trace, **condition.settings)
            # With several ranks, a thread calls the watcher while the scheduler runs.
            watcher.llm = llm if llm.config.tensor_parallel_size == 1 else None
            compare(llm, condition.num_rounds, reference, watcher)
            with trace.open() as lines:
                watcher.row.trace = replay.check(lines)
        return watcher.row


def compare(llm: LLM, num_rounds: int, reference: Reference, watcher: Watcher) -> None:
    """Serve the prompts of the reference and record the differences in the watcher's row."""
    row = watcher.row
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(output), ignore_eos=True)
        for output in reference.outputs
    ]
    for _ in range(num_rounds):
        results = llm.generate(reference.prompts, params, use_tqdm=False)
        for result, output, logits in zip(
            results, reference.outputs, reference.logits, strict=True
        ):
            got = result.outputs[0].token_ids
            row.num_tokens += len(output)
            row.num_wrong_tokens += sum(a != b for a, b in zip(got, output, strict=True))
            row.num_cached_tokens += result.metrics.num_cached_tokens
            ours = torch.stack([watcher.logits[result.request_id, i] for i in range(len(output))])
            error = (ours - logits).abs().amax(-1) / logits.abs().amax(-1)
            # np.maximum keeps NaN, which max would drop.
            largest = np.maximum(row.max_relative_error, error.max().item())
            row.max_relative_error = float(largest)


def check(
    row: GoldenRow, condition: Condition, max_relative_error: float = MAX_RELATIVE_ERROR
) -> None:
    """Fails unless the row is equal to the reference and its condition was met."""
    assert row.num_wrong_tokens == 0, str(row)
    assert row.trace is not None, "no trace was written"
    assert not row.trace.property_id, f"the specification refuses the run: {row.trace}"
    assert row.trace.num_steps == row.num_steps, "the trace is not of this run"
    assert row.max_relative_error <= max_relative_error, str(row)
    assert row.num_preemptions or not condition.must_preempt, f"nothing was preempted: {row}"
    assert row.num_cached_tokens or not condition.must_hit, f"nothing was cached: {row}"
    assert row.num_chunks or not condition.must_chunk, f"nothing was chunked: {row}"
