"""Message content as a string and as parts, for templates that support one, the other or both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_models import chat_tokenizer, make_reader

TOKENIZER = chat_tokenizer("qwen3")
CHAT = make_reader("qwen3", TOKENIZER)

# Loops as the templates of LLaVA, Llama 4, Gemma 3 and Mistral 3 have them.
TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
TRIMMED = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}>"
ADDED = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}>"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}{% endfor %}>"
)
SELECTED = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }};{% endfor %}{% endfor %}>"
)
ALIASED = (
    "{% macro write(given) %}{% for p in given %}{{ p.text }};{% endfor %}{% endmacro %}"
    "{% for m in messages %}{% set content = m.content %}[{{ m.role }}]{{ write(content) }}"
    "{% endfor %}>"
)
MAPPED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | map(attribute='text') | join('+') }}"
    "{% endfor %}>"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}{% endfor %}>"
)
FIRST = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}>"
# The system's and the assistant's content as text, the user's as parts.
MIXED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}"
    "{% for part in m.content %}{{ part.text }};{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}>"
)
TOOL_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}"
    "{% for part in m.content %}{{ part.text }};{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}>"
)
ITERATE = {"parts": PARTS, "selected": SELECTED, "aliased": ALIASED, "mapped": MAPPED}
TEXTS = {"text": TEXT, "trimmed": TRIMMED, "added": ADDED}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def conversation(wrap: Any) -> list[dict[str, Any]]:
    texts = [("system", "be brief"), ("user", "hé <b>"), ("assistant", "yes"), ("user", "a\nb")]
    return [{"role": role, "content": wrap(text)} for role, text in texts]


def rendered(messages: list[dict[str, Any]], template: str) -> str | None:
    return CHAT.read(messages, chat_template=template).text


def by_transformers(messages: list[dict[str, Any]], template: str) -> str:
    text: str = TOKENIZER.apply_chat_template(
        messages, tokenize=False, chat_template=template, add_generation_prompt=True
    )
    return text


@pytest.mark.parametrize("name", ITERATE)
def test_a_template_that_iterates_gets_the_list(name: str) -> None:
    template = ITERATE[name]
    given = conversation(lambda text: parts(text, "more"))
    assert rendered(given, template) == by_transformers(given, template)
    assert "hé <b>" in by_transformers(given, template), "the oracle reads them"


@pytest.mark.parametrize("name", ITERATE)
def test_text_for_a_template_that_iterates_becomes_one_part(name: str) -> None:
    template = ITERATE[name]
    expected = by_transformers(conversation(parts), template)
    assert rendered(conversation(str), template) == expected


@pytest.mark.parametrize("name", TEXTS)
def test_a_template_of_text_gets_the_parts_joined(name: str) -> None:
    template = TEXTS[name]
    assert rendered(conversation(str), template) == by_transformers(conversation(str), template)
    given = conversation(lambda text: parts(text, "more"))
    expected = by_transformers(conversation(lambda text: f"{text}\nmore"), template)
    assert rendered(given, template) == expected


def test_a_template_of_both_forms_gets_what_was_given() -> None:
    for wrap in (str, parts, lambda text: parts(text, "more")):
        given = conversation(wrap)
        assert rendered(given, BOTH) == by_transformers(given, BOTH)
    mixture = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts("b", "c")}]
    assert rendered(mixture, BOTH) == "[user]a[assistant]b;c;>"


def test_a_template_of_the_first_part_gets_one() -> None:
    given = [{"role": "user", "content": parts("a", "b")}, {"role": "assistant", "content": "c"}]
    assert rendered(given, FIRST) == "[user]a\nb[assistant]c>"


def test_forms_are_of_a_role() -> None:
    given = conversation(lambda text: parts(text, "more"))
    assert rendered(given, MIXED) == (
        "[system]be brief\nmore[user]hé <b>;more;[assistant]yes\nmore[user]a\nb;more;>"
    )
    assert rendered(conversation(str), MIXED) == (
        "[system]be brief[user]hé <b>;[assistant]yes[user]a\nb;>"
    )
    answer = {"role": "tool", "content": "9 degrees", "tool_call_id": "x"}
    function = {"name": "f", "arguments": "{}"}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    given = [{"role": "user", "content": parts("a")}, asked, answer]
    assert rendered(given, TOOL_PARTS) == "[user]a[assistant][tool]9 degrees;>"


def test_other_fields_of_a_part_reach_the_template() -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{{ p.mark }}{% endfor %}"
    template += "{% endfor %}"
    given = [{"role": "user", "content": [{"type": "text", "text": "a", "mark": "!"}]}]
    assert rendered(given, template) == "a!"


def test_a_message_that_is_continued_may_have_parts() -> None:
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts("b", "c d")}]
    prompt = CHAT.read(
        given, chat_template=PARTS, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt.text == "[user]a;[assistant]b;c d"


def test_a_template_that_refuses_a_role_still_says_so() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    )
    template += "{% endif %}{{ m.content }}{% endfor %}"
    assert rendered([{"role": "user", "content": parts("a", "b")}], template) == "a\nb"
    with pytest.raises(ValueError, match="no system"):
        rendered([{"role": "system", "content": "a"}], template)


def test_a_message_of_calls_alone_has_no_content_that_the_template_would_write() -> None:
    """As templates of DeepSeek-R1 have it, and as those that print None for it."""
    calls = "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    empty = (
        "{% for m in messages %}" + calls + "{% if m.content is not none %}<a>{{ m.content }}</a>"
    )
    empty += "{% endif %}{% endfor %}"
    printed = "{% for m in messages %}" + calls + "<a>{{ m.content | trim }}</a>{% endfor %}"
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    given = [{"role": "user", "content": "b"}, message]
    assert rendered(given, empty) == "<a>b</a>(f)"
    assert rendered(given, printed) == "<a>b</a>(f)<a></a>"
    assert rendered([given[0], {**message, "content": ""}], empty) == "<a>b</a>(f)<a></a>"
