"""The chunks of a streamed answer add up to the unstreamed one, wherever the answer is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st

from pagespec import LLM, AsyncLLM, SamplingParams
from pagespec.server import chat, completions
from pagespec.server.call import read_call
from pagespec.server.config import ServerConfig
from pagespec.server.context import ServerContext
from pagespec.server.protocol.endpoints import ChatRequest, CompletionRequest
from pagespec.server.sampling import SamplingDefaults, chat_params, completion_params
from pagespec.server.sse import EventStream
from pagespec.serving.generation import AnswerDelta, Generation
from tests.server.chunks import alike, joined_answer, read_events
from tests.support.chat_models import WEATHER, save_chat_model
from tests.support.scripted_llm import scripted_llm

SCRIPTS = [
    "Plain words, 語 é.",
    "<think>\nHow so? é\n</think>\n\nBecause.",
    '<think>x</think>Hm:<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n'
    "</tool_call>",
    "<tool_call>\n{no json\n</tool_call> and on",
]
REQUEST = Request({"type": "http", "headers": [], "pagespec.request_id": "it"})
EXAMPLES = settings(max_examples=60, deadline=None)


class CutGeneration:
    """A finished generation that returns given deltas."""

    def __init__(self, generation: Generation, pieces: list[AnswerDelta]) -> None:
        self._generation, self._pieces = generation, pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    async def deltas(self) -> AsyncIterator[list[AnswerDelta]]:
        for piece in self._pieces:
            yield [piece]


@dataclass
class Answered:
    """A request that was answered once, to be streamed in many ways."""

    generation: Generation
    answers: list[AnswerDelta]
    make_choices: Callable[[Any], Any]
    choice: Callable[[Any, AnswerDelta], dict[str, Any]]

    def unstreamed(self) -> dict[str, Any]:
        choices = self.make_choices(self.generation)
        found = [self.choice(choices, answer) for answer in self.answers]
        return alike(json.loads(json.dumps({"choices": found, "usage": choices.usage()})))

    def streamed(self, pieces: list[AnswerDelta]) -> dict[str, Any]:
        generation: Any = CutGeneration(self.generation, pieces)
        stream = EventStream(self.make_choices(generation))

        async def body() -> bytes:
            return b"".join([bytes(part) async for part in stream.body_iterator])  # type: ignore[arg-type]

        answer = joined_answer(read_events(asyncio.run(body()).decode()))
        return alike({key: answer[key] for key in ("choices", "usage")})


def ask(engine: AsyncLLM, prompt: Any, params: SamplingParams) -> tuple[Generation, Any]:
    async def run() -> tuple[Generation, Any]:
        generation = await engine.submit(prompt, params)
        return generation, await generation.result()

    return asyncio.run(run())


def completion(engine: AsyncLLM, **fields: Any) -> Answered:
    body = CompletionRequest(
        prompt="hé ab", seed=3, stream=True, stream_options={"include_usage": True}, **fields
    )
    params = completion_params(body, SamplingDefaults())
    call = read_call(body, REQUEST, ServerContext(engine, ServerConfig()))
    generation, result = ask(engine, body.prompt, params)
    return Answered(
        generation,
        result.outputs,
        lambda found: completions._Choices(call, params, [found]),
        lambda choices, answer: choices.choice(0, answer),
    )


def conversation(engine: AsyncLLM, **fields: Any) -> Answered:
    body = ChatRequest(
        messages=[{"role": "user", "content": "hé?"}],
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        **fields,
    )
    params = chat_params(body, SamplingDefaults())
    call = read_call(body, REQUEST, ServerContext(engine, ServerConfig()))
    prompt = engine.llm.chat_reader.read(body.messages, tools=body.tools)
    generation, result = ask(engine, prompt, params)
    return Answered(
        generation,
        result.outputs,
        lambda found: chat._Choices("auto", call, params, [found]),
        lambda choices, answer: choices.choice(answer),
    )


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answered]]:
    folder: Path = tmp_path_factory.mktemp("model")
    llm = LLM(save_chat_model(folder), max_num_seqs=8, num_blocks=400, compile="eager")
    model, script = AsyncLLM(llm), AsyncLLM(scripted_llm("qwen3", SCRIPTS))
    yield {
        "plain": completion(model),
        "echo": completion(model, logprobs=2, echo=True, n=2, max_tokens=8, return_token_ids=True),
        "stop": completion(model, stop=["a", "é"], logprobs=0, max_tokens=50),
        "chat": conversation(model, seed=3, logprobs=True, top_logprobs=2, max_tokens=30, n=2),
        "calls": conversation(script, seed=0, n=len(SCRIPTS), tools=[WEATHER]),
        "cut": conversation(script, seed=2, tools=[WEATHER], max_tokens=50),
        "stopped": conversation(script, seed=0, n=len(SCRIPTS), tools=[WEATHER], stop=["a", "."]),
    }
    asyncio.run(model.shutdown())
    asyncio.run(script.shutdown())


@st.composite
def cuts(draw: st.DrawFn, answers: list[AnswerDelta]) -> list[AnswerDelta]:
    """Pieces of the answers, cut at any token and at any character."""
    pieces: list[AnswerDelta] = []
    for answer in answers:
        ids, text, logprobs = answer.token_ids, answer.text, answer.logprobs
        places = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
        size = len(places)
        ends = sorted(draw(st.lists(st.integers(0, len(text)), min_size=size, max_size=size)))
        low_id = low = 0
        for high_id, high in zip([*places, len(ids)], [*ends, len(text)], strict=True):
            entries = None if logprobs is None else logprobs[low_id:high_id]
            pieces.append(AnswerDelta(answer.index, text[low:high], ids[low_id:high_id], entries))
            low_id, low = high_id, high
        last = pieces.pop()
        ending = answer.finish_reason, answer.stop_reason
        pieces.append(AnswerDelta(last.index, last.text, last.token_ids, last.logprobs, *ending))
    # The answers grow beside each other.
    turns = draw(st.permutations([piece.index for piece in pieces]))
    queues = {answer.index: [p for p in pieces if p.index == answer.index] for answer in answers}
    return [queues[index].pop(0) for index in turns]


@pytest.mark.parametrize("name", ["plain", "echo", "stop", "chat", "calls", "cut", "stopped"])
@EXAMPLES
@given(data=st.data())
def test_every_way_of_cutting(
    answered: dict[str, Answered], name: str, data: st.DataObject
) -> None:
    subject = answered[name]
    pieces = data.draw(cuts(subject.answers))
    assert subject.streamed(pieces) == subject.unstreamed()


def test_token_by_token(answered: dict[str, Answered]) -> None:
    for subject in answered.values():
        pieces = [
            AnswerDelta(
                answer.index,
                "",
                [token],
                None if answer.logprobs is None else [answer.logprobs[place]],
            )
            for answer in subject.answers
            for place, token in enumerate(answer.token_ids)
        ]
        pieces += [
            AnswerDelta(a.index, a.text, [], None if a.logprobs is None else [], a.finish_reason,
                        a.stop_reason)
            for a in subject.answers
        ]  # fmt: skip
        assert subject.streamed(pieces) == subject.unstreamed()
