"""Arguments of vLLM's calls: mapped, neutral, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.call_arguments import (
    adds_special_tokens,
    refuse_unserved,
    truncations,
    with_priorities,
)
from pagespec.engine.inputs import PromptInput, PromptReader

PARAMS = [SamplingParams(), SamplingParams(truncate_prompt_tokens=7)]
PROMPTS = [PromptInput(None, [1], priority=9), PromptInput(None, [2])]


def test_neutral_arguments_are_accepted() -> None:
    refuse_unserved(None, None, "auto")
    refuse_unserved([None, None], {})
    neutral = {"truncation_side": "left", "padding": False, "truncation": False}
    for given in (None, {}, neutral, {"add_special_tokens": True}):
        assert truncations(given, PARAMS) == [None, 7]
    assert with_priorities(PROMPTS, None) == PROMPTS


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lora_request": object()}, "lora_request"),
        ({"lora_request": [None, object()]}, "lora_request"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs"),
        ({"content_format": "openai"}, "chat_template_content_format"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        refuse_unserved(**given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "given",
    [{"truncate_prompt_tokens": 3}, {"truncation": True, "max_length": 3}],
)
def test_a_truncation_replaces_that_of_the_parameters(given: dict[str, Any]) -> None:
    assert truncations(given, PARAMS) == [3, 3]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([1], "tokenization_kwargs"),
        ({"truncate_prompt_tokens": 0}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncation": "only_first"}, "tokenization_kwargs.truncation"),
        ({"truncation": True}, "tokenization_kwargs.max_length"),
        ({"max_length": 3}, "tokenization_kwargs.max_length"),
        ({"truncation": True, "max_length": "3"}, "tokenization_kwargs.max_length"),
        ({"truncation_side": "right"}, "tokenization_kwargs.truncation_side"),
        ({"stride": 2}, "tokenization_kwargs.stride"),
    ],
)
def test_other_options_of_tokenizers_are_refused(given: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        truncations(given, PARAMS)
    assert refused.value.field == field


def test_special_tokens_can_be_left_out_of_texts_and_not_doubled_in_conversations() -> None:
    assert adds_special_tokens(None)
    assert not adds_special_tokens({"add_special_tokens": False})
    assert not adds_special_tokens(None, in_template=True)
    for given, in_template in (("no", False), (True, True)):
        with pytest.raises(InvalidInputError, match="add_special_tokens"):
            adds_special_tokens({"add_special_tokens": given}, in_template=in_template)


def test_a_text_is_read_without_special_tokens() -> None:
    def tokenizer(_: str, add_special_tokens: bool = True, **__: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, 5] if add_special_tokens else [5]}

    reader = PromptReader(tokenizer, 10, 50)
    assert [p.token_ids for p in reader.read_all(["a"], add_special_tokens=False)] == [[5]]
    assert reader.read_all(["a"])[0].token_ids == [1, 5]


@pytest.mark.parametrize("priority", [[1], [], 3, [1, -1], [1, 257], [1, None], [1, True]])
def test_priorities_are_integers_one_per_prompt(priority: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^priority"):
        with_priorities(PROMPTS, priority)


def test_priorities_replace_those_of_the_prompts() -> None:
    assert [p.priority for p in with_priorities(PROMPTS, (4, 0))] == [4, 0]
