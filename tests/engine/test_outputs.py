"""Outputs made by users: arguments in vLLM's order, and merging."""

from __future__ import annotations

import logging

import pytest

from pagespec import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagespec.engine.logprob_lists import FlatLogprobs


def test_positional_arguments_have_the_order_of_vllm() -> None:
    answer = CompletionOutput(0, "a", [1], -0.5, [{1: Logprob(-0.5)}], None, "stop", 7)
    assert (answer.cumulative_logprob, answer.finish_reason, answer.stop_reason) == (
        -0.5,
        "stop",
        7,
    )
    assert answer.finished()
    assert not CompletionOutput(0, "", []).finished()
    output = RequestOutput("r", "p", [1], None, [answer], False)
    assert (output.prompt_logprobs, output.outputs, output.finished) == (None, [answer], False)
    assert output.lora_request is output.encoder_prompt is output.kv_transfer_params is None


def test_arguments_that_do_not_exist_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "pagespec"):
        output = RequestOutput("r", None, [1], outputs=[], finished=False, a_later_argument=5)
    assert "a_later_argument" in caplog.text
    assert not hasattr(output, "a_later_argument")


def test_cached_tokens_are_those_of_the_metrics_unless_given() -> None:
    metrics = RequestMetrics(num_cached_tokens=4)
    assert RequestOutput("r", None, [1], metrics=metrics).num_cached_tokens == 4
    assert RequestOutput("r", None, [1], num_cached_tokens=3).num_cached_tokens == 3


@pytest.mark.parametrize("is_flat", [False, True])
def test_added_answers_are_appended_or_replace(is_flat: bool) -> None:
    def output(index: int, token: int, finish_reason: str | None = None) -> RequestOutput:
        entries = [{token: Logprob(-1.0)}]
        logprobs: list[dict[int, Logprob]] | FlatLogprobs = entries
        if is_flat:
            logprobs = FlatLogprobs()
            logprobs.extend(entries)
        answer = CompletionOutput(index, "ab"[token], [token], -token, logprobs)
        answer.finish_reason = finish_reason
        return RequestOutput("r", None, [5], None, [answer], finish_reason is not None)

    whole, later = output(0, 0), output(0, 1, "stop")
    whole.add(later, aggregate=True)
    (answer,) = whole.outputs
    assert (answer.text, answer.token_ids, answer.cumulative_logprob) == ("ab", [0, 1], -1)
    assert list(answer.logprobs or ()) == [{0: Logprob(-1.0)}, {1: Logprob(-1.0)}]
    assert isinstance(answer.logprobs, FlatLogprobs if is_flat else list)
    assert (answer.finish_reason, whole.finished) == ("stop", True)
    assert later.outputs[0].token_ids == [1]
    whole = output(0, 0)
    whole.add(output(1, 1), aggregate=True)
    whole.add(output(0, 1), aggregate=False)
    assert [a.token_ids for a in whole.outputs] == [[1], [1]]
