"""The openai client in typical use, against servers over a tiny model or scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from pagespec import LLM
from tests.support.chat_models import WEATHER, save_chat_model
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

CALL = '<think>\nAsk.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}'
ANSWERS = ["Plain words, 語.", CALL + "\n</tool_call>"]
HELLO = [{"role": "user", "content": "hé?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}  # the schema is for all of it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    llm = LLM(folder, max_num_seqs=8, num_blocks=200, compile="eager")
    with serving(llm, api_keys=["secret"], model="tiny") as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def script() -> Iterator[OpenAI]:
    with serving(scripted_llm("qwen3", ANSWERS)) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models(model: OpenAI) -> None:
    (card,) = model.models.list().data
    assert card.id == "tiny"


def test_completions_and_their_streams(model: OpenAI) -> None:
    answer = model.completions.create(
        model="tiny", prompt=["ab", "hé"], max_tokens=6, seed=3, n=2, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert answer.choices[2].text.startswith("hé")
    chunks = list(
        model.completions.create(model="tiny", prompt="ab", max_tokens=6, seed=3, stream=True,
                                 stream_options={"include_usage": True})
    )  # fmt: skip
    whole = model.completions.create(model="tiny", prompt="ab", max_tokens=6, seed=3)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


def test_chat_with_logprobs(model: OpenAI) -> None:
    answer = model.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=8, logprobs=True, top_logprobs=2, seed=1
    )  # type: ignore[call-overload]
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    # A byte that is no character by itself keeps its value.
    assert all(bytes(e.bytes).decode(errors="replace") == e.token for e in content)


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Oslo"]
    warm: bool


def test_parse_with_a_schema(model: OpenAI) -> None:
    answer = model.chat.completions.parse(
        model="tiny",
        messages=HELLO,
        response_format=Weather,
        seed=2,
        max_tokens=200,
        extra_body={"structured_outputs": None, **NO_THINKING},
    )  # type: ignore[arg-type]
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Weather)


def test_a_stream_is_read_to_its_end(model: OpenAI) -> None:
    with model.chat.completions.stream(
        model="tiny",
        messages=HELLO,
        response_format=Weather,
        seed=2,
        max_tokens=200,
        extra_body=NO_THINKING,
    ) as stream:  # type: ignore[arg-type]
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Weather)


def test_tools(script: OpenAI) -> None:
    answer = script.chat.completions.create(
        model="model", messages=HELLO, tools=[WEATHER], seed=1, max_tokens=200
    )  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Bern"},
    )
    assert choice.message.reasoning_content == "Ask."
    # The conversation goes on from there.
    more = [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    after = script.chat.completions.create(
        model="model", messages=[*HELLO, *more], tools=[WEATHER], seed=0
    )  # type: ignore[call-overload]
    assert after.choices[0].message.content == "Plain words, 語."


def test_streamed_tools(script: OpenAI) -> None:
    with script.chat.completions.stream(
        model="model", messages=HELLO, tools=[WEATHER], seed=1, max_tokens=200
    ) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_forced_tool(model: OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": Weather.model_json_schema()},
    }
    for choice in "required", {"type": "function", "function": {"name": "weather"}}:
        # Random weights write white space without end; of several answers some are complete.
        answer = model.chat.completions.create(
            model="tiny", messages=HELLO, tools=[tool], tool_choice=choice, seed=4, n=16,
            max_tokens=200,
        )  # type: ignore[call-overload]  # fmt: skip
        found = [c for c in answer.choices if c.finish_reason == "tool_calls"]
        assert found
        for call in (call for complete in found for call in complete.message.tool_calls):
            assert call.function.name == "weather"
            Weather.model_validate_json(call.function.arguments)


def test_errors_are_the_clients_own(model: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        model.completions.create(model="tiny", prompt="ab", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        model.completions.create(model="other", prompt="ab")
    with pytest.raises(openai.AuthenticationError):
        model.with_options(api_key="wrong").models.list()


def test_many_streams_of_one_asynchronous_client(script: OpenAI) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=str(script.base_url), api_key="none") as client:

            async def one() -> str:
                text = ""
                async for chunk in await client.chat.completions.create(
                    model="model", messages=HELLO, seed=0, stream=True
                ):  # type: ignore[call-overload]
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(one() for _ in range(20)))

    assert set(asyncio.run(run())) == {"Plain words, 語."}
