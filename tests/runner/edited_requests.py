"""Requests that edit their logits, served by a runner, compared with the plain-Python reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.runner import Runner
from pagespec.engine.scheduler import Scheduler
from tests.support.models import VOCAB_SIZE
from tests.support.plain_sampling import edited_logits, probabilities

END_TOKEN_IDS = (2,)


@dataclass
class Asked:
    """A request, with its edits as the caller's words and as token ids."""

    prompt: list[int]
    params: SamplingParams
    bad_words: list[tuple[int, ...]] = field(default_factory=list)

    def request(self, name: str, seed: int = 0) -> Request:
        stops = {*END_TOKEN_IDS, *(self.params.stop_token_ids or ())}
        return Request(
            name,
            self.prompt,
            self.params,
            max_num_tokens=len(self.prompt) + (self.params.max_tokens or 1),
            stop_token_ids=frozenset(self.params.stop_token_ids or ()),
            seed=seed,
            edits=LogitEdits.of(self.params, stops, self.bad_words),
        )


class LogitsByPosition:
    """An ``on_logits`` callback that records each row, by request and position of the sampled
    token."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, plan: StepPlan, logits: torch.Tensor) -> None:
        # A position behind a rejected draft token is sampled again later, and overwritten.
        sampled = [
            (request, start + n - i)
            for request, start, n, num_samples in plan.rows()
            for i in reversed(range(num_samples))
        ]
        for (request, position), row in zip(sampled, logits, strict=True):
            self.rows[request.request_id, position] = row.clone()


def serve(
    runner: Runner,
    requests: Sequence[Request],
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int = 5,
    budget: int = 24,
    caching: bool = True,
) -> list[list[int]]:
    """Serve requests that arrive together; return their outputs."""
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, enable_prefix_caching=caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        pipeline_depth=runner.pipeline_depth,
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def check_tokens(
    asked: Sequence[Asked], requests: Sequence[Request], seen: LogitsByPosition
) -> int:
    """Hold each token to the definition, given the model's own logits: a greedy one is a largest
    edited logit, a random one has a probability. Returns how many tokens an edit has changed."""
    num_changed = 0
    for case, request in zip(asked, requests, strict=True):
        prompt, output = case.prompt, request.output_token_ids
        for i, token in enumerate(output):
            logits = seen.rows[request.request_id, len(prompt) + i].double().cpu().numpy()
            edited = edited_logits(
                logits,
                prompt,
                output[:i],
                case.params,
                end_token_ids=END_TOKEN_IDS,
                bad_words=case.bad_words,
            )
            num_changed += int(np.argmax(edited) != np.argmax(logits))
            if case.params.temperature == 0:
                assert edited[token] >= edited.max() - 1e-4, (request, i)
            else:
                assert probabilities(edited, case.params)[token] > 0, (request, i)
    return num_changed


def mixed_cases(seed: int, num_tokens: int = 9) -> list[Asked]:
    """Rows of each kind and of several at once, greedy and random, some of them with nothing to
    edit; half of them begin alike."""
    rng = random.Random(seed)
    ids = range(3, VOCAB_SIZE)
    shared = rng.choices(ids, k=12)

    def asked(**params: Any) -> Asked:
        words = params.pop("words", [])
        prompt = rng.choices(ids, k=rng.choice([1, 5, 17, 26]))
        prompt = shared + prompt if rng.random() < 0.5 else prompt
        given = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True} | params
        return Asked(prompt, SamplingParams(**given), words)

    some = [rng.choices(ids, k=40) for _ in range(3)]
    repeating = {"allowed_token_ids": some[0][:3]}
    pairs = [(a, b) for a in some[0][:3] for b in some[0][:3] if a != b][:3]
    return [
        asked(repetition_penalty=1.8),
        asked(),
        asked(presence_penalty=2.0, frequency_penalty=0.5, temperature=0.7),
        asked(logit_bias=dict.fromkeys(some[1], 6.0), temperature=1.3, top_k=5),
        asked(top_p=0.8, temperature=1.0),
        asked(allowed_token_ids=some[2], temperature=1.0, top_p=0.9, min_p=0.01),
        asked(**repeating, words=pairs),
        asked(**repeating, words=[(token,) for token in some[0][:2]]),
        asked(
            min_tokens=4,
            stop_token_ids=some[1][:4],
            logit_bias=dict.fromkeys(some[1][:4], 50.0),
        ),
        asked(
            **repeating,
            words=[(some[0][0], some[0][0])],
            repetition_penalty=1.1,
            frequency_penalty=1.0,
            temperature=0.9,
            top_k=2,
        ),
    ]
