"""``speculative_config`` with a draft model, in whole engines."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, InvalidInputError, SamplingParams
from pagespec.compile.load.drafters import load_drafter, reads_head, target_aux_layers
from pagespec.compile.load.load import load_model
from pagespec.distributed import launch
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.plan import StepPlan
from pagespec.runner.cpu import platform as cpu_platform
from tests.support.draft_files import (
    eagle3_config,
    eagle3_tensors,
    save_eagle3,
    save_with_mtp,
)
from tests.support.drafting import Drafting, Target
from tests.support.models import VOCAB_SIZE, save_word_model, tiny_model

SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 90, "max_num_seqs": 4}
SETTINGS |= {"max_model_len": 64, "threads": 1, "check_invariants": True}
PROMPTS = ["word1 word2 word3", "word9 word8 word7 word1 word2 word3 word4 word5", "word5"]


@pytest.fixture
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of draft tokens would follow the load of this machine."""
    monkeypatch.setattr(cpu_platform, "_packing_bytes", lambda **_: 0)
    for module in (cpu_platform, launch):
        monkeypatch.setattr(module, "measure_costs", lambda *_: StepCosts([(1, 1.0), (99, 1.0)]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_word_model(tmp_path_factory.mktemp("target"))


def drafts_of(model: str, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 3, **more}


def answers(llm: LLM) -> list[Any]:
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3, n=2, top_p=0.95),
        SamplingParams(max_tokens=20, temperature=1.2, seed=4, prompt_logprobs=1, stop=["word77"]),
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.cumulative_logprob)
        for output in outputs
        for answer in output.outputs
    ]


@pytest.mark.usefixtures("_free")
@pytest.mark.parametrize(("overlap", "num_ranks"), [(False, 1), (True, 1), (True, 2)])
def test_answers_are_equal_and_a_model_is_always_right_about_itself(
    target: str, overlap: bool, num_ranks: int
) -> None:
    settings = SETTINGS | {"overlap": overlap, "tensor_parallel_size": num_ranks}
    plain = answers(LLM(target, **settings))
    llm = LLM(target, speculative_config=drafts_of(target), **settings)
    assert answers(llm) == plain
    stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30
    assert stats.accepted_per_position[0] == stats.num_drafts


@pytest.mark.usefixtures("_free")
def test_another_model_changes_no_answer(target: str, tmp_path: Path) -> None:
    tiny_model("llama", seed=1, num_hidden_layers=1, max_position_embeddings=2048).save_pretrained(
        tmp_path
    )
    plain = answers(LLM(target, **SETTINGS))
    config = json.dumps(drafts_of(str(tmp_path)))
    llm = LLM(target, speculative_config=config, kv_cache_dtype="auto", **SETTINGS)
    assert answers(llm) == plain
    stats = llm.stats()
    assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.usefixtures("_free")
def test_a_reset_of_the_cache_and_predictions_change_nothing(target: str) -> None:
    plain = answers(LLM(target, **SETTINGS))
    llm = LLM(target, speculative_config=drafts_of(target), **SETTINGS)
    for _ in range(2):
        assert answers(llm) == plain
        llm.reset_prefix_cache()
    (token_ids, *_), *_ = plain
    prediction = {"prompt": PROMPTS[0], "prediction": token_ids}
    (output,) = llm.generate([prediction], SamplingParams(max_tokens=20, temperature=0.0))
    assert output.outputs[0].token_ids == token_ids


class Drafted:
    """The draft tokens behind each row of an engine's steps: (request id, number of tokens before
    them, tokens)."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int, list[int]]] = []
        runner: Any = llm._runner
        drafting = getattr(runner, "local", runner).drafting
        own = drafting.draft

        def draft(plan: StepPlan, packed: Any, token_ids: Any, hidden: Any) -> Any:
            drafts = own(plan, packed, token_ids, hidden)
            for row, samples in enumerate(plan.accepted(token_ids.tolist())):
                request_id = plan.requests[row].request_id
                if request_id in drafts:
                    num_rejected = plan.num_samples[row] - len(samples)
                    end = plan.starts[row] + plan.num_tokens[row] - num_rejected + 1
                    self.found.append((request_id, end, drafts[request_id]))
            return drafts

        monkeypatch.setattr(drafting, "draft", draft)


def saved_drafter(method: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The folder of a target, and the config of its drafter."""
    config = {"method": method.partition(" ")[0], "num_speculative_tokens": 3}
    target = folder / "target"
    if method.startswith("mtp"):
        save_with_mtp(target, method.partition(" ")[2])
        return str(target), config
    is_shared = method.endswith("with the target's head")
    sizes = {"hidden_size": 32, "num_attention_heads": 4} if is_shared else {}
    main = tiny_model("llama", num_hidden_layers=6, **sizes)
    main.save_pretrained(target)
    num_tokens = VOCAB_SIZE if is_shared else 96
    tensors = eagle3_tensors(main, num_tokens, has_embedding=not is_shared)
    for name in ("lm_head.weight", "d2t") if is_shared else ():
        del tensors[name]
    save_eagle3(folder / "head", eagle3_config(main, num_tokens), tensors)
    assert reads_head("eagle3", str(folder / "head"), "auto") == is_shared
    return str(target), config | {"model": str(folder / "head")}


