"""``LLM`` and ``LLMEngine`` as programs for vLLM call them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from pagespec import LLM, InvalidInputError, SamplingParams, StructuredOutputs
from pagespec.engine.metric_values import Counter, Gauge, Histogram, Vector
from pagespec.llm import LLMEngine
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.scripted_llm import scripted_llm
from tests.support.tokenizers import byte_level

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        tiny_model("llama"),
        max_num_seqs=4,
        num_blocks=40,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        check_invariants=True,
    )


@pytest.fixture(scope="module")
def chat_llm() -> LLM:
    return scripted_llm("qwen3", ["The answer."])


def test_token_ids_come_with_their_text_one_by_one_or_in_a_list(llm: LLM) -> None:
    both = {"prompt": "five six", "prompt_token_ids": [5, 6]}
    (alone,) = llm.generate(both, GREEDY)
    listed = llm.generate((both, [5, 6], {"prompt_token_ids": (5, 6)}), GREEDY)
    assert [output.prompt for output in (alone, *listed)] == ["five six", "five six", None, None]
    assert {tuple(o.outputs[0].token_ids) for o in (alone, *listed)} == {
        tuple(alone.outputs[0].token_ids)
    }


def test_priorities_are_given_one_per_prompt(llm: LLM) -> None:
    assert len(llm.generate([[5], [6]], GREEDY, priority=[3, 0])) == 2
    assert len(llm.generate([5, 6], GREEDY, priority=[0])) == 1
    for priority in ([0], []):
        with pytest.raises(ValueError, match="given for 2 prompts"):
            llm.generate([[5], [6]], GREEDY, priority=priority)


def test_adapters_and_processors_are_refused_by_name(llm: LLM, chat_llm: LLM) -> None:
    assert llm.generate([5], GREEDY, lora_request=None, mm_processor_kwargs=None)
    for call, prompt in ((llm.generate, [5]), (chat_llm.chat, HELLO)):
        with pytest.raises(InvalidInputError, match=r"^lora_request = .*not supported"):
            call(prompt, lora_request="adapter")


def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert output.prompt_token_ids == [6, 7]


def test_a_progress_bar_may_be_made_by_the_caller(llm: LLM) -> None:
    bars: list[Any] = []

    class Kept(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **named: Any) -> None:
            bars.append(self)
            super().__init__(*args, **named)

    llm.generate([[5], [6]], GREEDY, use_tqdm=partial(Kept, leave=False))
    assert [(bar.total, bar.n, bar.leave) for bar in bars] == [(2, 2, False)]


def test_chat_takes_its_arguments_in_vllms_order(chat_llm: LLM) -> None:
    arguments = (SamplingParams(seed=0), False, None, None, "auto", True, False, None, None, None)
    (output,) = chat_llm.chat(HELLO, *arguments, None, priority=[1])
    (named,) = chat_llm.chat(HELLO, SamplingParams(seed=0), add_generation_prompt=True)
    assert output.outputs[0].text == named.outputs[0].text == "The answer."
    assert output.prompt_token_ids == named.prompt_token_ids
    with pytest.raises(InvalidInputError, match="chat_template_content_format"):
        chat_llm.chat(HELLO, chat_template_content_format="openai")
    with pytest.raises(InvalidInputError, match=r"tokenization_kwargs\.add_special_tokens"):
        chat_llm.chat(HELLO, tokenization_kwargs={"add_special_tokens": True})
    with pytest.raises(ValueError, match="maximum context length is"):
        chat_llm.chat([{"role": "user", "content": "word " * 20_000}])


def ends_of(llm: LLM) -> dict[str, Any]:
    found = {}
    for _ in range(100):
        if not llm.llm_engine.has_unfinished_requests():
            return found
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = output
    raise AssertionError("the requests do not end")


def test_requests_are_stepped_by_the_caller_beside_generate(llm: LLM) -> None:
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    long = SamplingParams(temperature=0.0, max_tokens=12)
    alone = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], long)]
    assert engine.add_request("a", [5, 6], long) == "a"
    engine.step()
    engine.add_request("b", {"prompt_token_ids": [7]}, long, priority=2, prompt_text="seven")
    engine.add_request("c", [7], long)
    assert engine.get_num_unfinished_requests() == 3
    engine.abort_request(["c"])
    assert llm.generate([7], long)[0].outputs[0].token_ids == alone[1]
    assert engine.get_num_unfinished_requests() == 2
    ended = ends_of(llm)
    assert [ended[name].outputs[0].token_ids for name in ("a", "b")] == alone
    assert (ended["a"].prompt, ended["b"].prompt) == (None, "seven")
    assert engine.step() == []


def test_bad_requests_are_refused_by_name(llm: LLM) -> None:
    engine = llm.llm_engine
    for named in ({"arrival_time": 1.0}, {"trace_headers": {}}, {"lora_request": 1}):
        with pytest.raises(InvalidInputError, match=f"^{next(iter(named))}"):
            engine.add_request("a", [5], GREEDY, **named)
    with pytest.raises(TypeError, match="request_id must be a string"):
        engine.add_request(1, [5], GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="out of vocabulary"):
        engine.add_request("a", [10**6], GREEDY)
    with pytest.raises(AttributeError, match="'apply_model': workers take no calls"):
        engine.apply_model(print)
    assert not engine.has_unfinished_requests()


def test_enqueued_prompts_wait_for_their_completion(llm: LLM) -> None:
    alone = llm.generate([[5, 6], [7]], GREEDY)
    num_steps = llm.engine.scheduler.num_steps
    names = llm.enqueue([[5, 6], [7]], GREEDY, priority=[1, 0])
    assert llm.engine.scheduler.num_steps == num_steps
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == names
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert llm.wait_for_completion() == []
    with pytest.raises(InvalidInputError, match="output_type"):
        llm.wait_for_completion(int)


def test_the_prefix_cache_is_emptied_or_kept_for_live_requests(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    llm.llm_engine.add_request("a", [5], GREEDY)
    assert not llm.reset_prefix_cache(reset_running_requests=False)
    assert llm.reset_prefix_cache()
    assert (
        ends_of(llm)["a"].outputs[0].token_ids == llm.generate([5], GREEDY)[0].outputs[0].token_ids
    )
    with pytest.raises(InvalidInputError, match="reset_connector"):
        llm.reset_prefix_cache(reset_connector=True)


def test_settings_are_read_under_vllms_names(llm: LLM, chat_llm: LLM) -> None:
    settings = llm.llm_engine.vllm_config
    assert llm.model_config is settings.model_config
    assert settings.model_config.max_model_len == llm.max_model_len
    assert settings.model_config.get_vocab_size() == VOCAB_SIZE
    assert settings.model_config.hf_config.model_type == "llama"
    assert str(settings.model_config.dtype) == "torch.float32"
    assert (settings.cache_config.num_gpu_blocks, settings.cache_config.block_size) == (40, 16)
    assert settings.parallel_config.world_size == llm.get_world_size() == 1
    assert settings.speculative_config.method == "ngram"
    assert chat_llm.llm_engine.vllm_config.speculative_config is None
    assert chat_llm.get_tokenizer() is chat_llm.tokenizer
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.get_tokenizer()


def test_an_engine_is_made_from_its_arguments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, *args: Any, **named: Any) -> None:
        raise InvalidInputError("given", (args, named), "is what was given")

    arguments = SimpleNamespace(model="m", num_blocks=8)
    monkeypatch.setattr(LLM, "__init__", refuse)
    for make in (LLM.from_engine_args, LLMEngine.from_engine_args):
        with pytest.raises(InvalidInputError) as given:
            make(arguments)
        assert given.value.value == ((), {"model": "m", "num_blocks": 8})
    monkeypatch.setattr(LLM, "from_engine_args", lambda _: llm)
    assert LLMEngine.from_engine_args(arguments, usage_context=None) is llm.llm_engine


def metrics_of(llm: LLM) -> dict[str, Any]:
    """By name, and for ended requests by reason."""
    found = {}
    for metric in llm.get_metrics():
        assert metric.labels["engine"] == "0"
        found[metric.name + metric.labels.get("finished_reason", "")] = metric
    return found


def test_metrics_have_vllms_names_and_count_the_results(llm: LLM) -> None:
    before = metrics_of(llm)
    outputs = llm.generate([[5, 6, 7, 5, 6], [7]], GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]
    now = metrics_of(llm)

    def grown(name: str, attribute: str = "value") -> float:
        return getattr(now[f"vllm:{name}"], attribute) - getattr(before[f"vllm:{name}"], attribute)

    assert isinstance(now["vllm:num_requests_running"], Gauge)
    assert now["vllm:num_requests_running"].value == 0.0
    assert now["vllm:kv_cache_usage_perc"].value == 0.0
    assert isinstance(now["vllm:generation_tokens"], Counter)
    assert (grown("generation_tokens"), grown("prompt_tokens")) == (8, 6)
    assert grown("request_successlength") == 2
    assert isinstance(now["vllm:request_generation_tokens"], Histogram)
    assert (grown("request_generation_tokens", "count")) == 2
    assert (grown("request_generation_tokens", "sum")) == 8
    assert grown("e2e_request_latency_seconds", "count") == 2
    buckets = now["vllm:request_prompt_tokens"].buckets
    assert buckets["+Inf"] == now["vllm:request_prompt_tokens"].count > buckets["1.0"] > 0
    accepted = now["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(accepted, Vector)
    assert len(accepted.values) == 3
    assert sum(accepted.values) == now["vllm:spec_decode_num_accepted_tokens"].value


def test_a_model_without_its_tokenizer_takes_token_ids_and_gives_no_text(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), byte_level()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for skips in (True, False):  # the second start may be restored from the record of the first
        llm = LLM(str(tmp_path), num_blocks=40, skip_tokenizer_init=skips)
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)
        assert len(output.outputs[0].token_ids) == 4
        assert (output.outputs[0].text == "") == skips
        if skips:
            with pytest.raises(ValueError, match="`skip_tokenizer_init=True`"):
                llm.generate("abc", GREEDY)
            constrained = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
            with pytest.raises(ValueError, match="no tokenizer"):
                llm.generate([5], constrained)
