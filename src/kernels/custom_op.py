"""Definition of the ops of ``torch.ops.pagespec``: each is defined once, by an annotated
function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, Signature
from itertools import islice
from typing import Any, Final, TypeVar, get_type_hints

import torch

# Registration in torch's dispatcher is process-wide, and this object keeps it alive. The code uses
# the bare Library, because the wrappers of torch.library.custom_op cost about 20 us per call, at 60
# calls per step.
_LIBRARY: Final = torch.library.Library("pagespec", "FRAGMENT")

R = TypeVar("R")


def custom_op(
    *,
    fake: Callable[..., Any],
    mutates: Iterable[str] = (),
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Register a function as an op under its name. Calls of the function then go through the op.

    The function's annotations determine the schema. A parameter that is a NamedTuple becomes one op
    parameter per field. The body computes the op on every device. It imports Triton kernels inside
    the function, because Triton is not installed on every machine.

    Args:
        fake: takes the function's arguments and returns an empty result of the right shape and
            dtype.
        mutates: names of the op's parameters that are written in place.
        backward, setup_context: see :func:`torch.library.register_autograd`. Without them the op
            has no gradient.
    """

    def define(function: Callable[..., R]) -> Callable[..., R]:
        name: str = function.__name__
        compute, compute_fake = _of_fields(function, function), _of_fields(function, fake)
        schema = torch.library.infer_schema(compute, mutates_args=tuple(mutates))
        schema = schema.replace("SymInt", "int")  # integers are constants of a graph
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pagespec::{name}", compute_fake, lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(
                f"pagespec::{name}", backward, setup_context=setup_context, lib=_LIBRARY
            )
        op: Any = getattr(torch.ops.pagespec, name)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            result: R = op(*args, **kwargs)
            return result

        return call

    return define


def _of_fields(declared: Callable[..., Any], function: Callable[..., R]) -> Callable[..., R]:
    """``function`` with the parameters of ``declared``, where each NamedTuple is replaced by its
    fields. Only the fields of the last NamedTuple may have defaults."""
    hints = get_type_hints(declared)
    result, sizes = hints.pop("return"), [len(getattr(h, "_fields", ())) for h in hints.values()]
    if not any(sizes):
        return function
    fields: list[Parameter] = []
    for name, kind in hints.items():
        own = get_type_hints(kind) if hasattr(kind, "_fields") else {name: kind}
        defaults = getattr(kind, "_field_defaults", {})
        for field, annotation in own.items():
            default = defaults.get(field, Parameter.empty)
            fields.append(
                Parameter(
                    field, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
                )
            )

    def of_fields(*args: Any) -> R:
        rest = iter(args)  # without trailing arguments that equal their defaults
        kinds = zip(hints.values(), sizes, strict=True)
        return function(*(kind(*islice(rest, n)) if n else next(rest) for kind, n in kinds))

    of_fields.__signature__ = Signature(fields, return_annotation=result)  # type: ignore[attr-defined]
    return of_fields
