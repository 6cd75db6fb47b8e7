"""Structured output and forced tool calls beside ``speculative_config``: equal to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, SamplingParams, StructuredOutputs, embedded_model_path
from pagespec.chat.tool_choice import forced_output
from pagespec.engine.drafting.costs import StepCosts
from pagespec.runner.cpu import platform as cpu_platform
from spec.replay import check
from tests.support.captures import capture_once
from tests.support.chat_models import WEATHER, save_chat_model
from tests.support.structured import save_byte_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_city": {"enum": ["é", "bb"]},
        "number": {"type": "integer", "maximum": 999},
        "names": {"type": "array", "items": {"enum": ["abc", "abd"]}, "maxItems": 3},
    },
    "required": ["name_of_city", "number", "names"],
    "additionalProperties": False,
}
METHODS = ("ngram", "suffix", "prediction")


@pytest.fixture(autouse=True)
def _fast_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch)
    # The number of draft tokens would follow the load of this machine.
    monkeypatch.setattr(cpu_platform, "measure_costs", lambda *_: StepCosts([(1, 1.0), (99, 1.0)]))


def asked_for() -> list[SamplingParams]:
    found = []
    for i, temperature in enumerate((0.0, 0.8, 1.2) * 2):
        outputs = StructuredOutputs(json=SCHEMA, disable_any_whitespace=i < 4)
        more: dict[str, Any] = ({}, {"n": 2, "logprobs": 1}, {"repetition_penalty": 1.2})[i % 3]
        found.append(
            SamplingParams(
                max_tokens=90, temperature=temperature, seed=i, structured_outputs=outputs, **more
            )
        )
    found.append(SamplingParams(max_tokens=40, seed=8, logprobs=2))
    found.append(
        SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(choice=["abab", "abc"]))
    )
    return found


def seen(llm: LLM, prompts: list[Any]) -> list[Any]:
    outputs = llm.generate(prompts, asked_for(), use_tqdm=False)
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.logprobs)
        for output in outputs
        for answer in output.outputs
    ]


@pytest.mark.parametrize(
    ("arch", "method"), [*(("llama", method) for method in METHODS), ("qwen3_5_text", "suffix")]
)
def test_json_does_not_depend_on_draft_tokens(arch: str, method: str, tmp_path: Path) -> None:
    """In other engines drafts beside a JSON schema gave garbage (vLLM issue 43338), and n-gram
    drafts changed answers (41758, 56077)."""
    save_byte_model(tmp_path / "model", arch)
    prediction = '{"name_of_city":"bb","number":17,"names":["abd"]}'
    prompts = [{"prompt": "abab" * (1 + i % 3), "prediction": prediction} for i in range(8)]
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 160, "num_blocks": 80}
    plain = seen(LLM(tmp_path / "model", **settings), [p["prompt"] for p in prompts])
    for text, reason in ((text, reason) for _, text, reason, _ in plain[:-2]):
        assert reason == "length" or json.loads(text)["number"] <= 999
    for more in ({}, {"num_blocks": 24, "block_size": 8, "overlap": True}):
        llm = LLM(
            tmp_path / "model",
            speculative_config={"method": method, "num_speculative_tokens": 6},
            check_invariants=True,
            trace=tmp_path / "run.jsonl",
            **settings | more,
        )
        assert seen(llm, prompts) == plain
        counts = llm.engine.scheduler.draft_counts
        assert counts.num_accepted_tokens > 60
        verdict = check((tmp_path / "run.jsonl").read_text().splitlines())
        assert not verdict.property_id, verdict


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("opens_thinking", [False, True])
def test_forced_tool_calls_do_not_depend_on_draft_tokens(
    method: str, opens_thinking: bool, tmp_path: Path
) -> None:
    """n-gram drafts broke half of the tool calls of another engine (vLLM issue 40875)."""
    folder = save_chat_model(tmp_path / "model", end="</s>")
    template = {"opens_thinking": True} if opens_thinking else {"enable_thinking": False}
    messages = [{"role": "user", "content": "hé?"}]

    def calls(llm: LLM) -> list[Any]:
        (closing,) = llm.tokenizer.convert_tokens_to_ids(["</think>"])
        params = [
            SamplingParams(
                max_tokens=90,
                temperature=temperature,
                seed=4,
                logit_bias={closing: 8.0},
                structured_outputs=forced_output([WEATHER], choice),
            )
            for temperature in (0.0, 0.8, 1.2)
            for choice in ("required", {"type": "function", "function": {"name": "weather"}})
        ]
        outputs = llm.chat(
            [messages] * len(params),
            params,
            use_tqdm=False,
            chat_template_kwargs=template,
            tools=[WEATHER],
        )
        return [
            (answer.token_ids, answer.text, answer.finish_reason, answer.message)
            for output in outputs
            for answer in output.outputs
        ]

    settings: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 400}
    plain = calls(LLM(folder, **settings))
    llm = LLM(folder, speculative_config={"method": method}, check_invariants=True, **settings)
    assert calls(llm) == plain
    assert llm.engine.scheduler.draft_counts.num_accepted_tokens > 20


@pytest.mark.smollm2
@pytest.mark.nightly
def test_json_of_the_embedded_model_does_not_depend_on_draft_tokens() -> None:
    path = embedded_model_path()
    assert path is not None
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 160, "num_blocks": 80}
    prompts: list[Any] = ["A city and a number as JSON:"] * 8
    plain = seen(LLM(path, **settings), prompts)
    for method in METHODS:
        llm = LLM(path, speculative_config={"method": method}, check_invariants=True, **settings)
        assert seen(llm, prompts) == plain
        assert llm.engine.scheduler.draft_counts.num_accepted_tokens > 40
