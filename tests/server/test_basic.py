"""The server's information about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pagespec import __version__
from tests.support.content_llm import content_llm
from tests.support.server import serving


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    llm = content_llm()
    with (
        serving(llm, model="tiny", served_model_names=["one", "org/two"]) as url,
        httpx.Client(base_url=url) as http,
    ):
        yield http


def test_models_are_listed_under_each_name(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["one", "org/two"]
    card = cards["data"][0]
    assert card["max_model_len"] == 49
    assert (card["object"], card["root"], card["owned_by"]) == ("model", "tiny", "pagespec")
    assert http.get("/v1/models/org/two").json()["id"] == "org/two"


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    answer = http.get("/v1/models/three")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model `three` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize("path", ["/health", "/ping", "/readiness", "/liveness"])
def test_health_is_an_empty_answer(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_numbers(http: httpx.Client) -> None:
    assert http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/get_world_size").json() == {"world_size": 1}


GETS = (
    *("/", "/page/app.js", "/health", "/ping", "/readiness", "/liveness", "/v1/models"),
    *("/v1/models/one", "/metrics", "/load", "/version", "/live", "/openapi.json"),
)


@pytest.mark.parametrize("path", [*GETS, "/nothing", "/v1/models/three", "/page/nothing"])
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    whole = http.get(path)
    head = http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    for name in "content-type", "content-length", "content-security-policy":
        is_fixed = name != "content-length" or path not in ("/metrics", "/live")
        if is_fixed:
            assert head.headers.get(name) == whole.headers.get(name), name
    # The connection goes on with the next answer.
    assert http.get("/version").json() == {"version": __version__}


def test_head_of_what_is_no_get_is_refused(http: httpx.Client) -> None:
    for path in "/v1/completions", "/tokenize":
        assert http.head(path).status_code == 405


def test_head_of_an_endless_stream_ends(http: httpx.Client) -> None:
    answer = http.head("/live/stream", timeout=10)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_head_needs_a_key_where_get_does() -> None:
    with serving(content_llm(), api_keys=["k"]) as url:
        assert httpx.head(url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert httpx.head(url + "/v1/models", headers=headers).status_code == 200
        assert httpx.head(url + "/health").status_code == 200


def test_a_model_card_shows_no_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "Tiny-1B").mkdir()
    file = tmp_path / "tiny.gguf"
    file.touch()
    for model, root in (
        (str(tmp_path / "Tiny-1B"), "Tiny-1B"),
        (f"{tmp_path}/Tiny-1B/", "Tiny-1B"),
        (str(file), "tiny.gguf"),
        ("./no/such/file.gguf", "file.gguf"),
        ("~/models/a", "a"),
        ("org/name", "org/name"),
        ("gpt2", "gpt2"),
    ):
        with serving(content_llm(), model=model, served_model_names=["one"]) as url:
            text = httpx.get(url + "/v1/models").text
            assert json.loads(text)["data"][0]["root"] == root
            assert str(tmp_path) not in text
