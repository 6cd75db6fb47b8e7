"""A model's generation config sets the defaults of fields that a request leaves out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagespec import LLM, AsyncLLM, InvalidInputError, SamplingParams
from pagespec.server.app import create_app
from tests.support.apart import run_apart
from tests.support.chat_models import save_chat_model
from tests.support.models import tiny_model
from tests.support.server import serving

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]
# Its answer of several tokens depends on each of the settings below.
SEEDED = {"seed": 11, "ignore_eos": True, "max_tokens": 12}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6, 7, 5, 6, 7]},
    CHAT: {"messages": HELLO},
}
# What a config says, and the value of a request that undoes it.
SETTINGS: list[tuple[str, Any, Any]] = [
    ("temperature", 0.01, 1.0),
    ("top_k", 1, 0),
    ("top_p", 0.01, 1.0),
    ("min_p", 0.99, 0.0),
    ("repetition_penalty", 0.01, 1.0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_chat_model(tmp_path_factory.mktemp("model")))


def configure(folder: Path, **settings: Any) -> Path:
    path = folder / "generation_config.json"
    kept = {k: v for k, v in _read(path).items() if k.endswith("_token_id")}
    path.write_text(json.dumps(kept | settings))
    return folder


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[httpx.Client]:
    llm = LLM(folder, max_num_seqs=4, num_blocks=100, compile="eager", **settings)
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def token_ids(http: httpx.Client, path: str, **fields: Any) -> list[int]:
    body = {**BODIES[path], **SEEDED, "return_token_ids": True, **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    found: list[int] = choice["token_ids"]
    return found


def num_tokens(http: httpx.Client, path: str, **fields: Any) -> int:
    answer = http.post(path, json={**BODIES[path], "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["completion_tokens"]
    return found


@pytest.mark.parametrize(("name", "value", "undone"), SETTINGS, ids=[s[0] for s in SETTINGS])
def test_each_setting_is_a_default_that_a_field_overrides(
    folder: Path, name: str, value: Any, undone: Any
) -> None:
    with served(configure(folder)) as http:
        plain = {path: token_ids(http, path) for path in BODIES}
        asked = {path: token_ids(http, path, **{name: value}) for path in BODIES}
    assert all(plain[path] != asked[path] for path in BODIES)
    with served(configure(folder, **{name: value})) as http:
        for path in BODIES:
            assert token_ids(http, path) == asked[path]
            assert token_ids(http, path, **{name: None}) == asked[path]
            assert token_ids(http, path, **{name: undone}) == plain[path]


def test_fields_override_one_by_one(folder: Path) -> None:
    with served(configure(folder)) as http:
        asked = token_ids(http, CHAT, repetition_penalty=100.0, temperature=0.01)
        warm = token_ids(http, CHAT, repetition_penalty=100.0, temperature=2.0)
    assert asked != warm
    with served(configure(folder, repetition_penalty=100.0, temperature=0.01)) as http:
        assert token_ids(http, CHAT) == asked
        assert token_ids(http, CHAT, temperature=2.0) == warm


def test_the_config_may_be_left_out_or_be_another_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 1}')
    with served(configure(folder)) as http:
        plain, greedy = token_ids(http, CHAT), token_ids(http, CHAT, top_k=1)
        cold = token_ids(http, CHAT, temperature=0.5)
    assert len({*map(tuple, (plain, greedy, cold))}) == 3
    configure(folder, temperature=0.5)
    for choice, expected in ("auto", cold), ("vllm", plain), (str(tmp_path), greedy):
        with served(folder, generation_config=choice) as http:
            assert token_ids(http, CHAT) == expected, choice


def test_tokens_in_tokens_out_takes_parameters_as_they_are(folder: Path) -> None:
    """As in vLLM: a trainer's update depends on the exact parameters that it sends."""
    body = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 3, "ignore_eos": True}}
    found = []
    for settings in {}, {"top_k": 1, "max_new_tokens": 7}:
        with served(configure(folder, **settings), max_model_len=40) as http:
            answer = http.post(GENERATE, json=body).json()
            found.append(answer["choices"][0]["token_ids"])
            every = {**body["sampling_params"], "max_tokens": None}  # type: ignore[dict-item]
            whole = http.post(GENERATE, json={**body, "sampling_params": every}).json()
            assert len(whole["choices"][0]["token_ids"]) == 37
    assert [len(ids) for ids in found] == [37, 7]
    assert found[0][:7] == found[1]


