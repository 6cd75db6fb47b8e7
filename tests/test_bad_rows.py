"""A row whose logit edits or text processing raise ends only its own request.

All other requests get the same results as alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, RequestError, RequestOutput, SamplingParams
from pagespec.engine.logit_edits import LogitEdits
from spec.replay import check
from tests.support.content_llm import answer_alone, content_llm
from tests.support.content_runner import TOKEN_STRIDE
from tests.support.models import tiny_model

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE, TOKEN_STRIDE]
BEYOND = 1 << 20
DOOMED_SEED = 666

# Past the door, which holds ids to the vocabulary: what a defect there would let in.
BAD_EDITS = [
    LogitEdits(min_tokens=4, stop_token_ids=(BEYOND,)),
    LogitEdits(bias=((BEYOND, 1.0),)),
    LogitEdits(allowed=(1, BEYOND)),
    LogitEdits(bad_words=((BEYOND,),)),
    LogitEdits(bad_words=((1, BEYOND), (BEYOND, 1))),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama"), max_num_seqs=4, num_blocks=64, compile="eager")


@pytest.mark.parametrize("edits", BAD_EDITS)
def test_edits_that_raise_end_their_own_request(
    llm: LLM, edits: LogitEdits, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = llm.factory._edits

    def edits_of(params: SamplingParams, *rest: Any) -> LogitEdits | None:
        return edits if params.seed == DOOMED_SEED else made(params, *rest)

    plain = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    edited = SamplingParams(max_tokens=6, seed=2, ignore_eos=True, logit_bias={3: 1.0})
    alone = [llm.generate([5, 6], each, use_tqdm=False)[0] for each in (plain, edited)]
    monkeypatch.setattr(llm.factory, "_edits", edits_of)
    doomed = SamplingParams(max_tokens=6, seed=DOOMED_SEED, ignore_eos=True)
    before, failed, after = llm.generate_iter(
        [([5, 6], plain), ([5, 6], doomed), ([5, 6], edited)], window=3
    )
    assert isinstance(before, RequestOutput)
    assert isinstance(after, RequestOutput)
    assert before.outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert after.outputs[0].token_ids == alone[1].outputs[0].token_ids
    if isinstance(failed, RequestOutput):  # an id that no row has bans nothing
        assert edits.bad_words
    else:
        assert isinstance(failed, RequestError)
        assert "logits cannot be edited" in str(failed)


@pytest.mark.parametrize("pipeline_depth", [0, 1, 2])
def test_a_text_that_cannot_be_read_ends_its_own_request(
    pipeline_depth: int, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    llm = content_llm(
        num_blocks=60, pipeline_depth=pipeline_depth, check_invariants=True, trace=trace
    )
    decode, num_calls = llm.tokenizer.decode, 0

    def fail(token_ids: list[int], **arguments: Any) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise ValueError("bytes of no character")
        return str(decode(token_ids, **arguments))

    watched = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, stop=["no such text"])
    plain = SamplingParams(max_tokens=20, seed=6, ignore_eos=True, detokenize=False)
    llm.tokenizer.decode = fail
    first, failed, last = llm.generate_iter(
        [(PROMPT, plain), (PROMPT, watched), (PROMPT, plain)], window=3
    )
    llm.tokenizer.decode = decode
    assert isinstance(failed, RequestError)
    assert "bytes of no character" in str(failed)
    for output in (first, last):
        assert isinstance(output, RequestOutput)
        assert output.outputs[0].token_ids == answer_alone(llm, PROMPT, plain)
    (after,) = llm.generate(PROMPT, watched, use_tqdm=False)
    assert after.outputs[0].token_ids == answer_alone(llm, PROMPT, watched)
    assert not llm.engine.has_work
    verdict = check(trace.read_text().splitlines())
    assert not verdict.property_id, verdict
