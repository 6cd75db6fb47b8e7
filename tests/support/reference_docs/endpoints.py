"""The tables of ``docs/http_reference.md``, from the app and the models of bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fastapi.routing import APIRoute

from pagespec import AsyncLLM
from pagespec.engine.sampling_params import SamplingParams
from pagespec.params.declare import declared, defaults
from pagespec.server import admin
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from pagespec.server.protocol.endpoints import ChatRequest, CompletionRequest, GenerateRequest
from pagespec.server.protocol.fields import (
    SAME_NAME,
    Body,
    GeneratingBody,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
)
from pagespec.server.security import is_open
from pagespec.server.tokenization import DetokenizeRequest, TokenizeRequest
from tests.support.content_llm import content_llm

from .cells import code, json_type, limit_of, prose, table

# Descriptions of endpoints and fields that have none in the code.
_ENDPOINTS = {
    "/": "The page: a chat, and a live view of the engine.",
    "/page/{name}": "Files of the page.",
    "/metrics": "Metrics in Prometheus' text format.",
    "/live": "The numbers of the live view, once.",
    "/live/stream": "The numbers of the live view, twice per second, as server-sent events.",
    "/version": "The version of pagespec.",
    "/is_paused": "Whether the engine is paused.",
    "/openapi.json": "This interface as an OpenAPI document.",
}
_FIELDS = {
    "stream": "Send the answer in pieces, as server-sent events.",
    "stream_options": "Usage in a stream, see below.",
    "metadata": "Ignored.",
    "store": "Ignored.",
    "service_tier": "Ignored.",
    "safety_identifier": "Ignored.",
    "prompt_cache_key": "Ignored.",
    "max_tokens": "Most tokens to generate.",
    "logit_bias": "Added to the logits of tokens. Keys are token ids as text.",
    "stop": "Text that ends the answer and is cut from it; several may be given.",
    "vllm_xargs": "`extra_args` for the classes of the engine argument `logits_processors`.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, with that many alternatives. Not "
    "for a stream.",
    "response_format": "The form of the text, see below.",
    "structured_outputs": "A constraint: an object with the fields of "
    "[StructuredOutputs](structured_output.md).",
    "guided_json": "A constraint: a JSON schema, as an object or as text.",
    "guided_regex": "A constraint: a regular expression.",
    "guided_choice": "A constraint: one of these texts.",
    "guided_grammar": "A constraint: a grammar.",
    "guided_whitespace_pattern": "Whitespace between the parts of JSON, a regular expression.",
    "return_token_ids": "The answer also has the token ids of prompt and choices.",
    "return_tokens_as_token_ids": "Log-probabilities name tokens `token_id:NN`.",
    "messages": "The conversation. Content is text, or a list of parts of type `text`.",
    "logprobs": "Log-probabilities of the sampled tokens.",
    "top_logprobs": "That many alternatives per token; needs `logprobs`.",
    "tools": "Functions that the model may call ([Chat](chat.md)).",
    "tool_choice": "Which of `tools` to call.",
    "parallel_tool_calls": "False: only the first call is returned.",
    "include_reasoning": "False: the message has no `reasoning` and no `reasoning_content`.",
    "add_generation_prompt": "End the prompt with the opening of an answer.",
    "continue_final_message": "Continue the last message in place of a new one.",
    "chat_template_kwargs": "Variables for the chat template.",
    "token_ids": "The prompt.",
    "prompt": "The prompt, or several.",
    "TokenizeRequest.prompt": "A text.",
    "tokens": "Token ids.",
    "model": "The model's name. Without it, the model that is served.",
    "return_token_strs": "The answer also has the text of each token.",
    "type": "The kind of constraint; `text` is none.",
    "json_schema": 'Only with `type` "json_schema".',
    "name": "Ignored.",
    "description": "Ignored.",
    "schema": "The schema.",
}
# Defaults that the code applies where a body omits the field.
_DEFAULTS = {
    "add_generation_prompt": "true",
    "continue_final_message": "false",
    "include_reasoning": "true",
    "parallel_tool_calls": "true",
    "stop_in_reasoning": "false",
    "echo": "false",
    "logprobs": "none",
    "max_tokens": "the model's, else what the context leaves",
    "max_completion_tokens": "the model's, else what the context leaves",
}  # fmt: skip
_BODIES: Mapping[str, tuple[str, type[Body], tuple[type[Body], ...]]] = {
    "Fields of completions and chat": (
        "Both `POST /v1/completions` and `POST /v1/chat/completions` take these fields.",
        GeneratingBody, (),
    ),
    "POST /v1/chat/completions": (
        "The fields above, and:", ChatRequest, (GeneratingBody,),
    ),
    "POST /v1/completions": (
        "The fields above, and:", CompletionRequest, (GeneratingBody,),
    ),
    "POST /inference/v1/generate": (
        "Token ids in, token ids out. Sampling parameters are in one object.", GenerateRequest, (),
    ),
    "POST /tokenize": ("Either `prompt` or `messages`.", TokenizeRequest, ()),
    "POST /detokenize": ("", DetokenizeRequest, ()),
    "`response_format`": ("", ResponseFormat, ()),
    "`response_format.json_schema`": ("", JsonSchema, ()),
    "`stream_options`": ("", StreamOptions, ()),
}  # fmt: skip


@cache
def _app() -> Any:
    config = ServerConfig(enable_admin=True)
    return create_app(AsyncLLM(content_llm()), config)


def endpoints() -> Iterator[str]:
    """Every endpoint of the server."""
    app = _app()
    admins = {route.path for route in admin.router.routes if isinstance(route, APIRoute)}
    described = app.openapi()["paths"]
    rows = []
    for path, methods, endpoint in _routes():
        known = described.get(path, {})
        parameters = [p for one in known.values() for p in one.get("parameters", ())]
        query = [_query(p, app) for p in parameters if p["in"] == "query"]
        text = _ENDPOINTS.get(path) or (endpoint.__doc__ or "").split("\n\n")[0]
        assert text, f"{path} has no description"
        text += f" Query: {'; '.join(query)}." if query else ""
        text += " Only with `--enable-admin`." if path in admins else ""
        needs = "no" if is_open(path) else "yes"
        shown = path.replace("{name:path}", "{name}")
        rows.append((", ".join(sorted(methods)), code(shown), needs, prose(text)))
    yield from table(("method", "path", "API key", "description"), rows)


def _routes() -> Iterator[tuple[str, set[str], Any]]:
    """Paths, methods and functions. Routes of one path are joined."""
    found: dict[str, tuple[set[str], Any]] = {}
    for route in _flat(_app().routes):
        methods = set(route.methods or ()) - {"HEAD"}
        found.setdefault(route.path, (set(), route.endpoint))[0].update(methods)
    for path, (methods, endpoint) in found.items():
        yield path, methods, endpoint


def _flat(routes: Any) -> Iterator[Any]:
    """Routes, and those of included routers, which some releases of FastAPI keep apart."""
    for route in routes:
        if hasattr(route, "methods"):
            yield route
        else:
            router = getattr(route, "original_router", None) or getattr(route, "router", None)
            yield from _flat(getattr(router, "routes", None) or getattr(route, "routes", ()))


def _query(parameter: Mapping[str, Any], app: Any) -> str:
    schema = parameter["schema"]
    if "$ref" in schema:
        schema = schema | app.openapi()["components"]["schemas"][schema["$ref"].split("/")[-1]]
        schema.pop("$ref", None)
    default = schema.get("default")
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"`{parameter['name']}`, {json_type(schema)}, default {shown}"


def bodies() -> Iterator[str]:
    """The fields of each body."""
    for title, (text, body, without) in _BODIES.items():
        yield from (f"### {title}", "")
        if text:
            yield from (text, "")
        known = {name for other in without for name in other.model_fields}
        rows = [
            row for name, row in _rows(body) if name not in known or name in body.__annotations__
        ]
        yield from (*table(("field", "type", "default", "limit", "description"), rows), "")


def _rows(body: type[Body]) -> Iterator[tuple[str, tuple[str, ...]]]:
    schema = body.model_json_schema()
    required = set(schema.get("required", ()))
    for name, field in body.model_fields.items():
        shown = field.alias or name
        one = schema["properties"][shown]
        default, limit = "", _limit(one)
        if shown in required:
            default = "required"
        elif field.default is not None:
            default = str(field.default).lower()
        elif issubclass(body, GeneratingBody) and name in (*SAME_NAME, "max_tokens", "logit_bias"):
            default = _sampling_default(name)
        default = default or _DEFAULTS.get(shown, "")
        if issubclass(body, GeneratingBody) and name in declared(SamplingParams):
            is_count = name != "logprobs" or body is CompletionRequest
            limit = limit_of(name, declared(SamplingParams)[name]) if is_count else limit
        elif shown == "top_logprobs":
            limit = limit_of("logprobs", declared(SamplingParams)["logprobs"])
        text = field.description or _FIELDS.get(f"{body.__name__}.{shown}") or _FIELDS.get(shown)
        assert text, f"{body.__name__}.{shown} has no description"
        yield name, (code(shown), json_type(one), default, limit, prose(text))


def _sampling_default(name: str) -> str:
    known, value = declared(SamplingParams)[name], defaults(SamplingParams).get(name)
    if name == "max_tokens":
        return ""
    shown = known.absent or ("" if value in (None, (), {}) else str(value).lower())
    return f"the model's, else {shown}" if known.is_of_model else shown


def _limit(schema: Mapping[str, Any]) -> str:
    """Of lengths."""
    found = []
    for one in (schema, *schema.get("anyOf", ())):
        if "maxLength" in one:
            found.append(f"at most {one['maxLength']} characters")
        if "minItems" in one:
            found.append(f"at least {one['minItems']} item")
    return ", ".join(found)


def neutral_fields() -> Iterator[str]:
    """Unsupported fields, with the values that have no effect."""
    rows = []
    for title, body in (
        ("completions and chat", GeneratingBody),
        ("chat", ChatRequest),
        ("completions", CompletionRequest),
        ("generate", GenerateRequest),
        ("tokenize", TokenizeRequest),
    ):
        known = GeneratingBody.neutral if body in (ChatRequest, CompletionRequest) else {}
        for name, values in body.neutral.items():
            if name not in known:
                rows.append((code(name), title, code("null", *map(_json, values))))
    yield from table(("field", "body", "accepted values"), rows)


def _json(value: Any) -> str:

    return json.dumps(value)
