"""What a server says about itself."""

from __future__ import annotations

from collections.abc import Iterator

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
