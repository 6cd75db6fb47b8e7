"""Which rejected requests count as a second owner's; the queue reserves room for second owners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pagespec import AsyncLLM, EngineBusyError, InvalidInputError, SamplingParams
from tests.support.content_llm import content_llm

LIMIT, KEPT = 16, 2
_PARAMS = SamplingParams(max_tokens=2)

Refused = Callable[[AsyncLLM], Awaitable[object]]


async def _id_in_use(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidInputError, match="is in use"):
        await engine.submit("ab", _PARAMS, "first", owner="two")


async def _id_twice(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidInputError, match="is in use"):
        await engine.submit_all([("ab", _PARAMS)] * 2, ["new", "new"], owner="two")


async def _bad_prompt(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidInputError):
        await engine.submit([-1], _PARAMS, owner="two")


async def _too_many(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidInputError, match="max_num_requests"):
        await engine.submit_all([("ab", _PARAMS)] * (LIMIT + 1), owner="two")


async def _num_admitted(refused: Refused | None) -> int:
    """Requests of one owner that fit beside its first, after a request of another is refused."""
    engine = AsyncLLM(content_llm(policy="fair", num_blocks=400), max_num_requests=LIMIT)
    await engine.pause_generation()
    held = [await engine.submit("ab", _PARAMS, "first", owner="one")]
    if refused is not None:
        await refused(engine)
    try:
        while True:
            held.append(await engine.submit("ab", _PARAMS, owner="one"))
    except EngineBusyError:
        return len(held)
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("refused", [None, _id_in_use, _id_twice, _bad_prompt, _too_many])
def test_an_owner_of_refused_requests_only_has_no_room_kept(refused: Refused | None) -> None:
    assert asyncio.run(_num_admitted(refused)) == LIMIT


async def _no_room(engine: AsyncLLM) -> None:
    held = [await engine.submit("ab", _PARAMS, owner="one") for _ in range(LIMIT - 1)]
    with pytest.raises(EngineBusyError):
        await engine.submit("ab", _PARAMS, owner="two")
    for generation in held:
        await engine.abort(generation.request_id)


def test_room_is_kept_for_an_owner_that_found_none() -> None:
    assert asyncio.run(_num_admitted(_no_room)) == LIMIT - KEPT
