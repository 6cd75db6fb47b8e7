"""How an op of ``torch.ops.pagespec`` is defined: once, by an annotated function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import torch

# Registration in torch's dispatcher is process wide by nature; this object keeps it alive.
# The bare Library rather than torch.library.custom_op: the latter's wrappers cost about 20 us per
# call, 60 calls per step.
_LIBRARY: Final = torch.library.Library("pagespec", "FRAGMENT")

P = ParamSpec("P")
R = TypeVar("R")


def custom_op(
    *,
    fake: Callable[..., Any],
    mutates: Iterable[str] = (),
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an op of a function, under its name. Calls of the function then go through the op.

    The schema is that of the function's annotations. The body is what the op computes on every
    device; it imports Triton's kernels where it needs them, as Triton is not on every machine.

    Args:
        fake: of the same arguments, an empty result of the right shape and dtype.
        mutates: names of parameters that are written in place.
        backward, setup_context: as of :func:`torch.library.register_autograd`; without them the
            op has no gradient.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        name: str = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        schema = schema.replace("SymInt", "int")  # integers are constants of a graph
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pagespec::{name}", fake, lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(
                f"pagespec::{name}", backward, setup_context=setup_context, lib=_LIBRARY
            )
        op: Any = getattr(torch.ops.pagespec, name)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = op(*args, **kwargs)
            return result

        return call

    return define
