"""Record the attention, recurrent and index calls of a pass, and refuse those that no kernel
computes.

For attention it records the shapes, scale, softcap, sinks, the window or chunk (derived from the
mask closure that reaches exactly this call), and the slopes of a bias. For recurrences it records
their kinds, the shapes of their states and their settings. For indexers it records the attention
calls that each selects for, and the shape of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...kernels.attention.attention_spec import AttentionSpec
from ...kernels.recurrent.ops import ACTIVATIONS
from ...kernels.recurrent.recurrent_spec import RecurrentSpec
from ..model.current_step import Functions, IndexCall, RecurrentCall, RunningCall, Scope
from ..model.local_calls import local_attention, local_recurrence, no_choice, per_token
from .masks import MaskFunction, MaskPattern, alibi_slopes, pattern_of_mask

# Tensor arguments whose meaning is known; any other would be dropped silently.
_KNOWN_TENSOR_KWARGS = frozenset({"s_aux", "position_ids", "alibi", "logits_to_keep", "indices"})
# Number arguments whose meaning is known. Flags (bool), strings and None do not affect values.
_KNOWN_NUMBER_KWARGS = frozenset(
    {
        *("scaling", "dropout", "softcap", "sliding_window", "own_window"),
        *("layer_idx", "logits_to_keep"),
    }
)
# Tensors that a recurrence over packed texts may ignore; any other would be dropped silently.
_RECURRENT_TENSORS = frozenset({"position_ids", "position_embeddings", "cache_position"})
# Numbers that the call's own arguments also determine. Flags and texts do not affect values.
_RECURRENT_NUMBERS = frozenset({"layer_idx"})
_ALL = slice(None)
# A mask with a dimension of heads, as used by an indexer: that of the only head.
_OF_A_HEAD = (_ALL, 0, _ALL, _ALL)
Refuse = Callable[[str], UnsupportedModelError]
Caller = tuple[nn.Module, int]
"""The module that makes a call, and the number of its earlier calls in the pass."""


class RecurrentRecorder:
    """The recurrent calls of a pass of ``num_tokens`` tokens."""

    def __init__(self, refuse: Refuse, num_tokens: int) -> None:
        self._refuse, self._num_tokens = refuse, num_tokens
        self._running: list[RunningCall] = []
        self.specs: dict[Caller, RecurrentSpec] = {}

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Within the context, the recorder tracks which part of the model makes a call."""
        with Scope() as scope:
            self._running = scope.running(module.modules())
            yield

    def recurrence(self, call: RecurrentCall) -> Tensor:
        """Record the call; returns a stand-in for its result."""
        for name, argument in call.others.items():
            self._check_argument(call, name, argument)
        for tensor in per_token(call):
            if tensor.shape[0] != self._num_tokens:
                raise self._refuse(
                    f"its {call.kind} is handed {tuple(tensor.shape)} for the {self._num_tokens} "
                    "tokens of a pass"
                )
        part = self._running[-1].part
        caller = part, sum(other is part for other, _ in self.specs)
        spec = _spec(len(self.specs), call)
        if spec is None:
            shapes = [None if x is None else tuple(x.shape) for x in call.tensors]
            raise self._refuse(f"its {call.kind} is over shapes {shapes}, which is not known here")
        if call.kind == "short_conv" and call.settings[0] not in ("", *ACTIVATIONS):
            raise self._refuse(f"its short_conv has the activation {call.settings[0]!r}")
        self.specs[caller] = spec
        return local_recurrence(call)

    def _check_argument(self, call: RecurrentCall, name: str, argument: Any) -> None:
        if argument is None or isinstance(argument, (bool, str)):
            return
        is_number = isinstance(argument, (int, float))
        if name not in (_RECURRENT_NUMBERS if is_number else _RECURRENT_TENSORS):
            what = f"{name} = {argument}" if is_number else f"{name!r}"
            raise self._refuse(f"its {call.kind} takes {what}, which is not known here")

    def check_again(self, again: RecurrentRecorder) -> None:
        """Refuse different calls in another pass, perhaps of fewer layers."""
        for caller, spec in again.specs.items():
            before = self.specs.get(caller)
            if before is None or replace(spec, call=before.call) != before:
                raise again._refuse(f"its {spec.kind} is {spec}, not {before}")


