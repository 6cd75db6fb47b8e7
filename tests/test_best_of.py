"""``best_of``: generate more continuations than are returned, ranked by their log-probability."""

from __future__ import annotations

import pytest

from pagespec import LLM, InvalidInputError, SamplingParams
from tests.support.models import save_word_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_word_model(tmp_path_factory.mktemp("model"))
    return LLM(folder, device="cpu", num_blocks=64, max_model_len=128)


def test_the_likeliest_of_those_generated_come_back(llm: LLM) -> None:
    prompt, settings = [[5, 6, 7]], {"max_tokens": 6, "seed": 11, "ignore_eos": True}
    (every,) = llm.generate(prompt, SamplingParams(n=6, logprobs=0, **settings), use_tqdm=False)
    (best,) = llm.generate(prompt, SamplingParams(n=2, best_of=6, **settings), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda answer: -answer.cumulative_logprob)
    assert [answer.token_ids for answer in best.outputs] == [a.token_ids for a in ranked[:2]]
    assert [answer.index for answer in best.outputs] == [0, 1]
    found = [answer.cumulative_logprob for answer in best.outputs]
    assert found == [answer.cumulative_logprob for answer in ranked[:2]]
    assert found[1] > ranked[-1].cumulative_logprob
    # In another order than they were generated in: else this would show nothing.
    assert [a.token_ids for a in every.outputs[:2]] != [a.token_ids for a in best.outputs]


def test_a_stream_refuses_it(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="best_of"):
        llm.stream([5, 6], SamplingParams(best_of=2))
    with pytest.raises(InvalidInputError, match="best_of"):
        llm.stream_all([5, 6], SamplingParams(n=2, best_of=3))
