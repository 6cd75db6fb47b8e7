"""Detection of the response format: automatic choice, overrides, and inconsistent answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.chat.deltas import message_of
from pagespec.chat.formats import CALL_FORMATS, REASONING_FORMATS, AnswerFormat, check_formats
from pagespec.chat.reader import ChatReader
from pagespec.chat.response import read_response
from pagespec.chat.template import ChatTemplate, detect
from pagespec.engine.inputs import PromptReader
from tests.support.chat_families import FAMILIES, Family
from tests.support.chat_models import PLAIN_TEMPLATE, WEATHER, chat_tokenizer, ids_of, make_reader
from tests.support.scripted_llm import scripted_llm

PARAMS = SamplingParams(max_tokens=None)
USER = [{"role": "user", "content": "hé?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SHOWS = "{{ tools | tojson }}" + PLAIN_TEMPLATE


def chat_of(family: Family, template: str | None = None, **settings: Any) -> tuple[Any, ChatReader]:
    tokenizer = family.tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    ends = frozenset(tokenizer.convert_tokens_to_ids([family.end]))
    prompts = PromptReader(tokenizer, len(tokenizer), 100_000)
    return tokenizer, ChatReader(prompts, tokenizer, eos_token_ids=ends, **settings)


def read(
    name: str,
    text: str,
    *,
    template: str | None = None,
    variables: dict[str, Any] | None = None,
    tools: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """An answer read whole, and token by token."""
    tokenizer, chat = chat_of(FAMILIES[name], template, **settings)
    prompt = chat.read(USER, chat_template_kwargs=variables)
    ids = ids_of(tokenizer, text)
    whole = read_response(chat.reader(prompt, PARAMS, tools=tools), ids)
    reader = chat.reader(prompt, PARAMS, tools=tools)
    deltas = [delta for token_id in ids for delta in reader.feed([token_id])]
    assert message_of([*deltas, *reader.finish()]) == whole
    return whole


def parts(message: dict[str, Any]) -> tuple[Any, Any, list[tuple[str, Any]]]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(f["name"], json.loads(f["arguments"])) for f in functions]
    return message["reasoning_content"], message["content"], calls


# Reasoning ---------------------------------------------------------------------------------------


def test_reasoning_without_its_opening_where_models_begin_with_it() -> None:
    """The first templates of DeepSeek-R1, and so of its distills, only cut reasoning off."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    for text in ("So é.\n</think>\n\nYes.", "<think>\nSo é.\n</think>\n\nYes."):
        assert parts(read("deepseek_r1", text, template=template)) == ("So é.", "Yes.", [])
    assert parts(read("deepseek_r1", "So", template=template)) == ("So", None, [])


def test_a_prompt_opens_or_closes_reasoning() -> None:
    assert parts(read("qwen3_5", "So.\n</think>\n\nYes.<|im_end|>")) == ("So.", "Yes.", [])
    assert parts(read("qwen3_5", "<think>So.</think>Yes.")) == ("So.", "Yes.", [])
    closed = FAMILIES["qwen3_5"].template.replace(
        "<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}"
    )
    assert parts(read("qwen3_5", "Yes.", template=closed)) == (None, "Yes.", [])
    alone = FAMILIES["deepseek_v31"].template.replace(
        "'tool' %}<｜Assistant｜>", "'tool' %}<｜Assistant｜></think>"
    )
    assert parts(read("deepseek_v31", "Yes.", template=alone)) == (None, "Yes.", [])


@pytest.mark.parametrize("name", ["qwen3", "glm45", "kimi_k2"])
def test_tags_in_the_middle_of_content_are_content(name: str) -> None:
    text = "The tag <think> opens, </think> closes."
    assert parts(read(name, text)) == (None, text, [])


def test_tags_in_a_user_message_open_no_reasoning() -> None:
    tokenizer, chat = chat_of(FAMILIES["qwen3"])
    prompt = chat.read([{"role": "user", "content": "What is <think>?"}])
    message = read_response(chat.reader(prompt, PARAMS), ids_of(tokenizer, "A tag.<|im_end|>"))
    assert parts(message) == (None, "A tag.", [])


