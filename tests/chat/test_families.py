"""Every response format: parse conversations that its chat template wrote, whole and in pieces.

The chat template is the reference. The text that it writes for a message is taken as the model's
answer. The parsed message must equal the original, and the template must write the same tokens for
it. The parsed message must not depend on how the answer is cut into pieces.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from pagespec import SamplingParams
from pagespec.chat.deltas import message_of
from pagespec.chat.formats import CALL_FORMATS, REASONING_FORMATS, AnswerFormat
from pagespec.chat.reader import ChatReader
from pagespec.chat.response import read_response
from pagespec.engine.inputs import PromptInput, PromptReader
from tests.support.chat_families import FAMILIES, Family

NUM_CONVERSATIONS = 200
PARAMS = SamplingParams(max_tokens=None)
TYPES = {
    "text": "string", "count": "integer", "ratio": "number", "flag": "boolean", "items": "array",
    "shape": "object", "nothing": "null",
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in TYPES.items()},
            },
        },
    }
    for name in ("edit_file", "get-weather2")
]
WORDS = [
    "a", "the city", "Köln", "語", "\U0001f600", "é\u0301", " ", "  ", "\n", "\n\n", "\t", '"', "'",
    "\\", "\\n", '\\"', "{", "}", "[", "]", ",", ":", "<", ">", "</", "|", "3", "-1", "true",
    "None", "null",
    "    if x:\n        return", '{"name": "f", "arguments": {}}', "[f(a=1)]", "<b>&amp;</b>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>\n", "<function=f>",
    "<parameter=a>", "</parameter>", "\n</parameter>", "</function>", "<arg_key>", "</arg_value>",
    "<arg_value>", "<tool_calls>", "</tool_calls>", "</invoke>", "<minimax:tool_call>",
    "[TOOL_CALLS]", "[ARGS]", "```json\n", "\n```", "functions.f:0", " to=functions.f",
]  # fmt: skip


@cache
def subject(name: str) -> tuple[Family, Any, ChatReader]:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    ends = {family.end, "<|call|>"} & set(tokenizer.get_vocab())
    chat = ChatReader(
        PromptReader(tokenizer, len(tokenizer), 100_000),
        tokenizer,
        eos_token_ids=frozenset(tokenizer.convert_tokens_to_ids(sorted(ends))),
    )
    return family, tokenizer, chat


def written_text(rng: random.Random, family: Family, most: int) -> str:
    """Text of words, none of which is a special token of the family."""
    words = [word for word in WORDS if not any(s in word or word in s for s in family.special)]
    words += [word for word in WORDS if len(word) < 3]
    return "".join(rng.choice(words) for _ in range(rng.randint(1, most)))


def argument(rng: random.Random, family: Family, kind: str) -> Any:
    if kind == "string":
        text = written_text(rng, family, 8) if rng.random() < 0.95 else ""
        return text if not re.search(family.ambiguous, text) else "plain"
    if kind == "integer":
        return rng.choice([0, 3, -17, 12345678901234567890])
    if kind == "number":
        return rng.choice([0.5, -2.25, 1e-07, 1.5e300, 4])
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    kinds = rng.choices(["string", "integer", "number", "boolean", "null"], k=rng.randint(0, 3))
    values = [argument(rng, family, kind) for kind in kinds]
    if kind == "array":
        return values if rng.random() < 0.7 else [values, {"k": values}]
    return {f"k{i}": value for i, value in enumerate(values)}


def written_message(rng: random.Random, family: Family, seed: int) -> dict[str, Any]:
    """A message as its reader should give it."""
    form = None if family.reasoning is None else REASONING_FORMATS[family.reasoning]
    calls = []
    for i in range(rng.choice([0, 1, 1, 2, 3]) if family.max_calls > 1 else rng.choice([0, 1])):
        names = rng.sample(sorted(TYPES), rng.randint(0, len(TYPES)))
        name = rng.choice(["edit_file", "get-weather2"])
        if family.calls in ("pythonic", "lfm2"):
            name = "edit_file"
        given = {key: argument(rng, family, TYPES[key]) for key in names}
        if family.calls == "gemma4":
            given = dict(sorted(given.items()))  # the template sorts them
        if re.search(family.ambiguous, json.dumps(given, ensure_ascii=False).replace("\\n", "\n")):
            given = {}
        call_id = f"id{seed:06d}{i}" if family.calls != "kimi_k2" else f"functions.{name}:{i}"
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        calls.append({"id": call_id, "type": "function", "function": function})
    content: str | None = written_text(rng, family, 6).strip()
    if calls and (family.is_alone or rng.random() < 0.5):
        content = None
    reasoning = None
    if form is not None and rng.random() < 0.7:
        reasoning = written_text(rng, family, 8).strip()
        if form.close in reasoning or form.open in reasoning or not reasoning:
            reasoning = "hm"
    if family.is_apart and calls and reasoning:
        content = None
    return {
        "role": "assistant",
        "content": _plain(content or "ok", family) if content is not None or not calls else None,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }


def _plain(content: str, family: Family) -> str:
    """Content that does not begin as other parts of the answer do, and holds no delimiters of the
    family: such content would be read as what it says."""
    calls, reasoning = CALL_FORMATS[family.calls], REASONING_FORMATS.get(family.reasoning or "")
    texts = [marker.open for marker in calls.markers if not marker.at_start]
    if family.reasoning is not None and reasoning is not None:
        texts += [reasoning.open, reasoning.close]
    if any(text.strip() in content for text in texts) or content[:1] in "{[" or not content.strip():
        return "ok"
    return content


@cache
def prompt_of(name: str) -> PromptInput:
    return subject(name)[2].read([{"role": "user", "content": "hé?"}], tools=TOOLS)


def conversation(name: str, seed: int) -> tuple[dict[str, Any], PromptInput, list[int]]:
    """A message, the prompt before it and the tokens that the template writes for it."""
    message = written_message(random.Random(f"{name}/{seed}"), FAMILIES[name], seed)
    prompt = prompt_of(name)
    return message, prompt, answer_tokens(name, message, prompt)


def answer_tokens(name: str, message: dict[str, Any], prompt: PromptInput) -> list[int]:
    _, tokenizer, chat = subject(name)
    given = {key: value for key, value in message.items() if value is not None or key == "content"}
    whole = chat.read(
        [{"role": "user", "content": "hé?"}, given], tools=TOOLS, add_generation_prompt=False
    )
    assert prompt.text is not None
    assert whole.text is not None
    text = whole.text
    begin = len(prompt.text)
    if not text.startswith(prompt.text):  # thinking off: the template writes no `<think>` again
        raise AssertionError(f"the template does not go on: {text[begin - 20 :]!r}")
    ids: list[int] = tokenizer(text[begin:], add_special_tokens=False)["input_ids"]
    return ids


def read(name: str, prompt: PromptInput, ids: list[int], cuts: list[int]) -> dict[str, Any]:
    _, _, chat = subject(name)
    reader = chat.reader(prompt, PARAMS, tools=TOOLS, request_id="r")
    ends = [0, *cuts, len(ids)]
    deltas = [delta for a, b in pairwise(ends) for delta in reader.feed(ids[a:b])]
    return message_of([*deltas, *reader.finish()])


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        (call["function"]["name"], json.dumps(json.loads(call["function"]["arguments"])))
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_shows_the_format(name: str) -> None:
    family, _, chat = subject(name)
    form = chat.answer_format
    assert isinstance(form, AnswerFormat)
    assert form.calls is CALL_FORMATS[family.calls]
    expected = None if family.reasoning is None else REASONING_FORMATS[family.reasoning]
    assert form.reasoning == expected
    assert form.reasoning_tags == (expected and (expected.open, form.reasoning_tags[1]))  # type: ignore[index]


def check(name: str, seed: int, num_cuts: int | None) -> None:
    """
    Args:
        num_cuts: of the tokens; None: between all.
    """
    message, prompt, ids = conversation(name, seed)
    found = read(name, prompt, ids, [])
    assert without_ids(found) == without_ids(message)
    if num_cuts is None:
        cuts = list(range(1, len(ids)))
    else:
        rng = random.Random(seed)
        cuts = sorted(rng.randint(0, len(ids)) for _ in range(num_cuts))
    assert read(name, prompt, ids, cuts) == found
    # Ids of the calls are the model's own where the template writes them.
    assert answer_tokens(name, found, prompt) == ids


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_template_writes_is_read_again(name: str) -> None:
    for seed in range(NUM_CONVERSATIONS):
        check(name, seed, num_cuts=6 if seed % 20 else None)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_of_what_the_template_writes(name: str) -> None:
    for seed in range(1000, 1000 + NUM_CONVERSATIONS):
        check(name, seed, num_cuts=None)
        message, prompt, ids = conversation(name, seed)
        if seed % 20 == 0:
            found = read_response(
                subject(name)[2].reader(prompt, PARAMS, tools=TOOLS, request_id="r"), ids
            )
            for cut in range(1, len(ids)):
                assert read(name, prompt, ids, [cut]) == found, (message, cut)


def hostile_ids(name: str, seed: int) -> list[int]:
    """Tokens of pieces of answers, of delimiters and of noise, in any order."""
    family, tokenizer, _ = subject(name)
    rng = random.Random(f"hostile {name} {seed}")
    form = CALL_FORMATS[family.calls]
    texts = sorted({*form.texts, *WORDS, *family.special, *family.plain} - {""})
    ids: list[int] = []
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.4:
            _, _, answer = conversation(name, rng.randrange(NUM_CONVERSATIONS))
            begin, end = sorted(rng.randint(0, len(answer)) for _ in range(2))
            ids += answer[begin:end] if rng.random() < 0.6 else answer[:end]
        else:
            text = rng.choice(texts)
            # A delimiter is mostly one token; some in their bytes, as a model may write them too.
            pieces = [text] if rng.random() < 0.7 else text
            ids += [i for p in pieces for i in tokenizer(p, add_special_tokens=False)["input_ids"]]
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_any_text_is_read_alike_however_it_is_cut(name: str) -> None:
    for seed in range(40):
        ids, rng = hostile_ids(name, seed), random.Random(seed)
        whole = read(name, prompt_of(name), ids, [])
        assert read(name, prompt_of(name), ids, list(range(1, len(ids)))) == whole, seed
        for _ in range(3):
            cuts = sorted(rng.randint(0, len(ids)) for _ in range(4))
            assert read(name, prompt_of(name), ids, cuts) == whole, (seed, cuts)
