"""A server with draft tokens: predictions of chat completions, usage and metrics."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from pagespec import LLM
from tests.support.chat_models import save_chat_model
from tests.support.server import serving

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "hé?"}],
    "temperature": 0.8,
    "seed": 3,
    "max_tokens": 24,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    config = {"method": "ngram", "num_speculative_tokens": 4}
    return LLM(folder, max_num_seqs=4, num_blocks=200, speculative_config=config)


def post(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post(CHAT, json=BODY | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_prediction_changes_the_usage_alone(http: httpx.Client, llm: LLM) -> None:
    plain = post(http)
    token_ids = plain["choices"][0]["token_ids"]
    details = plain["usage"].get("completion_tokens_details", {})
    assert "accepted_prediction_tokens" not in details
    content = llm.tokenizer.decode(token_ids, skip_special_tokens=False)
    for text in (content, "nothing of it"):
        found = post(http, prediction={"type": "content", "content": text})
        assert found["choices"] == plain["choices"]
        details = found["usage"]["completion_tokens_details"]
        counts = [details[f"{how}_prediction_tokens"] for how in ("accepted", "rejected")]
        assert all(count >= 0 for count in counts)
        assert sum(counts) > 0


def test_metrics_have_vllms_names(http: httpx.Client, llm: LLM) -> None:
    post(http, messages=[{"role": "user", "content": "a b a b a b a b"}])
    samples = [s for family in parse(http.get("/metrics").text) for s in family.samples]
    drafts = [s for s in samples if s.name.startswith("vllm:spec_decode_")]
    counts = llm.engine.scheduler.draft_counts
    found = {s.name: s.value for s in drafts if "position" not in s.labels}
    assert found == {
        "vllm:spec_decode_num_drafts_total": counts.num_drafts,
        "vllm:spec_decode_num_draft_tokens_total": counts.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": counts.num_accepted_tokens,
    }
    assert counts.num_draft_tokens > 0
    per_position = {s.labels["position"]: s.value for s in drafts if "position" in s.labels}
    assert per_position == dict(zip("0123", counts.accepted_per_position, strict=True))


def test_a_server_without_draft_tokens_accepts_predictions(llm: LLM) -> None:
    plain = LLM(llm_folder(llm), max_num_seqs=2, num_blocks=80)
    with serving(plain) as url, httpx.Client(base_url=url, timeout=60) as http:
        found = post(http, prediction={"type": "content", "content": "a"})
        assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
        assert "spec_decode" not in http.get("/metrics").text


def llm_folder(llm: LLM) -> str:
    return str(llm.tokenizer.name_or_path)


def test_requests_with_edits_and_constraints_are_served(llm: LLM, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a_long_name": {"enum": ["yes", "no"]}}}
    schema |= {"required": ["a_long_name"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    before = llm.engine.scheduler.draft_counts.num_accepted_tokens
    body = BODY | {"presence_penalty": 1.0, "response_format": asked, "max_tokens": 60}
    body |= {"chat_template_kwargs": {"enable_thinking": False}}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200
    assert "a_long_name" in answer.json()["choices"][0]["message"]["content"]
    assert llm.engine.scheduler.draft_counts.num_accepted_tokens > before + 5
