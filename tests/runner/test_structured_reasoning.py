"""Constraints after reasoning, through both runners; the GPU runner's kernels are interpreted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagespec import StructuredOutputs
from pagespec.engine.request import Request
from pagespec.engine.text.reasoning import Reasoning
from pagespec.engine.text.token_bytes import TokenBytes
from tests.runner.both_runners import RUNNERS
from tests.runner.test_structured import run_out, serve
from tests.support.structured import END, make_request, random_outputs, tokenizer

pytestmark = pytest.mark.usefixtures("small_chunks")

OPEN = Reasoning(b"(", b"ab", is_open=True)
MAY_OPEN = replace(OPEN, is_open=False)
SPELLED = Reasoning(b"(ab", b"ab)", is_open=False)
BYTES = TokenBytes(tokenizer())
A, B, AB, PAREN, CLOSE = (3 + ord("a"), 3 + ord("b"), 260, 3 + ord("("), 3 + ord(")"))
LIKELY = {A: 4.0, B: 4.0, AB: 3.0, PAREN: 4.0, CLOSE: 4.0}


def text_of(token_ids: list[int]) -> bytes:
    return b"".join(BYTES(i) for i in token_ids if i != END)


def make(
    number: int, outputs: StructuredOutputs | None, reasoning: Reasoning | None, **params: Any
) -> Request:
    """Of a prompt and parameters that depend on ``number`` alone."""
    rng = random.Random(number)
    max_tokens = params.pop("max_tokens", 40)
    request = make_request(str(number), outputs, rng, max_tokens, logit_bias=LIKELY, **params)
    request.info = replace(request.info, reasoning=reasoning)
    return request


def mixed(seed: int, num: int, **params: Any) -> tuple[list[Request], list[Callable[[str], bool]]]:
    requests, checks = [], []
    for number in range(num):
        rng = random.Random(seed * 1000 + number)
        outputs, is_met = random_outputs(rng)
        reasoning = rng.choice([OPEN, OPEN, MAY_OPEN, SPELLED, None])
        requests.append(make(seed * 1000 + number, outputs, reasoning, **params))
        checks.append(is_met)
    return requests, checks


def content_of(request: Request) -> bytes | None:
    """The content, found in the text alone; None if there is none. An answer may begin with the
    closing delimiter, without any reasoning."""
    text, reasoning = text_of(request.output_token_ids), request.info.reasoning
    if reasoning is None:
        return text
    if not reasoning.is_open:
        if text.lstrip().startswith(reasoning.closing):
            return text.lstrip()[len(reasoning.closing) :]
        if not text.lstrip().startswith(reasoning.opening):
            return text
        text = text.lstrip()[len(reasoning.opening) :]
    _, closing, content = text.partition(reasoning.closing)
    return content if closing else None


def check_content(requests: list[Request], checks: list[Callable[[str], bool]]) -> list[bytes]:
    """Check that all complete content matches its constraint; return the reasoning before it."""
    reasoned = []
    for request, is_met in zip(requests, checks, strict=True):
        content = content_of(request)
        assert request.finish_reason in ("stop", "length")
        if content is not None and request.finish_reason == "stop":
            # White space in the token that closes the reasoning is not the constraint's.
            text = content.decode()
            assert is_met(text) or is_met(text.lstrip()), text
            before = text_of(request.output_token_ids)[: -len(content) or None]
            if before:
                reasoned.append(before)
    return reasoned


def test_content_behind_reasoning_meets_its_constraint() -> None:
    requests, checks = mixed(1, 60, temperature=1.0)
    serve(requests)
    reasoned = check_content(requests, checks)
    assert len(reasoned) > 15
    assert len({text[:1] for text in reasoned}) > 5, "the reasoning is unconstrained"
    assert any(text.startswith(b"(") for text in reasoned)
    assert any(r.finish_reason == "stop" and content_of(r) is None for r in requests), (
        "an end token inside the reasoning ends the answer"
    )


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("cpu", {"top_k": 0}),
        ("cpu", {"top_k": 7}),
        ("cpu", {"top_p": 0.8}),
        ("gpu", {"top_k": 0}),
        pytest.param("gpu", {"top_k": 7}, marks=pytest.mark.nightly),
        pytest.param("gpu", {"top_p": 0.8}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_reasoning_is_that_of_the_request_without_a_constraint(
    kind: str, params: dict[str, Any]
) -> None:
    if kind not in RUNNERS:
        pytest.skip("kernels are not interpreted here")
    num = 12 if kind == "cpu" else 3
    numbers = range(3000, 3000 + num)
    choice = StructuredOutputs(choice=["yes", "no"])
    params = params | {"max_tokens": 40 if kind == "cpu" else 20}
    own = [make(n, choice, OPEN, temperature=1.0, **params) for n in numbers]
    free = [make(n, None, None, temperature=1.0, **params) for n in numbers]
    serve(own, kind)
    serve(free, kind)
    num_equal = 0
    for one, other in zip(own, free, strict=True):
        got, plain = one.output_token_ids, other.output_token_ids
        content = content_of(one)
        if content is None:
            assert got == plain
            num_equal += len(got)
            continue
        before = next(n for n in range(len(got)) if b"ab" in text_of(got[: n + 1]))
        # The token that closes the reasoning has nothing behind: it may be another.
        assert got[:before] == plain[:before]
        num_equal += before
    assert num_equal > 4 * num


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.nightly)])
def test_tokens_are_those_of_the_request_alone(seed: int) -> None:
    alone = []
    for number in range(14):
        requests, _ = mixed(seed, 14)
        serve([requests[number]], overlap=False, max_num_seqs=1)
        alone.append(requests[number].output_token_ids)
    for overlap, num_blocks in ((False, 200), (True, 200), (True, 16)):
        requests, _ = mixed(seed, 14)
        serve(requests, overlap=overlap, num_blocks=num_blocks)
        assert [request.output_token_ids for request in requests] == alone
        assert any(r.num_preemptions and r.info.reasoning for r in requests) == (num_blocks == 16)


@pytest.mark.skipif("gpu" not in RUNNERS, reason="kernels are not interpreted here")
def test_on_a_gpu_it_is_the_same() -> None:
    requests, checks = mixed(6, 5, temperature=0.0, max_tokens=24)
    serve(requests, "gpu", num_blocks=24)
    check_content(requests, checks)
    alone, _ = mixed(6, 5, temperature=0.0, max_tokens=24)
    serve(alone, "cpu", overlap=False, max_num_seqs=1)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in alone]


def test_continuations_of_one_prompt() -> None:
    def group() -> list[Request]:
        leader = make(7001, StructuredOutputs(choice=["yes", "no"]), OPEN, temperature=1.0)
        return [leader, *(leader.sibling(str(i), i, None) for i in (1, 2, 3))]

    requests, alone = group(), group()
    engine = serve([])
    engine.add(requests[0], siblings=requests[1:])
    run_out(engine)
    for request in alone:
        serve([request], overlap=False)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in alone]
    check_content(requests, [lambda text: text in ("yes", "no")] * 4)


def test_other_parameters_act_in_the_reasoning_as_ever() -> None:
    """``allowed_token_ids`` applies there too; ignored end tokens follow reasoning like any other
    token."""
    allowed = [A, B, 3 + ord("x")]
    params = {"temperature": 1.0, "allowed_token_ids": allowed, "ignore_eos": True}
    own = [make(8000 + n, StructuredOutputs(regex="x{3}"), OPEN, **params) for n in range(8)]
    for request in own:
        request.stop_token_ids = frozenset()
    engine = serve(own)
    for request in own:
        assert set(request.output_token_ids) <= set(allowed)
        if request.finish_reason == "error":  # nothing but ends may follow, and they are banned
            assert content_of(request) == b"xxx"
            assert "structured_outputs" in str(engine.error(request))
    assert any(request.finish_reason == "error" for request in own)
