"""Records the attention calls of a pass: what each needs, or why it is refused.

The shapes, scale, softcap, sinks, the window or chunk, read off the mask closure that reaches this
very call, and the slopes of a bias. Recurrences and indexers have recorders of their own
(:mod:`.recurrent_probe`, :mod:`.index_probe`), which come with this one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...kernels.attention.spec import AttentionSpec
from ..model.local_calls import local_attention
from .index_probe import IndexRecorder, MaskMarker
from .masks import MaskFunction, MaskPattern, alibi_slopes, pattern_of_mask
from .recurrent_probe import RecurrentRecorder

# Tensor arguments whose meaning is known; any other would be dropped silently.
_KNOWN_TENSOR_KWARGS = frozenset({"s_aux", "position_ids", "alibi", "logits_to_keep", "indices"})
# Numbers whose meaning is known. Flags (bool), strings and None carry no numerics.
_KNOWN_NUMBER_KWARGS = frozenset(
    {
        *("scaling", "dropout", "softcap", "sliding_window", "own_window"),
        *("layer_idx", "logits_to_keep"),
    }
)


class CallRecorder:
    """The attention and mask functions of a pass, and what they saw; its recurrent and index
    functions are those of ``recurrent`` and ``indexers``."""

    def __init__(self, architecture: str, num_tokens: int) -> None:
        self.architecture = architecture
        self.recurrent = RecurrentRecorder(self.refuse, num_tokens)
        self.indexers = IndexRecorder(self.refuse, num_tokens)
        self.masks: list[tuple[Tensor, MaskFunction]] = []
        self.patterns: dict[tuple[int, int], MaskPattern | None] = {}
        self.modules: list[nn.Module] = []
        self.specs: list[AttentionSpec] = []
        self.num_keys = 0  # calls one behind the other over the same keys count once
        self._key: Tensor | None = None  # of the last call

    def refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.architecture}: {reason}")

    def mask(self, *_: Any, mask_function: MaskFunction, **kwargs: Any) -> Tensor:
        q_length, kv_length = kwargs["q_length"], kwargs["kv_length"]
        # One number in memory: thousands of tokens have no room for their square.
        marker = torch.zeros(1, 1, 1, 1, device=kwargs.get("device"))
        marker = marker.expand(1, 1, int(q_length), int(kv_length)).as_subclass(MaskMarker)
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
        if query.dim() != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise self.refuse(f"attention over shapes {tuple(query.shape)}, {tuple(key.shape)}")
        num_q_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_q_heads % num_kv_heads or value.shape[1] != num_kv_heads:
            raise self.refuse(f"{num_q_heads} query heads over {num_kv_heads} KV heads")
        sinks = kwargs.get("s_aux")
        if sinks is not None and tuple(sinks.shape) != (num_q_heads,):
            raise self.refuse(f"sinks of shape {tuple(sinks.shape)} for {num_q_heads} heads")
        pattern = self._pattern(module, attention_mask, num_q_heads, kwargs)
        if kwargs.get("own_window"):
            if pattern != MaskPattern():
                raise self.refuse(f"its attention has a window of its own within {pattern}")
            pattern = MaskPattern(kwargs["own_window"])
        index_mask = self.indexers.mask()
        if index_mask is not None and index_mask is not attention_mask:
            raise self.refuse("its indexer has another mask than its attention")
        of_indexers = self.indexers.attend(len(self.specs), kwargs.get("indices"))
        slopes = self._slopes(kwargs.get("alibi"), query)
        if of_indexers and (pattern != MaskPattern() or slopes):
            raise self.refuse(f"its indexer chooses within {pattern} and slopes {slopes}")
        self.modules.append(module)
        if self._key is None or _place(key) != _place(self._key):
            self.num_keys += 1
        self._key = key
        self.specs.append(
            AttentionSpec(
                call=len(self.specs),
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                k_dim=key.shape[3],
                v_dim=value.shape[3],
                scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
                window=pattern.window,
                softcap=float(kwargs.get("softcap") or 0.0),
                has_sinks=sinks is not None,
                chunk=pattern.chunk,
                alibi_slopes=slopes,
                **of_indexers,
            )
        )
        return local_attention(query, key, value), None

    def _check_kwarg(self, name: str, argument: Any) -> None:
        if isinstance(argument, Tensor) and name not in _KNOWN_TENSOR_KWARGS:
            raise self.refuse(f"its attention takes the tensor {name!r}, which is not known here")
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        if is_number and name not in _KNOWN_NUMBER_KWARGS:
            raise self.refuse(f"its attention takes {name} = {argument}, which is not known here")

    def _slopes(self, bias: Tensor | None, query: Tensor) -> tuple[float, ...]:
        if bias is None:
            return ()
        slopes = alibi_slopes(bias, query.shape[1], query.shape[2])
        if slopes is None:
            raise self.refuse("its attention adds a bias that is not linear in the key's position")
        return slopes

    def _pattern(
        self, module: nn.Module, mask: Tensor | None, num_heads: int, kwargs: dict[str, Any]
    ) -> MaskPattern:
        if mask is None:
            # As transformers' own sdpa function decides.
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            if not causal or kwargs.get("sliding_window"):
                raise self.refuse("attention without a mask that is not plainly causal")
            return MaskPattern()
        for marker, mask_function in self.masks:
            if marker is mask:
                key = (id(marker), num_heads)
                if key not in self.patterns:
                    self.patterns[key] = pattern_of_mask(mask_function, num_heads)
                pattern = self.patterns[key]
                if pattern is None:
                    raise self.refuse("its mask is neither causal nor a causal window or chunk")
                return pattern
        raise self.refuse("its attention adds a bias or a mask of its own")

    def calls(self) -> dict[nn.Module, list[AttentionSpec]]:
        """The calls of each module, in order."""
        found: dict[nn.Module, list[AttentionSpec]] = {}
        for module, spec in zip(self.modules, self.specs, strict=True):
            found.setdefault(module, []).append(spec)
        return found


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype
