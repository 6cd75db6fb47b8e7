"""The recurrences a Hugging Face model computes, replaced by ours: short convolutions, delta rules,
state-space scans.

Their mixers call functions of their modelling file, which are known here by name and parameters,
never by model. In a block of :func:`recurrences_replaced` these names stand for functions that hand
the same tensors, a row for each packed token, to a :data:`RecurrentFunction`: one that reads and
writes the states of the step's requests, or a stand-in of the probe. What mixes tokens otherwise,
the probe refuses.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...kernels.recurrent import ops as _recurrent_ops  # noqa: F401 - called by name
from .current_step import current


class RecurrentCall(NamedTuple):
    """One call of a recurrence, as the op of its kind takes it.

    Attributes:
        kind: name of the op. tensors, settings: its first and its last arguments, those of the
            states left out.
        others: what the model handed over besides, which the probe looks at.
    """

    kind: str
    tensors: tuple[Tensor | None, ...]
    settings: tuple[Any, ...]
    others: dict[str, Any]


RecurrentFunction = Callable[[RecurrentCall], Tensor]


def run_on_states(call: RecurrentCall) -> Tensor:
    """The recurrence over the states of the step's requests."""
    step = current.step
    assert step is not None
    number = current.num_recurrent_calls
    current.num_recurrent_calls = number + 1
    inputs, states = step.inputs, step.states
    out: Tensor = getattr(torch.ops.pagespec, call.kind)(
        *call.tensors,
        states.tensors[number],
        inputs.query_starts,
        inputs.context_lens,
        inputs.state_tables,
        inputs.table_rows,
        states.interval,
        *call.settings,
    )
    return out


class _Function(threading.local):
    """What computes the recurrences of a thread's passes; None leaves that to the model."""

    function: RecurrentFunction | None = None


_current = _Function()


# What the models call, with the parameters that it has there. Their one text is packed tokens.


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """``[1, C, T]`` to the same; weight ``[C, K]``."""
    tensors = hidden_states.squeeze(0).transpose(0, 1), weight, bias
    out = _compute("short_conv", tensors, (activation or "",), kwargs)
    return out.transpose(0, 1).unsqueeze(0)


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,  # noqa: ARG001 (of another algorithm for the same function)
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``[1, T, H, K]`` and ``[1, T, H, V]`` to ``[1, T, H, V]``."""
    tensors = tuple(x.squeeze(0) for x in (query, key, value, g, beta))
    kwargs["initial_state"] = initial_state
    kwargs["output_final_state"] = output_final_state or None
    settings = query.shape[-1] ** -0.5, use_qk_l2norm_in_kernel
    return _compute("delta_rule", tensors, settings, kwargs).unsqueeze(0), None


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,  # noqa: ARG001 (as above)
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``[1, T, H, P]`` to the same."""
    x, dt, B, C = (tensor.squeeze(0) for tensor in (hidden_states, dt, B, C))
    kwargs["initial_states"] = initial_states
    kwargs["return_final_states"] = return_final_states or None
    settings = dt_softplus, float(dt_limit[0]), float(dt_limit[1])
    return _compute("ssd_scan", (x, dt, A, B, C, D, dt_bias), settings, kwargs).unsqueeze(0)


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,  # noqa: ARG001 (as above)
    use_associative_scan: bool = False,  # noqa: ARG001
    **kwargs: Any,
) -> Tensor:
    """``[1, I, T]`` to the same."""
    x, dt, B, C = (tensor.squeeze(0).transpose(0, 1) for tensor in (hidden_states, dt, B, C))
    gate = None if z is None else z.squeeze(0).transpose(0, 1)
    kwargs["return_last_state"] = return_last_state or None
    tensors = x, dt, A, B, C, D, gate, delta_bias
    out = _compute("selective_scan", tensors, (delta_softplus,), kwargs)
    return out.transpose(0, 1).unsqueeze(0)


_KNOWN: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": torch_chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": torch_chunk_gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}


def _compute(
    kind: str, tensors: tuple[Any, ...], settings: tuple[Any, ...], others: dict[str, Any]
) -> Tensor:
    function = _current.function or run_on_states
    return function(RecurrentCall(kind, tensors, settings, others))


@contextmanager
def recurrences_replaced(module: PreTrainedModel, function: RecurrentFunction) -> Iterator[None]:
    """In the block, recurrences that the model computes in this thread are the function's."""
    homes = _homes(module)
    for home in homes:
        _install(home)
    before = _current.function
    _current.function = function
    try:
        yield
    finally:
        _current.function = before
        for home in homes:
            _remove(home)


def _homes(module: PreTrainedModel) -> list[str]:
    """The Python modules of the model's classes that have functions known here."""
    names = dict.fromkeys(
        base.__module__
        for cls in dict.fromkeys(map(type, module.modules()))
        for base in cls.__mro__
    )
    return [name for name in names if _found(name)]


def _found(home: str) -> dict[str, Callable[..., Any]]:
    globals_of_home = vars(sys.modules[home]) if home in sys.modules else {}
    return {
        name: globals_of_home[name]
        for name, ours in _KNOWN.items()
        if name in globals_of_home and _is_alike(globals_of_home[name], ours)
    }


def _is_alike(theirs: Any, ours: Callable[..., Any]) -> bool:
    try:
        parameters = [*inspect.signature(theirs).parameters]
    except (TypeError, ValueError):
        return False
    return parameters == [*inspect.signature(ours).parameters]


# Names of a Python module are of all threads: they are set when the first enters a block and set
# back when the last leaves one; in between, a thread outside of all blocks gets the model's own.
_lock = threading.Lock()
_depths: dict[str, int] = {}
_originals: dict[str, dict[str, Callable[..., Any]]] = {}


def _install(home: str) -> None:
    with _lock:
        _depths[home] = _depths.get(home, 0) + 1
        if _depths[home] == 1:
            _originals[home] = _found(home)
            for name, original in _originals[home].items():
                setattr(sys.modules[home], name, _either(_KNOWN[name], original))


def _remove(home: str) -> None:
    with _lock:
        _depths[home] -= 1
        if not _depths[home]:
            for name, original in _originals.pop(home).items():
                setattr(sys.modules[home], name, original)


def _either(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        # Dynamo of torch 2.11 sees of a thread's own only what it has traced itself: the step.
        is_ours = current.step is not None or _current.function is not None
        return (ours if is_ours else original)(*args, **kwargs)

    # As `inspect.signature` sees it, the same function.
    function.__wrapped__ = original  # type: ignore[attr-defined]
    return function
