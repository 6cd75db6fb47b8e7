"""Parts of an answer, joined, are the answer."""

from __future__ import annotations

import pytest

from pagespec import SamplingParams
from pagespec.engine.growing_answer import GrowingAnswer
from pagespec.engine.inputs import PromptInput
from pagespec.engine.outputs import CompletionOutput
from pagespec.engine.request import Request

PROMPT = [ord("a"), ord("b")]


class Letters:
    """A token per character."""

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_parts_and_the_rest_are_the_answer(num_read: int, is_text: bool) -> None:
    params = SamplingParams(max_tokens=9, detokenize=is_text)
    request = Request("0", PROMPT, params, max_num_tokens=11)
    tokenizer = Letters()
    answer = GrowingAnswer(1, request, PromptInput(None, PROMPT), tokenizer, None)
    assert answer.read() is None
    whole = answer.empty()
    new = [[99], [100, 101], [102]]
    for token_ids in new[:num_read]:
        request.token_ids += token_ids
        part = answer.read()
        assert part is not None
        assert (part.index, part.token_ids, part.logprobs) == (1, token_ids, None)
        assert answer.read() is None
        whole.extend(part)
    token_ids = [token for part in new for token in part]
    text = tokenizer.decode(token_ids) if is_text else ""
    rest = answer.cut(CompletionOutput(1, text, token_ids, finish_reason="stop"))
    assert rest.finish_reason == "stop"
    whole.extend(rest)
    assert (whole.text, whole.token_ids, whole.finish_reason) == (text, token_ids, "stop")
