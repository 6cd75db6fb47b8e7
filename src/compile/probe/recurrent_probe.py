"""Finds the recurrent calls of a model: their kinds, the shapes of their states, their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...kernels.recurrent.ops import ACTIVATIONS
from ...kernels.recurrent.spec import RecurrentSpec
from ..model.local_calls import local_recurrence, per_token
from ..model.recurrent import RecurrentCall

# Tensors that are of no matter to a recurrence over packed texts; any other would be dropped
# silently.
_KNOWN_TENSORS = frozenset({"position_ids", "position_embeddings", "cache_position"})
# Numbers of which a call's own arguments say what they are. Flags and texts carry no numerics.
_KNOWN_NUMBERS = frozenset({"layer_idx"})
Refuse = Callable[[str], UnsupportedModelError]
Caller = tuple[nn.Module, int]
"""The module that makes a call, and how many it has made before in the pass."""


class RecurrentRecorder:
    """The recurrent calls of a pass of ``num_tokens`` tokens."""

    def __init__(self, refuse: Refuse, num_tokens: int) -> None:
        self._refuse, self._num_tokens = refuse, num_tokens
        self._running: list[nn.Module] = []
        self.specs: dict[Caller, RecurrentSpec] = {}

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """In the block, the recorder knows which part of the model a call is made by."""
        with ExitStack() as stack:
            for part in module.modules():
                stack.callback(part.register_forward_pre_hook(self._enter).remove)
                stack.callback(part.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, part: nn.Module, _inputs: Any) -> None:
        self._running.append(part)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def recurrence(self, call: RecurrentCall) -> Tensor:
        """Records the call; a stand-in for its result."""
        for name, argument in call.others.items():
            self._check_argument(call, name, argument)
        for tensor in per_token(call):
            if tensor.shape[0] != self._num_tokens:
                raise self._refuse(
                    f"its {call.kind} is handed {tuple(tensor.shape)} for the {self._num_tokens} "
                    "tokens of a pass"
                )
        caller = self._running[-1], sum(self._running[-1] is part for part, _ in self.specs)
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
        if name not in (_KNOWN_NUMBERS if is_number else _KNOWN_TENSORS):
            what = f"{name} = {argument}" if is_number else f"{name!r}"
            raise self._refuse(f"its {call.kind} takes {what}, which is not known here")

    def check_again(self, again: RecurrentRecorder) -> None:
        """Refuses what another pass, perhaps of fewer layers, does otherwise."""
        for caller, spec in again.specs.items():
            before = self.specs.get(caller)
            if before is None or replace(spec, call=before.call) != before:
                raise again._refuse(f"its {spec.kind} is {spec}, not {before}")


def _spec(number: int, call: RecurrentCall) -> RecurrentSpec | None:
    """None if the tensors are not of the shapes that the op takes."""
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
