"""A rotation in complex numbers is rewritten in real ones, with equal values for any number of
rows.

Other uses of complex numbers are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pagespec.compile.captured_model import capture_model
from pagespec.compile.fx.nodes import example
from pagespec.compile.load.load import load_model
from pagespec.compile.passes import PassContext
from pagespec.compile.passes.write_as_real import write_as_real
from pagespec.compile.probe.probe import probe_model
from tests.support.captures import graph_cache
from tests.support.models import tiny_model

Rotation = Callable[[Tensor, Tensor], Any]


def heads_first(x: Tensor, angles: Tensor) -> Tensor:
    """As DeepSeek-V2 has it: ``x [1, T, H, D]``, ``angles [1, T, D / 2]``."""
    table = torch.polar(torch.ones_like(angles), angles) * 1.25
    x = x.transpose(1, 2)
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    out = torch.view_as_real(z * table.unsqueeze(1).to(x.device)).flatten(3)
    return out.type_as(x).transpose(1, 2)


def tokens_first(x: Tensor, angles: Tensor) -> Tensor:
    """As Llama 4 has it."""
    table = torch.polar(torch.ones_like(angles), angles) * 1.25
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * table[:, :, None, :]).flatten(3).type_as(x)


def other_words(x: Tensor, angles: Tensor) -> Tensor:
    """A table made of its two parts; the parts of the complex multiplication are read singly."""
    table = torch.complex(angles.cos(), angles.sin())
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    table = table.unsqueeze(-1).transpose(2, 3).expand(-1, -1, x.shape[2], -1)
    out = 1.25 * table * z
    return torch.stack((torch.real(out), out.imag), -1).flatten(3).type_as(x)


def expected(x: Tensor, angles: Tensor) -> Tensor:
    angles = angles.contiguous()
    c, s = (angles.cos() * 1.25)[:, :, None], (angles.sin() * 1.25)[:, :, None]
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(3).to(x.dtype)


def inputs(num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    return (
        torch.randn(1, num_tokens, num_heads, dim).to(dtype),
        torch.randn(1, dim // 2, num_tokens).transpose(1, 2) * 100,
    )


class Rewritten:
    """A function, retraced for each shape and rewritten; counts complex calls removed and left."""

    def __init__(self, function: Callable[..., Any]) -> None:
        torch._dynamo.reset()
        self.run = torch.compile(function, backend=self._rewrite, fullgraph=True, dynamic=False)

    def _rewrite(self, gm: GraphModule, _: object) -> Callable[..., Any]:
        before = calls_of(gm)
        count = write_as_real(gm, PassContext(nn.Module(), {}))
        gm.graph.lint()
        gm.recompile()
        self.counts = count, num_complex(gm)
        self.is_unchanged = calls_of(gm) == before
        return gm.forward


def calls_of(gm: GraphModule) -> list[object]:
    return [(node.op, node.target, node.args, node.kwargs) for node in gm.graph.nodes]


def num_complex(gm: GraphModule) -> int:
    found = map(example, gm.graph.nodes)
    return sum(isinstance(value, Tensor) and value.is_complex() for value in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rotation", "num_calls"), [(heads_first, 6), (tokens_first, 5), (other_words, 7)]
)
def test_a_rotation_is_written_in_real_numbers(
    rotation: Rotation, num_calls: int, dtype: torch.dtype
) -> None:
    for num_heads, dim in ((1, 8), (3, 24), (16, 64)):
        rewritten = Rewritten(rotation)
        x, angles = inputs(7, num_heads, dim, dtype)
        found = rewritten.run(x, angles)
        assert rewritten.counts == (num_calls, 0)
        assert torch.equal(found, expected(x, angles))
        torch.testing.assert_close(found, rotation(x, angles))
        # torch's complex multiplication is not row-invariant for one head of 8.
        for num_tokens in (1, 3):
            part = rewritten.run(x[:, :num_tokens], angles[:, :num_tokens])
            assert torch.equal(part, found[:, :num_tokens])


def test_a_table_with_sizes_of_its_own() -> None:
    def rotation(x: Tensor, angles: Tensor) -> Tensor:
        table = torch.polar(angles.abs(), angles)[:, :, None]
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table)

    rewritten = Rewritten(rotation)
    x, angles = inputs(5, 2, 8, torch.float32)
    torch.testing.assert_close(rewritten.run(x, angles), rotation(x, angles))
    assert rewritten.counts == (4, 0)


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def spectrum(x: Tensor, angles: Tensor) -> Any:
    return torch.fft.irfft(torch.fft.rfft(x.float()) * 2.0)


def conjugate(x: Tensor, angles: Tensor) -> Any:
    return torch.view_as_real(
        pairs(x) * torch.polar(angles, angles)[:, :, None].conj().resolve_conj()
    )


def magnitude(x: Tensor, angles: Tensor) -> Any:
    return (pairs(x) * torch.polar(angles, angles)[:, :, None]).abs()


def result(x: Tensor, angles: Tensor) -> Any:
    return pairs(x) * torch.polar(angles, angles)[:, :, None]


def in_place(x: Tensor, angles: Tensor) -> Any:
    z = pairs(x) * 2.0
    z.mul_(torch.polar(angles, angles)[:, :, None])
    return torch.view_as_real(z)


def parts_in_place(x: Tensor, angles: Tensor) -> Any:
    z = pairs(x) * torch.polar(angles, angles)[:, :, None]
    torch.view_as_real(z).add_(1.0)
    return z.real


def imaginary_factor(x: Tensor, angles: Tensor) -> Any:
    return torch.view_as_real(pairs(x) * 1j)


def rows_by_number(x: Tensor, angles: Tensor) -> Any:
    rows = torch.arange(x.shape[1]).flip(0)
    return torch.view_as_real(torch.polar(angles, angles)[:, rows])


def double(x: Tensor, angles: Tensor) -> Any:
    angles = angles.double()
    return torch.view_as_real(torch.polar(angles, angles))


def sum_of_numbers(x: Tensor, angles: Tensor) -> Any:
    return torch.view_as_real(pairs(x) + torch.polar(angles, angles)[:, :, None])


@pytest.mark.parametrize(
    "function",
    [
        spectrum, conjugate, magnitude, result, in_place, parts_in_place, imaginary_factor,
        rows_by_number, double, sum_of_numbers,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_what_is_not_known_stays(function: Rotation) -> None:
    rewritten = Rewritten(function)
    x, angles = inputs(5, 2, 8, torch.float32)
    assert torch.equal(rewritten.run(x, angles), function(x, angles))
    assert rewritten.counts[0] == 0 < rewritten.counts[1]
    assert rewritten.is_unchanged


def test_a_rotation_beside_other_complex_numbers_is_written() -> None:
    def both(x: Tensor, angles: Tensor) -> Any:
        return tokens_first(x, angles), spectrum(x, angles)

    rewritten = Rewritten(both)
    x, angles = inputs(5, 2, 8, torch.float32)
    found = rewritten.run(x, angles)
    assert torch.equal(found[0], expected(x, angles))
    assert torch.equal(found[1], spectrum(x, angles))
    assert rewritten.counts == (5, 2)


# Two layers rotate queries and keys; of Llama 4's tiny model one does.
@pytest.mark.parametrize(("arch", "num_calls"), [("deepseek_v2", 11), ("llama4_text", 8)])
def test_models_have_no_complex_numbers_left(arch: str, num_calls: int) -> None:
    loaded = load_model(tiny_model(arch).to(torch.bfloat16))
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    assert captured.rewrites["write_as_real"] == num_calls
    assert captured.graph is not None
    assert num_complex(captured.graph) == 0
