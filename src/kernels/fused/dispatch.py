"""Fused operations (RMSNorm, activation, RoPE with KV store), which fusion passes insert into
graphs.

These are plain functions. On a GPU each is one Triton kernel. Elsewhere each runs exactly the
operations that it replaces, so a rewritten graph computes the bits of the original. The kernels
round where those operations round (arithmetic in float32, one rounding per operation). Only the
order of additions inside a mean differs, and it is the same for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from .. import e4m3
from ..arguments import RopeInputs

NormForm = Literal["rounded", "wide", "plus_one"]
"""How an RMSNorm applies its weight to the normalised float32 value y of an input of some dtype:
``weight * y.to(dtype)``, ``(weight * y).to(dtype)``, or ``(y * (1 + weight.float())).to(dtype)``.
"""
Activation = Literal["silu", "gelu_tanh"]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _on_gpu(module: str) -> Callable[[_Function], _Function]:
    """On a GPU, replace the decorated function by the function of the same name in ``module``. The
    device of the first argument, or of its first field, decides."""

    def decorate(reference: _Function) -> _Function:
        @cache
        def kernel() -> Any:
            # Triton is installed only on machines with a GPU.
            return getattr(import_module(f"{__package__}.{module}"), reference.__name__)

        @wraps(reference)
        def call(*args: Any, **kwargs: Any) -> Any:
            first: Tensor = args[0][0] if isinstance(args[0], tuple) else args[0]
            by = kernel() if first.device.type == "cuda" else reference
            return by(*args, **kwargs)

        return cast(_Function, call)

    return decorate


@_on_gpu("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """RMSNorm of ``x [..., N]`` over its last dim with ``weight [N]``, both of one dtype."""
    return rms_norm_reference(x, weight, eps, form)


@_on_gpu("rms_norm")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: NormForm
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of h, h) with h = ``residual + x``, all ``[..., N]`` of one dtype."""
    hidden = residual + x
    return rms_norm_reference(hidden, weight, eps, form), hidden


@_on_gpu("rms_norm")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """``rms_norm(x) * silu(gate)``, where the second factor and the multiplication are in float32,
    rounded once.

    Args:
        x: ``[R, N]``. weight: ``[N]``. eps, form: see :func:`rms_norm`.
        gate: ``[R, N]``, or ``[1, T, H, N]`` with R = T * H; of the dtype of x.

    Returns:
        ``[R, N]`` in the dtype of x.
    """
    normed = rms_norm_reference(x, weight, eps, form)
    return (normed * torch.nn.functional.silu(gate.reshape(x.shape).float())).to(x.dtype)


@_on_gpu("activation")
def act_mul(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """``activation(gate) * up``, elementwise over ``[..., N]``; both may be slices of a matmul's
    result."""
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@_on_gpu("norm_rope_store")
def norm_rope_store(
    inputs: RopeInputs, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Normalise (if weights are given) and rotate queries and keys; store keys and values.

    Args:
        inputs: :class:`.arguments.RopeInputs`.
        k_cache: ``[num_blocks + 1, block_size, Hkv, D]``. v_cache: likewise with Dv.
        slot_mapping: int64 ``[T]``; tokens of padding point into the null block.

    Returns:
        The rotated queries ``[T, Hq, D]``.
    """
    query, key, value, cos, sin, rotary_dim, q_weight, k_weight, eps, form = inputs
    if q_weight is not None and k_weight is not None:
        query = rms_norm_reference(query, q_weight, eps, form)
        key = rms_norm_reference(key, k_weight, eps, form)
    key = rotate_reference(key, cos, sin, rotary_dim)
    kv_store(key, value, k_cache, v_cache, slot_mapping)
    return rotate_reference(query, cos, sin, rotary_dim)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """:func:`rms_norm` with the operations of Hugging Face's modules."""
    wide = x.to(torch.float32)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "rounded":
        return weight * y.to(x.dtype)
    if form == "wide":
        return (weight * y).to(x.dtype)
    return (y * (1.0 + weight.float())).to(x.dtype)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Rotate ``x [T, H, D]`` by ``cos`` and ``sin`` ``[1, T, R or R / 2]``, as in Hugging Face's
    modules."""
    cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    if cos.shape[-1] == rotary_dim:
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    else:
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


@_on_gpu("rope_cos_sin")
def rope_table(
    frequencies: Tensor, positions: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles ``frequencies * positions`` of a packed batch.

    Args:
        frequencies: float32 ``[1, H, 1]``. positions: int64 ``[1, 1, T]``.
        scaling: factor on cosines and sines, before they are rounded.
        dtype: of the results.

    Returns:
        cos, sin: ``[1, T, 2 H]``, contiguous; the angles twice, side by side.
    """
    angles = (frequencies * positions.float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def kv_store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write ``key [T, Hkv, Dk]`` and ``value [T, Hkv, Dv]`` into the caches at ``slot_mapping``.

    Caches are contiguous ``[num_blocks + 1, block_size, Hkv, D]``, or contain rows or planes of
    :mod:`..e4m3`. ``slot_mapping`` is int64 ``[T]``; slot = block id * block_size + offset.
    Repeated slots (those of padding tokens, in the null block) end with any one of the values.
    """
    if e4m3.are_planes(k_cache):
        e4m3.store_planes(k_cache, slot_mapping, key)
        e4m3.store_planes(v_cache, slot_mapping, value)
        return
    if e4m3.are_rows(k_cache):
        key, value = e4m3.encode_rows(key), e4m3.encode_rows(value)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, key)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, value)