def test_reasoning_by_tokens_alone() -> None:
    """As of models that think though their template has no word of it."""
    assert parts(read("qwen3", "<think>a</think>b", template=PLAIN_TEMPLATE)) == ("a", "b", [])
    assert parts(read("qwen2.5", "<think>a</think>b")) == (None, "<think>a</think>b", [])


def test_harmony_without_channels_is_content() -> None:
    assert parts(read("gpt_oss", '{"a": 1}')) == (None, '{"a": 1}', [])
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>ok"
    assert parts(read("gpt_oss", text)) == ("hm", "ok", [])
    for header in (
        " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f",
        "<|channel|>analysis to=functions.f",
    ):
        message = read("gpt_oss", f'{header}<|message|>{{"a": " <|end|>"}}<|call|>')
        assert parts(message) == (None, None, [("f", {"a": " <|end|>"})])


CONTENT_TYPES = (
    " <|constrain|>json", "<|constrain|>json", " <|constrain|> json ", " json", "<|constrain|>",
    " <|constrain|>text/x-c++", " ",
)  # fmt: skip


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_headers_of_harmony_may_name_a_content_type(content_type: str) -> None:
    """The same for every single cut."""
    behind = f"{content_type}<|message|>"
    final = f'<|channel|>final{behind}{{"a": 1}}<|return|>'
    thought = f"<|channel|>analysis{behind}hm<|end|><|start|>assistant"
    said = f"<|channel|>commentary{behind}so<|end|><|start|>assistant"
    call = f' to=functions.f<|channel|>commentary{behind}{{"a": 1}}<|call|>'
    other = f'<|channel|>commentary{content_type} to=functions.f<|message|>{{"a": 1}}<|call|>'
    for text, expected in (
        (final, (None, '{"a": 1}', [])),
        (thought + final, ("hm", '{"a": 1}', [])),
        (thought + said + call, ("hm", "so", [("f", {"a": 1})])),
        (thought + other, ("hm", None, [("f", {"a": 1})])),
        (f"<|channel|>final{content_type}", (None, f"<|channel|>final{content_type}".strip(), [])),
    ):
        found = read("gpt_oss", text)
        assert parts(found) == expected
        tokenizer, chat = chat_of(FAMILIES["gpt_oss"])
        prompt, ids = chat.read(USER), ids_of(tokenizer, text)
        for cut in range(1, len(ids)):
            reader = chat.reader(prompt, PARAMS)
            deltas = [*reader.feed(ids[:cut]), *reader.feed(ids[cut:]), *reader.finish()]
            assert message_of(deltas) == found, cut


@pytest.mark.parametrize("between", [" to=python code", "ly", " <|constrain|>{", " a=b", " a" * 99])
def test_what_is_no_header_of_harmony_begins_nothing(between: str) -> None:
    text = f"<|channel|>final{between}<|message|>a<|return|>"
    assert parts(read("gpt_oss", text)) == (None, text.removesuffix("<|return|>"), [])


# Calls -------------------------------------------------------------------------------------------


def test_a_template_that_describes_calls_but_writes_none() -> None:
    """As templates of older models, which show an example to the model."""
    told = "{{ tools | tojson }}Answer with <tool_call>{...}</tool_call>." + PLAIN_TEMPLATE
    _, chat = chat_of(FAMILIES["qwen2.5"], told)
    form = chat.answer_format
    assert isinstance(form, AnswerFormat)
    assert form.calls is CALL_FORMATS["hermes"]


def test_a_template_of_an_unknown_format_is_not_taken_for_a_known_one() -> None:
    odd = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}%<tool_call>{{ c.function.name }}%"
        "{{ c.function.arguments | tojson }}%</tool_call>{% endfor %}\n{% endfor %}"
    )
    _, chat = chat_of(FAMILIES["qwen2.5"], odd)
    assert chat.answer_format is None
    with pytest.raises(
        InvalidInputError, match=r"^tools = \['weather'\]: the format of this model's"
    ):
        chat.read(USER, tools=[WEATHER])
    chosen = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", "none", chosen):
        assert "weather" in (chat.read(USER, tools=[WEATHER], tool_choice=choice).text or "")


