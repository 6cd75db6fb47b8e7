"""All-reduce over the GPUs of a host: microseconds per call inside CUDA graphs.

    python -m benchmarks.all_reduce [--num-ranks 2] [--columns 4096 5120] [--rows 1 64]
                                    [--mode table shots sweep two-shot overlap]

The table compares pagespec's all-reduce with NCCL and with torch's symmetric-memory kernels, on
bfloat16 rows. Further columns include the residual and the norm after it: pagespec's all-reduce and
norm ("+ norm"); both in one launch ("joined"); that launch with and without flags at any number of
rows; and torch's one-shot sum, its addition and ``F.rms_norm``. The roofline is the bytes that each
GPU must receive, divided by the GPU-to-GPU bandwidth that this run measures. These bytes are (N -
1) / N of the sum twice, or (N - 1) parts once, whichever is less. The last columns state whether
every element is the float32 sum in rank order, and whether "joined" has the bits of two launches.

``--mode shots`` compares one-shot and two-shot calls, without and with the norm ("joined"), with
NCCL, at any number of rows. "Ours" and "joined" are the engine's choices between the two. "2-shot
few" has no flags, up to 256 rows.

``--mode sweep`` times other divisions of pagespec's calls into programs (``LaunchShape``). A norm
with another number of warps has other bits. ``--mode two-shot`` does so for two-shot calls, and
``--mode overlap`` times a matmul and its all-reduce, one after the other and beside each other.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(number=2)  # before torch is imported

import argparse
import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor

from pagespec.kernels.collectives.boxes import LaunchShape
from pagespec.kernels.collectives.communicator import Communicator
from pagespec.kernels.collectives.library import GatherCommunicator
from pagespec.kernels.collectives.symmetric import PeerCommunicator
from pagespec.kernels.fused import rms_norm as fused

_CALLS, _REPLAYS = 50, 7
_REPLAY_US, _GUESSED_GB_PER_S = 15_000, 150
_NAMES = ("ours", "NCCL", "one-shot", "two-shot", "+ norm", "joined", "flags", "no flags")
_NAMES = (*_NAMES, "1-shot+norm", "roofline")
_MAX_ROWS_WITHOUT_FLAGS = 1024
_EPS = 1e-6
# (bytes of a chunk, warps), without a norm; with one, (bytes, warps of a row).
_SHAPES = ((2048, 2), (2048, 4), (4096, 2), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (8192, 16))
_NEVER = 1 << 62
# Of two-shot calls: (rows of a block, lag), and (registers of a thread, programs).
_BLOCKS = ((1, 16), (1, 64), (2, 32), (4, 0), (4, 8), (4, 16), (4, 32), (8, 8), (8, 16))
_LIMITS = ((None, None), (40, None), (32, None), (64, 264), (64, 132), (64, 64), (64, 32), (64, 16))
_TWO_SHOT = LaunchShape(two_shot_bytes=0)
_PARTS = (2, 4)
_OVERLAPS: dict[str, dict[str, int]] = {
    "parts": {},
    "of 64 p": {"max_programs": 64, "max_registers": 64},
    "of 32 p": {"max_programs": 32, "max_registers": 64},
}
_NORM_SHAPES = ((4096, 4), (4096, 8), (4096, 16), (4096, 32), (8192, 8), (8192, 16))


def _num_calls(num_bytes: int, num_ranks: int) -> int:
    """The number of calls per replay, equal on all ranks: fewer of large ones."""
    expected_us = 5 + (num_ranks - 1) * num_bytes / _GUESSED_GB_PER_S / 1e3
    return max(4, min(_CALLS, int(_REPLAY_US / expected_us)))


def _microseconds(call: Callable[[], object], num_calls: int = _CALLS) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
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
        times.append(begin.elapsed_time(end) / num_calls * 1e3)
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


def _run(
    rank: int, num_ranks: int, port: int, widths: list[int], all_rows: list[int], modes: list[str]
) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=num_ranks, device_id=device
    )
    bandwidth = _peer_gb_per_s() if rank == 0 else 0.0
    if rank == 0:
        print(
            f"{num_ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL "
            f"{'.'.join(map(str, torch.cuda.nccl.version()))}, peer to peer {bandwidth:.0f} GB/s"
        )
    for mode, columns in itertools.product(modes, widths):
        if mode == "sweep":
            _sweep(rank, columns, all_rows)
        elif mode == "two-shot":
            _sweep_two_shot(rank, num_ranks, columns, all_rows)
        elif mode == "overlap":
            _overlap(rank, num_ranks, columns, all_rows)
        else:
            compare = _compare_shots if mode == "shots" else _compare
            compare(rank, num_ranks, columns, all_rows, bandwidth)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def _communicator(columns: int, all_rows: list[int], shape: LaunchShape) -> PeerCommunicator:
    device = torch.device("cuda", torch.cuda.current_device())
    ours = PeerCommunicator(GatherCommunicator(), device, shape=shape)
    ours.reserve((max(all_rows), 2 * columns))
    ours.connect()
    return ours


def _inputs(num_rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part, the residual and the norm's weight."""
    sizes = (num_rows, columns), (num_rows, columns), (columns,)
    x, residual, weight = (torch.randn(size, device="cuda").bfloat16() for size in sizes)
    torch.cuda.synchronize()  # a weight is read early
    return x, residual, weight


