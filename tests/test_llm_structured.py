"""Structured output through ``LLM``: a model folder with a tokenizer, and the embedded model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagespec import (
    LLM,
    InvalidInputError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
    embedded_model_path,
)
from spec.replay import check
from tests.support.models import tiny_model
from tests.support.structured import save_byte_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 999}, "s": {"enum": ["é", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_byte_model(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_model_len=128, num_blocks=64)


def params(max_tokens: int = 60, **asked: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, seed=1, structured_outputs=StructuredOutputs(**asked)
    )


def text_of(output: RequestOutput) -> str:
    (completion,) = output.outputs
    assert completion.finish_reason == "stop"
    return completion.text


def test_answers_match_their_constraints(llm: LLM) -> None:
    asked = [
        params(json=SCHEMA, disable_any_whitespace=True),
        params(regex="a[0-9]{2}|b{3}"),
        params(choice=["yes", "no"]),
        params(grammar='start: "<" /[a-z]{1,5}/ ">"'),
    ]
    answers = [text_of(output) for output in llm.generate(["ab"] * 4, asked, use_tqdm=False)]
    value = json.loads(answers[0])
    assert value["n"] <= 999
    assert value["s"] in ("é", "b")
    assert re.fullmatch("a[0-9]{2}|b{3}", answers[1])
    assert answers[2] in ("yes", "no")
    assert re.fullmatch("<[a-z]{1,5}>", answers[3])
    assert "".join(llm.stream("ab", asked[0])) == answers[0]
    assert llm.stats().host_s["masks"] > 0


def test_each_of_several_continuations_matches_its_constraint(llm: LLM, folder: Path) -> None:
    outputs = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    several = SamplingParams(n=3, max_tokens=60, seed=2, structured_outputs=outputs, logprobs=1)
    asked = [several, params(regex="[a-c]{4}"), SamplingParams(max_tokens=20, seed=3)]
    prompts = ["abababab", "ab", "abab"]
    answers = llm.generate(prompts, asked, use_tqdm=False)
    for completion in answers[0].outputs:
        assert completion.finish_reason == "stop"
        assert json.loads(completion.text)["s"] in ("é", "b")
    assert len({completion.text for completion in answers[0].outputs}) > 1
    crowded = LLM(
        folder,
        device="cpu",
        max_model_len=64,
        block_size=4,
        num_blocks=16,
        overlap=True,
        check_invariants=True,
    )
    others = crowded.generate(prompts, asked, use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in others)
    for one, other in zip(answers, others, strict=True):
        assert one.outputs == other.outputs


def test_what_is_refused_leaves_the_others_alone(llm: LLM) -> None:
    refused = params(json={"not": {}})
    with pytest.raises(InvalidInputError, match="not"):
        llm.generate("ab", refused, use_tqdm=False)
    items = [("ab", params(choice=["x"])), ("ab", refused), ("ab", params(choice=["y"]))]
    first, error, last = llm.generate_iter(items)
    assert isinstance(error, InvalidInputError)
    assert [text_of(first), text_of(last)] == ["x", "y"]  # type: ignore[arg-type]


def test_min_tokens_lengthen_a_text_that_can_go_on(llm: LLM) -> None:
    least = SamplingParams(
        structured_outputs=StructuredOutputs(regex="x*"), min_tokens=5, max_tokens=20, seed=1
    )
    fixed = replace(least, structured_outputs=StructuredOutputs(choice=["xy"]))
    together = llm.generate(["ab", "ab"], [least, fixed], use_tqdm=False)
    long, short = (output.outputs[0] for output in together)
    assert set(long.text) == {"x"}
    assert len(long.text) >= 5
    assert (short.text, short.finish_reason) == ("xy", "stop")
    [alone] = llm.generate("ab", least, use_tqdm=False)
    assert alone.outputs[0].token_ids == long.token_ids


def test_a_request_that_cannot_go_on_ends_alone(llm: LLM) -> None:
    nothing_left = SamplingParams(
        allowed_token_ids=[3 + ord("z")],
        structured_outputs=StructuredOutputs(choice=["x"]),
    )
    items = [("ab", params(choice=["x"])), ("ab", nothing_left), ("ab", params(choice=["y"]))]
    first, error, last = llm.generate_iter(items)
    assert isinstance(error, RequestError)
    assert [text_of(first), text_of(last)] == ["x", "y"]  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"structured_outputs.* other parameters ban all"):
        llm.generate("ab", nothing_left, use_tqdm=False)


def test_bad_words_hold_beside_a_constraint(llm: LLM) -> None:
    """The byte tokenizer has one token per letter: a word's last letter is banned behind the
    others."""
    free = SamplingParams(
        structured_outputs=StructuredOutputs(choice=["no", "nz"]), logit_bias={3 + ord("o"): 100.0}
    )
    banned = replace(free, bad_words=["no"])
    doomed = replace(banned, structured_outputs=StructuredOutputs(choice=["no"]))
    first, other, error = llm.generate_iter([("ab", free), ("ab", banned), ("ab", doomed)])
    assert [text_of(first), text_of(other)] == ["no", "nz"]  # type: ignore[arg-type]
    assert isinstance(error, RequestError)
    assert "other parameters ban all allowed tokens" in str(error)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_may_leave_nothing_to_sample(llm: LLM, temperature: float) -> None:
    [z] = llm.tokenizer.encode("z", add_special_tokens=False)
    nothing_left = SamplingParams(
        temperature=temperature, seed=1, allowed_token_ids=[z], bad_words=["zzz"], max_tokens=9
    )
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, error, last = llm.generate_iter([("ab", plain), ("ab", nothing_left), ("ab", plain)])
    assert isinstance(error, RequestError)
    assert "leave no token to sample" in str(error)
    assert first.outputs == last.outputs  # type: ignore[union-attr]
    enough = replace(nothing_left, max_tokens=2)
    [output] = llm.generate("ab", enough, use_tqdm=False)
    assert output.outputs[0].token_ids == [z, z]


def test_the_trace_of_one_that_failed_alone_is_replayed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    traced = LLM(folder, device="cpu", max_model_len=128, num_blocks=64, trace=path)
    test_a_request_that_cannot_go_on_ends_alone(traced)
    lines = path.read_text().splitlines()
    assert any(json.loads(line).get("reason") == "error" for line in lines)
    verdict = check(lines)
    assert not verdict.property_id, verdict


def test_a_model_without_tokenizer_refuses() -> None:
    llm = LLM(tiny_model("llama", num_hidden_layers=1), device="cpu", num_blocks=16)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.generate([[5, 6]], params(choice=["x"]), use_tqdm=False)


@pytest.mark.smollm2
@pytest.mark.nightly
def test_the_embedded_model_gives_valid_json() -> None:
    path = embedded_model_path()
    assert path is not None
    llm = LLM(path, device="cpu", max_model_len=128, num_blocks=32)
    schema = SCHEMA | {"properties": {"n": {"type": "integer"}, "s": {"enum": ["Paris", "Rome"]}}}
    (output,) = llm.generate(
        "A city and its number of hills as JSON:", params(json=schema), use_tqdm=False
    )
    value = json.loads(text_of(output))
    assert isinstance(value["n"], int)
    assert value["s"] in ("Paris", "Rome")


class PanicError(BaseException):
    """Like a panic in Rust, which is not an Exception."""


@pytest.mark.parametrize("function", ["consume_token_par", "fill_next_token_bitmask_par"])
def test_a_matcher_that_panics_ends_its_own_request(
    llm: LLM, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llguidance.numpy

    whole = getattr(llguidance.numpy, function)
    num_calls = 0

    def panic(executor: Any, matchers: list[Any], *bits: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= 3 and any(len(pair) and pair[0] in doomed for pair in matchers):
            raise PanicError("called `Option::unwrap()` on a `None` value")
        doomed.append(matchers[0][0])
        del doomed[1:]
        whole(executor, matchers, *bits)

    doomed: list[Any] = []
    plain = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    expected = llm.generate("b", plain, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setattr(llguidance.numpy, function, panic)
    asked = [("a", params(regex="[ab]{30}")), ("b", plain)]
    constrained, neighbour = llm.generate_iter(asked, window=2)
    assert isinstance(constrained, RequestError)
    assert "unwrap" in str(constrained)
    assert isinstance(neighbour, RequestOutput)
    assert neighbour.outputs[0].token_ids == expected
    monkeypatch.undo()
    (after,) = llm.generate("a", params(regex="[ab]{30}"), use_tqdm=False)
    assert re.fullmatch("[ab]{30}", text_of(after))
