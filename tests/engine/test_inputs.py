"""Prompts that are rejected, and their error messages."""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.inputs import PromptInput, PromptReader, pair_params, split_prompts
from pagespec.engine.policy import ARRIVALS_PER_PRIORITY, MAX_PRIORITY, Policy
from pagespec.engine.request import Request
from pagespec.engine.request_factory import RequestFactory
from tests.support.cli_fakes import FakeTokenizer

READER = PromptReader(None, vocab_size=10, max_model_len=5)
TEXT_READER = PromptReader(FakeTokenizer(), vocab_size=1 << 21, max_model_len=100)
SURROGATE = "a\ud800"  # JSON can spell it, UTF-8 cannot


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "decoder prompt cannot be empty"),
        ([1, 2, 3, 4, 5], "5 tokens.*at most 4.*maximum context length is 5 tokens. Please reduce"),
        ([10], "= 10: out of vocabulary: .* from 0 to 9"),
        ([-1], "from 0 to 9"),
        ([1.0], "from 0 to 9"),
        ("text", "no tokenizer"),
        (b"bytes", "must be text or a list"),
        ({}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "prompt": 3}, "^prompt.prompt = 3: must be text"),
        ({"prompt_token_ids": [1], "prompt": SURROGATE}, "not Unicode"),
        ({"prompt_token_ids": [1], "image": 1}, "at most 'cache_salt'"),
        *(
            ({"prompt_token_ids": [1], key: {"image": 1}}, f"^prompt.{key} = .*not supported")
            for key in (
                *("multi_modal_data", "prompt_embeds", "multi_modal_uuids"),
                *("mm_processor_kwargs", "token_type_ids", "prompt_token_offsets"),
            )
        ),
        ({"segments": [{"prompt_token_ids": [1]}], "prompt": "a"}, "either 'prompt'"),
        ({"segments": []}, r"^prompt.segments = \[\]: must be a list of {'prompt_token_ids'"),
        ({"segments": "ab"}, "^prompt.segments = 'ab': must be a list of"),
        ({"segments": {"prompt_token_ids": [1]}}, "^prompt.segments = {.*: must be a list of"),
        ({"segments": [[1]]}, r"^prompt.segments\[0\] = \[1\]: .*than tokens is not supported"),
        (
            {"segments": [{"prompt_token_ids": [1]}, {"image": b"png"}]},
            r"^prompt.segments\[1\] = .*image.*: .*other content than tokens is not supported",
        ),
        (
            {"segments": [{"prompt_token_ids": [1], "content_hash": "a"}]},
            r"^prompt.segments\[0\] = .*: .*other content than tokens is not supported",
        ),
        (
            {"segments": [{"prompt_token_ids": []}, {"prompt_token_ids": [1]}]},
            r"^prompt.segments\[0\].prompt_token_ids = \[\]: must be a list .*at least one",
        ),
        ({"segments": [{"prompt_token_ids": "ab"}]}, r"segments\[0\].prompt_token_ids = 'ab'"),
        ({"segments": [{"prompt_token_ids": [1]}, {"prompt_token_ids": [10]}]}, "from 0 to 9"),
        ({"segments": [{"prompt_token_ids": [1] * 3}] * 2}, "6 tokens.*at most 4"),
        ({"prompt": [1]}, r"^prompt.prompt = \[1\]: must be text"),
        ({"prompt": None}, "^prompt.prompt = None: must be text"),
        ({"prompt": b"a"}, "^prompt.prompt = b'a': must be text"),
        ({"prompt_token_ids": "abc"}, "^prompt.prompt_token_ids = 'abc': must be a list of token"),
        ({"prompt_token_ids": b"abc"}, "^prompt.prompt_token_ids = b'abc': must be a list of"),
        ({"prompt_token_ids": None}, "^prompt.prompt_token_ids = None: must be a list of"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "must be text"),
        ({"prompt_token_ids": [1], "cache_salt": SURROGATE}, "cache_salt.*not Unicode"),
        (memoryview(b"a"), "must be text or a list"),
        *(
            ({"prompt_token_ids": [1], "priority": priority}, "prompt.priority.*from 0.* to 256")
            for priority in (-1, 257, 10**400, True, 1.0, "1", None)
        ),
    ],
)
def test_prompts_are_checked(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        READER.read(prompt)


def test_token_segments_are_joined() -> None:
    segments = [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": (3,)}]
    read = READER.read({"segments": segments, "cache_salt": "s", "multi_modal_data": None})
    assert read == READER.read({"prompt_token_ids": [1, 2, 3], "cache_salt": "s"})
    assert READER.read({"segments": segments}, truncate=2).token_ids == [2, 3]


@pytest.mark.parametrize("prompt", [{"prompt": [97]}, {"prompt_token_ids": "a"}])
def test_a_field_of_a_prompt_takes_one_kind_only(prompt: dict[str, Any]) -> None:
    """Also where the model has a tokenizer, and could read both."""
    with pytest.raises(InvalidInputError, match=f"^p.{next(iter(prompt))} = "):
        TEXT_READER.read(prompt, "p")


@pytest.mark.parametrize("prompt", [SURROGATE, {"prompt": SURROGATE}])
def test_lone_surrogates_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^p = .*is not Unicode text"):
        TEXT_READER.read(prompt, "p")
    assert TEXT_READER.read("a\U0001f600").token_ids == [97, 0x1F600]


def test_a_priority_reaches_the_request() -> None:
    factory = RequestFactory(
        None, vocab_size=10, eos_token_ids=frozenset(), max_model_len=5, seed=0
    )

    def request(prompt: dict[str, Any], seniority: int) -> Request:
        [made] = factory.make(READER.read({"prompt_token_ids": [1]} | prompt), SamplingParams())
        made.seniority = seniority
        return made

    policy = Policy("priority")
    least = request({"priority": MAX_PRIORITY}, 0)
    overtaken = MAX_PRIORITY * ARRIVALS_PER_PRIORITY
    assert least.priority == MAX_PRIORITY
    assert policy.max_overtakes == overtaken, "no smaller number would do the same"
    assert policy.rank(request({}, overtaken - 1)) < policy.rank(least)
    assert policy.rank(least) < policy.rank(request({"priority": 0}, overtaken))


def test_token_ids_are_used_and_the_text_beside_them_is_kept() -> None:
    both = {"prompt": "one", "prompt_token_ids": [1, 2], "multi_modal_data": {}}
    assert READER.read(both) == PromptInput("one", [1, 2])
    assert READER.read(both | {"prompt": None}) == PromptInput(None, [1, 2])


def test_an_empty_text_is_a_prompt_if_the_tokenizer_adds_a_token() -> None:
    assert PromptReader(lambda _, **__: {"input_ids": [1]}, 10, 5).read("").token_ids == [1]
    with pytest.raises(InvalidInputError, match=r"^prompt = '': .*decoder prompt cannot be empty"):
        TEXT_READER.read("")


def test_prompts_of_all_shapes() -> None:
    assert READER.read([1, 2]).token_ids == [1, 2]
    assert READER.read({"prompt_token_ids": [1], "cache_salt": "a"}).cache_salt == b"a"
    assert split_prompts("a") == ["a"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], "b"]) == [[1], "b"]
    assert split_prompts([]) == []
    with pytest.raises(InvalidInputError):
        split_prompts(5)