def _row(rank: int, *cells: object) -> None:
    if rank == 0:
        values = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
        print("".join(f"{value:>13}" for value in values), flush=True)


def _in_rank_order(x: Tensor, num_ranks: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(num_ranks)]
    dist.all_gather(parts, x)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(x.dtype)


def _roofline_us(num_bytes: int, num_ranks: int, bandwidth: float) -> float:
    factor = min(num_ranks - 1, 2 * (num_ranks - 1) / num_ranks)
    return factor * num_bytes / bandwidth / 1e3 if bandwidth else 0.0


def _compare_shots(
    rank: int, num_ranks: int, columns: int, all_rows: list[int], bandwidth: float
) -> None:
    groups = [
        _communicator(columns, all_rows, LaunchShape(few_two_shot_bytes=few, two_shot_bytes=least))
        for few, least in ((None, None), (_NEVER, _NEVER), (_NEVER, 0), (0, _NEVER))
    ]
    names = ["ours", "one-shot", "two-shot", "NCCL"]
    names += ["joined", "1-shot joined", "2-shot joined", "2-shot few", "NCCL + norm", "roofline"]
    _row(rank, f"rows x {columns}", *names, "rank order", "same bits")
    for num_rows in all_rows:
        x, residual, weight = _inputs(num_rows, columns)
        dist.broadcast(residual, 0)
        norm = (residual, weight, _EPS, "rounded")
        library = x.clone()

        def of_library(
            x: Tensor = library, residual: Tensor = residual, weight: Tensor = weight
        ) -> Tensor:
            dist.all_reduce(x)
            return fused.add_rms_norm(x, residual, weight, _EPS, "rounded")[0]

        want = _in_rank_order(x, num_ranks)
        is_same = all(torch.equal(each.all_reduce(x), want) for each in groups)
        apart = Communicator.all_reduce_norm(groups[1], x, *norm)
        is_alike = all(
            torch.equal(one, two)
            for each in groups
            for one, two in zip(each.all_reduce_norm(x, *norm), apart, strict=True)
        )
        calls: list[Callable[[], object]] = [
            *(partial(each.all_reduce, x) for each in groups[:3]),
            lambda x=library: dist.all_reduce(x),
            *(partial(each.all_reduce_norm, x, *norm) for each in groups),
            of_library,
        ]
        num_calls = _num_calls(x.nbytes, num_ranks)
        times = [_microseconds(call, num_calls) for call in calls]
        roofline = _roofline_us(x.nbytes, num_ranks, bandwidth)
        _row(rank, num_rows, *times, roofline, is_same, is_alike)


