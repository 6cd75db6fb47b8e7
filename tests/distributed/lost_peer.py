"""Kill the other rank of an engine whose kernels wait for each other's data.

Fails unless the engine reports the loss and all kernels end. ``test_gpus.py`` starts this program,
since a process can set up peer memory only once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

from pagespec import LLM, EngineError, SamplingParams
from pagespec.kernels.collectives.symmetric import PeerCommunicator
from tests.distributed.rank_group import BOUND_S, assert_gone


def main(folder: str, max_num_seqs: int) -> None:
    llm = LLM(
        folder,
        device="cuda",
        tensor_parallel_size=2,
        memory_utilization=0.3,
        max_num_seqs=max_num_seqs,
    )
    assert isinstance(llm._runner._communicator, PeerCommunicator)
    pids = llm._runner._workers.pids
    threading.Timer(1.0, os.kill, (pids[0], signal.SIGKILL)).start()
    begin = time.monotonic()
    long = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    with pytest.raises(EngineError, match="rank 1"):
        llm.generate([[1, 2, 3]] * 500, long, use_tqdm=False)
    torch.cuda.synchronize()
    assert time.monotonic() - begin < BOUND_S
    assert_gone(pids)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    print("ok")
