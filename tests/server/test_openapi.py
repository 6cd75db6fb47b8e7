"""The OpenAPI document describes the server's real behaviour."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.content_llm import content_llm
from tests.support.server import serving


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(content_llm()) as url, httpx.Client(base_url=url) as client:
        yield client


def test_every_operation_documents_its_refusals(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert "Error" in document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"], (method, path)
            assert {"4XX", "5XX"} <= set(operation["responses"]), (method, path)


@pytest.mark.parametrize("path", ["/health", "/readiness", "/liveness"])
def test_what_has_no_body_documents_none(http: httpx.Client, path: str) -> None:
    document = http.get("/openapi.json").json()
    assert "content" not in document["paths"][path]["get"]["responses"]["200"]
    assert http.get(path).content == b""


def test_token_ids_are_integers(http: httpx.Client) -> None:
    for wrong in (True, "0", 0.5, None):
        answer = http.post("/detokenize", json={"tokens": [0, wrong]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens.1")


def test_options_lists_the_allowed_methods(http: httpx.Client) -> None:
    assert set(http.options("/ping").headers["allow"].split(", ")) == {"GET", "POST"}