def test_a_named_format_reads_what_the_template_does_not_show() -> None:
    tokenizer = chat_tokenizer("plain")
    tokenizer.chat_template = SHOWS
    with pytest.raises(InvalidInputError, match=r"^tools = "):
        make_reader(None, tokenizer).read(USER, tools=[WEATHER])
    chat = make_reader(None, tokenizer, tool_call_format="hermes", reasoning_format="deepseek_r1")
    prompt = chat.read(USER, tools=[WEATHER])
    message = read_response(
        chat.reader(prompt, PARAMS, tools=[WEATHER]), ids_of(tokenizer, f"hm</think>a{CALL}")
    )
    assert parts(message) == ("hm", "a", [("weather", {"city": "Köln"})])


def test_none_reads_nothing() -> None:
    text = f"<think>a</think>{CALL}"
    found = read("qwen3", text, tool_call_format="none", reasoning_format="none")
    assert parts(found) == (None, text, [])
    assert parts(read("qwen3", text, tool_call_format="none")) == ("a", CALL, [])
    assert parts(read("qwen3", text, reasoning_format="none")) == (
        None, "<think>a</think>", [("weather", {"city": "Köln"})],
    )  # fmt: skip


@pytest.mark.parametrize("field", ["tool_call_format", "reasoning_format"])
@pytest.mark.parametrize("name", ["banana", "", 3])
def test_formats_that_do_not_exist_are_refused(field: str, name: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{field} = .*must be one of auto, none, .*"):
        check_formats(**{"tool_call_format": "auto", "reasoning_format": "auto", field: name})
    with pytest.raises(InvalidInputError, match=rf"^{field} = "):
        scripted_llm("qwen3", ["a"], **{field: name})


def test_an_engine_takes_the_names() -> None:
    llm = scripted_llm("qwen3", [f"<think>a</think>b{CALL}"], reasoning_format="none")
    (output,) = llm.chat(USER, SamplingParams(max_tokens=400, seed=0), use_tqdm=False)
    message = output.outputs[0].message
    assert message is not None
    assert message["content"] == "<think>a</think>b"
    assert len(message["tool_calls"]) == 1


def test_a_template_of_the_request_has_its_own_format() -> None:
    llm = scripted_llm("qwen3", [CALL])
    template = FAMILIES["llama3"].template
    arguments: dict[str, Any] = {"chat_template": template, "use_tqdm": False}
    (output,) = llm.chat(USER, SamplingParams(max_tokens=400, seed=0), **arguments)
    message = output.outputs[0].message
    assert message is not None
    assert message["content"] == CALL


def test_every_name_reads_its_own_calls() -> None:
    """Rows of the table that no family covers, in the words that their models write."""
    call = '{"name": "weather", "arguments": {"city": "Köln"}}'
    texts = {
        "nemotron": f"<TOOLCALL>[{call}]</TOOLCALL>",
        "granite": f"<|tool_call|>[{call}]",
        "phi4_mini_json": f"<|tool_call|>[{call}]<|/tool_call|>",
        "lfm2": '<|tool_call_start|>[weather(city="Köln")]<|tool_call_end|>',
        "functionary": '<function=weather>{"city": "Köln"}</function>',
        "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Köln</parameter>\n"
        "</function>\n</seed:tool_call>",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Köln"}}\n]<|END_ACTION|>',
        "pythonic": "<|python_start|>[weather(city='Köln')]<|python_end|>",
        "llama3_json": f"<|python_tag|>{call}; {call}",
    }
    covered = {family.calls for family in FAMILIES.values()}
    assert set(CALL_FORMATS) == covered | set(texts)
    for name, text in texts.items():
        message = read("qwen2.5", f"a {text}", tools=[WEATHER], tool_call_format=name)
        assert parts(message)[1:] == ("a", [("weather", {"city": "Köln"})] * text.count("Köln")), (
            name
        )


def test_ids_that_mistral_refuses_are_shortened() -> None:
    _, chat = chat_of(FAMILIES["mistral_small"])
    function = {"name": "weather", "arguments": "{}"}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "function": function}],
    }
    answer = {"role": "tool", "content": "9", "tool_call_id": "call_1"}
    text = chat.read([*USER, asked, answer], tools=[WEATHER]).text
    assert text is not None
    (given,) = [part.split("[ARGS]")[0] for part in text.split("[CALL_ID]")[1:]]
    assert len(given) == 9
    asked["tool_calls"] = [{"id": given, "function": function}]
    assert (
        chat.read([*USER, asked, {**answer, "tool_call_id": given}], tools=[WEATHER]).text == text
    )


