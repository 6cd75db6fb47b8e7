"""The recurrences a Hugging Face model computes, replaced by ours: short convolutions, delta rules,
state-space scans.

Their mixers call functions of their modelling file, which are known here by name and parameters,
never by model. In a block of :func:`recurrences_replaced` these names stand for functions that pass
the same tensors, a row for each packed token, to the thread's :attr:`.Functions.recurrence`. The
probe refuses a model that mixes tokens otherwise.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .current_step import ON_CACHES, RecurrentCall, Scope, current

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
    return current.functions.recurrence(RecurrentCall(kind, tensors, settings, others))


@contextmanager
def recurrences_replaced(module: PreTrainedModel) -> Iterator[None]:
    """In the block, recurrences of the model's passes in this thread are the thread's function."""
    with Scope() as scope:
        for home in _homes(module):
            _install(home)
            scope.callback(_remove, home)
        yield


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
_installed: dict[str, tuple[int, Scope]] = {}  # number of blocks, and their changes


def _install(home: str) -> None:
    with _lock:
        depth, scope = _installed.get(home, (0, Scope()))
        if not depth:
            for name, original in _found(home).items():
                scope.set(sys.modules[home], name, _either(_KNOWN[name], original))
        _installed[home] = depth + 1, scope


def _remove(home: str) -> None:
    with _lock:
        depth, scope = _installed.pop(home)
        if depth > 1:
            _installed[home] = depth - 1, scope
        else:
            scope.close()


def _either(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        # Dynamo of torch 2.11 sees of a thread's own only what it has traced itself: the step.
        is_ours = current.step is not None or current.functions is not ON_CACHES
        return (ours if is_ours else original)(*args, **kwargs)

    # As `inspect.signature` sees it, the same function.
    function.__wrapped__ = original  # type: ignore[attr-defined]
    return function
