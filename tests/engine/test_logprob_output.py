"""Each row of log-probabilities reaches its own token, whatever happens to requests.

Random runs use a runner whose rows name the token that they belong to.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence

import pytest

from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.logprob_output import add_logprobs
from pagespec.engine.logprobs import RequestLogprobs, StepLogprobs
from pagespec.engine.outputs import CompletionOutput, RequestOutput
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.engine.scheduler import Scheduler
from pagespec.errors import EngineError
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner

VOCAB = 5
STOP = 3 * TOKEN_STRIDE


class TokenRows:
    """Rows whose log-probability is the negative token."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def logprob(self, index: int) -> float:
        return self.row(index, 0)[0]

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        token = self._token_ids[index]
        top = [place * TOKEN_STRIDE for place in range(num_top)]
        return -float(token), 1 + index, top, [-float(id_) for id_ in top]


class LogprobRunner(ContentRunner):
    """Gives rows as a model's runner does: only of what the plan's requests ask for."""

    def dispatch(self, plan: StepPlan) -> object:
        return plan, super().dispatch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        plan, own = handle
        token_ids = super().collect(own).token_ids
        tokens, sampled, prompt = iter(token_ids), [], []
        for info, start, num_tokens, num_samples in plan.rows():
            count = info.num_prompt_rows(start, num_tokens)
            if count:
                prompt += info.prompt_token_ids[start + 1 : start + 1 + count]
            for token in itertools.islice(tokens, num_samples):
                if info.sampling_params.logprobs is not None:
                    sampled.append(token)
        found = StepLogprobs(TokenRows(sampled), TokenRows(prompt))
        return StepResult(token_ids, found if sampled or prompt else None)


def check(request: Request) -> None:
    params, prompt = request.sampling_params, request.token_ids[: request.num_prompt_tokens]
    answer = CompletionOutput(0, "", request.output_token_ids)
    output = RequestOutput("", None, prompt, None, [answer])
    add_logprobs(output, [request], None)
    assert (answer.logprobs is None) == (params.logprobs is None)
    for token, entries in zip(answer.token_ids, answer.logprobs or [], strict=False):
        assert entries[token].logprob == -token
        assert len(entries) >= (params.logprobs or 0)
    if answer.logprobs is not None:
        assert len(answer.logprobs) == len(answer.token_ids)
        assert answer.cumulative_logprob == -sum(answer.token_ids)
    assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        found = output.prompt_logprobs[1:]
        assert len(found) == len(prompt) - 1 or request.finish_reason in ("abort", "error")
        assert len(found) == len(prompt) - 1 or not answer.token_ids
        for token, of_prompt in zip(prompt[1:], found, strict=False):
            assert of_prompt is not None
            assert of_prompt[token].logprob == -token


@pytest.mark.parametrize("pipeline_depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_random_walks(pipeline_depth: int, seed: int) -> None:
    rng = random.Random(seed)
    runner = LogprobRunner(
        num_blocks=10, block_size=2, vocab_size=VOCAB, pipeline_depth=pipeline_depth
    )
    scheduler = Scheduler(
        BlockManager(10, 2),
        max_num_seqs=4,
        max_num_batched_tokens=6,
        pipeline_depth=pipeline_depth,
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    requests: list[Request] = []
    for number in range(400):
        action = rng.random()
        live = [request for request in requests if request.finish_reason is None]
        if number == 180:
            runner.fail_at_step = runner.num_steps
        elif number < 350 and action < 0.25:
            asked = {
                "logprobs": rng.choice([None, 0, 2]),
                "prompt_logprobs": rng.choice([None, None, 0, 3]),
            }
            length, limit = rng.randrange(1, 12), rng.randrange(1, 9)
            prompt = [rng.randrange(VOCAB) * TOKEN_STRIDE for _ in range(length)]
            requests.append(
                Request(
                    f"r{number}",
                    prompt,
                    SamplingParams(**asked),  # type: ignore[arg-type]
                    max_num_tokens=length + limit,
                    stop_token_ids=frozenset({STOP}),
                    seed=number,
                )
            )
            engine.add(requests[-1])
        elif action < 0.3 and live:
            engine.abort(rng.choice(live).request_id)
        elif action < 0.36 and live:
            engine.pause(rng.choice(live).request_id)
        elif action < 0.5 and live:
            engine.resume(rng.choice(live).request_id)
        else:
            with contextlib.suppress(EngineError):
                engine.step()
    for request in requests:
        if request.finish_reason is None:
            engine.resume(request.request_id)
    while engine.has_work:
        engine.step()
    assert any(request.num_preemptions for request in requests)
    assert {"stop", "length", "abort", "error"} <= {
        str(request.finish_reason) for request in requests
    }
    for request in requests:
        check(request)


def test_positions_cannot_be_skipped() -> None:
    kept = RequestLogprobs()
    rows = TokenRows([1, 2, 3])
    kept.add_prompt(rows, 0, 0, 2)
    kept.add_prompt(rows, 1, 1, 2)  # computed again, and one more
    assert list(kept.prompt) == [(rows, 0), (rows, 1), (rows, 2)]
    with pytest.raises(RuntimeError, match="never computed"):
        kept.add_prompt(rows, 0, 4, 1)


def test_siblings_leave_the_prompt_to_their_leader() -> None:
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    leader = Request("a", [0, TOKEN_STRIDE], params, max_num_tokens=4)
    sibling = leader.sibling("b", 1, None)
    assert leader.info.num_prompt_rows(0, 2) == 1
    assert not leader.reads_cache
    assert sibling.info.num_prompt_rows(0, 2) == 0
    assert sibling.reads_cache
    assert sibling.logprobs is not None