@pytest.mark.usefixtures("_free")
@pytest.mark.parametrize(
    ("method", "num_ranks"),
    [
        pytest.param("mtp deepseek_v3", 1, marks=pytest.mark.nightly),
        # runner/gpu/test_drafters.py has it by day.
        pytest.param("mtp glm4_moe", 1, marks=pytest.mark.nightly),
        ("eagle3", 1),
        ("mtp deepseek_v3", 2),
        pytest.param("mtp glm4_moe", 2, marks=pytest.mark.nightly),
        pytest.param("eagle3", 2, marks=pytest.mark.nightly),
        pytest.param("eagle3 with the target's head", 2, marks=pytest.mark.nightly),
    ],
)
def test_drafts_of_a_head_are_those_of_whole_passes(
    method: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, prefix hits and rejected tokens in the engine; one pass over all slots in
    the reference, a whole model. Of two ranks each has a part of the target's head."""
    model, config = saved_drafter(method, tmp_path)
    prompts = [[(7 * i * i + j) % VOCAB_SIZE for i in range(30)] for j in range(3)]
    prompts.append([*prompts[0][:20], 5, 6, 7])
    params = [
        SamplingParams(max_tokens=14, temperature=t, seed=1, ignore_eos=True)
        for t in (0.0, 0.0, 0.9, 0.0)
    ]
    settings = SETTINGS | {"max_num_batched_tokens": 16, "tensor_parallel_size": num_ranks}

    def answered(llm: LLM) -> list[list[int]]:
        return [
            output.outputs[0].token_ids
            for p, q in zip(prompts, params, strict=True)
            for output in llm.generate([{"prompt_token_ids": p}] * 2, q, use_tqdm=False)
        ]

    plain = answered(LLM(model, **settings))
    llm = LLM(model, speculative_config=config, **settings)
    drafted = Drafted(llm, monkeypatch)
    assert answered(llm) == plain
    assert llm.stats().num_draft_tokens > 60

    loaded = load_model(model)
    layers = target_aux_layers(config["method"], config.get("model"), loaded)
    loaded = replace(loaded, aux_layers=layers)
    drafter = Drafting(load_drafter(config["method"], config.get("model"), loaded))
    run = Target(loaded)
    num_equal = num_compared = 0
    for request_id, end, found in drafted.found:
        index = int(request_id)
        # The last prompt shares a part of the first one's blocks. Slot p has token p + 1, so the
        # last shared slot has the first prompt's next token.
        if params[index // 2].temperature or index > 5:
            continue
        ids = (prompts[index // 2] + plain[index])[:end]
        outputs = run(ids[:-1])
        hidden = outputs.hidden if outputs.aux is None else outputs.aux
        assert hidden is not None
        num_compared += 1
        num_equal += found == drafter.greedy(ids[1:], hidden, 0, len(found))
    assert num_equal == num_compared > 40


@pytest.mark.parametrize("more", [{}, {"max_num_seqs": 1}, {"block_size": 1, "num_blocks": 360}])
def test_costs_of_the_drafter_are_measured(
    target: str, more: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS | more
    with caplog.at_level(logging.INFO, "pagespec"):
        llm = LLM(target, speculative_config=drafts_of(target), **settings)
    assert "milliseconds of a drafter's pass: 1: " in caplog.text
    assert llm.step_costs.draft_s(1) > 0
    assert answers(llm) == answers(LLM(target, **settings))


@pytest.mark.usefixtures("_free")
def test_the_kv_cache_has_space_for_both_models(target: str) -> None:
    settings = {k: v for k, v in SETTINGS.items() if k != "num_blocks"}
    settings |= {"memory_utilization": 1e-5, "max_num_seqs": 4096, "max_num_batched_tokens": 4096}
    alone = LLM(target, **settings).num_blocks
    both = LLM(target, speculative_config=drafts_of(target), **settings).num_blocks
    assert 0.3 * alone < both < 0.7 * alone


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"model": "/nowhere/at-all"}, {}, "/nowhere/at-all"),
        ({"draft_tensor_parallel_size": 2}, {"tensor_parallel_size": 2}, "a model drafts on one"),
        ({"num_speculative_tokens": 17}, {}, "num_speculative_tokens = 17: must be at most 16"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    target: str, config: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LLM(target, speculative_config=drafts_of(target) | config, **SETTINGS | more)


def test_recurrent_layers_over_two_ranks_are_refused_with_mtp_too(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, "qwen3_next")
    config = {"method": "mtp"}
    with pytest.raises(InvalidInputError, match=r"tensor_parallel_size = 2: must be 1: recurrent"):
        LLM(tmp_path, speculative_config=config, tensor_parallel_size=2, **SETTINGS)


def test_a_draft_model_with_recurrent_layers_is_refused(target: str, tmp_path: Path) -> None:
    tiny_model("mamba", max_position_embeddings=2048).save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="must have attention only"):
        LLM(target, speculative_config=drafts_of(str(tmp_path)), **SETTINGS)
