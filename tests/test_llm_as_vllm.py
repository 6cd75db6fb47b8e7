"""``LLM`` as programs for vLLM call it: argument order, priorities, progress bars."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tqdm import tqdm

from pagespec import LLM, InvalidInputError, SamplingParams
from tests.support.models import tiny_model
from tests.support.scripted_llm import scripted_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama"), max_num_seqs=4, num_blocks=40, check_invariants=True)


@pytest.fixture(scope="module")
def chat_llm() -> LLM:
    return scripted_llm("qwen3", ["The answer."])


def test_token_ids_come_with_their_text_one_by_one_or_in_a_list(llm: LLM) -> None:
    both = {"prompt": "five six", "prompt_token_ids": [5, 6]}
    (alone,) = llm.generate(both, GREEDY)
    listed = llm.generate((both, [5, 6], {"prompt_token_ids": (5, 6)}), GREEDY)
    assert [output.prompt for output in (alone, *listed)] == ["five six", "five six", None, None]
    assert {tuple(o.outputs[0].token_ids) for o in (alone, *listed)} == {
        tuple(alone.outputs[0].token_ids)
    }


def test_priorities_are_given_one_per_prompt(llm: LLM) -> None:
    assert len(llm.generate([[5], [6]], GREEDY, priority=[3, 0])) == 2
    assert len(llm.generate([5, 6], GREEDY, priority=[0])) == 1
    for priority in ([0], []):
        with pytest.raises(ValueError, match="given for 2 prompts"):
            llm.generate([[5], [6]], GREEDY, priority=priority)


def test_adapters_and_processors_are_refused_by_name(llm: LLM, chat_llm: LLM) -> None:
    assert llm.generate([5], GREEDY, lora_request=None, mm_processor_kwargs=None)
    for call, prompt in ((llm.generate, [5]), (chat_llm.chat, HELLO)):
        with pytest.raises(InvalidInputError, match=r"^lora_request = .*not supported"):
            call(prompt, lora_request="adapter")


def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert output.prompt_token_ids == [6, 7]


def test_a_progress_bar_may_be_made_by_the_caller(llm: LLM) -> None:
    bars: list[Any] = []

    class Kept(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **named: Any) -> None:
            bars.append(self)
            super().__init__(*args, **named)

    llm.generate([[5], [6]], GREEDY, use_tqdm=partial(Kept, leave=False))
    assert [(bar.total, bar.n, bar.leave) for bar in bars] == [(2, 2, False)]


def test_chat_takes_its_arguments_in_vllms_order(chat_llm: LLM) -> None:
    arguments = (SamplingParams(seed=0), False, None, None, "auto", True, False, None, None, None)
    (output,) = chat_llm.chat(HELLO, *arguments, None, priority=[1])
    (named,) = chat_llm.chat(HELLO, SamplingParams(seed=0), add_generation_prompt=True)
    assert output.outputs[0].text == named.outputs[0].text == "The answer."
    assert output.prompt_token_ids == named.prompt_token_ids
    with pytest.raises(InvalidInputError, match="chat_template_content_format"):
        chat_llm.chat(HELLO, chat_template_content_format="openai")
    with pytest.raises(InvalidInputError, match=r"tokenization_kwargs\.add_special_tokens"):
        chat_llm.chat(HELLO, tokenization_kwargs={"add_special_tokens": True})
    with pytest.raises(ValueError, match="maximum context length is"):
        chat_llm.chat([{"role": "user", "content": "word " * 20_000}])
