"""API keys, salts of keys, and web pages of other origins."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from pagespec import AsyncLLM, InvalidInputError
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from pagespec.server.context import salt_of
from tests.support.content_llm import content_llm
from tests.support.server import client

ENGINE = AsyncLLM(content_llm())
KEYS = ["first", "second"]


def app_of(**config: Any) -> FastAPI:
    app = create_app(ENGINE, ServerConfig(**config))

    @app.post("/v1/salt")
    async def salt(request: Request, own: str | None = None) -> str | None:
        return salt_of(request, own)

    return app


def ask(
    app: FastAPI, method: str, path: str, root_path: str = "", **headers: str
) -> httpx.Response:
    async def call() -> httpx.Response:
        async with client(app, root_path) as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(call())


GUARDED = [
    *("/v1/models", "/v1/chat/completions", "/v2/anything", "/inference/v1/generate"),
    *("/tokenize", "/tokenizer_info", "/pause", "/reset_prefix_cache", "/live", "/nothing"),
    *("//v1/models", "/v1", "/v1/models/", "/healthy", "/page", "/health//"),
]


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("given", [None, "Bearer", "Bearer third", "Bearer firs", "Basic first"])
def test_without_a_key_nothing_is_served(path: str, given: str | None) -> None:
    answer = ask(app_of(api_keys=KEYS), "GET", path, **{"Authorization": given} if given else {})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (401, "invalid_api_key", None)
    assert error["type"] == "AuthenticationError"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(key: str, scheme: str) -> None:
    answer = ask(app_of(api_keys=KEYS), "GET", "/v1/models", Authorization=f"{scheme} {key}")
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/openapi.json"])
def test_some_paths_are_open(path: str) -> None:
    assert ask(app_of(api_keys=KEYS), "GET", path).status_code == 200
    with_slash = ask(app_of(api_keys=KEYS), "GET", f"{path}/")
    assert with_slash.status_code == 307
    assert with_slash.headers["location"].endswith(path)


@pytest.mark.parametrize("path", ["/x/v1/models", "/v1/models"])
def test_the_path_of_a_proxy_opens_nothing(path: str) -> None:
    app = app_of(api_keys=KEYS)
    assert ask(app, "GET", path, root_path="/x").status_code == 401
    with_key = ask(app, "GET", path, root_path="/x", Authorization="Bearer first")
    assert with_key.status_code == 200
    assert ask(app, "GET", "/x/health", root_path="/x").status_code == 200


def test_without_keys_all_is_open() -> None:
    assert ask(app_of(), "GET", "/v1/models").status_code == 200


def salt(app: FastAPI, key: str, own: str | None = None) -> str | None:
    path = "/v1/salt" if own is None else f"/v1/salt?own={own}"
    found: str | None = ask(app, "POST", path, Authorization=f"Bearer {key}").json()
    return found


def test_keys_have_salts_of_their_own() -> None:
    app = app_of(api_keys=KEYS, salt_per_key=True)
    salts = {(key, own): salt(app, key, own) for key in KEYS for own in (None, "a", "b")}
    assert len(set(salts.values())) == len(salts)
    assert all(isinstance(one, str) and "first" not in one for one in salts.values())
    # No request can make its salt that of another key.
    other = salts["second", "a"]
    assert salt(app, "first", other) not in salts.values()
    assert salts == {(key, own): salt(app, key, own) for key, own in salts}


def test_without_that_a_salt_is_the_requests_own() -> None:
    app = app_of(api_keys=KEYS)
    assert [salt(app, "first", own) for own in (None, "a")] == [None, "a"]


PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def test_other_origins_are_refused_unless_they_are_named() -> None:
    off = ask(app_of(), "OPTIONS", "/v1/chat/completions", **PREFLIGHT)
    assert "access-control-allow-origin" not in off.headers
    app = app_of(cors_origins=["https://a.example"], api_keys=KEYS)
    on = ask(app, "OPTIONS", "/v1/chat/completions", **PREFLIGHT)
    assert on.status_code == 200
    assert on.headers["access-control-allow-origin"] == "https://a.example"
    other = PREFLIGHT | {"Origin": "https://b.example"}
    assert ask(app, "OPTIONS", "/v1/chat/completions", **other).status_code == 400


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_a_page_that_may_can_read_refusals(path: str) -> None:
    app = app_of(cors_origins=["https://a.example"], api_keys=KEYS)
    answer = ask(app, "GET", path, Origin="https://a.example")
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


BAD = [
    ("api_keys", [""]),
    ("api_keys", ["é"]),
    ("api_keys", "one"),
    ("salt_per_key", True),
    ("port", 1 << 16),
    ("port", "8000"),
    ("host", ""),
    ("root_path", "x"),
    ("ssl_keyfile", "key"),
    ("max_num_requests", 0),
    ("max_body_bytes", 1.5),
    ("body_timeout_s", None),
    ("request_timeout_s", 0),
    ("drain_timeout_s", -1),
    ("cors_origins", [1]),
    ("enable_admin", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ServerConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field in (name, "ssl_certfile")
    assert "é" not in str(caught.value)


def test_keys_are_not_shown() -> None:
    assert ServerConfig(api_keys=["first"]).shown()["api_keys"] == 1
