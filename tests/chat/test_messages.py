"""How conversations and tools are read, and the error messages for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import InvalidInputError
from pagespec.chat.messages import names_of, read_messages, read_tools
from tests.support.chat_models import WEATHER, chat_tokenizer, make_reader

USER = {"role": "user", "content": "a"}


def call(arguments: Any, **changes: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function} | changes


def assistant(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"^m = \[\]: must be a non-empty list"),
        ("text", "^m = 'text': must be a non-empty list"),
        ([USER, "text"], r"^m\[1\] = 'text': a message needs 'role' and 'content'"),
        ([{"content": "a"}], r"^m\[0\] = .*needs 'role'"),
        ([{"role": "user"}], r"^m\[0\] = .*needs 'role' and 'content'"),
        ([{"role": 3, "content": "a"}], r"^m\[0\].role = 3: must be text"),
        ([{"role": "user", "content": 3}], r"^m\[0\].content = 3: must be text, or a list"),
        ([{"role": "user", "content": None}], r"^m\[0\].content = None: must be text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"^m\[0\].content\[0\] = 'image_url': only parts of type 'text'",
        ),
        ([{"role": "user", "content": ["a"]}], r"^m\[0\].content\[0\] = 'a': only parts"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            r"^m\[0\].content\[0\].text = 1: must be text",
        ),
        ([USER | {"tool_calls": [call("{}")]}], r"^m\[0\].tool_calls.*only messages of the assi"),
        ([USER | {"tool_call_id": 3}], r"^m\[0\].tool_call_id = 3: must be text"),
        ([USER | {"reasoning_content": 3}], r"^m\[0\].reasoning_content = 3: must be text"),
        ([assistant("f")], r"^m\[0\].tool_calls\[0\] = 'f': a tool call needs 'function'"),
        ([assistant() | {"tool_calls": "f"}], r"^m\[0\].tool_calls = 'f': must be a list"),
        ([assistant(call("{}", type="x"))], r"tool_calls\[0\].type = 'x': must be 'function'"),
        ([assistant({"function": {}})], r"tool_calls\[0\].function.name = None: must be a name"),
        ([assistant(call("{"))], r"function.arguments = '{': must be the text of a JSON object"),
        ([assistant(call("[1]"))], r"function.arguments = '\[1\]': must be the text of a JSON"),
        ([assistant(call("[" * 9**5))], r"function.arguments = .*must be the text of a JSON obj"),
        ([assistant(call(3))], r"function.arguments = 3: must be the text of a JSON object"),
    ],
)
def test_messages_are_checked(messages: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        read_messages(messages, "m")


def test_messages_become_what_templates_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "c", "name": "d"},
        {
            "role": "assistant",
            "reasoning": "e",
            "tool_calls": [call('{"g": 1}'), call(""), call({"h": 2})],
        },
        {"role": "tool", "content": "i", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "j", "reasoning_content": None, "tool_calls": []},
    ]
    read = read_messages(given)
    assert read[0] == {"role": "system", "content": "a\nb"}
    assert read[1] == given[1]
    assert (read[2]["content"], read[2]["reasoning_content"]) == ("", "e")
    arguments = [made["function"]["arguments"] for made in read[2]["tool_calls"]]
    assert arguments == [{"g": 1}, {}, {"h": 2}]
    assert read[3] == given[3]
    assert read[4] == {"role": "assistant", "content": "j"}
    assert "reasoning" in given[2], "what the caller gave is left alone"


def add(a: int, b: int = 0) -> int:
    """
    Adds.

    Args:
        a: a number
        b: a number
    """
    return a + b


def test_tools_are_dicts_or_functions() -> None:
    tools = read_tools([WEATHER, add])
    assert tools is not None
    assert tools[0] == WEATHER
    assert names_of(tools) == ["weather", "add"]
    assert set(tools[1]["function"]["parameters"]["properties"]) == {"a", "b"}
    assert read_tools(tools) == tools
    assert read_tools(None) is None
    assert read_tools([]) is None


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({}, "^tools = .*must be a list"),
        ([3], r"^tools\[0\] = 3: must be a function, or a dict"),
        ([{"type": "web"}], r"^tools\[0\] = .*must be a function, or a dict"),
        ([{"type": "function"}], r"^tools\[0\].function = None: must be a dict"),
        ([{"type": "function", "function": {}}], r"^tools\[0\].function.name = None: must be a n"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            r"^tools\[0\].function.parameters = \[\]: must be a JSON schema",
        ),
        ([lambda a: a], r"^tools\[0\] = .*no schema can be derived from it"),
    ],
)
def test_tools_are_checked(tools: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        read_tools(tools)


CHAT = make_reader("qwen3", chat_tokenizer("qwen3"))


def test_the_template_sees_tools_and_variables() -> None:
    prompt = CHAT.read([USER], tools=[WEATHER], chat_template_kwargs={"enable_thinking": False})
    assert prompt.text is not None
    assert '"name": "weather"' in prompt.text
    assert prompt.text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert CHAT.read([USER], chat_template="{{ messages[0].content }}!").text == "a!"
    answered = [USER, {"role": "assistant", "content": "b"}]
    open_end = CHAT.read(answered, add_generation_prompt=False, continue_final_message=True)
    assert open_end.text is not None
    assert open_end.text.endswith("assistant\nb")


IGNORES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# Tools by another name, tools in the system's message only, tools of the whole conversation.
SHOWN = [
    "{% if tools %}{{ tools | tojson }}{% endif %}" + IGNORES,
    "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}" + IGNORES,
    "{% for m in messages %}{% if m.role == 'system' %}{{ tools | tojson }}{% endif %}{% endfor %}"
    + IGNORES,
    "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    "{{ tools }}" + IGNORES,
]


@pytest.mark.parametrize(
    "template",
    [
        IGNORES,
        "{% if tools is defined %}{% endif %}" + IGNORES,
        "{# tools #}" + IGNORES,
        "{% if builtin_tools %}{{ tools | tojson }}{% endif %}" + IGNORES,
    ],
)
def test_tools_that_the_template_does_not_show_are_refused(template: str) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^tools = \['weather'\]: .*template does not show tools"
    ):
        CHAT.read([USER], tools=[WEATHER], chat_template=template)
    for none in (None, []):
        assert CHAT.read([USER], tools=none, chat_template=template).text == "user: a\nassistant:"


@pytest.mark.parametrize("template", SHOWN)
def test_tools_that_the_template_shows_reach_the_model(template: str) -> None:
    messages = [{"role": "system", "content": "b"}, USER]
    text = CHAT.read(messages, tools=[WEATHER], chat_template=template).text
    assert text is not None
    assert "weather" in text


def test_tools_that_this_conversation_does_not_show_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^tools = .*does not show tools"):
        CHAT.read([USER], tools=[WEATHER], chat_template=SHOWN[2])


def test_named_templates_are_told_apart_by_tools() -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.chat_template = {"default": IGNORES, "tool_use": SHOWN[0]}
    chat = make_reader("qwen3", tokenizer)
    assert "weather" in (chat.read([USER], tools=[WEATHER]).text or "")
    with pytest.raises(InvalidInputError, match=r"^tools = "):
        chat.read([USER], tools=[WEATHER], chat_template="default")


def test_an_answer_goes_back_into_the_conversation() -> None:
    messages = [USER, assistant(call('{"city": "Köln"}')) | {"reasoning_content": "hm"}]
    text = CHAT.read([*messages, {"role": "tool", "content": "9", "tool_call_id": "call_1"}]).text
    assert text is not None
    assert '<tool_call>\n{"name": "f", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    assert "<think>\nhm\n</think>" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"chat_template": 3}, "^chat_template = 3: must be text"),
        ({"chat_template": "{{ oops("}, "^messages = .*chat template: "),
        ({"chat_template": "{{ raise_exception('no') }}"}, "^messages = .*chat template: no"),
        ({"continue_final_message": True}, "^continue_final_message = True: must be False if"),
        ({"chat_template_kwargs": 3}, "^chat_template_kwargs = 3: must be a dict"),
        ({"chat_template_kwargs": {"tokenize": True}}, "^chat_template_kwargs = 'tokenize': is no"),
        ({"tools": 3}, "^tools = 3: must be a list"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "is not Unicode text"),
        ({"messages": [{"role": "user", "content": "a" * 20_000}]}, "must be at most 9999 tokens"),
    ],
)
def test_what_the_template_is_given_is_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        CHAT.read(**({"messages": [USER]} | arguments))


def test_a_long_conversation_may_lose_its_beginning() -> None:
    whole = CHAT.read([USER])
    assert CHAT.read([USER], truncate=3).token_ids == whole.token_ids[-3:]