def test_max_new_tokens_is_a_default(folder: Path) -> None:
    with served(configure(folder, max_new_tokens=5), max_model_len=60) as http:
        assert num_tokens(http, CHAT) == 5
        assert num_tokens(http, CHAT, max_tokens=None, max_completion_tokens=None) == 5
        assert num_tokens(http, CHAT, max_tokens=8) == 8
        assert num_tokens(http, CHAT, max_completion_tokens=8) == 8
        assert num_tokens(http, COMPLETIONS) == 16
        assert num_tokens(http, COMPLETIONS, max_tokens=None) == 5


def test_max_new_tokens_of_a_folder_is_a_limit_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5}')
    configure(folder)
    with served(folder, generation_config=str(tmp_path), max_model_len=60) as http:
        assert num_tokens(http, CHAT) == 5
        assert num_tokens(http, CHAT, max_tokens=8) == 5
        assert num_tokens(http, CHAT, max_completion_tokens=3) == 3
        assert num_tokens(http, COMPLETIONS) == 5
        assert num_tokens(http, COMPLETIONS, max_tokens=None) == 5
        body = {"prompt": [5, 6], "echo": True, "max_tokens": 0}
        assert http.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"] == 0


def test_what_the_context_leaves_is_less_than_the_default(folder: Path) -> None:
    with served(configure(folder, max_new_tokens=500), max_model_len=40) as http:
        answer = http.post(COMPLETIONS, json={"prompt": [5] * 30, "max_tokens": None})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 10


def test_async_requests_without_parameters_take_them(folder: Path) -> None:
    configure(folder, top_k=1, max_new_tokens=5)

    async def answers(*params: SamplingParams | None) -> list[list[int]]:
        engine = AsyncLLM(folder, max_num_seqs=4, num_blocks=100, compile="eager")
        try:
            found = [await (await engine.submit([5, 6, 7], given)).result() for given in params]
        finally:
            await engine.shutdown()
        return [result.outputs[0].token_ids for result in found]

    explicit = SamplingParams(top_k=1, max_tokens=5), SamplingParams(ignore_eos=True)
    left_out, asked, plain = asyncio.run(answers(None, *explicit))
    assert left_out == asked
    assert len(plain) == 16


def test_a_server_refuses_a_bad_config_when_it_starts(folder: Path) -> None:
    llm = LLM(configure(folder, min_p=7.0), max_num_seqs=4, num_blocks=40, compile="eager")
    with pytest.raises(InvalidInputError, match=r"generation_config\.min_p = 7\.0.*vllm"):
        create_app(AsyncLLM(llm))


@pytest.mark.parametrize("value", ["", "no/such/folder", 5, b"auto", "file"])
def test_a_config_that_is_not_there_is_refused_before_the_model_is_read(
    value: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("{}")
    given = str(tmp_path / "file") if value == "file" else value
    with pytest.raises(InvalidInputError) as caught:
        LLM("no-such-model-either", generation_config=given)
    assert caught.value.field == "generation_config"


@pytest.mark.parametrize("content", ["{", "[1]", '"auto"'])
def test_a_config_that_cannot_be_read_is_refused(
    folder: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InvalidInputError) as caught:
        LLM(folder, max_num_seqs=4, num_blocks=40, compile="eager", generation_config=tmp_path)
    assert caught.value.field == "generation_config"


_START = """
import os, sys
os.dup2(1, 2)  # the workers' too
from pagespec import LLM
LLM(sys.argv[1], max_num_seqs=4, num_blocks=40, device="cpu", compile="graph",
    tensor_parallel_size=int(sys.argv[2]), generation_config=sys.argv[3])
"""


@pytest.mark.parametrize(
    ("num_ranks", "choice", "num_lines"), [(1, "auto", 1), (1, "vllm", 0), (2, "auto", 1)]
)
def test_ignored_settings_are_reported_once_per_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    choice: str,
    num_lines: int,
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_model("qwen3", num_hidden_layers=1).save_pretrained(folder)
    configure(folder, suppress_tokens=[3])
    for _ in range(2 if num_ranks == 1 else 1):  # the second start is restored
        said = run_apart("-c", _START, str(folder), str(num_ranks), choice)
        assert said.count("ignored, although generate would apply it") == num_lines, said
        assert said.count("suppress_tokens") == num_lines
