"""Run the collectives on all GPUs, which have peer access; fail if a bit is wrong.

``test_peer_memory_gpu.py`` starts this program, which starts one process per rank.
"""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from pagespec.kernels.collectives.boxes import LaunchShape
from pagespec.kernels.collectives.communicator import Communicator
from pagespec.kernels.collectives.library import GatherCommunicator
from pagespec.kernels.collectives.symmetric import PeerCommunicator
from pagespec.kernels.fused import rms_norm
from pagespec.kernels.fused.dispatch import NormForm
from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.matmul import dispatch as gpu_linear
from pagespec.kernels.matmul.dispatch import RowParallel

_ROWS = (1, 2, 7, 33, 256)
_MANY_ROWS = (1, 300, 4096, 33, 1021)
_FORMS: tuple[NormForm, ...] = ("rounded", "wide", "plus_one")
_HIDDEN, _OTHER = 4096, 1536  # the latter is cut otherwise
_NUM_LAYERS, _NUM_REPLAYS = 6, 40


def rank_program(rank: int, num_ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=num_ranks, device_id=device
    )
    ours = PeerCommunicator(GatherCommunicator(), device)
    ours.reserve((max(_ROWS), 4 * 8192))
    many = PeerCommunicator(GatherCommunicator(), device, shape=LaunchShape(two_shot_bytes=0))
    many.reserve((max(_MANY_ROWS), 4 * 8192))
    few = PeerCommunicator(GatherCommunicator(), device, shape=LaunchShape(few_two_shot_bytes=0))
    few.reserve((max(_ROWS), 4 * 8192))
    torch.manual_seed(rank)
    with torch.inference_mode():
        with parallel_build(device):  # side by side, which one by one would take a minute
            check_calls(ours, _ROWS, is_compiled=False)
            check_calls(few, _ROWS, is_compiled=False)
            check_calls(many, _MANY_ROWS, is_compiled=False)
            for num_rows in _ROWS:
                check_replays(ours, num_rows, is_compiled=False)
                check_replays(few, num_rows, is_compiled=False)
        ours.connect()
        few.connect()
        many.connect()
        check_calls(ours, _ROWS)
        check_calls(few, _ROWS)
        check_calls(many, _MANY_ROWS)
        check_drift(many)
        for num_rows in _ROWS:
            check_replays(ours, num_rows)
            check_replays(few, num_rows)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def in_rank_order(partial: Tensor, num_ranks: int) -> Tensor:
    partial = partial.contiguous()
    parts = [torch.empty_like(partial) for _ in range(num_ranks)]
    dist.all_gather(parts, partial)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(partial.dtype)


def check_calls(
    ours: PeerCommunicator, all_rows: tuple[int, ...], *, is_compiled: bool = True
) -> None:
    """One launch after the other, of all kinds; or what they compile."""
    widths = (48, 576, 1000, 2304, _HIDDEN, 5120, 8192)
    for dtype, width in itertools.product((torch.bfloat16, torch.float16, torch.float32), widths):
        for number, num_rows in enumerate(all_rows):
            merged = normal(num_rows, 2 * width + 8, dtype=dtype)
            partial = merged[:, :width] if number % 2 else merged[:, :width].contiguous()
            residual = None if number % 3 == 2 else normal(num_rows, width, dtype=dtype, alike=True)
            norm = (normal(width, dtype=dtype, alike=True), 1e-6, _FORMS[number % 3])
            torch.cuda.synchronize()  # a weight is read early
            total = in_rank_order(partial, ours.num_ranks)
            is_right = torch.equal(ours.all_reduce(partial), total)
            assert is_right or not is_compiled, (dtype, width, num_rows)
            found = ours.all_reduce_norm(partial, residual, *norm)
            if residual is None:
                wanted = (rms_norm.rms_norm(total, *norm),) * 2
            else:
                wanted = rms_norm.add_rms_norm(total, residual, *norm)
            for one, two in zip(found, wanted, strict=True):
                is_right = torch.equal(one, two)
                assert is_right or not is_compiled, (dtype, width, num_rows, norm[2])


def check_drift(many: PeerCommunicator) -> None:
    """Calls of changing sizes in one CUDA graph, replayed by ranks that start at other times. Each
    call reads the sum of the preceding one."""
    sizes = [(4096, 5120), (300, 5120), (4096, 4096), (33, 5120), (1021, 8192)] * 3
    parts = [normal(*size) for size in sizes]
    residuals = [normal(*size, alike=True) for size in sizes]
    weight = normal(8192, alike=True)
    torch.cuda.synchronize()

    def run() -> list[Tensor]:
        results, last = [], parts[0]
        for part, residual in zip(parts, residuals, strict=True):
            norm = residual, weight[: part.shape[1]], 1e-6, "rounded"
            results += many.all_reduce_norm(part + last.flatten()[0], *norm)
            last = results[-1]
        return results

    wanted = [result.clone() for result in run()]
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for replay in range(_NUM_REPLAYS):
        if replay % many.num_ranks == many.rank:
            torch.cuda._sleep(2_000_000)
        graph.replay()
        for number, (one, two) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(one, two), (replay, number)


def check_replays(ours: PeerCommunicator, num_rows: int, *, is_compiled: bool = True) -> None:
    """Layers as an engine has them: in a CUDA graph, kernels started early, ranks that drift."""
    x = normal(num_rows, _HIDDEN)
    weights = [normal(_HIDDEN, _HIDDEN) / 64 for _ in range(_NUM_LAYERS)]
    narrow = normal(_OTHER, _HIDDEN) / 64
    norms = [normal(_HIDDEN, alike=True) for _ in range(_NUM_LAYERS)]
    start, layers = normal(num_rows, _HIDDEN, alike=True), RowParallel(ours)
    torch.cuda.synchronize()  # weights are read early

    def run(*, is_joined: bool) -> list[Tensor]:
        normed, hidden, results = x, start, []
        for layer in range(_NUM_LAYERS):
            norm = (hidden, norms[layer], 1e-6, _FORMS[layer % 3])
            if is_joined and layer != 2:
                normed, hidden = layers.linear_norm(normed, weights[layer], num_rows, *norm)
            else:
                partial = gpu_linear.linear(normed, weights[layer], None, num_rows)
                if is_joined:
                    normed, hidden = ours.all_reduce_norm(partial, *norm)
                else:
                    normed, hidden = Communicator.all_reduce_norm(ours, partial, *norm)
            results += [normed, hidden]
            if layer % 2:
                results.append(ours.all_reduce(gpu_linear.linear(normed, narrow, None, num_rows)))
        return results

    run(is_joined=True)
    if not is_compiled:
        run(is_joined=False)
        return
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(is_joined=True)
    for replay in range(_NUM_REPLAYS):
        x.copy_(normal(num_rows, _HIDDEN))
        if replay % 4 == ours.rank:
            torch.cuda._sleep(200_000)
        graph.replay()
        kept = [result.clone() for result in found]
        if replay % 8 == 7:  # some go without an answer in between
            graph.replay()
        for number, (one, two) in enumerate(zip(kept, run(is_joined=False), strict=True)):
            assert torch.equal(one, two), (num_rows, replay, number)


def normal(*size: int, dtype: torch.dtype = torch.bfloat16, alike: bool = False) -> Tensor:
    """Of this rank, or ``alike`` on all."""
    x = torch.randn(*size, device="cuda").to(dtype)
    if alike:
        dist.broadcast(x, 0)
    return x


if __name__ == "__main__":
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True).port
    num_ranks = torch.cuda.device_count()
    multiprocessing.spawn(rank_program, (num_ranks, port), num_ranks)
    print("ok")
