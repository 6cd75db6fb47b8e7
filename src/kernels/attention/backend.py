"""The attention backend of an engine (Triton, FlashAttention or torch), selected at startup.

Three implementations serve the ops of :mod:`..ops`: the Triton kernels, a FlashAttention library,
and the reference in plain torch. The runner replaces the ops in the graph by the functions of an
:class:`AttentionBackend`, so a step makes no choice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..arguments import AttentionParams, PagedKV, RopeInputs
from ..fused import dispatch as fused
from . import flash, reference
from .attention_spec import AttentionSpec, reference_only
from .flash import Library

Attend = Callable[[Tensor, PagedKV, AttentionParams], Tensor]
"""``pagespec::paged_attention`` of a query, with the other arguments bundled."""
Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""The signature of ``pagespec::kv_store``, all arguments by position."""
FusedRopeAttention = Callable[[RopeInputs, Tensor, PagedKV, AttentionParams], Tensor]
"""Norm, rotation, store to ``slot_mapping`` (the second argument), and attention."""

REQUESTS = ("auto", "triton", "flash", "reference")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_SIZES = (16, 32, 64, 128, 256)
_WIDEST_HEAD = 256  # the widest head whose tile of keys and values fits shared memory


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """An implementation of attention.

    Attributes:
        name: "triton", "flash" or "reference".
        reason: one sentence for the log.
        attend, store: implementations of the ops. One backend serves one engine: calls of
            ``attend`` must follow one another on one stream.
        fused_rope_attention: norm, rotation, store and attention in one call, with the same bits as
            separate calls; None if there is no such call.
        quantizing: versions of ``attend`` and ``fused_rope_attention`` that quantise outputs for an
            FP8 matmul (``fused.e4m3_groups.QuantizedRows``, one row per token); empty if there are
            none. Head sizes must be multiples of 128.
        longest_first: :func:`.triton_backend.longest_first`. All functions above but ``store`` take
            its result as an additional argument. None if they do not.
    """

    name: str
    reason: str
    attend: Attend
    store: Store
    fused_rope_attention: FusedRopeAttention | None = None
    quantizing: Mapping[Callable[..., Tensor], Callable[..., Any]] = field(
        default_factory=dict, hash=False
    )
    longest_first: Callable[[Tensor, int], Tensor | None] | None = None

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured in a CUDA graph. The reference may not: it waits for the
        device."""
        return self.name != "reference"


def triton_limit(
    device: torch.device, dtype: torch.dtype, widest_head: int, block_size: int
) -> str | None:
    """The reason why the Triton kernels cannot serve such calls, or None.

    Args:
        device: of the tensors. dtype: of queries and caches.
        widest_head: the largest head size of keys and values.
        block_size: slots per block.
    """
    if device.type != "cuda":
        return f'the Triton kernels need an NVIDIA GPU, not device "{device}"'
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the Triton kernels need compute capability 8.0, this GPU has {major}.{minor}"
    if dtype not in _DTYPES:
        return f"the Triton kernels take {_names(_DTYPES)}, not {_names((dtype,))}"
    if block_size not in _BLOCK_SIZES:
        return f"the Triton kernels take block sizes {_BLOCK_SIZES}, not {block_size}"
    if widest_head > _WIDEST_HEAD:
        return f"the Triton kernels take head sizes up to {_WIDEST_HEAD}, not {widest_head}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install pagespec[cuda])"
    return None


def planes_limit(
    device: torch.device, specs: Sequence[AttentionSpec], block_size: int
) -> str | None:
    """The reason why a GPU cannot store keys and values in FP8 (e4m3), or None.

    Args:
        specs: the attention calls. block_size: slots per block.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"fp8 needs compute capability 8.9, this GPU has {major}.{minor}"
    if any(spec.num_chosen for spec in specs):
        return "fp8 has no kernel for keys that an indexer chooses"
    for spec in specs:
        for dim in (spec.k_dim, spec.v_dim):
            if block_size * spec.num_kv_heads * dim % 4:  # scales would not be aligned
                return (
                    f"fp8 needs blocks of a multiple of 4 bytes, not block_size {block_size} x "
                    f"{spec.num_kv_heads} heads x {dim}"
                )
    return None


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def select_backend(
    requested: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[AttentionSpec],
    block_size: int,
    kv_cache_dtype: str = "auto",
) -> AttentionBackend:
    """Select a backend for a model whose attention calls are ``specs``.

    "auto" selects the reference on a CPU. On a GPU it selects Triton if Triton supports all calls,
    else the reference. A FlashAttention library is used only on request: on an H100, none was
    faster in all cases (docs/notes/attention.md).

    Args:
        requested: one of :data:`REQUESTS`.
        device: of the model. dtype: of queries and caches.
        specs: the attention calls; empty for a model without attention. block_size: slots per
            block.
        kv_cache_dtype: "fp8" for caches of e4m3 elements, which FlashAttention does not read.

    Raises:
        InvalidInputError: field "kv_cache_dtype": FP8 caches do not support this GPU, these head
            sizes or this block size.
        InvalidInputError: field "attention": ``requested`` is unknown, or it is "triton" or "flash"
            and does not support the model. The message gives the reason.
    """
    if requested not in REQUESTS:
        raise InvalidInputError("attention", requested, f"must be one of {', '.join(REQUESTS)}")
    has_planes = kv_cache_dtype == "fp8" and device.type == "cuda"
    if has_planes and (limit := planes_limit(device, specs, block_size)) is not None:
        raise InvalidInputError("kv_cache_dtype", kv_cache_dtype, limit)
    if requested == "reference":
        return _reference("it was requested")
    if requested == "flash":
        chosen: AttentionBackend | str = 'FlashAttention reads no cache of kv_cache_dtype "fp8"'
        if not has_planes:
            chosen = _flash(flash.LIBRARIES, device, dtype, specs, block_size)
        if isinstance(chosen, str):
            raise InvalidInputError("attention", requested, chosen)
        return chosen
    widest = max((max(spec.k_dim, spec.v_dim) for spec in specs), default=0)
    limit = triton_limit(device, dtype, widest, block_size)
    if limit is None and (lacking := reference_only(specs)):
        limit = f"the Triton kernels {lacking}"
    if limit is None and has_planes and any(spec.k_dim % 2 or spec.v_dim % 2 for spec in specs):
        limit = "the Triton kernels take e4m3 values in pairs: even head sizes"
    if requested == "triton" and limit is not None:
        raise InvalidInputError("attention", requested, limit)
    if limit is not None:
        return _reference(limit)
    is_asked = requested == "triton"
    return _triton(
        "it was requested" if is_asked else "they serve all attention calls of the model"
    )


