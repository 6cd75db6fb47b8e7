"""The eager probe: run the model on a few tokens and see what its attention needs.

Five runs with stand-in attention functions, no KV cache and no graph: four that look for
something, and a plain one that the last two are compared with.

1. *record*: every attention call in order, its shapes, scale, softcap, sinks, and the window,
   read off the mask closure that reaches this very call;
2. *poison*: with an attention that mixes no tokens, NaN in one token's embedding must reach no
   other token's logits. So nothing else mixes tokens: no recurrence, convolution, token shift, or
   attention that bypasses the interface. NaN shows however small the weights are;
3. *permute*: the packed tokens in another order must give the same queries, keys and logits in
   that order, so explicit position ids are followed;
4. *stretch*: one token at a far position must leave the others alone (rotary embeddings that
   depend on the longest position of the batch).

Each refusal names the architecture and the reason: a wrong guess here would be silently wrong
tokens later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pagespec.compile.attention import METADATA_KWARGS, AttentionSpec, attention_implementation
from pagespec.compile.load import LoadedModel
from pagespec.compile.masks import MaskFunction, window_of_mask
from pagespec.errors import UnsupportedModelError

_PROBE_NAME = "pagespec_probe"
_NUM_PROBE_TOKENS = 8
_REFUSED_ROPE_TYPES = ("dynamic", "longrope")
# Tensor arguments whose meaning is known; any other would be dropped silently.
_KNOWN_TENSOR_KWARGS = frozenset({"s_aux", "position_ids", *METADATA_KWARGS})
# Numbers whose meaning is known. Flags (bool), strings and None carry no numerics.
_KNOWN_NUMBER_KWARGS = frozenset({"scaling", "dropout", "softcap", "sliding_window", "layer_idx"})

AttentionFunction = Callable[..., tuple[Tensor, None]]
ForwardFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Recorder:
    """The attention and mask functions of the first run, and what they saw."""

    def __init__(self, architecture: str, slot_mapping: Tensor) -> None:
        self.architecture = architecture
        self.slot_mapping = slot_mapping
        self.masks: list[tuple[Tensor, MaskFunction]] = []
        self.windows: dict[tuple[int, int], int | None] = {}
        self.modules: list[nn.Module] = []
        self.specs: list[AttentionSpec] = []

    def refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.architecture}: {reason}")

    def mask(self, *_: Any, mask_function: MaskFunction, **kwargs: Any) -> Tensor:
        q_length, kv_length = kwargs["q_length"], kwargs["kv_length"]
        marker = torch.zeros(1, 1, int(q_length), int(kv_length), device=kwargs.get("device"))
        self.masks.append((marker, mask_function))
        return marker

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        for name, argument in kwargs.items():
            self._check_kwarg(name, argument)
        if kwargs.get("slot_mapping") is not self.slot_mapping:
            raise self.refuse("does not hand keyword arguments down to its attention")
        if any(module is seen for seen in self.modules):
            raise self.refuse(f"calls {type(module).__name__} more than once per forward pass")
        if query.dim() != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise self.refuse(f"attention over shapes {tuple(query.shape)}, {tuple(key.shape)}")
        num_q_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_q_heads % num_kv_heads or value.shape[1] != num_kv_heads:
            raise self.refuse(f"{num_q_heads} query heads over {num_kv_heads} KV heads")
        sinks = kwargs.get("s_aux")
        if sinks is not None and tuple(sinks.shape) != (num_q_heads,):
            raise self.refuse(f"sinks of shape {tuple(sinks.shape)} for {num_q_heads} heads")
        self.modules.append(module)
        self.specs.append(
            AttentionSpec(
                call=len(self.specs),
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                k_dim=key.shape[3],
                v_dim=value.shape[3],
                scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
                window=self._window(module, attention_mask, num_q_heads, kwargs),
                softcap=float(kwargs.get("softcap") or 0.0),
                has_sinks=sinks is not None,
            )
        )
        return _local_attention(query, key, value), None

    def _check_kwarg(self, name: str, argument: Any) -> None:
        if isinstance(argument, Tensor) and name not in _KNOWN_TENSOR_KWARGS:
            raise self.refuse(f"its attention takes the tensor {name!r}, which is not known here")
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        if is_number and name not in _KNOWN_NUMBER_KWARGS:
            raise self.refuse(f"its attention takes {name} = {argument}, which is not known here")

    def _window(
        self, module: nn.Module, mask: Tensor | None, num_heads: int, kwargs: dict[str, Any]
    ) -> int:
        if mask is None:
            # As transformers' own sdpa function decides.
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            if not causal or kwargs.get("sliding_window"):
                raise self.refuse("attention without a mask that is not plainly causal")
            return 0
        for marker, mask_function in self.masks:
            if marker is mask:
                key = (id(marker), num_heads)
                if key not in self.windows:
                    self.windows[key] = window_of_mask(mask_function, num_heads)
                window = self.windows[key]
                if window is None:
                    raise self.refuse("its mask is neither causal nor a causal sliding window")
                return window
        raise self.refuse("its attention adds a bias or a mask of its own")


def _local_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A stand-in that depends on each token's query, key and value and on no other token's."""
    group_size = query.shape[1] // value.shape[1]

    def gate(x: Tensor) -> Tensor:
        ramp = torch.linspace(-1.0, 1.0, x.shape[-1], dtype=x.dtype, device=x.device)
        return torch.tanh((x * ramp).sum(-1, keepdim=True))

    out = value.repeat_interleave(group_size, 1) * (1 + gate(query))
    out = out * (1 + gate(key).repeat_interleave(group_size, 1))
    return out.transpose(1, 2).contiguous()


