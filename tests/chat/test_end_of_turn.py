"""The end-of-turn token of the chat template ends answers in chat."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.chat.answer_text import special_tokens
from pagespec.chat.reader import ChatReader
from pagespec.chat.template import ChatTemplate, turn_ends
from pagespec.engine.inputs import PromptInput, PromptReader
from tests.support.chat_models import END, chat_tokenizer
from tests.support.cli_fakes import chat_reader
from tests.support.scripted_llm import scripted_llm
from tests.support.tokenizers import byte_level

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|eot_id|>", "<|end|>",
    "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<|return|>", "<|channel|>",
    "<|message|>", "<|start|>", "<|end_of_text|>", "<|end|><|extra|>",
]  # fmt: skip
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"),
    "gemma": (
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}",
        "<end_of_turn>",
    ),
    "llama 3": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}",
        "<|eot_id|>",
    ),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "harmony": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final"
        "{% endif %}<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% endfor %}",
        "<|return|>",
    ),
    "a line break before it": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n<|end|>\n{% endfor %}",
        "<|end|>",
    ),
    "the longest of two": (
        "{% for m in messages %}{{ m.content }}<|end|><|extra|>{% endfor %}",
        "<|end|><|extra|>",
    ),
    "parts": (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>"
        "{% endfor %}",
        "<|end|>",
    ),
    "no end": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    "plain text": ("{% for m in messages %}{{ m.content }} END {% endfor %}<|im_end|>", None),
    "content left out": ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", None),
    "refuses": ("{{ raise_exception('needs a system message') }}", None),
    "no Jinja": ("{% for", None),
}


def tokenizer_with(template: str) -> Any:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(["END"])  # an added token that is not special
    tokenizer.chat_template = template
    return tokenizer


def ends_of(tokenizer: Any, template: str) -> frozenset[int]:
    def render(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return text

    return turn_ends(ChatTemplate(template, render), tokenizer, special_tokens(tokenizer))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    template, end = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    own = {tokenizer.eos_token_id}
    expected = own if end is None else own | {tokenizer.convert_tokens_to_ids(end)}
    assert ends_of(tokenizer, template) == expected
    assert ends_of(tokenizer_with(CHATML), template) == expected  # a request's own


def test_the_prompt_has_the_ends_of_its_template_which_is_tried_once() -> None:
    tokenizer = tokenizer_with(CHATML)
    reader = chat_reader(tokenizer)
    calls: list[int] = []
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *a, **k: (calls.append(1), render(*a, **k))[1]
    conversation = [{"role": "user", "content": "a"}]
    other = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    for template, end in ((None, "<|im_end|>"), (other, "<|end|>")):
        for reads in range(3):
            del calls[:]
            prompt = reader.read(conversation, chat_template=template)
            expected = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)}
            assert prompt.end_token_ids == expected
            assert reads == 0 or len(calls) == 1


def test_a_template_is_tried_while_another_thread_encodes() -> None:
    """Threads may share a fast tokenizer: its templates are rendered without a lock."""
    tokenizer = tokenizer_with(CHATML)
    prompts = PromptReader(tokenizer, len(tokenizer), 1000)
    reader = ChatReader(prompts, tokenizer)
    conversation = [{"role": "user", "content": "a"}]
    reader.read(conversation)  # sets the tokenizer up
    read: list[PromptInput] = []
    other = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    with prompts.encoding_lock:
        thread = threading.Thread(
            target=lambda: read.append(reader.read(conversation, chat_template=other)), daemon=True
        )
        thread.start()
        thread.join(30)
    assert len(read) == 1


@pytest.mark.parametrize("style", ["qwen3", "gemma4"])
def test_it_ends_answers_of_conversations_alone(style: str) -> None:
    """The config names another end: in a completion the token is one like others."""
    tokenizer = chat_tokenizer(style)
    end = tokenizer.convert_tokens_to_ids(END[style])
    llm = scripted_llm(style, ["yes"], eos_token_ids=frozenset({0}))
    asked = SamplingParams(max_tokens=12, seed=0)
    conversation = [{"role": "user", "content": "well?"}]
    (output,) = llm.chat(conversation, asked, use_tqdm=False)
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("yes", "stop", None)
    assert answer.token_ids[-1] == end
    assert answer.message is not None
    assert answer.message["content"] == "yes"

    ignoring = SamplingParams(max_tokens=12, seed=0, ignore_eos=True)
    (output,) = llm.chat(conversation, ignoring, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    (output,) = llm.generate("well?", asked, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12

    with pytest.raises(InvalidInputError):  # the end is kept away as the model's own ends are
        llm.chat(
            conversation,
            SamplingParams(max_tokens=12, min_tokens=12, allowed_token_ids=[end]),
            use_tqdm=False,
        )
