"""``LLM`` on a tiny model: order of results, parameters, streams, errors and recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagespec import (
    LLM,
    EngineBusyError,
    EngineError,
    InvalidInputError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from pagespec.engine.invariants import check_state
from tests.support.cli_fakes import FakeTokenizer, chat_reader
from tests.support.content_llm import content_llm
from tests.support.models import VOCAB_SIZE, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


ASKED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama"), max_num_seqs=4, num_blocks=40, check_invariants=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5, 6, 7], [9], [3] * 40, [5, 6, 8], [4, 4], [2] * 17]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 1, 3, 5, 2, 7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(t) for t in ids(outputs)] == [9, 1, 3, 5, 2, 7]
    assert all(type(token) is int for tokens in ids(outputs) for token in tokens)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 6
    alone = [llm.generate(p, q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    assert ids(alone) == ids(outputs)


def test_metrics_are_filled_in(llm: LLM) -> None:
    prompt = [7, 8, 9] * 16
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    metrics = again.metrics
    assert metrics.num_cached_tokens == 32, "two full blocks of 16; one token is always computed"
    assert again.num_cached_tokens == 32
    assert metrics.num_preemptions == 0
    assert 0 <= metrics.queue_time_s <= metrics.time_to_first_token_s <= metrics.total_time_s
    assert metrics.tokens_per_second > 0


def test_a_model_without_tokenizer_takes_token_ids_and_gives_no_text(llm: LLM) -> None:
    assert llm.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].text == ""
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))
    with pytest.raises(InvalidInputError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_default_parameters_may_be_changed_as_in_vllm(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature = 0.0
    params.max_tokens = 3
    [output] = llm.generate([[1, 2]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_methods_of_vllm_are_refused_with_what_serves_in_their_place(llm: LLM) -> None:
    with pytest.raises(TypeError, match="cross-encoder is not supported"):
        llm.score("q", ["a", "b"])
    with pytest.raises(AttributeError, match=r"'collective_rpc': workers take no calls"):
        llm.collective_rpc("f")
    with pytest.raises(AttributeError, match=r"AsyncLLM\.pause_generation"):
        llm.pause()
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        _ = llm.other
    assert not hasattr(llm, "pause")


def test_requests_without_parameters_take_those_of_the_generation_config(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.update(**ASKED, max_new_tokens=5, do_sample=True)
    model.save_pretrained(tmp_path)
    # The second start is restored from the record of the first.
    for _ in range(2):
        llm = LLM(str(tmp_path), max_num_seqs=4, num_blocks=40, seed=1)
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(**ASKED, max_tokens=5)
        assert len(ids(llm.generate([5, 6, 7]))[0]) == 5


def test_a_bad_generation_config_is_refused_where_it_is_asked_for_alone(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"min_p": 7.0}')
    llm = LLM(str(tmp_path), max_num_seqs=4, num_blocks=40)
    assert len(ids(llm.generate([5, 6, 7], GREEDY))[0]) == 6
    with pytest.raises(InvalidInputError, match="min_p"):
        llm.generate([5, 6, 7])


def test_a_model_without_such_defaults_has_those_of_the_class(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()


def test_stop_tokens_end_a_request_and_are_kept(llm: LLM) -> None:
    free = ids(llm.generate([5, 6, 7], GREEDY, use_tqdm=False))[0]
    stop = free[2]
    params = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[stop])
    output = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == free[: free.index(stop) + 1]
    assert output.finish_reason == "stop"


def test_edited_requests_are_served_beside_others(llm: LLM) -> None:
    prompt = list(range(3, 15))
    free = ids(llm.generate(prompt, GREEDY, use_tqdm=False))[0]
    few = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=[40, 41])
    late = SamplingParams(
        temperature=0.0, max_tokens=9, min_tokens=4, stop_token_ids=[40], logit_bias={"40": 100}
    )
    cut = SamplingParams(temperature=0.0, max_tokens=6, truncate_prompt_tokens=5)
    params = [GREEDY, few, late, cut]
    found = llm.generate([prompt] * 4, params, use_tqdm=False)
    assert ids(found)[0] == free
    assert set(ids(found)[1]) <= {40, 41}
    assert ids(found)[2].index(40) == 4
    assert (found[2].outputs[0].finish_reason, found[2].outputs[0].stop_reason) == ("stop", 40)
    assert found[3].prompt_token_ids == prompt[-5:]
    iterated = list(llm.generate_iter([(prompt, p) for p in params]))
    assert [o.outputs[0].token_ids for o in iterated] == ids(found)  # type: ignore[union-attr]


def test_continuations_are_edited_each_by_its_own_tokens(llm: LLM) -> None:
    prompt = list(range(3, 40))
    asked = {
        "temperature": 1.0,
        "max_tokens": 12,
        "repetition_penalty": 3.0,
        "frequency_penalty": 2.0,
        "allowed_token_ids": range(30, 60),
        "ignore_eos": True,
    }
    [together] = llm.generate(prompt, SamplingParams(n=3, seed=5, **asked), use_tqdm=False)
    alone = [SamplingParams(seed=5 + i, **asked) for i in range(3)]
    apart = ids(llm.generate([prompt] * 3, alone, use_tqdm=False))
    assert [output.token_ids for output in together.outputs] == apart
    assert len({tuple(tokens) for tokens in apart}) == 3
    assert all(set(tokens) <= {*range(30, 60)} for tokens in apart)


def _too_short(_: list[int], row: Any) -> Any:
    return row[1:]


def _nothing_left(output: list[int], row: Any) -> Any:
    return row * float("nan") if len(output) > 1 else row


def _raising(_: list[int], row: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"logits_processors": [_too_short]}, "must return a row of"),
        ({"logits_processors": [_nothing_left]}, "no token is left"),
        ({"logits_processors": [_raising]}, "KeyError: 'mine'"),
        ({"stop_token_ids": range(VOCAB_SIZE), "min_tokens": 2}, "leave no token"),
        ({"stop_token_ids": range(VOCAB_SIZE), "min_tokens": 2, "top_k": 5}, "leave no token"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_request_with_no_token_left_to_sample_ends(
    llm: LLM, asked: dict[str, Any], words: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=6, **asked)
    first, error, last = llm.generate_iter([([5, 6], GREEDY), ([7], params), ([5, 6], GREEDY)])
    assert isinstance(error, RequestError)
    assert words in str(error)
    assert isinstance(first, RequestOutput)
    assert isinstance(last, RequestOutput)
    alone = ids(llm.generate([5, 6], GREEDY, use_tqdm=False))
    assert ids([first]) == ids([last]) == alone


def test_token_0_is_given_where_it_is_allowed(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=[0], max_tokens=3, ignore_eos=True)
    assert ids(llm.generate([5, 6], params, use_tqdm=False)) == [[0, 0, 0]]


def test_a_seed_decides_the_sample_whatever_runs_beside_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=11)
    other = SamplingParams(temperature=1.0, max_tokens=12, seed=12)
    alone = ids(llm.generate([5, 6], params, use_tqdm=False))[0]
    crowd = ids(llm.generate([[9] * 30, [5, 6], [5, 6]], [other, params, other], use_tqdm=False))
    assert crowd[1] == alone
    assert crowd[2] != alone
    unseeded = SamplingParams(temperature=1.0, max_tokens=12)
    first, second = ids(llm.generate([[5, 6]] * 2, unseeded, use_tqdm=False))
    assert first != second, "requests without a seed get different ones"


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[1], []], GREEDY, r"prompts\[1\] = \[\]: must not be empty"),
        ([[1], [VOCAB_SIZE]], GREEDY, f"{VOCAB_SIZE}: out of vocabulary: token ids must be"),
        ([[1] * 512], GREEDY, "prompt = '512 tokens': must be at most 511"),
        ([[1], [2]], [GREEDY], "1 given for 2 prompts"),
        ([1], SamplingParams(stop_token_ids=[VOCAB_SIZE]), "ids must be below"),
        ([1], {"temperature": 0}, "must be a SamplingParams"),
    ],
)
def test_bad_input_is_refused_and_nothing_runs(llm: LLM, prompts, params, words: str) -> None:
    num_steps = llm.engine.scheduler.num_steps
    with pytest.raises(InvalidInputError, match=words):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.scheduler.num_steps == num_steps
    assert not llm.engine.has_work


def test_requests_that_run_are_not_disturbed_by_bad_ones(llm: LLM) -> None:
    expected = ids(llm.generate([5, 6, 7], GREEDY, use_tqdm=False))[0]
    items = [([5, 6, 7], GREEDY), ([], GREEDY), ([VOCAB_SIZE], GREEDY), ([5, 6, 7], GREEDY)]
    results = list(llm.generate_iter(items, window=2))
    assert [isinstance(r, InvalidInputError) for r in results] == [False, True, True, False]
    assert ids([results[0], results[3]]) == [expected] * 2


@pytest.mark.parametrize(
    "item",
    [
        None,
        5,
        "ab",
        (),
        ([1],),
        ([1], GREEDY, GREEDY),
        ([1], None),
        ("\ud800", GREEDY),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, GREEDY),
        InvalidInputError("line", "x", "must be JSON"),
    ],
)
def test_a_bad_item_of_a_stream_is_refused_in_its_place(llm: LLM, item: Any) -> None:
    good = ([5, 6, 7], GREEDY)
    results = list(llm.generate_iter([good, item, list(good)], window=3))
    assert isinstance(results[1], InvalidInputError)
    assert ids([results[0], results[2]]) == ids(
        llm.generate([[5, 6, 7]] * 2, GREEDY, use_tqdm=False)
    )


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_counts_the_item_yielded(llm: LLM, window: int) -> None:
    read: list[int] = []

    def items() -> Iterator[tuple[list[int], SamplingParams]]:
        for i in range(4):
            read.append(i)
            yield [5 + i], GREEDY

    results = llm.generate_iter(items(), window=window)
    next(results)
    assert len(read) == window
    results.close()


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_a_bad_window_is_refused_before_anything_is_read(llm: LLM, window: Any) -> None:
    items = iter([([5, 6, 7], GREEDY)])
    with pytest.raises(InvalidInputError, match="window"):
        llm.generate_iter(items, window=window)
    assert len(list(items)) == 1


@pytest.mark.parametrize("params", [{}, 0, [], False])
def test_a_stream_takes_nothing_for_its_default_but_none(
    params: Any,
) -> None:
    with pytest.raises(InvalidInputError, match="must be a SamplingParams"):
        content_llm().stream([1], params)


def test_a_conversation_among_several_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [{"role": "user", "content": "a"}]
    monkeypatch.setattr(llm, "chat_reader", chat_reader(FakeTokenizer()))
    with pytest.raises(InvalidInputError, match=r"^messages\[1\] = \[\]: must be a non-empty"):
        llm.chat([good, []])
    with pytest.raises(InvalidInputError, match=r"^messages = .*no such role"):
        llm.chat([{"role": "nobody", "content": "a"}])


def test_urgent_requests_are_served_first() -> None:
    llm = LLM(tiny_model("llama"), max_num_seqs=1, num_blocks=8, compile="eager", policy="priority")
    prompts = [{"prompt_token_ids": [5], "priority": p} for p in (2, 1, 0)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    late, middle, urgent = (output.metrics.queue_time_s for output in outputs)
    assert urgent < middle < late


def test_a_closed_iterator_leaves_nothing_behind(llm: LLM) -> None:
    results = llm.generate_iter((([i, i], GREEDY) for i in range(2, 50)), window=8)
    next(results)
    results.close()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.blocks.num_available == 40


def test_a_failing_step_ends_its_requests_and_not_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids(llm.generate([5, 6, 7], GREEDY, use_tqdm=False))
    runner = llm.engine.runner
    dispatch, calls = runner.dispatch, []

    def fails_at_third_call(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", fails_at_third_call)
    with pytest.raises(EngineError, match="out of memory"):
        llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    check_state(llm.engine.scheduler)
    assert not llm.engine.has_work
    assert ids(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)) == expected


def test_the_length_limit_is_the_models(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    output = llm.generate([3] * 500, params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 12
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 513}, "max_model_len = 513: the model's own limit is 512"),
        ({"num_blocks": 4, "max_model_len": 100}, "holds one request of at most 65 tokens"),
        ({"num_blocks": 10**9}, "num_blocks = 1000000000: their .* GiB do not fit the"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:256"}, "device = 'cuda:256': [0-9]+ GPUs are visible"),
        ({"block_size": 0}, "block_size = 0"),
    ],
)
def test_settings_that_do_not_suit_the_model(settings, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        LLM(tiny_model("llama"), **settings)


def test_a_pool_smaller_than_one_request_needs(llm: LLM) -> None:
    small = LLM(tiny_model("llama"), num_blocks=2, block_size=4)
    assert small.max_model_len == 9
    with pytest.raises(InvalidInputError, match="at most 8 tokens"):
        small.generate([1] * 9, GREEDY)
    assert len(ids(small.generate([1] * 8, GREEDY, use_tqdm=False))[0]) == 1


def test_an_item_that_the_engine_is_too_busy_for_yields_that_in_its_place(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = llm.factory.make

    def make_one(prompt: Any, params: SamplingParams) -> Any:
        if prompt.token_ids == [9]:
            raise EngineBusyError("all are compiling")
        return make(prompt, params)

    monkeypatch.setattr(llm.factory, "make", make_one)
    first, error, last = llm.generate_iter([([5, 6], GREEDY), ([9], GREEDY), ([5, 6], GREEDY)])
    assert isinstance(error, EngineBusyError)
    assert ids([first]) == ids([last])  # type: ignore[list-item]
    for wrong in (None, 5):
        with pytest.raises(InvalidInputError, match=r"^items = "):
            llm.generate_iter(wrong)  # type: ignore[arg-type]
