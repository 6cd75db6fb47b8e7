"""A complete ``LLM`` over the content runner: every public call works, without a model."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch

from pagespec import LLM, SamplingParams
from pagespec import llm as llm_module
from pagespec.build import BuiltEngine
from pagespec.engine.config import EngineConfig
from pagespec.engine.outputs import EngineStats
from pagespec.engine.plan import StepPlan
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner, stream_alone

NUM_TOKENS = 3
STOP_TOKEN = 2 * TOKEN_STRIDE


class LetterTokenizer:
    """One letter per token."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": ["abc".index(letter) * TOKEN_STRIDE for letter in text]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join("abc"[token // TOKEN_STRIDE] for token in token_ids)


def content_llm(
    *,
    num_blocks: int = 24,
    block_size: int = 2,
    pipeline_depth: int = 0,
    runner: ContentRunner | None = None,
    **settings: Any,
) -> LLM:
    """``settings`` as of ``LLM``."""

    def build(_model: object, config: EngineConfig, _on_logits: object) -> BuiltEngine:
        made = runner or ContentRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=NUM_TOKENS,
            pipeline_depth=pipeline_depth,
        )
        return BuiltEngine(
            runner=made,  # type: ignore[arg-type]
            tokenizer=LetterTokenizer(),
            eos_token_ids=frozenset({STOP_TOKEN}),
            vocab_size=NUM_TOKENS * TOKEN_STRIDE,
            max_model_len=num_blocks * block_size + 1,
            num_blocks=num_blocks,
            device=torch.device("cpu"),
            config=config,
            stats=EngineStats(),  # type: ignore[call-arg]
        )

    with mock.patch.object(llm_module, "import_engine", return_value=build):
        return LLM("content", block_size=block_size, num_blocks=num_blocks, **settings)


def answer_alone(llm: LLM, prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    """The tokens of a continuation with these parameters, which must have a seed."""
    limit = len(prompt) + (params.max_tokens or llm.max_model_len)
    return stream_alone(
        prompt,
        min(limit, llm.max_model_len),
        seed=(params.seed or 0) + index,
        vocab_size=NUM_TOKENS,
        stop_token_ids=frozenset(() if params.ignore_eos else {STOP_TOKEN}),
    )


def text_alone(llm: LLM, prompt: list[int], params: SamplingParams, index: int = 0) -> str:
    answer = answer_alone(llm, prompt, params, index)
    if not params.ignore_eos and answer[-1:] == [STOP_TOKEN]:
        answer.pop()  # a token that ends an answer has no text
    return LetterTokenizer().decode(answer)


def slowed(llm: LLM, step_s: float) -> LLM:
    """Make each step of an ``LLM`` wait the given seconds; other threads run meanwhile."""
    runner: Any = llm.engine.runner
    dispatch = runner.dispatch

    def wait_and_dispatch(plan: StepPlan) -> Any:
        time.sleep(step_s)
        return dispatch(plan)

    runner.dispatch = wait_and_dispatch
    return llm


def slow_llm(step_s: float, **settings: Any) -> LLM:
    """``settings`` as of ``content_llm``."""
    return slowed(content_llm(**settings), step_s)
