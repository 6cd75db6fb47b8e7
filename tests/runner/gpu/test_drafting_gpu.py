"""Draft tokens with a second model on a GPU, inside CUDA graphs and without them."""

from __future__ import annotations

import functools
import gc
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM, RequestOutput, SamplingParams
from pagespec.engine.drafting.costs import StepCosts
from tests.support.draft_files import eagle3_config, eagle3_tensors, save_eagle3, save_with_mtp
from tests.support.models import tiny_model
from tests.support.structured import saved_qwen3

pytestmark = pytest.mark.gpu

NUM_DRAFTS = 3


@functools.cache
def folder(num_hidden_layers: int = 2, seed: int = 0) -> str:
    """Qwen3 with heads of 64."""
    return saved_qwen3(seed=seed, num_hidden_layers=num_hidden_layers)


def engine(
    drafter: str | None, quantization: str | None = None, method: str = "draft_model", **more: Any
) -> LLM:
    given = {"max_num_seqs": 16, "max_model_len": 512, "num_blocks": 600} | more
    model = given.pop("model", None) or folder()
    has_drafter = drafter is not None or method == "mtp"
    if has_drafter:
        config = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
        config |= {} if drafter is None else {"model": drafter}
        given["speculative_config"] = config | {"quantization": quantization}
    llm = LLM(model, dtype="bfloat16", device="cuda", check_invariants=True, **given)
    if has_drafter:  # by the measured costs a model as small as this one needs no drafts
        mode = llm.engine.scheduler.drafter.other.mode
        mode.costs = StepCosts([(1, 1.0), (1000, 1.0)])
        mode.reset()
    return llm


def outputs_of(llm: LLM, *, is_plain: bool, num_requests: int = 12) -> list[RequestOutput]:
    """Answers to prompts of unlike lengths. Plain requests only have a temperature."""
    rng = random.Random(0)
    prompts, params = [], []
    for i in range(num_requests):
        prompts.append(rng.choices(range(3, 266), k=rng.choice([1, 20, 90])))
        kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}]
        if not is_plain:
            kinds += [{"top_p": 0.9}, {"repetition_penalty": 1.2}]
        asked = rng.choice(kinds)
        logprobs = rng.choice([None, 2])
        params.append(
            SamplingParams(max_tokens=48, ignore_eos=True, seed=i, logprobs=logprobs, **asked)
        )
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def counts(outputs: list[RequestOutput]) -> tuple[int, int]:
    """Numbers of draft tokens and of accepted ones."""
    metrics = [output.metrics for output in outputs]
    return (
        sum(m.num_draft_tokens for m in metrics if m is not None),
        sum(m.num_accepted_tokens for m in metrics if m is not None),
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"graph_batch_sizes": []}, {"max_num_batched_tokens": 64}, {"num_blocks": 40}],
    ids=["captured", "uncaptured", "chunks", "preempting"],
)
def test_a_model_that_drafts_for_itself_is_always_right(settings: dict[str, Any]) -> None:
    plain = outputs_of(engine(None, **settings), is_plain=True)
    llm = engine(folder(), **settings)
    drafted = outputs_of(llm, is_plain=True)
    assert results(drafted) == results(plain)
    num_drafts, num_accepted = counts(drafted)
    assert num_drafts == num_accepted > 0


def test_another_model_changes_no_output() -> None:
    plain = outputs_of(engine(None), is_plain=False)
    drafted = outputs_of(engine(folder(1, seed=1)), is_plain=False)
    assert results(drafted) == results(plain)
    num_drafts, num_accepted = counts(drafted)
    assert num_drafts > num_accepted


@pytest.mark.parametrize(
    "settings", [{}, {"graph_batch_sizes": []}], ids=["captured", "uncaptured"]
)
def test_a_model_that_drafts_for_itself_in_fp8_is_often_right(settings: dict[str, Any]) -> None:
    plain, of_plain = engine_and_weights(None, **settings)
    expected = outputs_of(plain, is_plain=True)
    _, in_bfloat16 = engine_and_weights(folder(), **settings)
    llm, in_fp8 = engine_and_weights(folder(), "fp8", **settings)
    drafted = outputs_of(llm, is_plain=True)
    assert results(drafted) == results(expected)
    num_drafts, num_accepted = counts(drafted)
    assert 0 < num_accepted < num_drafts
    # The KV cache gets what the weights leave, those of the drafter included.
    assert of_plain < in_fp8 < in_bfloat16
    assert llm.stats().quantization is None  # the target's


def engine_and_weights(*given: Any, **settings: Any) -> tuple[LLM, int]:
    """An engine, and the bytes that it counts as weights."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = engine(*given, **settings)
    return llm, llm.stats().memory_bytes["weights"] - before


@functools.cache
def with_head(kind: str) -> tuple[str, str | None]:
    """The folder of a target with a tiny head that drafts for it, and the head's folder."""
    path = Path(tempfile.mkdtemp(prefix="drafting-"))
    if kind != "eagle3":
        save_with_mtp(path, kind)
        return str(path), None
    main = tiny_model("llama", num_hidden_layers=6)
    main.save_pretrained(path / "target")
    save_eagle3(path / "head", eagle3_config(main, 96), eagle3_tensors(main, 96))
    return str(path / "target"), str(path / "head")


UNCAPTURED: dict[str, Any] = {"graph_batch_sizes": []}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    ("kind", "quantization", "settings"),
    [
        *((kind, None, {}) for kind in ("deepseek_v3", "glm4_moe", "qwen3_5_text", "eagle3")),
        *((kind, "fp8", {}) for kind in ("deepseek_v3", "glm4_moe", "qwen3_5_text", "eagle3")),
        ("glm4_moe", "fp8", UNCAPTURED),
        ("eagle3", None, UNCAPTURED),
        ("qwen3_5_text", None, CHUNKS),
        ("eagle3", "fp8", CHUNKS),
    ],
)
def test_heads_that_read_hidden_states_change_no_output(
    kind: str, quantization: str | None, settings: dict[str, Any]
) -> None:
    model, head = with_head(kind)
    settings = settings | {"model": model, "max_model_len": 256}
    expected = outputs_of(engine(None, **settings), is_plain=False)
    llm = engine(head, quantization, "mtp" if head is None else kind, **settings)
    drafted = outputs_of(llm, is_plain=False)
    assert results(drafted) == results(expected)
    num_drafts, num_accepted = counts(drafted)
    assert num_drafts > 0
    assert num_accepted < num_drafts  # its weights are random
    assert (llm.stats().num_graphs > 0) == ("graph_batch_sizes" not in settings)
