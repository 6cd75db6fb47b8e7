"""A generation loop that makes its plans by hand, without a scheduler."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.runner.cpu.runner import ModelRunner


def make_requests(prompts: list[list[int]], max_tokens: int, **params: float) -> list[Request]:
    return [
        Request(
            f"r{i}",
            prompt,
            SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}),  # type: ignore[arg-type]
            max_num_tokens=len(prompt) + max_tokens,
            seed=1000 + i,
        )
        for i, prompt in enumerate(prompts)
    ]


def drive(
    runner: ModelRunner,
    requests: list[Request],
    *,
    block_size: int,
    num_blocks: int,
    chunk: int,
    seed: int = 0,
) -> int:
    """Run all requests to their full length and return the number of steps. Chunks of prompts are
    mixed with decodes, one request joins per step, and blocks are allocated in random order."""
    rng = random.Random(seed)
    free = list(range(num_blocks))
    rng.shuffle(free)
    step = 0
    while any(len(r.token_ids) < r.max_num_tokens for r in requests):
        rows, starts, lengths, sampled, token_ids = [], [], [], [], []
        tables, new_blocks = {}, {}
        for request in requests[: step + 1]:
            if len(request.token_ids) >= request.max_num_tokens:
                continue
            start = request.num_computed
            n = min(chunk, len(request.token_ids) - start)
            needed = -(-(start + n) // block_size) - len(request.block_table)
            if needed > 0:
                taken = tuple(free.pop() for _ in range(needed))
                is_first = not request.block_table
                request.block_table.extend(taken)
                (tables if is_first else new_blocks)[len(rows)] = taken
            rows.append(request)
            starts.append(start)
            lengths.append(n)
            sampled.append(start + n == len(request.token_ids))
            token_ids += request.token_ids[start : start + n]
        plan = StepPlan(
            step=step,
            requests=tuple(request.info for request in rows),
            starts=tuple(starts),
            num_tokens=tuple(lengths),
            num_samples=tuple(map(int, sampled)),
            token_ids=tuple(token_ids),
            tables=tables,
            new_blocks=new_blocks,
        )
        tokens = iter(runner.collect(runner.dispatch(plan)).token_ids)
        for request, start, n, is_sampled in zip(rows, starts, lengths, sampled, strict=True):
            request.num_computed = start + n
            if is_sampled:
                request.token_ids.append(next(tokens))
        step += 1
    return step


def hf_greedy(module: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """``generate`` with transformers' eager attention, which implements softcaps and sinks."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        out = module.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    finally:
        module.set_attn_implementation(before)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def hf_logits(module: PreTrainedModel, ids: list[int]) -> Tensor:
    """Logits ``[len(ids), V]`` of a plain forward pass with eager attention."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(before)
