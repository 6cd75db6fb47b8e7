"""Bitmasks of constrained texts before and during the reasoning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagespec import SamplingParams, StructuredOutputs
from pagespec.engine.request import RequestInfo
from pagespec.engine.text.reasoning import Reasoning
from pagespec.structured.grammars import Grammars
from pagespec.structured.matchers import ConstrainedRows, Matchers
from tests.structured.test_matchers import allowed, plan
from tests.support.chat_families import FAMILIES
from tests.support.chat_models import chat_tokenizer
from tests.support.structured import END, tokenizer

NUM_IDS = 320
GRAMMARS = Grammars(tokenizer(), NUM_IDS, {END})
X, Y, Z, LESS, A, B = (3 + ord(letter) for letter in "xyz<ab")
ALL = set(range(NUM_IDS))


def info(reasoning: Reasoning, regex: str = "xy?z", name: str = "own") -> RequestInfo:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=regex))
    return RequestInfo(name, 2, params, 0, b"", True, None, None, reasoning)


class Answer:
    """One request, fed token by token."""

    def __init__(
        self,
        reasoning: Reasoning,
        regex: str = "xy?z",
        outputs: tuple[int, ...] = (),
        grammars: Grammars = GRAMMARS,
    ):
        grammars.check(StructuredOutputs(regex=regex), reasoning)
        self.matchers = Matchers(grammars)
        self.requests = (info(reasoning, regex),)
        self.num = 2 + len(outputs)
        tokens = [[9, 9, *outputs][-1:]]
        before = {0: (9, 9, *outputs)[:-1]}
        self.rows = self.matchers.take(plan(self.requests, [self.num - 1], tokens, admitted=before))

    def allowed(self) -> set[int]:
        return set(allowed(self.matchers, self.rows)[0])

    def push(self, token_id: int) -> dict[str, str]:
        self.allowed()
        assert self.rows is not None
        failures, _ = self.matchers.settle(self.rows, [token_id])
        if not failures:
            self.rows = self.matchers.take(plan(self.requests, [self.num], [[token_id]]))
            self.num += 1
        return failures


SPELLED = Reasoning(b"<a", b"ab", is_open=False)


def test_in_the_reasoning_everything_is_allowed_and_behind_it_the_constraint() -> None:
    answer = Answer(replace(SPELLED, is_open=True))
    assert answer.allowed() == ALL
    for token_id in (X, END, 300, A):
        assert not answer.push(token_id)
        assert answer.allowed() == ALL
    answer.push(B)
    assert answer.allowed() == {X}
    answer.push(X)
    assert answer.allowed() == {Y, Z}
    answer.push(Z)
    assert answer.allowed() == {END}


@pytest.mark.parametrize("is_open", [True, False])
def test_min_tokens_bans_end_tokens_in_the_reasoning_too(is_open: bool) -> None:
    own = info(replace(SPELLED, is_open=is_open), "xy*")
    params = replace(own.sampling_params, min_tokens=4 - is_open)
    own = replace(own, sampling_params=params, early_stop_ids=frozenset({END, 300}))
    matchers = Matchers(GRAMMARS)
    rows = matchers.take(plan((own,), [0], [[9, 9]], admitted={0: ()}))
    answer = [A, 17, 300, 301] if is_open else [LESS, A, 17, 300, 301]
    for i, token_id in enumerate(answer):
        found = set(allowed(matchers, rows)[0])
        if i >= 2 * (not is_open):
            assert found == (ALL if i >= params.min_tokens else ALL - {END, 300})
        assert rows is not None
        token_id = token_id if token_id in found else 301
        assert matchers.settle(rows, [token_id]) == ({}, {})
        rows = matchers.take(plan((own,), [2 + i], [[token_id]]))
    assert set(allowed(matchers, rows)[0]) == ALL


def test_the_answer_may_open_its_reasoning_or_begin_with_content() -> None:
    answer = Answer(SPELLED)
    assert answer.allowed() == {X, LESS}
    answer.push(X)
    assert answer.allowed() == {Y, Z}, "the reasoning cannot begin behind content"
    answer = Answer(SPELLED)
    answer.push(LESS)
    letters = {i for i in ALL if GRAMMARS.token_bytes(i).startswith(b"a")}
    assert answer.allowed() == letters, "the rest of the delimiter, and what its token has behind"
    answer.push(A)
    assert answer.allowed() == ALL
    answer.push(A)
    answer.push(B)
    assert answer.allowed() == {X}


def test_what_may_be_both_is_followed_as_both() -> None:
    answer = Answer(SPELLED, regex="<(x|ax)")
    answer.push(LESS)
    letters = {i for i in ALL if GRAMMARS.token_bytes(i).startswith(b"a")}
    assert answer.allowed() == {X} | letters
    answer.push(X)
    assert answer.allowed() == {END}
    answer = Answer(SPELLED, regex="<(x|ax)")
    answer.push(LESS)
    answer.push(A)
    assert answer.allowed() == ALL, "the delimiter is complete: the reasoning has begun"
    answer.push(A)
    answer.push(B)
    assert answer.allowed() == {LESS}, "the content begins anew"


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("num_known", range(7))
def test_outputs_that_come_back_lead_to_the_same_masks(is_open: bool, num_known: int) -> None:
    outputs = ((LESS, A) if not is_open else (7, 8)) + (Y, A, B, X, Y)
    reasoning = replace(SPELLED, is_open=is_open)
    whole, again = Answer(reasoning), Answer(reasoning, outputs=outputs[:num_known])
    for token_id in outputs[:num_known]:
        whole.push(token_id)
    for token_id in outputs[num_known:]:
        assert whole.allowed() == again.allowed()
        whole.push(token_id)
        again.push(token_id)
    assert whole.allowed() == again.allowed() == {Z}


def drafted(
    matchers: Matchers, request: RequestInfo, known: tuple[int, ...], drafts: tuple[int, ...]
) -> ConstrainedRows:
    """An admission of a request with these outputs, whose row carries draft tokens."""
    tokens = [[(9, 9, *known)[-1], *drafts]]
    before = {0: (9, 9, *known)[:-1]}
    given = plan((request,), [1 + len(known)], tokens, admitted=before)
    samples = (len(drafts) + 1,)
    rows = matchers.take(replace(given, num_samples=samples, is_decode_only=False))
    assert rows is not None
    return rows


DRAFTED = [
    (SPELLED, (LESS, A, Y, A, B, X, Y, Z, END)),
    (replace(SPELLED, is_open=True), (7, A, A, B, X, Z, END)),
    (SPELLED, (X, Y, Z, END)),
]


@pytest.mark.parametrize(("reasoning", "outputs"), DRAFTED)
def test_masks_behind_draft_tokens_are_those_of_one_token_per_step(
    reasoning: Reasoning, outputs: tuple[int, ...]
) -> None:
    """vLLM 44297, 36138: if the reasoning ended among draft tokens, masks behind it allowed all.
    Draft tokens open and close it here, at each place."""
    request = info(reasoning)
    alone = [Answer(reasoning, outputs=outputs[:i]).allowed() for i in range(len(outputs))]
    for start in range(len(outputs) - 1):
        for end in range(start + 1, len(outputs)):
            drafts = outputs[start:end]
            for num_right in range(len(drafts) + 1):
                matchers = Matchers(GRAMMARS)
                rows = drafted(matchers, request, outputs[:start], drafts)
                masks = allowed(matchers, rows)
                assert [set(masks[i]) for i in sorted(masks)] == alone[start : end + 1]
                # Another token at the place behind the right ones, unless only one is allowed.
                place = start + num_right
                others = alone[place] - {outputs[place]}
                last = min(others) if others else outputs[place]
                samples = [*outputs[start:place], last, *[0] * len(drafts)][: len(drafts) + 1]
                num_sampled = num_right + 1
                if last == outputs[place]:  # the draft tokens go on to be right
                    samples, num_sampled = list(outputs[start : end + 1]), end + 1 - start
                assert matchers.settle(rows, samples) == ({}, {})
                known = (*outputs[:start], *samples[:num_sampled])
                if END in known:
                    continue
                tokens = [[known[-1]]]
                again = matchers.take(plan((request,), [1 + len(known)], tokens))
                assert (
                    set(allowed(matchers, again)[0]) == Answer(reasoning, outputs=known).allowed()
                )


def test_a_wrong_draft_token_of_the_reasoning_leaves_the_row_as_it_was() -> None:
    """The copy that reads draft tokens has its own tracker of the reasoning."""
    matchers, request = Matchers(GRAMMARS), info(replace(SPELLED, is_open=True))
    rows = drafted(matchers, request, (), (A, B, X, Z))
    assert [set(ids) for ids in allowed(matchers, rows).values()] == [ALL, ALL, {X}, {Y, Z}, {END}]
    assert matchers.settle(rows, [Y, B, X, Z, END]) == ({}, {})
    again = matchers.take(plan((request,), [2], [[Y]]))
    assert set(allowed(matchers, again)[0]) == ALL
    assert again is not None
    matchers.settle(again, [A])
    again = matchers.take(plan((request,), [3], [[A]]))
    assert set(allowed(matchers, again)[0]) == ALL


def test_no_token_closes_the_reasoning_with_content_behind() -> None:
    """The delimiter is "é"; one token has its last byte followed by "a"."""
    of = GRAMMARS.token_bytes
    by_bytes = {of(i): i for i in range(3, NUM_IDS) if of(i)}
    behind = by_bytes[b"\xa9a"]
    answer = Answer(Reasoning(b"<", "é".encode(), is_open=True))
    assert answer.allowed() == ALL
    answer.push(by_bytes[b"a\xc3"])
    assert answer.allowed() == ALL - {behind}
    answer.push(A)
    assert answer.allowed() == ALL
    answer.push(by_bytes[b"a\xc3"])
    answer.push(by_bytes[b"\xa9"])
    assert answer.allowed() == {X}
    # What follows an overlap counts, too: "aab" in which "ab" may begin at the second letter.
    answer = Answer(Reasoning(b"<", b"aab", is_open=True))
    for token_id in (A, A, A):
        answer.push(token_id)
        assert answer.allowed() == ALL
    answer.push(B)
    assert answer.allowed() == {X}


def test_white_space_behind_the_delimiter_is_in_its_token() -> None:
    made = chat_tokenizer("qwen3")
    made.add_tokens([">\n", ">x"])
    grammars = Grammars(made, len(made), {END})
    tokens = grammars.reasoning_tokens(Reasoning(b"<t>", b"</t>", is_open=False))
    line, beyond = made.convert_tokens_to_ids([">\n", ">x"])
    assert tokens.banned(3).tolist() == [beyond]
    assert tokens.banned(2).tolist() == []
    less, letter, greater = (3 + ord(c) for c in "<t>")
    assert tokens.opening(b"").tolist() == [less]
    assert tokens.opening(b"<").tolist() == [letter]
    assert tokens.opening(b"<t").tolist() == sorted([greater, line, beyond])
    assert tokens.opening(b"x").tolist() == []


def test_a_delimiter_that_is_one_token_is_allowed_as_that() -> None:
    made = chat_tokenizer("qwen3")
    grammars = Grammars(made, len(made), {END})
    tokens = grammars.reasoning_tokens(Reasoning(b"<think>", b"</think>", is_open=False))
    assert tokens.opening(b"").tolist() == [made.convert_tokens_to_ids("<think>")]
    assert all(len(tokens.banned(n)) == 0 for n in range(len("</think>")))


def test_content_with_a_header_of_its_own_may_begin_at_once() -> None:
    made = chat_tokenizer("qwen3")
    made.add_special_tokens({"additional_special_tokens": ["<|c|>", "<|m|>"]})
    grammars = Grammars(made, len(made), {END})
    reasoning = Reasoning(b"<|c|>an<|m|>", b"<|c|>fi<|m|>", is_open=False)
    tokens = grammars.reasoning_tokens(reasoning)
    channel, message = made.convert_tokens_to_ids(["<|c|>", "<|m|>"])
    assert tokens.opening(b"").tolist() == [channel]
    assert tokens.opening(b"<|c|>").tolist() == sorted([3 + ord("a"), 3 + ord("f")])
    assert tokens.opening(b"<|c|>fi").tolist() == [message]


def test_the_header_of_content_may_name_its_type() -> None:
    """Harmony: the constraint begins after the header, whatever content type it names."""
    header_end = b"<|message|>"
    made = FAMILIES["gpt_oss"].tokenizer()
    made.add_tokens(["|>x"])
    grammars = Grammars(made, NUM_IDS, {END})
    opening, closing = b"<|channel|>analysis<|message|>", b"<|channel|>final<|message|>"
    asked = Reasoning(opening, closing, is_open=False, header_end=header_end)
    beyond = made.convert_tokens_to_ids("|>x")

    def ids(text: str) -> list[int]:
        return list(made(text, add_special_tokens=False)["input_ids"])

    for content_type in ("", " <|constrain|>json", "<|constrain|>text/plain", " json"):
        header = f"<|channel|>final{content_type}<|message|>"
        plain = [i for c in header for i in ids(c)][:-2]
        for begun, banned in (
            (ids(header), set()),
            (plain, {beyond}),
            (ids("<|channel|>final" + content_type), set()),
            (ids(header)[:-1], set()),
        ):
            answer = Answer(asked, grammars=grammars)
            for token_id in ids("<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
                answer.push(token_id)
            assert answer.allowed() == ALL
            for token_id in begun:
                answer.push(token_id)
            content_begins = begun == ids(header)
            expected = {X} if content_begins else ALL - banned
            assert answer.allowed() == expected, (content_type, begun)
    # An answer may begin with such a header.
    answer = Answer(asked, grammars=grammars)
    for token_id in ids("<|channel|>final <|constrain|>json<|message|>"):
        assert token_id in answer.allowed()
        answer.push(token_id)
    assert answer.allowed() == {X}


def test_a_token_that_the_mask_forbids_ends_its_request() -> None:
    answer = Answer(SPELLED)
    assert list(answer.push(Y)) == ["own"]
    answer = Answer(SPELLED)
    answer.push(LESS)
    assert list(answer.push(X)) == ["own"]


def test_masks_of_others_are_left_alone() -> None:
    matchers = Matchers(GRAMMARS)
    requests = (
        info(replace(SPELLED, is_open=True), name="a"),
        info(SPELLED, name="b"),
        replace(info(SPELLED, "zz", name="c"), reasoning=None),
    )
    rows = matchers.take(
        plan(requests, [0, 0, 0], [[7, 7]] * 3, admitted=dict.fromkeys(range(3), ()))
    )
    found = {row: set(ids) for row, ids in allowed(matchers, rows).items()}
    assert found == {0: ALL, 1: {X, LESS}, 2: {Z}}
    assert rows is not None
    masks = matchers.masks(rows)
    assert len(np.unique(list(masks.numbers.values()))) == 3
