"""The recurrences of a Hugging Face model (short convolutions, delta rules, state-space scans),
replaced by the project's ops.

Their mixers call functions of their modelling file, which are identified by name and parameters,
never by model. Within :func:`recurrences_replaced` these names refer to functions that pass the
same tensors, one row per packed token, to the thread's :attr:`.Functions.recurrence`. The probe
refuses a model that mixes tokens in another way.
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

_Arguments = dict[str, Any]


def _short_conv(given: _Arguments) -> Tensor:
    """``[1, C, T]`` to the same; weight ``[C, K]``."""
    x = given.pop("hidden_states").squeeze(0).transpose(0, 1)
    tensors = x, given.pop("weight"), given.pop("bias", None)
    out = _compute("short_conv", tensors, (given.pop("activation", None) or "",), given)
    return out.transpose(0, 1).unsqueeze(0)


def _delta_rule(given: _Arguments) -> tuple[Tensor, None]:
    """``[1, T, H, K]`` and ``[1, T, H, V]`` to ``[1, T, H, V]``."""
    names = ("query", "key", "value", "g", "beta")
    tensors = tuple(given.pop(name).squeeze(0) for name in names)
    given.pop("chunk_size", None)  # a parameter of another algorithm for the same function
    settings = tensors[0].shape[-1] ** -0.5, given.pop("use_qk_l2norm_in_kernel", False)
    return _compute("delta_rule", tensors, settings, given).unsqueeze(0), None


def _ssd_scan(given: _Arguments) -> Tensor:
    """``[1, T, H, P]`` to the same."""
    x, dt, b, c = (given.pop(name).squeeze(0) for name in ("hidden_states", "dt", "B", "C"))
    tensors = x, dt, given.pop("A"), b, c, given.pop("D", None), given.pop("dt_bias", None)
    given.pop("chunk_size", None)  # as above
    low, high = given.pop("dt_limit", (0.0, float("inf")))
    settings = given.pop("dt_softplus", False), float(low), float(high)
    return _compute("ssd_scan", tensors, settings, given).unsqueeze(0)


def _selective_scan(given: _Arguments) -> Tensor:
    """``[1, I, T]`` to the same."""
    names = ("hidden_states", "dt", "B", "C")
    x, dt, b, c = (given.pop(name).squeeze(0).transpose(0, 1) for name in names)
    z = given.pop("z", None)
    gate = None if z is None else z.squeeze(0).transpose(0, 1)
    tensors = x, dt, given.pop("A"), b, c, given.pop("D", None), gate, given.pop("delta_bias", None)
    out = _compute("selective_scan", tensors, (given.pop("delta_softplus", False),), given)
    return out.transpose(0, 1).unsqueeze(0)


_DELTA_RULE = (
    _delta_rule,
    "query key value g beta chunk_size initial_state output_final_state use_qk_l2norm_in_kernel "
    "kwargs",
)
_KNOWN: dict[str, tuple[Callable[[_Arguments], Any], str]] = {
    "causal_conv1d_fn": (_short_conv, "hidden_states weight bias activation kwargs"),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": (
        _ssd_scan,
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit "
        "return_final_states kwargs",
    ),
    "mamba_selective_scan": (
        _selective_scan,
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy "
        "use_associative_scan kwargs",
    ),
}
"""By the names of functions that models call: a function that computes the same from the arguments
by name, for one text of packed tokens; and the names of parameters that such a function has."""


def _compute(
    kind: str, tensors: tuple[Any, ...], settings: tuple[Any, ...], others: dict[str, Any]
) -> Tensor:
    return current.functions.recurrence(RecurrentCall(kind, tensors, settings, others))


@contextmanager
def recurrences_replaced(module: PreTrainedModel) -> Iterator[None]:
    """Within the context, the thread's function replaces the recurrences of the model's passes in
    this thread."""
    with Scope() as scope:
        for home in _homes(module):
            _install(home)
            scope.callback(_remove, home)
        yield


def _homes(module: PreTrainedModel) -> list[str]:
    """The Python modules of the model's classes that have known functions."""
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
        for name, (_, parameters) in _KNOWN.items()
        if name in globals_of_home and _parameters(globals_of_home[name]) == parameters.split()
    }


def _parameters(function: Any) -> list[str]:
    """Names of the parameters; none for a function without a signature."""
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return []


# Names of a Python module are shared by all threads. They are set when the first thread enters a
# context and restored when the last leaves one. In between, a thread outside of all contexts gets
# the model's own functions.
_lock = threading.Lock()
_installed: dict[str, tuple[int, Scope]] = {}  # number of contexts, and their changes


def _install(home: str) -> None:
    with _lock:
        depth, scope = _installed.get(home, (0, Scope()))
        if not depth:
            for name, original in _found(home).items():
                scope.set(sys.modules[home], name, _either(_KNOWN[name][0], original))
        _installed[home] = depth + 1, scope


def _remove(home: str) -> None:
    with _lock:
        depth, scope = _installed.pop(home)
        if depth > 1:
            _installed[home] = depth - 1, scope
        else:
            scope.close()


def _either(ours: Callable[[_Arguments], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    names = _parameters(original)

    def function(*args: Any, **kwargs: Any) -> Any:
        # Dynamo of torch 2.11 sees thread-local data only if it has traced it: the step.
        if current.step is not None or current.functions is not ON_CACHES:
            return ours({**dict(zip(names, args, strict=False)), **kwargs})
        return original(*args, **kwargs)

    # `inspect.signature` then sees the original signature.
    function.__wrapped__ = original  # type: ignore[attr-defined]
    return function