class _LocalAttention:
    """Runs :func:`_local_attention` and keeps queries and keys, ``[T, H, D]``, of every call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def attention(
        self, _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        self.seen.extend(x[0].transpose(0, 1).clone() for x in (query, key))
        return _local_attention(query, key, value), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def _registered(
    module: PreTrainedModel, attention: AttentionFunction, mask: Callable[..., Any]
) -> Iterator[None]:
    """Have the model call a pair of stand-in functions for the length of the block."""
    AttentionInterface.register(_PROBE_NAME, attention)
    AttentionMaskInterface.register(_PROBE_NAME, mask)
    try:
        with attention_implementation(module, _PROBE_NAME):
            yield
    finally:
        AttentionInterface._global_mapping.pop(_PROBE_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_PROBE_NAME, None)


def probe_model(loaded: LoadedModel) -> list[AttentionSpec]:
    """Find what each attention call of the model needs, or refuse the model.

    Sets ``pagespec_call``, the call's number, on each attention module; changes nothing else.

    Returns:
        One spec an attention call, in order of execution.

    Raises:
        UnsupportedModelError: something the kernels would not compute exactly.
    """
    module, name = loaded.module, loaded.architecture
    _check_statically(loaded)
    device = loaded.device
    slot_mapping = torch.zeros(_NUM_PROBE_TOKENS, dtype=torch.int64, device=device)
    recorder = _Recorder(name, slot_mapping)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, loaded.vocab_size, (_NUM_PROBE_TOKENS,), generator=generator).to(device)
    positions = torch.arange(_NUM_PROBE_TOKENS, device=device)
    rows = torch.tensor([1, _NUM_PROBE_TOKENS - 1, 1], device=device)

    def forward(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        try:
            logits = module(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                logits_to_keep=rows,
                use_cache=False,
                slot_mapping=slot_mapping,
            ).logits
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{name}: its forward pass fails on packed tokens ({type(error).__name__}: {error})"
            ) from error
        if logits.dim() != 3 or logits.shape[:2] != (1, len(rows)):
            raise UnsupportedModelError(f"{name}: logits of shape {tuple(logits.shape)}")
        result: Tensor = logits[0]
        return result

    local = _LocalAttention()
    with torch.inference_mode():
        with _registered(module, recorder.attention, recorder.mask):
            forward(ids, positions, rows)
        _check_calls(loaded, recorder)
        with _registered(module, local.attention, _no_mask):
            _check_token_independence(loaded, forward, local, ids)
    for call, attention_module in enumerate(recorder.modules):
        attention_module.pagespec_call = call  # type: ignore[assignment]
    return recorder.specs


def _check_statically(loaded: LoadedModel) -> None:
    module, config, name = loaded.module, loaded.config, loaded.architecture
    parameters = inspect.signature(module.forward).parameters
    for needed in ("input_ids", "position_ids", "logits_to_keep"):
        if needed not in parameters:
            raise UnsupportedModelError(f"{name}: its forward takes no {needed}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: it is an encoder-decoder model")
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "alibi", False):
        raise UnsupportedModelError(f"{name}: it uses alibi position biases")
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters_of_type in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        rope_type = parameters_of_type.get("rope_type")
        if rope_type in _REFUSED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"{name}: rope type {rope_type!r} depends on the longest position of the batch"
            )


def _check_calls(loaded: LoadedModel, recorder: _Recorder) -> None:
    expected = loaded.config.get_text_config(decoder=True).num_hidden_layers
    if len(recorder.specs) != expected:
        raise recorder.refuse(
            f"{len(recorder.specs)} attention calls through AttentionInterface in {expected} layers"
        )


def _check_token_independence(
    loaded: LoadedModel, forward: ForwardFunction, local: _LocalAttention, ids: Tensor
) -> None:
    """Runs 2 to 4 of the module's description, and the one that 3 and 4 are compared with."""
    name, limit = loaded.architecture, loaded.max_position_embeddings
    if limit < 4:
        raise UnsupportedModelError(f"{name}: max_position_embeddings = {limit}")
    half = len(ids) // 2
    # Two packed rows that start at different positions.
    positions = torch.cat([torch.arange(half), torch.arange(half) + min(5, limit - half)])
    positions = positions.to(ids.device)
    rows = torch.arange(len(ids), device=ids.device)

    def run(ids: Tensor, positions: Tensor) -> list[Tensor]:
        """Queries and keys of every call, and the logits; dim 0 is the token."""
        local.seen.clear()
        return [forward(ids, positions, rows), *local.seen]

    poisoned = half - 1

    def poison(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, poisoned] = float("nan")
        return output

    hook = loaded.module.get_input_embeddings().register_forward_hook(poison)
    try:
        reached = run(ids, positions)[0].isnan().any(-1)
    finally:
        hook.remove()
    if not bool(reached[poisoned]) or int(reached.sum()) != 1:
        raise UnsupportedModelError(f"{name}: tokens mix outside attention")

    base = run(ids, positions)
    order = torch.tensor([5, 0, 7, 2, 6, 1, 4, 3], device=ids.device)
    permuted = run(ids[order], positions[order])
    if not all(_same(a, b[order]) for a, b in zip(permuted, base, strict=True)):
        raise UnsupportedModelError(f"{name}: position_ids are not followed")
    positions[-1] = limit - 1
    stretched = run(ids, positions)
    if not all(_same(a[:-1], b[:-1]) for a, b in zip(stretched, base, strict=True)):
        raise UnsupportedModelError(
            f"{name}: its position embeddings depend on the longest position of the batch"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, relative to the largest element; loosely for half precision."""
    if not bool(a.isfinite().all()):
        return False
    bound = 1e-4 if a.dtype == torch.float32 else 2e-2
    return float((a - b).abs().max()) <= bound * float(b.abs().max())
