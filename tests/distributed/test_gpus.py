"""Two ranks on two GPUs: over peer memory and over NCCL, and the loss of one rank."""

from __future__ import annotations

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROMPTS = [[(7 * i + 3 * j) % 3900 for j in range(3 + 37 * i)] for i in range(10)]
PARAMS = [
    SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **kind)
    for i, kind in enumerate([{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20}] * 4)
][: len(PROMPTS)]


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
