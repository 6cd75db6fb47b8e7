"""Two ranks on two GPUs: over peer memory and over NCCL, and the loss of one rank."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from pagespec import LLM, EngineError, SamplingParams
from tests.distributed.rank_group import BOUND_S, assert_gone
from tests.support.apart import run_apart
from tests.support.draft_files import eagle3_config, eagle3_tensors, save_eagle3, save_with_mtp
from tests.support.models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROMPTS = [[(7 * i + 3 * j) % 3900 for j in range(3 + 37 * i)] for i in range(10)]
PARAMS = [
    SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **kind)
    for i, kind in enumerate([{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20}] * 4)
][: len(PROMPTS)]

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
SIZES_OF = {
    "glm4_moe": {"num_key_value_heads": 4, "head_dim": 64},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4000,
        hidden_size=1536,  # norms of narrower rows join the matmul behind them, not the sum
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
    )
    path = tmp_path_factory.mktemp("two_gpus")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(
        folder,
        device="cuda",
        tensor_parallel_size=2,
        memory_utilization=0.3,
        max_num_seqs=16,
        **settings,
    )


def tokens(llm: LLM, order: list[int]) -> list[list[int]]:
    results = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def over_peer_memory(folder: Path) -> list[list[int]]:
    llm = make_llm(folder)
    order = list(range(len(PROMPTS)))
    answers = tokens(llm, order)
    assert tokens(llm, order[::-1])[::-1] == answers
    assert [tokens(llm, [i])[0] for i in order] == answers
    pids = llm._runner._workers.pids
    del llm
    assert_gone(pids)
    return answers


def test_nccl_moves_what_peers_cannot_reach(
    folder: Path, over_peer_memory: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both add in rank order in float32, so the tokens are equal."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert tokens(make_llm(folder), list(range(len(PROMPTS)))) == over_peer_memory


@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_kernels_that_wait_for_a_lost_rank_end(folder: Path, max_num_seqs: int) -> None:
    """Matmuls of two rows push their own results to the peer."""
    script = Path(__file__).with_name("lost_peer.py")
    assert run_apart(str(script), str(folder), str(max_num_seqs)).endswith("ok\n")


@pytest.mark.parametrize(
    "method", ["ngram", "draft_model", "mtp glm4_moe", "mtp deepseek_v3", "eagle3"]
)
def test_draft_tokens_change_no_answer(method: str, tmp_path: Path) -> None:
    """A model drafts on rank 0, which has a part of the target's head, and the whole one for
    mtp."""
    method, _, arch = method.partition(" ")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    path = tmp_path / "target"
    if method == "mtp":
        save_with_mtp(path, arch, **SIZES, **SIZES_OF[arch])
    else:
        main = tiny_model("qwen3", num_hidden_layers=6, **SIZES, **SIZES_OF["glm4_moe"])
        main.save_pretrained(path)
    if method == "draft_model":
        config["model"] = str(path)
    if method == "eagle3":
        config["model"] = str(tmp_path / "head")
        fields = eagle3_config(main, 512) | {"max_position_embeddings": 1024}
        save_eagle3(tmp_path / "head", fields, eagle3_tensors(main, 512))
    script = "tests.distributed.drafts_on_gpus"
    output = run_apart("-m", script, str(path), json.dumps(config))
    print(output)
    num_drafts, num_accepted = json.loads(output.splitlines()[-1])
    assert num_drafts > 20
    # It drafts without penalties and allowed tokens, which one row in four has.
    assert method != "draft_model" or num_accepted > 0.5 * num_drafts


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_reported_and_the_next_engine_starts(
    folder: Path, over_peer_memory: list[list[int]], how: signal.Signals
) -> None:
    """A second engine in this process, whose sums use NCCL and not peer memory."""
    llm = make_llm(folder)
    pids = llm._runner._workers.pids
    threading.Timer(1.0, os.kill, (pids[0], how)).start()
    begin = time.monotonic()
    long = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    with pytest.raises(EngineError, match="rank 1"):
        llm.generate([[1, 2, 3]] * 500, long, use_tqdm=False)
    print(f"{how.name}: told after {time.monotonic() - begin - 1.0:.1f} s")
    assert time.monotonic() - begin < BOUND_S
    assert_gone(pids)
    del llm
    assert tokens(make_llm(folder), list(range(len(PROMPTS)))) == over_peer_memory
