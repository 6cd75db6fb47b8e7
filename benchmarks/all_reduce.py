"""All-reduce over the GPUs of a host: microseconds per call inside CUDA graphs.

    python -m benchmarks.all_reduce [--num-ranks 2] [--columns 4096] [--rows 1 8 64]

Ours beside NCCL and the symmetric-memory kernels of torch, on bfloat16 rows. The floor is the bytes
that each GPU must receive, (N - 1) / N of the sum twice or (N - 1) parts once, whichever is less,
over the peer-to-peer bandwidth that this run copies with. "order" says whether the result is the
float32 sum in rank order, at every element.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from pagespec.kernels.collectives.library import GatherCommunicator
from pagespec.kernels.collectives.symmetric import PeerCommunicator

_CALLS, _REPLAYS = 50, 7


def _microseconds(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / _CALLS * 1e3)
    return statistics.median(times)


def _peer_gb_per_s() -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    target.copy_(source)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(8):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 8 * source.numel() / begin.elapsed_time(end) / 1e6


def _run(rank: int, num_ranks: int, port: int, columns: int, all_rows: list[int]) -> None:
    import torch.distributed._symmetric_memory as symmetric

    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=num_ranks,
        device_id=torch.device("cuda", rank),
    )
    group = dist.group.WORLD.group_name
    device = torch.device("cuda", rank)
    ours = PeerCommunicator(GatherCommunicator(), device)
    ours.reserve((max(all_rows), 2 * columns))
    ours.connect()
    bandwidth = _peer_gb_per_s() if rank == 0 else 0.0
    if rank == 0:
        print(
            f"{num_ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL "
            f"{'.'.join(map(str, torch.cuda.nccl.version()))}, peer to peer {bandwidth:.0f} GB/s"
        )
        names = ("ours", "NCCL", "one-shot", "two-shot", "floor")
        print(f"{'rows':>6} x {columns}" + "".join(f"{name:>10}" for name in names) + "  order")
    for num_rows in all_rows:
        x = torch.randn(num_rows, columns, device=device).bfloat16()
        parts = [torch.empty_like(x) for _ in range(num_ranks)]
        dist.all_gather(parts, x)
        want = parts[0].float()
        for part in parts[1:]:
            want = want + part.float()
        is_same = torch.equal(ours.all_reduce(x), want.to(x.dtype))
        shared = symmetric.empty(x.numel(), dtype=x.dtype, device=device)
        symmetric.rendezvous(shared, group)
        library = x.clone()
        calls: list[Callable[[], Tensor | object]] = [
            lambda x=x: ours.all_reduce(x),
            lambda x=library: dist.all_reduce(x),
            lambda x=shared: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group),
            lambda x=shared: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group),
        ]
        times = [_microseconds(call) for call in calls]
        factor = min(num_ranks - 1, 2 * (num_ranks - 1) / num_ranks)
        if rank == 0:
            times.append(factor * x.nbytes / bandwidth / 1e3)
            row = "".join(f"{time:>10.1f}" for time in times)
            print(f"{num_rows:>6} {'':>{len(str(columns)) + 1}}{row}  {is_same}", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256, 1024, 8192])
    options = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True).port
    multiprocessing.spawn(
        _run, (options.num_ranks, port, options.columns, options.rows), options.num_ranks
    )


if __name__ == "__main__":
    main()