def _compare(
    rank: int, num_ranks: int, columns: int, all_rows: list[int], bandwidth: float
) -> None:
    import torch.distributed._symmetric_memory as symmetric

    ours, flagged, flagless = (
        _communicator(columns, all_rows, shape)
        for shape in (
            LaunchShape(),
            LaunchShape(few_rows=0, two_shot_bytes=_NEVER),
            LaunchShape(
                few_rows=_MAX_ROWS_WITHOUT_FLAGS, few_two_shot_bytes=_NEVER, two_shot_bytes=_NEVER
            ),
        )
    )
    group = dist.group.WORLD.group_name
    _row(rank, f"rows x {columns}", *_NAMES, "rank order", "same bits")
    for num_rows in all_rows:
        x, residual, weight = _inputs(num_rows, columns)
        norm = (residual, weight, _EPS, "rounded")
        is_same = torch.equal(ours.all_reduce(x), _in_rank_order(x, num_ranks))
        shared = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(shared, group)
        library = x.clone()

        def of_torch(
            x: Tensor = shared, residual: Tensor = residual, weight: Tensor = weight
        ) -> Tensor:
            total = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group)
            return F.rms_norm(residual + total.view(residual.shape), weight.shape, weight, _EPS)

        apart = Communicator.all_reduce_norm(ours, x, *norm)
        is_alike = all(
            torch.equal(one, two)
            for each in (ours, flagged, flagless)
            for one, two in zip(each.all_reduce_norm(x, *norm), apart, strict=True)
        )
        calls: list[Callable[[], object]] = [
            partial(ours.all_reduce, x),
            lambda x=library: dist.all_reduce(x),
            lambda x=shared: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group),
            lambda x=shared: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group),
            partial(Communicator.all_reduce_norm, ours, x, *norm),
            *(partial(each.all_reduce_norm, x, *norm) for each in (ours, flagged, flagless)),
            of_torch,
        ]
        num_calls = _num_calls(x.nbytes, num_ranks)
        times = [_microseconds(call, num_calls) for call in calls]
        roofline = _roofline_us(x.nbytes, num_ranks, bandwidth)
        _row(rank, num_rows, *times, roofline, is_same, is_alike)


def _sweep(rank: int, columns: int, all_rows: list[int]) -> None:
    for title, shapes in (("all-reduce", _SHAPES), ("joined", _NORM_SHAPES)):
        is_joined = title == "joined"
        cut = [
            LaunchShape(size, norm_warps=warps, few_rows=0, two_shot_bytes=_NEVER)
            if is_joined
            else LaunchShape(size, warps, two_shot_bytes=_NEVER)
            for size, warps in shapes
        ]
        groups = [_communicator(columns, all_rows, shape) for shape in cut]
        _row(rank, title, *(f"{size} B, {warps} w" for size, warps in shapes))
        for num_rows in all_rows:
            x, *norm = *_inputs(num_rows, columns), _EPS, "rounded"
            calls: list[Callable[[], object]] = [
                partial(ours.all_reduce_norm, x, *norm)
                if is_joined
                else partial(ours.all_reduce, x)
                for ours in groups
            ]
            _row(rank, num_rows, *map(_microseconds, calls))


def _sweep_two_shot(rank: int, num_ranks: int, columns: int, all_rows: list[int]) -> None:
    """Two-shot calls with the norm: rows of blocks, and the lag of steps in units; then registers
    per thread, and the number of programs."""
    groups = [
        (LaunchShape(two_shot_bytes=0, block_rows=block_rows, lag=lag), f"{block_rows}, {lag}")
        for block_rows, lag in _BLOCKS
    ]
    _sweep_shapes(rank, num_ranks, columns, all_rows, "rows, lag", groups)
    default = LaunchShape(two_shot_bytes=0)
    groups = [
        (
            dataclasses.replace(default, max_registers=registers, max_programs=programs),
            f"{registers} r, {programs} p",
        )
        for registers, programs in _LIMITS
    ]
    _sweep_shapes(rank, num_ranks, columns, all_rows, "limits", groups)


