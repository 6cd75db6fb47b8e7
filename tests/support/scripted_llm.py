"""A complete ``LLM`` without a model that gives scripted answers through a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from pagespec import LLM
from pagespec import llm as llm_module
from pagespec.build import BuiltEngine
from pagespec.engine.config import EngineConfig
from pagespec.engine.outputs import EngineStats
from pagespec.engine.plan import StepPlan, StepResult
from tests.support.chat_models import END, chat_tokenizer, ids_of

BLOCK_SIZE = 4


class ScriptRunner:
    """Samples the tokens of answer ``seed % len(answers)``, one after the other."""

    pipeline_depth = 0
    pack_s = mask_s = wait_s = 0.0

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self._answers = answers

    def reset(self) -> None: ...

    def dispatch(self, plan: StepPlan) -> StepResult:
        sampled = []
        for request, start, num_tokens, is_sampled in plan.rows():
            if is_sampled:
                answer = self._answers[request.seed % len(self._answers)]
                place = start + num_tokens - request.num_prompt_tokens
                sampled.append(answer[place % len(answer)])
        return StepResult(sampled)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepResult)
        return handle


def scripted_llm(
    style: str,
    answers: Sequence[str],
    *,
    num_blocks: int = 600,
    make_runner: Callable[[list[list[int]]], ScriptRunner] = ScriptRunner,
    eos_token_ids: frozenset[int] | None = None,
    **settings: Any,
) -> LLM:
    """
    Args:
        style: of ``chat_models``.
        answers: an end token is added to each; a request with seed i is given the i-th.
        eos_token_ids: of the model; None: the end token that is added.
        settings: of ``LLM``.
    """
    tokenizer = chat_tokenizer(style)
    (end,) = tokenizer.convert_tokens_to_ids([END[style]])
    scripts = [[*ids_of(tokenizer, answer), end] for answer in answers]

    def build(_model: object, config: EngineConfig, _on_logits: object) -> BuiltEngine:
        return BuiltEngine(
            runner=make_runner(scripts),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            eos_token_ids=frozenset({end}) if eos_token_ids is None else eos_token_ids,
            vocab_size=len(tokenizer),
            max_model_len=num_blocks * BLOCK_SIZE,
            num_blocks=num_blocks,
            device=torch.device("cpu"),
            config=config,
            stats=EngineStats(),  # type: ignore[call-arg]
        )

    with mock.patch.object(llm_module, "import_engine", return_value=build):
        return LLM("script", block_size=BLOCK_SIZE, num_blocks=num_blocks, **settings)