def test_ids_of_calls_are_what_templates_accept() -> None:
    text = '[TOOL_CALLS][{"name": "weather"}, {"name": "f", "arguments": {}, "id": "x"}]'
    ids = [call["id"] for call in read("mistral_nemo", text)["tool_calls"]]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert len(set(ids)) == 2
    written = '[TOOL_CALLS]weather[CALL_ID]aB3456789[ARGS]{"city": "a"}'
    assert read("mistral_small", written)["tool_calls"][0]["id"] == "aB3456789"


MALFORMED = [
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>"),
    ("qwen3_coder", "<tool_call>\nweather\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>"),
    ("glm45", "<tool_call>weather forecast\n</tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n</minimax:tool_call>'),
    ("minimax_m1", '<tool_calls>\n{"name": "weather"\n</tool_calls>'),
    ("deepseek_v31", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
    ("deepseek_v31", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"a": [1}<｜tool▁call▁end｜>'),
    ("kimi_k2", "<|tool_call_begin|>weather:0<|tool_call_argument_begin|>[]<|tool_call_end|>"),
    ("mistral_small", "[TOOL_CALLS]weather[ARGS][]"),
    ("mistral_nemo", '[TOOL_CALLS][{"name": "weather", "arguments": {}}'),
    ("llama3", '{"name": "weather", "parameters": {"city": "Kö'),
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", '{"city": "Köln"}'),
    ("llama_pythonic", '[weather(city="Köln"]'),
    ("llama_pythonic", "[weather(city)]"),
    ("llama_pythonic", "[weather(city=open('x'))]"),
    ("llama_pythonic", "[1, 2]"),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Köln}<tool_call|>'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_no_call_is_content_from_its_delimiter_on(name: str, text: str) -> None:
    closed = "</think>" if name == "minimax_m2" else ""  # its prompt opens reasoning
    message = read(name, closed + text, tools=[WEATHER])
    assert parts(message) == (None, text, [])


def test_calls_in_the_arguments_of_a_call_that_is_cut_off_are_not_read() -> None:
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{CALL}\n<tool_call>\n<function=f>\n</function>\n</tool_call>"  # noqa: E501
    assert parts(read("qwen3_coder", text, tools=[WEATHER])) == (None, text, [])


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "  a\n", "  a\n"),
        ({}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1, {'a': True}]", [1, {"a": True}]),
        ({"$ref": "#/$defs/n"}, "4", 4),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": True}, "true", True),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "array", "nullable": True}, "null", None),
    ],
)
def test_schemas_type_what_is_written_without_quotes(schema: Any, raw: str, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": schema},
        "$defs": {"n": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{raw}\n</parameter>\n"
    text += "</function>\n</tool_call>"
    ((_, arguments),) = parts(read("qwen3_coder", text, tools=[tool]))[2]
    assert arguments == {"city": value}
    assert type(arguments["city"]) is type(value)


def test_detection_survives_any_template() -> None:
    def refuse(*_: Any) -> str:
        raise RuntimeError("no")

    assert detect(ChatTemplate("", refuse)) is None
    form = detect(ChatTemplate("<think></think>", refuse))
    assert form is not None
    assert form.reasoning is REASONING_FORMATS["think"]