def _spec(number: int, call: RecurrentCall) -> RecurrentSpec | None:
    """The spec of a call; None if the tensors do not have the shapes that the op takes."""
    shapes = [() if tensor is None else tuple(tensor.shape) for tensor in call.tensors]
    dims = [len(shape) for shape in shapes]
    state: tuple[int, ...]
    dtype = torch.float32
    keys_and_values: tuple[Tensor | None, ...] = ()
    if call.kind == "short_conv":
        if dims[:2] != [2, 2] or shapes[0][1] != shapes[1][0] or shapes[1][1] < 2:
            return None
        assert call.tensors[0] is not None
        state, dtype = (shapes[1][1] - 1, shapes[1][0]), call.tensors[0].dtype
    elif call.kind == "delta_rule":
        query, key, value, decay, beta = shapes
        if dims[:3] != [3, 3, 3] or query != key or value[1] % query[1]:
            return None
        if decay not in (value[:2], (*value[:2], query[2])) or beta != value[:2]:
            return None
        state = value[1], query[2], value[2]
        if len(decay) == 2:
            keys_and_values = call.tensors[1:3]
    elif call.kind == "ssd_scan":
        x, dt, a, b, c, d, dt_bias = shapes
        if dims[:2] != [3, 2] or dims[3] != 3 or b != c or dt != x[:2] or x[1] % b[1]:
            return None
        if any(shape not in ((), (x[1],)) for shape in (a, d, dt_bias)) or not a:
            return None
        state = x[1], b[2], x[2]
        keys_and_values = call.tensors[3], call.tensors[0]
    else:
        x, dt, a, b, c, d, z, dt_bias = shapes
        if dims[0] != 2 or len(b) != 2 or b != c or dt != x or a != (x[1], b[1]):
            return None
        if z not in ((), x) or any(shape not in ((), (x[1],)) for shape in (d, dt_bias)):
            return None
        state = b[1], x[1]
    names = tuple(_name(x.dtype) for x in keys_and_values if x is not None)
    return RecurrentSpec(number, call.kind, state, _name(dtype), call.settings, names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MaskMarker(Tensor):
    """A mask that a model passes to its attention. It is also identified as a boolean mask, and as
    the part that an indexer gets."""

    whole: MaskMarker | None = None

    def to(self, *_: Any, **__: Any) -> Tensor:
        return self

    def __getitem__(self, at: Any) -> Tensor:
        part = super().__getitem__(at)
        # A tensor in it has another type, and cannot be compared.
        has_types = isinstance(at, tuple) and [*map(type, at)] == [slice, int, slice, slice]
        if isinstance(part, MaskMarker) and has_types and at == _OF_A_HEAD:
            part.whole = self
        return part


class IndexRecorder:
    """The indexers of a pass of ``num_tokens`` tokens.

    An indexer selects for the attention call after it; later calls may see the same positions.

    Attributes:
        modules: each with the number of its attention call.
    """

    def __init__(self, refuse: Refuse, num_tokens: int) -> None:
        self._refuse, self._num_tokens = refuse, num_tokens
        self._chosen: list[tuple[Tensor, int]] = []
        self._next: tuple[nn.Module, IndexCall] | None = None
        self.modules: dict[nn.Module, int] = {}

    def choose(self, module: nn.Module, call: IndexCall) -> Tensor:
        """Record the call; returns a stand-in for its result."""
        if self._next is not None:
            raise self._refuse("two indexers choose for one attention call")
        if module in self.modules:
            raise self._refuse(f"its {type(module).__name__} runs more than once a pass")
        shapes = [tuple(x.shape) for x in (call.query, call.key, call.weights)]
        if any(shape[0] != self._num_tokens for shape in shapes):
            raise self._refuse(
                f"an indexer gets shapes {shapes} for the {self._num_tokens} tokens of a pass"
            )
        self._next = module, call
        chosen = no_choice(module, call)
        self._chosen.append((chosen, call.num_chosen))
        return chosen

    def attend(self, number: int, indices: Tensor | None) -> dict[str, Any]:
        """The properties of an attention call that come from indexers, as fields of its spec."""
        following, self._next = self._next, None
        of_key: dict[str, Any] = {}
        if following is not None:
            module, call = following
            self.modules[module] = number
            of_key = {"index_dim": call.key.shape[1], "index_dtype": _name(call.key.dtype)}
        if indices is None:
            if of_key:
                raise self._refuse("its attention does not get its indexer's selection")
            return of_key
        for chosen, num_chosen in self._chosen:
            if chosen is indices:
                return {**of_key, "num_chosen": num_chosen}
        raise self._refuse("its attention takes the tensor 'indices', which is no indexer's choice")

    def mask(self) -> Any:
        """The whole mask that the indexer of the next attention call adds to its scores; None if it
        has none."""
        if self._next is None:
            return None
        mask = self._next[1].mask
        whole = mask.whole if isinstance(mask, MaskMarker) else None
        if whole is None:
            raise self._refuse("its indexer adds a mask of its own")
        return whole


class CallRecorder:
    """The attention and mask functions of a pass, and their calls. Its recurrent and index
    functions are those of ``recurrent`` and ``indexers``."""

    def __init__(self, architecture: str, num_tokens: int) -> None:
        self.architecture = architecture
        self.recurrent = RecurrentRecorder(self.refuse, num_tokens)
        self.indexers = IndexRecorder(self.refuse, num_tokens)
        self.masks: list[tuple[Tensor, MaskFunction]] = []
        self.patterns: dict[tuple[int, int], MaskPattern | None] = {}
        self.modules: list[nn.Module] = []
        self.specs: list[AttentionSpec] = []
        self.num_keys = 0  # consecutive calls over the same keys count once
        self._key: Tensor | None = None  # of the last call

    @property
    def functions(self) -> Functions:
        """Functions for a model to call, each of which records its calls."""
        return Functions(self.attention, self.recurrent.recurrence, self.indexers.choose, self.mask)

    def refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.architecture}: {reason}")

    def mask(self, *_: Any, mask_function: MaskFunction, **kwargs: Any) -> Tensor:
        q_length, kv_length = kwargs["q_length"], kwargs["kv_length"]
        # One element in memory: a mask for thousands of tokens would not fit.
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
        return local_attention(module, query, key, value)

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
            # As in transformers' own sdpa function.
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
