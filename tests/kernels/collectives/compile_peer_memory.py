"""Compile all-reduces fused with their norm, and the norm alone, as if on an H100.

Prints properties of the results (JSON). The launches are compiled but not executed, so no GPU is
needed. ``test_peer_memory.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from pagespec.kernels.arch import Arch
from pagespec.kernels.collectives import symmetric
from pagespec.kernels.collectives.boxes import Boxes, Capacity, LaunchShape
from pagespec.kernels.collectives.communicator import LoneRank
from pagespec.kernels.collectives.peer_memory import all_reduce_norm_kernel, few_rows_norm_kernel
from pagespec.kernels.collectives.symmetric import PeerCommunicator
from pagespec.kernels.collectives.two_shot import few_rows_two_shot_kernel, two_shot_kernel
from pagespec.kernels.fused import rms_norm
from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.matmul import dispatch
from pagespec.kernels.matmul.sm90.matmul_sm90 import skinny_kernel
from pagespec.kernels.matmul.tuned_tiles import PrefetchTile
from pagespec.kernels.registry import registry
from tests.kernels.jit.parallel_build_cases import FakeDriver

_RANK, _NUM_RANKS, _ADDRESS = 1, 2, 0x7F00_0000_0000


def make_boxes(capacity: Capacity, shape: LaunchShape, num_ranks: int, _device: object) -> Boxes:
    memory = torch.empty(sum(Boxes.num_bytes(capacity, shape, num_ranks)), dtype=torch.uint8)
    addresses = [_ADDRESS + rank * (1 << 30) for rank in range(num_ranks)]
    return Boxes.over(memory, addresses, capacity, shape)


def compiled(kernel: Any) -> Any:
    """What the last launch has made."""
    return list(kernel.device_caches[0][0].values())[-1].asm


def order_of_additions(asm: Any) -> list[str]:
    """The layout of the row that is added up, then the steps between threads."""
    # Integers are reduced as well.
    kinds = re.findall(r'"tt\.reduce".*?\(tensor<(\w+), (#\w+)>\)', asm["ttgir"], re.S)
    (kind,) = {kind for of, kind in kinds if of.endswith("f32")}
    (layout,) = re.findall(rf"^{kind} = (.*)$", asm["ttgir"], re.M)
    steps = re.findall(r"shfl\.sync\.bfly\.b32 .*?, (\d+), (\d+), -1", asm["ptx"])
    # What else is reduced, of integers, comes before, and begins with one step for a warp.
    last = max((n for n, step in enumerate(steps) if step[0] == "16"), default=0)
    return [layout, *map(" ".join, steps[last:])]


def events(ptx: str) -> str:
    """The order of (l)oads of rows, other loads (o), (d)ependents' start, the (w)ait, (s)tores of
    rows, (b)arriers, the (f)lag, the (p)olls of one, the looks for (m)issing data."""
    kinds = {
        r"ld\.volatile\.global\.v\d": "m",
        r"ld\.global(?:\.cg)?\.v\d": "l",
        r"ld\.global\.sys\.acquire": "p",
        r"ld\.global": "o",
        r"griddepcontrol\.launch_dependents": "d",
        r"griddepcontrol\.wait": "w",
        r"st\.global\.v\d": "s",
        r"bar\.sync": "b",
        r"atom\.global\.sys\.release": "f",
    }
    found = re.finditer("|".join(f"({pattern})" for pattern in kinds), ptx)
    return "".join(list(kinds.values())[match.lastindex - 1] for match in found if match.lastindex)


def check_compiled_before_ranks_meet(ours: PeerCommunicator, fake: FakeDriver) -> None:
    x = torch.ones(3, 48, dtype=torch.bfloat16)

    def call_all() -> Tensor:
        normed, _ = ours.all_reduce_norm(ours.all_reduce(x), x, x[0], 1e-6, "wide")
        return ours.all_gather(normed, [40, 48])

    torch.cuda.device = lambda _: nullcontext()  # type: ignore
    with parallel_build(torch.device("cuda", 0)):
        expected = call_all()
    assert torch.equal(call_all(), expected)  # until then a rank computes by itself
    assert (len(fake.loaded), fake.launched) == (3, [])
    ours.connect()
    call_all()
    assert (len(fake.loaded), len(fake.launched)) == (3, 3)


def pushed(few: PeerCommunicator) -> list[str]:
    """The events of a matmul that pushes its results, and of the sum behind it."""
    found = registry().find("few_rows_matmul", "bfloat16", Arch("sm90", has_gluon=True))
    dispatch.few_rows_kernel = lambda *_, **__: (found, PrefetchTile(32, 4, 8))  # type: ignore
    dispatch.supports_tma = lambda _: True  # type: ignore
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (2, 4096))
    dispatch.RowParallel(few).linear_norm(x, weight, 16, x, weight[0], 1e-6, "rounded")
    kernels = skinny_kernel, few_rows_norm_kernel
    return [events(compiled(kernel)["ptx"]) for kernel in kernels]


def main() -> None:
    fake = FakeDriver()
    driver.set_active(fake)  # type: ignore[arg-type]
    options = {"PDL": True, "launch_pdl": True}
    symmetric.overlap_options = rms_norm.overlap_options = lambda _: options  # type: ignore
    device = torch.device("cpu")
    few, ours = (
        PeerCommunicator(LoneRank(_RANK, _NUM_RANKS), device, make_boxes, LaunchShape(few_rows=n))
        for n in (3, 0)
    )
    ours.reserve((64, 1))
    check_compiled_before_ranks_meet(ours, fake)
    few.reserve((64, 1))
    few.connect()
    many = PeerCommunicator(LoneRank(_RANK, 4), device, make_boxes, LaunchShape(two_shot_bytes=0))
    owned = PeerCommunicator(
        LoneRank(_RANK, 4),
        device,
        make_boxes,
        LaunchShape(few_row_bytes=1 << 15, few_two_shot_bytes=0),
    )
    for of_owners in (many, owned):
        of_owners.reserve((64, 4 * 5120))
        of_owners.connect()
    answer = []
    for name, width, gap in json.loads(sys.argv[1]):
        dtype: torch.dtype = getattr(torch, name)
        x = torch.empty(3, width + gap, dtype=dtype)[:, :width]
        norm = (torch.empty(width, dtype=dtype), 1e-6, "rounded")
        few.all_reduce_norm(x, x, *norm)
        ours.all_reduce_norm(x, x, *norm)
        rms_norm.add_rms_norm(x, x, *norm)
        many.all_reduce_norm(x, x, *norm)
        owned.all_reduce_norm(x, x, *norm)
        kernels = few_rows_norm_kernel, all_reduce_norm_kernel, two_shot_kernel
        kernels = *kernels, few_rows_two_shot_kernel, rms_norm._norm_kernel
        made = [compiled(kernel) for kernel in kernels]
        orders = [order_of_additions(asm) for asm in made]
        answer.append([orders, *(events(asm["ptx"]) for asm in made[:4])])
    print(json.dumps([answer, pushed(few)]))


if __name__ == "__main__":
    main()