def _sweep_shapes(
    rank: int,
    num_ranks: int,
    columns: int,
    all_rows: list[int],
    title: str,
    groups: list[tuple[LaunchShape, str]],
) -> None:
    _row(rank, title, *(name for _, name in groups))
    communicators = [_communicator(columns, all_rows, shape) for shape, _ in groups]
    for num_rows in all_rows:
        x, residual, weight = _inputs(num_rows, columns)
        norm = (residual, weight, _EPS, "rounded")
        num_calls = _num_calls(x.nbytes, num_ranks)
        _row(
            rank,
            num_rows,
            *(
                _microseconds(partial(each.all_reduce_norm, x, *norm), num_calls)
                for each in communicators
            ),
        )


def _overlap(rank: int, num_ranks: int, columns: int, all_rows: list[int]) -> None:
    """A row-parallel matmul, then its all-reduce with the norm: whole, and in parts of the rows,
    where the all-reduce of a part runs in another stream beside the matmul of the next one."""
    groups = {
        name: _communicator(columns, all_rows, dataclasses.replace(_TWO_SHOT, **limits))
        for name, limits in _OVERLAPS.items()
    }
    names = [f"{n} {name}" for name in groups for n in _PARTS]
    _row(rank, "rows x K", "matmul", "joined", "in sequence", *names)
    for k_size, num_rows in itertools.product((2048, 6400, 12800), all_rows):
        x = torch.randn(num_rows, k_size, device="cuda").bfloat16()
        weight = torch.randn(columns, k_size, device="cuda").bfloat16() / k_size**0.5
        part, residual, norm_weight = _inputs(num_rows, columns)
        first = next(iter(groups.values()))
        calls: list[Callable[[], object]] = [
            partial(F.linear, x, weight),
            partial(first.all_reduce_norm, part, residual, norm_weight, _EPS, "rounded"),
            *(
                partial(_in_parts, ours, num_parts, x, weight, residual, norm_weight)
                for ours, num_parts in [(first, 1), *itertools.product(groups.values(), _PARTS)]
            ),
        ]
        num_calls = _num_calls(part.nbytes, num_ranks)
        _row(rank, f"{num_rows} x {k_size}", *(_microseconds(call, num_calls) for call in calls))


_SIDE: list[torch.cuda.Stream] = []


def _in_parts(
    ours: PeerCommunicator,
    num_parts: int,
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm: Tensor,
) -> object:
    if num_parts == 1:
        return ours.all_reduce_norm(F.linear(x, weight), residual, norm, _EPS, "rounded")
    if not _SIDE:
        _SIDE.append(torch.cuda.Stream(priority=-1))
    main, kept = torch.cuda.current_stream(), []
    for rows, residual_rows in zip(x.chunk(num_parts), residual.chunk(num_parts), strict=True):
        kept.append(F.linear(rows, weight))  # not freed while the other stream reads it
        _SIDE[0].wait_stream(main)
        with torch.cuda.stream(_SIDE[0]):
            kept.append(ours.all_reduce_norm(kept[-1], residual_rows, norm, _EPS, "rounded"))
    main.wait_stream(_SIDE[0])
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--columns", type=int, nargs="+", default=[4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256, 1024, 8192])
    modes = ("table", "shots", "sweep", "two-shot", "overlap")
    parser.add_argument("--mode", choices=modes, nargs="+", default=["table"])
    options = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True).port
    arguments = (options.num_ranks, port, options.columns, options.rows, options.mode)
    multiprocessing.spawn(_run, arguments, options.num_ranks)


if __name__ == "__main__":
    main()
