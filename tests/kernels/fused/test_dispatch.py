"""The fused Triton kernels under Triton's interpreter, against torch's own operations.

Without a norm, the rotation is compared bit for bit. Elsewhere the tolerance is one unit in the
last place in 16 bits, and four in float32: means are summed in another order, and ``exp`` comes
from another library.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.fused.dispatch import rope_table

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="Triton's interpreter is off: the kernels are compiled here, not interpreted",
    ),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS: list[fused.NormForm] = ["rounded", "wide", "plus_one"]
_INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance between ``a`` and ``b`` in representable numbers of their dtype."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    ordered = []
    for x in (a, b):
        bits = x.contiguous().view(_INTEGERS[x.dtype]).long()
        smallest = torch.iinfo(_INTEGERS[x.dtype]).min
        ordered.append(torch.where(bits < 0, smallest - bits, bits))
    return int((ordered[0] - ordered[1]).abs().max())


def test_ulps_counts_representable_numbers() -> None:
    one = torch.ones(1, dtype=torch.bfloat16)
    assert ulps(one, one) == 0
    assert ulps(one, one + 2**-7) == 1
    assert ulps(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    assert ulps(torch.tensor([2.0**-149]), torch.tensor([-(2.0**-149)])) == 2


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 256, 1000])
def test_norms(width: int, dtype: torch.dtype, form: fused.NormForm) -> None:
    from pagespec.kernels.fused import rms_norm

    merged = normal(7, 2 * width + 3, dtype=dtype, scale=3.0)
    x, residual = merged[:, :width].unsqueeze(0), merged[:, width : 2 * width].unsqueeze(0)
    weight = normal(width, dtype=dtype, seed=1)
    out = rms_norm.rms_norm(x, weight, 1e-6, form)
    expected = fused.rms_norm(x, weight, 1e-6, form)
    limit = 4 if dtype == torch.float32 else 1
    assert ulps(out, expected) <= limit
    assert (out != expected).float().mean() < (0.4 if dtype == torch.float32 else 0.005)

    out, hidden = rms_norm.add_rms_norm(x, residual, weight, 1e-6, form)
    expected, expected_hidden = fused.add_rms_norm(x, residual, weight, 1e-6, form)
    assert torch.equal(hidden, expected_hidden)
    assert ulps(out, expected) <= limit


def test_norm_of_heads_first_keeps_the_layout() -> None:
    from pagespec.kernels.fused import rms_norm

    x = normal(1, 5, 3, 16, dtype=torch.float32).transpose(1, 2)
    weight = normal(16, dtype=torch.float32, seed=1)
    out = rms_norm.rms_norm(x, weight, 1e-6, "plus_one")
    expected = fused.rms_norm(x, weight, 1e-6, "plus_one")
    assert out.stride() == expected.stride()
    assert ulps(out, expected) <= 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    from pagespec.kernels.fused import rms_norm

    x, residual = normal(9, 96, dtype=dtype), normal(9, 96, dtype=dtype, seed=1)
    weight = normal(96, dtype=dtype, seed=2)
    whole = rms_norm.add_rms_norm(x, residual, weight, 1e-6, "rounded")
    plain = rms_norm.rms_norm(x, weight, 1e-6, "rounded")
    rope = Rope(num_tokens=9, dtype=dtype)
    turned = rope.run_triton(0, 9)
    for begin, end in ((0, 1), (3, 5), (8, 9), (1, 8)):
        part = rms_norm.add_rms_norm(x[begin:end], residual[begin:end], weight, 1e-6, "rounded")
        assert torch.equal(part[0], whole[0][begin:end])
        assert torch.equal(part[1], whole[1][begin:end])
        part = rms_norm.rms_norm(x[begin:end], weight, 1e-6, "rounded")
        assert torch.equal(part, plain[begin:end])
        some = rope.run_triton(begin, end)
        slots = rope.slots[begin:end]
        assert torch.equal(some[0], turned[0][begin:end])
        for cache, whole_cache in zip(some[1:], turned[1:], strict=True):
            assert torch.equal(cache.flatten(0, 1)[slots], whole_cache.flatten(0, 1)[slots])


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_programs_of_several_tokens_have_the_same_bits(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagespec.kernels.fused import norm_rope_store

    sizes = {"hq": 12, "hkv": 6, "dim": 128, "v_dim": 64, "rotary_dim": 64}
    rope = Rope(num_tokens=num_tokens, **sizes, dtype=torch.bfloat16, is_contiguous=True)

    def at_once() -> int:
        return norm_rope_store.tokens_at_once(1024, rope.cos, rope.sin, rope.caches[0])

    expected = rope.run_triton(0, num_tokens)
    assert at_once() == 1
    monkeypatch.setattr(norm_rope_store, "_MANY_TOKENS", 1)
    assert at_once() > 1
    for out, single in zip(rope.run_triton(0, num_tokens), expected, strict=True):
        assert torch.equal(out, single)
    # Angles that do not allow 16 bytes at once, and heads of too few elements.
    assert norm_rope_store.tokens_at_once(1024, rope.cos[..., 4:], rope.sin, rope.caches[0]) == 1
    assert norm_rope_store.tokens_at_once(512, rope.cos, rope.sin, rope.caches[0]) == 1


class Rope:
    """Operands of ``norm_rope_store`` as slices of one tensor, for ``num_tokens`` tokens."""

    def __init__(
        self,
        *,
        num_tokens: int = 5,
        hq: int = 6,
        hkv: int = 2,
        dim: int = 16,
        v_dim: int = 16,
        rotary_dim: int = 16,
        half_table: bool = False,
        form: fused.NormForm | None = "rounded",
        dtype: torch.dtype = torch.float32,
        is_contiguous: bool = False,
    ) -> None:
        sizes = [hq * dim, hkv * dim, hkv * v_dim]
        merged = normal(num_tokens, sum(sizes), dtype=dtype, scale=2.0)
        parts = merged.split(sizes, -1)
        self.qkv = [
            part.view(num_tokens, heads, -1)
            for part, heads in zip(parts, (hq, hkv, hkv), strict=True)
        ]
        width = rotary_dim // 2 if half_table else rotary_dim
        angles = normal(1, width, num_tokens, dtype=torch.float32, seed=3, scale=9.0)
        # Strided, as the matmul of frequencies and positions leaves them; or as the kernel does.
        angles = angles.transpose(1, 2)
        angles = angles.contiguous() if is_contiguous else angles
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.rotary_dim = rotary_dim
        self.weights = [None, None]
        if form is not None:
            self.weights = [normal(dim, dtype=dtype, seed=s) for s in (4, 5)]
        self.form = form or "rounded"
        self.slots = (torch.arange(num_tokens) * 7 + 2) % 24
        self.caches = [normal(7, 4, hkv, d, dtype=dtype, seed=s) for d, s in ((dim, 6), (v_dim, 7))]

    def run_triton(self, begin: int, end: int) -> list[Tensor]:
        from pagespec.kernels.fused import norm_rope_store

        return self._run(norm_rope_store.norm_rope_store, begin, end)

    def run_torch(self) -> list[Tensor]:
        return self._run(fused.norm_rope_store, 0, len(self.slots))

    def _run(self, function, begin: int, end: int) -> list[Tensor]:
        caches = [cache.clone() for cache in self.caches]
        out = function(
            RopeInputs(
                *(x[begin:end] for x in self.qkv),
                self.cos[:, begin:end],
                self.sin[:, begin:end],
                self.rotary_dim,
                *self.weights,
                1e-6,
                self.form,
            ),
            *caches,
            self.slots[begin:end],
        )
        return [out, *caches]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"half_table": True},
        {"dim": 12, "rotary_dim": 6, "v_dim": 20},
        {"hq": 5, "hkv": 1, "dim": 24, "rotary_dim": 24},
        {"hq": 12, "hkv": 12, "dim": 256, "rotary_dim": 256, "v_dim": 64, "num_tokens": 3},
    ],
    ids=str,
)
def test_rotation_and_store_are_bit_equal(shape: dict, dtype: torch.dtype) -> None:
    rope = Rope(**shape, form=None, dtype=dtype)
    for out, expected in zip(rope.run_triton(0, len(rope.slots)), rope.run_torch(), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_after_a_norm(dtype: torch.dtype, form: fused.NormForm) -> None:
    rope = Rope(num_tokens=11, dim=32, rotary_dim=32, form=form, dtype=dtype)
    out, k_cache, v_cache = rope.run_triton(0, 11)
    expected, expected_k, expected_v = rope.run_torch()
    assert torch.equal(v_cache, expected_v)
    # A sum of two terms that cancel magnifies a last place: compare with the size of the terms.
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in ((out, expected), (k_cache, expected_k)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert (a != b).float().mean() < (0.4 if dtype == torch.float32 else 0.005)


def test_padding_may_share_a_slot_of_the_null_block() -> None:
    rope = Rope(num_tokens=6)
    rope.slots = torch.tensor([3, 24, 9, 24, 24, 0])
    out, k_cache, v_cache = rope.run_triton(0, 6)
    expected, expected_k, expected_v = rope.run_torch()
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(k_cache[:6], expected_k[:6], rtol=2e-6, atol=2e-6)
    assert torch.equal(v_cache[:6], expected_v[:6])
    assert torch.equal(v_cache[6, 1:], rope.caches[1][6, 1:])
    assert any(torch.equal(v_cache[6, 0], rope.qkv[2][i]) for i in (1, 3, 4))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [96, 1500])
def test_activations(width: int, dtype: torch.dtype, kind: fused.Activation) -> None:
    from pagespec.kernels.fused import activation

    gate_up = normal(1, 5, 2 * width, dtype=dtype, scale=3.0)
    gate, up = gate_up.chunk(2, dim=-1)
    out = activation.act_mul(gate, up, kind)
    expected = fused.act_mul(gate, up, kind)
    assert out.stride() == expected.stride()
    if kind == "gelu_tanh":
        # 1 + tanh(u) cancels far below zero, where a last place of tanh is many of the result.
        far = gate < -1.0
        torch.testing.assert_close(out[far], expected[far], rtol=1e-2, atol=1e-5)
        out, expected = out[~far], expected[~far]
    assert ulps(out, expected) <= (4 if dtype == torch.float32 else 1)
    assert (out != expected).float().mean() < (0.4 if dtype == torch.float32 else 0.005)


def test_no_rows() -> None:
    from pagespec.kernels.fused import activation, rms_norm

    x, weight = torch.empty(1, 0, 32), torch.ones(32)
    assert rms_norm.rms_norm(x, weight, 1e-6, "wide").shape == (1, 0, 32)
    assert rms_norm.add_rms_norm(x, x, weight, 1e-6, "wide")[1].shape == (1, 0, 32)
    assert activation.act_mul(x, x, "silu").shape == (1, 0, 32)
    assert Rope().run_triton(0, 0)[0].shape == (0, 6, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("half", "scaling"), [(8, 1.0), (24, 1.3), (64, 0.7)])
def test_the_table_of_angles(half: int, scaling: float, dtype: torch.dtype) -> None:
    from pagespec.kernels.fused import rope_cos_sin

    frequencies = (10_000.0 ** -torch.linspace(0, 1, half))[None, :, None].expand(1, -1, 1)
    positions = torch.tensor([0, 1, 7, 300, 4095, 40_959, 12])[None, None, :]
    # As the graph has it: one of several strides.
    positions = torch.stack((positions, positions), dim=-1)[..., 0]
    expected = rope_table(frequencies, positions, scaling, dtype)
    found = rope_cos_sin.rope_table(frequencies, positions, scaling, dtype)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape == (1, 7, 2 * half)
        assert (a.float() - b.float()).abs().max() <= 4 * torch.finfo(dtype).eps
        assert torch.equal(b[..., :half], b[..., half:])
