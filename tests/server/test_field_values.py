"""Field values without effect are accepted; unsupported ones are rejected by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pagespec import LLM
from pagespec.errors import InvalidInputError
from pagespec.server.protocol.endpoints import ChatRequest, CompletionRequest
from pagespec.server.sampling import SamplingDefaults, chat_params, completion_params
from pagespec.server.template_fields import check_effort, template_variables
from tests.server.chunks import read_events
from tests.server.test_bad_fields import JSON
from tests.server.test_requests import CHAT, COMPLETIONS, GENERATE, HELLO, VALID
from tests.support.chat_models import QWEN_TEMPLATE, save_chat_model
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

# Reads an effort, has a level and a role of its own, and roles of all others.
_OWN_TEMPLATE = """{% if reasoning_effort == 'deepest' %}Dig. {% endif %}{{ reasoning_effort }}
{%- for message in messages %}{% if message.role == "critic" or message.role != 'x' %}
{{- message.role }}: {{ message.content }}
{% elif message.role == 'observer' %}{% endif %}{% endfor %}{{ others }}"""


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    llm = scripted_llm("qwen3", ["Plain words."], max_num_seqs=4)
    with serving(llm, model="tiny") as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """With constraints."""
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    llm = LLM(folder, max_num_seqs=4, num_blocks=100, compile="eager")
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def own() -> Iterator[httpx.Client]:
    llm = scripted_llm("qwen3", ["Plain words."], max_num_seqs=4)
    llm.tokenizer.chat_template = _OWN_TEMPLATE
    with serving(llm, model="tiny") as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def error_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


EVERYWHERE = CHAT, COMPLETIONS, GENERATE
OPENAI = CHAT, COMPLETIONS
# By clients: openai 3.57, LiteLLM 1.110, langchain-openai 1.7; and vLLM's own fields.
ASKS_FOR_NOTHING: list[tuple[tuple[str, ...], str, list[Any]]] = [
    (EVERYWHERE, "stream_options", [None, {}, {"include_obfuscation": False}]),
    (EVERYWHERE, "kv_transfer_params", [None, {}]),
    (OPENAI, "thinking_token_budget", [None, -1]),
    (OPENAI, "repetition_detection", [None]),
    (OPENAI, "return_token_offsets", [None, False]),
    ((CHAT,), "return_assistant_tokens_mask", [None, False]),
    ((CHAT,), "truncation_side", [None, "left"]),
    ((GENERATE,), "assistant_tokens_mask", [None]),
    ((GENERATE,), "token_offsets", [None]),
    (OPENAI, "store", [None, False]),
    (OPENAI, "service_tier", [None, "auto", "default"]),
    (OPENAI, "metadata", [None, {}, {"a": "b"}]),
    (OPENAI, "user", [None, "u"]),
    (OPENAI, "safety_identifier", [None, "s"]),
    (OPENAI, "prompt_cache_key", [None, "k"]),
    (OPENAI, "prompt_cache_retention", [None, "in_memory", "in-memory"]),
    (OPENAI, "prompt_cache_options", [None, {}]),
    (OPENAI, "moderation", [None]),
    (OPENAI, "n", [None, 1]),
    (OPENAI, "stop", [None, []]),
    (OPENAI, "logit_bias", [None, {}]),
    (OPENAI, "bad_words", [None, []]),
    (OPENAI, "stop_token_ids", [None, []]),
    (OPENAI, "structured_outputs", [None, {}]),
    (OPENAI, "response_format", [None, {"type": "text"}]),
    (OPENAI, "logits_processors", [None, []]),
    (OPENAI, "use_beam_search", [None, False]),
    (OPENAI, "vllm_xargs", [None, {}]),
    ((CHAT,), "modalities", [None, ["text"], []]),
    ((CHAT,), "functions", [None, []]),
    ((CHAT,), "function_call", [None, "none"]),
    ((CHAT,), "tools", [None, []]),
    ((CHAT,), "tool_choice", [None, "none"]),
    ((CHAT,), "parallel_tool_calls", [None, True, False]),
    ((CHAT,), "documents", [None, []]),
    ((CHAT,), "verbosity", [None, "medium"]),
    ((CHAT,), "reasoning_effort", [None, "medium"]),
    ((CHAT,), "audio", [None]),
    ((CHAT,), "prediction", [None, {"type": "content", "content": "a"}]),
    ((CHAT,), "web_search_options", [None]),
    ((CHAT,), "thinking", [None]),
    ((CHAT,), "context_management", [None, []]),
    ((CHAT,), "include_server_side_tool_invocations", [None, False]),
    ((CHAT,), "top_logprobs", [None, 0]),
    ((CHAT,), "logprobs", [None, False]),
    ((CHAT,), "chat_template_kwargs", [None, {}]),
    ((CHAT,), "mm_processor_kwargs", [None, {}]),
    ((COMPLETIONS,), "suffix", [None, ""]),
    ((COMPLETIONS,), "prompt_embeds", [None, []]),
    ((COMPLETIONS,), "echo", [None, False]),
    (("/tokenize",), "tools", [None, []]),
    (("/tokenize",), "chat_template", [None]),
    (("/tokenize",), "mm_processor_kwargs", [None, {}]),
]  # fmt: skip
NOTHING = [
    (path, name, value)
    for paths, name, values in ASKS_FOR_NOTHING
    for path in paths
    for value in values
]


@pytest.mark.parametrize(("path", "name", "value"), NOTHING, ids=str)
def test_values_without_effect_are_accepted(
    http: httpx.Client, path: str, name: str, value: Any
) -> None:
    body = {**VALID.get(path, {"messages": HELLO}), name: value}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text


REFUSED: list[tuple[str, str, Any]] = [
    *(
        (path, "stream_options", {"include_usage": value})
        for path in EVERYWHERE
        for value in (None, False, True)
    ),
    *((path, "stream_options", {"include_obfuscation": True}) for path in EVERYWHERE),
    *((path, "store", True) for path in OPENAI),
    *((path, "service_tier", "flex") for path in OPENAI),
    *((path, "prompt_cache_retention", "24h") for path in OPENAI),
    *((path, "prompt_cache_options", {"mode": "explicit"}) for path in OPENAI),
    *((path, "moderation", {"model": "m"}) for path in OPENAI),
    *((path, "kv_transfer_params", {"a": 1}) for path in EVERYWHERE),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "modalities", ["audio"]),
    (CHAT, "modalities", "text"),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "function_call", "auto"),
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "documents", [{"text": "a"}]),
    (CHAT, "verbosity", "low"),
    (CHAT, "verbosity", "banana"),
    (CHAT, "audio", {"voice": "v"}),
    (CHAT, "prediction", {"type": "content"}),
    (CHAT, "prediction", "a"),
    (CHAT, "prediction", {"type": "content", "content": [{"type": "image_url"}]}),
    (CHAT, "web_search_options", {}),
    (CHAT, "thinking", {"type": "enabled"}),
    (CHAT, "context_management", [{"type": "compaction"}]),
    (CHAT, "include_server_side_tool_invocations", True),
    (CHAT, "reasoning_effort", "banana"),
    (COMPLETIONS, "suffix", "x"),
    (COMPLETIONS, "reasoning_effort", "high"),
    (COMPLETIONS, "use_beam_search", 0),
    (COMPLETIONS, "echo", 0),
]


@pytest.mark.parametrize(("path", "name", "value"), REFUSED, ids=str)
def test_values_of_unsupported_features_are_refused(
    http: httpx.Client, path: str, name: str, value: Any
) -> None:
    error = error_of(http.post(path, json={**VALID[path], name: value}))
    assert error["param"].split(".")[0] == name
    assert error["message"].startswith(name)


# Roles and efforts ------------------------------------------------------------------------------

ROLES = "system", "developer", "user", "assistant", "tool", "function"


def said_by(role: str) -> list[dict[str, str]]:
    return [*HELLO, {"role": role, "content": "a"}]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_roles_are_those_of_openai_and_of_the_template(
    http: httpx.Client, own: httpx.Client, path: str
) -> None:
    for role in ROLES:
        assert http.post(path, json={"messages": said_by(role)}).status_code == 200, role
    for role in ("banana", "critic", "User", "", "message", "im_start", "\ud800", "a" * 10_000):
        body = json.dumps({"messages": said_by(role)})  # httpx writes no lone surrogates
        error = error_of(http.post(path, content=body, headers=JSON))
        assert error["param"] == "messages[1].role"
        assert "assistant" in error["message"]
        assert len(error["message"]) < 400
    for role, status in ("critic", 200), ("observer", 200), ("banana", 400), ("others", 400):
        assert own.post(path, json={"messages": said_by(role)}).status_code == status, role


def test_an_effort_is_one_of_openais_or_of_the_template(own: httpx.Client) -> None:
    seen = set()
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", "deepest"):
        body = {"messages": HELLO, "reasoning_effort": effort, "return_token_ids": True}
        answer = own.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        seen.add(tuple(answer.json()["prompt_token_ids"]))
    assert len(seen) == 8
    for effort in ("banana", "High", ""):
        error = error_of(own.post(CHAT, json={"messages": HELLO, "reasoning_effort": effort}))
        assert (error["param"], "deepest" in error["message"]) == ("reasoning_effort", False)
        assert "xhigh" in error["message"]


def test_an_effort_switches_thinking(http: httpx.Client) -> None:
    assert "reasoning_effort" not in QWEN_TEMPLATE

    def text(**fields: Any) -> str:
        body = {"messages": HELLO, "return_prompt_text": True, "max_tokens": 1, **fields}
        found: str = http.post(CHAT, json=body).json()["prompt_text"]
        return found

    off = text(chat_template_kwargs={"enable_thinking": False})
    assert text(reasoning_effort="none") == off != text(reasoning_effort="low")
    kwargs = {"enable_thinking": True}
    assert text(reasoning_effort="none", chat_template_kwargs=kwargs) != off


@pytest.mark.parametrize(
    ("template", "is_accepted"), [("", False), ("{{ enable_thinking }}", True),
                                  ("{{ reasoning_effort }}", True)]
)  # fmt: skip
def test_an_effort_that_the_template_does_not_read_is_refused(
    template: str, is_accepted: bool
) -> None:
    tokenizer = SimpleNamespace(chat_template=template)
    check_effort("medium", tokenizer)
    with nullcontext() if is_accepted else pytest.raises(InvalidInputError, match="chat template"):
        check_effort("low", tokenizer)


def test_documents_are_for_a_template_that_reads_them() -> None:
    documents = [{"title": "a", "text": "b"}]
    with pytest.raises(InvalidInputError, match="documents = '1 documents'"):
        template_variables(None, None, documents, SimpleNamespace(chat_template="{{ messages }}"))
    tokenizer = SimpleNamespace(chat_template="{{ documents }}")
    assert template_variables(None, None, documents, tokenizer) == {"documents": documents}


# Sentences --------------------------------------------------------------------------------------


def test_top_logprobs_alone_need_logprobs(http: httpx.Client) -> None:
    for fields in {"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}:
        error = error_of(http.post(CHAT, json={"messages": HELLO, **fields}))
        assert error["param"] == "top_logprobs"
        assert error["message"] == "top_logprobs = 3: needs logprobs = true"


SCHEMA = "response_format.json_schema.schema"
RAW: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"$ref": "#"}}, "no text can satisfy it"),
    ({"guided_json": {"anyOf": [{"$ref": "#"}]}}, "no text can satisfy it"),
    ({"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
     "no text can satisfy it"),
    ({"guided_json": {"$ref": "http://x/y"}}, "other documents are not fetched"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "is not supported: uniqueItems"),
    ({"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "anyOf"),
    ({"guided_json": {"type": "integer", "minimum": "a"}}, "'minimum' must be a number"),
    ({"guided_json": {"type": "number", "minimum": 1e308, "maximum": 1.1e308}},
     "from 1e308 to 1.1e308"),
    ({"guided_json": "true"}, "must be an object"),
    ({"guided_regex": r"[^\s\S]"}, "no text can satisfy it"),
    ({"guided_regex": "("}, "unclosed group"),
    ({"guided_regex": "(?=a)"}, "look-around, including look-ahead and look-behind"),
    ({"guided_regex": r"\b"}, "look-around"),
    ({"guided_regex": "[z-a]"}, "invalid character class range"),
    ({"guided_grammar": "root ::= root"}, "no text can satisfy it"),
    ({"guided_grammar": "start: a\na: b\nb: a"}, "no text can satisfy it"),
    ({"guided_grammar": 'start: %json {"$ref":"#"}'}, "no text can satisfy it"),
    ({"guided_grammar": "start: foo"}, 'line 1: unknown name: "foo"'),
    ({"guided_grammar": "start: a\na: /(/"}, "line 2: "),
    ({"guided_grammar": "start: <nope>"}, 'unknown special token: "<nope>"'),
]  # fmt: skip
# Words of the compiler's inside, of Rust, and of its other callers' options.
FOREIGN = (
    *("non-verbose", "NoExtension", "Some(", "f64", "coerce_one_of", "Unimplemented", "registry"),
    *("no_forcing", "(in regex)", "| start:", "^", "available", "regex /"),
)


@pytest.mark.parametrize(("fields", "words"), RAW, ids=str)
def test_an_unsupported_constraint_is_refused_with_a_reason(
    real: httpx.Client, fields: dict[str, Any], words: str
) -> None:
    error = error_of(real.post(COMPLETIONS, json={"prompt": "ab", **fields}))
    (name,) = fields
    reason = error["message"].rpartition('": ')[2]
    assert error["param"] == name
    assert words in reason
    assert not [word for word in FOREIGN if word in reason]
    assert len(reason) < 200


def test_a_text_that_grows_too_complex_ends_with_a_reason(real: httpx.Client) -> None:
    # The door finds the first to be too complex; of the second that shows as it is sampled.
    for regex, field in (("a{1000000}", "guided_regex"), ("[ab]{20}a{1000000}", "")):
        body = {"prompt": "ab", "max_tokens": 40, "guided_regex": regex}
        message = error_of(real.post(COMPLETIONS, json=body))["message"]
        assert "too complex" in message
        assert field in message
        assert not [word for word in FOREIGN if word in message]


# The context ------------------------------------------------------------------------------------


def too_long(num_tokens: int, num_output: int, most: int) -> str:
    return (
        f"This model's maximum context length is {most} tokens. However, you requested "
        f"{num_output} output tokens and your prompt contains {num_tokens} input tokens, for a "
        f"total of {num_tokens + num_output} tokens. Please reduce the length of the input prompt "
        "or the number of requested output tokens."
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_gets_vllms_error(
    http: httpx.Client, stream: bool
) -> None:
    most = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body: dict[str, Any] = {"prompt": [5] * (most + 3), "stream": stream}
    for path, fields, num_output, param in (
        (COMPLETIONS, {}, 16, "prompt"),
        (COMPLETIONS, {"max_tokens": 7}, 7, "prompt"),
        (COMPLETIONS, {"max_tokens": None}, 1, "prompt"),
        (GENERATE, {}, 1, "token_ids"),
    ):
        given = {**body, **fields}
        if path == GENERATE:
            given["token_ids"] = given.pop("prompt")
        error = error_of(http.post(path, json=given))
        assert error == {
            "message": too_long(most + 3, num_output, most),
            "type": "BadRequestError",
            "param": param,
            "code": "context_length_exceeded",
        }
    several = {"prompt": [[5], [5] * (most + 3)], "stream": stream}
    assert error_of(http.post(COMPLETIONS, json=several))["param"] == "prompts[1]"
    text = {"messages": [{"role": "user", "content": "é" * most}], "stream": stream}
    error = error_of(http.post(CHAT, json={**text, "max_completion_tokens": 9}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert f"is {most} tokens. However, you requested 9 output tokens" in error["message"]


def test_a_prompt_that_fits_is_answered(http: httpx.Client) -> None:
    most = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [5] * (most - 1), "max_tokens": 50}
    answer = http.post(COMPLETIONS, json=body)
    assert answer.json()["usage"]["completion_tokens"] == 1
    streamed = http.post(COMPLETIONS, json={**body, "stream": True}).text
    assert read_events(streamed)[-1]["choices"][0]["finish_reason"] == "length"


def test_arguments_of_logits_processors_are_parameters() -> None:
    xargs = {"target": 1}
    completion = CompletionRequest(prompt="a", vllm_xargs=xargs)
    assert completion_params(completion, SamplingDefaults()).extra_args == xargs
    message = ChatRequest(messages=[{"role": "user", "content": "a"}], vllm_xargs=xargs)
    assert chat_params(message, SamplingDefaults()).extra_args == xargs
