"""Answers of two ranks on two GPUs with draft tokens, over peer memory and over NCCL, and without.

    python -m tests.distributed.drafts_on_gpus FOLDER SPECULATIVE_CONFIG

``test_gpus.py`` starts this program, since a process can set up peer memory only once. Prints the
numbers of draft tokens and of accepted ones, over peer memory.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from pagespec import LLM, SamplingParams
from pagespec.engine.drafting.costs import DEFAULT_COSTS, StepCosts
from pagespec.kernels.collectives.symmetric import PeerCommunicator

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    # Few tokens, so that the answer repeats itself. Rank 0 samples these rows.
    {"temperature": 0.0, "repetition_penalty": 1.05, "allowed_token_ids": range(100, 103)},
]
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(3 + 17 * i)] for i in range(12)]
PROMPTS += PROMPTS[:4]  # prefix hits


def answers(folder: str, config: Any, *, is_over_peer_memory: bool) -> tuple[Any, int, int]:
    """Tokens and log-probabilities, and the numbers of draft tokens and of accepted ones."""
    llm = LLM(
        folder,
        device="cuda",
        dtype="bfloat16",
        tensor_parallel_size=2,
        num_blocks=400,
        max_num_seqs=8,
        max_model_len=512,
        max_num_batched_tokens=128,
        check_invariants=True,
        speculative_config=config,
    )
    runner: Any = llm._runner
    assert isinstance(runner._communicator, PeerCommunicator) == is_over_peer_memory
    if config is not None:
        assert llm.step_costs is not DEFAULT_COSTS
        print(llm.step_costs.measured, llm.step_costs.exposed_s, llm.step_costs.draft_s(1))
        # By the measured costs a model as small as this one needs no draft tokens.
        drafter: Any = llm.engine.scheduler.drafter
        drafter.mode.costs = StepCosts([(1, 1.0), (1000, 1.0)])
        drafter.mode.reset()
    params = [
        SamplingParams(max_tokens=40, seed=i, ignore_eos=True, **KINDS[i % len(KINDS)])
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    stats = llm.stats()
    found = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
    return found, stats.num_draft_tokens, stats.num_accepted_tokens


def main(folder: str, config: dict[str, Any]) -> None:
    drafted, *counts = answers(folder, config, is_over_peer_memory=True)
    gc.collect()
    plain = answers(folder, None, is_over_peer_memory=False)[0]
    gc.collect()
    assert drafted == plain
    assert answers(folder, config, is_over_peer_memory=False)[0] == plain
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