def _reference(why: str) -> AttentionBackend:
    reason = f"attention by the reference in plain torch: {why}."
    return AttentionBackend("reference", reason, reference.paged_attention, fused.kv_store)


def _triton(why: str) -> AttentionBackend:
    # Triton is installed only on machines with a GPU, and compiles nothing before the first call.
    from ..fused import kv_store
    from . import triton_backend

    reason = f"attention by the Triton kernels: {why}."
    counted = triton_backend.TritonBackend()
    quantizing: dict[Callable[..., Tensor], Callable[..., Any]] = {
        counted.attend: counted.attend_quantized,
        counted.fused_rope_attention: counted.fused_rope_attention_quantized,
    }
    return AttentionBackend(
        "triton",
        reason,
        counted.attend,
        kv_store.kv_store,
        counted.fused_rope_attention,
        quantizing,
        triton_backend.longest_first,
    )


def _flash(
    libraries: Sequence[Library],
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[AttentionSpec],
    block_size: int,
) -> AttentionBackend | str:
    """The first of ``libraries`` that supports the calls, or the reasons why none does."""
    if device.type != "cuda":
        return f'FlashAttention needs an NVIDIA GPU, not device "{device}"'
    capability = torch.cuda.get_device_capability(device)
    limits = []
    for library in libraries:
        limit = flash.limit_of(library, capability, dtype, specs, block_size)
        if limit is not None:
            limits.append(limit)
            continue
        attend = flash.attend_4 if library == "flash-attn-4" else flash.attend_2
        reason = f"attention by {library}; its bits may change with the schedule."
        has_triton = importlib.util.find_spec("triton") is not None
        store = _triton("").store if has_triton else fused.kv_store
        return AttentionBackend("flash", reason, attend, store)
    return "; ".join(limits)