def test_unequal_lists_are_refused() -> None:
    params = [SamplingParams()] * 2
    with pytest.raises(InvalidInputError, match="2 given for 3 prompts"):
        pair_params(["a", "b", "c"], params, lambda: params[0])
    assert pair_params(["a", "b"], None, lambda: params[0]) == params


@pytest.mark.parametrize("params", [5, 0, "", b"", {}])
def test_parameters_of_no_prompt_are_looked_at(params: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a SamplingParams"):
        pair_params([], params, SamplingParams)


def test_marks_of_a_read_prompt_are_checked_and_no_other_is_taken() -> None:
    prompt = READER.read({"prompt_token_ids": [1], "owner": "a", "cache_salt": "s"})
    marked = READER.marked(prompt, priority=3, owner=None, cache_salt="t")
    assert (marked.priority, marked.owner, marked.cache_salt) == (3, "a", b"t")
    for wrong in ({"priority": -1}, {"priority": True}, {"owner": 1}, {"cache_salt": "\ud800"}):
        with pytest.raises(InvalidInputError) as refused:
            READER.marked(prompt, **wrong)  # type: ignore[arg-type]
        assert refused.value.field == f"prompt.{next(iter(wrong))}"
    with pytest.raises(TypeError, match="flavour"):
        READER.marked(prompt, flavour=1)  # type: ignore[call-arg]
