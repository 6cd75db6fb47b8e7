"""Declares parameters once: fields of a dataclass with limits, help texts and names.

From a field are derived its check, the keyword argument of ``LLM`` (:func:`takes`), the command
line option, the field of a request's body, and its row in the documentation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import UnknownArgumentError

Check = Callable[[str, Any], Any]
"""Maps a field's name and value to the value to keep, or raises InvalidInputError."""

_P = ParamSpec("_P")
_Args = TypeVar("_Args")
_Self = TypeVar("_Self")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Param:
    """The declaration of a field, except its name, type and default.

    Attributes:
        help: text for the command line, ``help(LLM)`` and the documentation.
        check: check of its value; not applied to None if None is allowed.
        takes_none: None is allowed, and is not checked.
        absent: the meaning of None, as text, if None stands for another value.
        metavar: placeholder for its option; empty: derived from its type.
        flag: spellings of its option; empty: its name; None: it has no option.
        stage: for an engine argument, "build" (read by every rank) or "serve" (rank 0 only). For
            a sampling parameter, "cut" if it limits which tokens can be sampled. For a server
            setting, its panel in the help.
        wire: its place in a request over HTTP: "field" of the body, or only in the "object"
            ``sampling_params``; None: not accepted.
        is_of_model: the generation config may set its default.
        sent: maps the value to the number that a kernel receives, in stage "cut".
    """

    help: str
    check: Check | None = None
    takes_none: bool = False
    absent: str = ""
    metavar: str | None = None
    flag: str | tuple[str, ...] | None = ""
    stage: str = "build"
    wire: str | None = "field"
    is_of_model: bool = False
    sent: Callable[[Any], float] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag,) if isinstance(self.flag, str) and self.flag else tuple(self.flag or ())


def param(
    default: Any = MISSING, help: str = "", check: Check | None = None, **declared: Any
) -> Any:
    """A field of a dataclass. None is allowed if it is the default. ``declared``: fields of
    :class:`Param`."""
    declared.setdefault("takes_none", default is None)
    is_hashed = None if declared.pop("is_hashed", True) else False
    made = {"param": Param(help, check, **declared)}
    return field(default=default, hash=is_hashed, metadata=made)


@cache
def declared(cls: Any) -> Mapping[str, Param]:
    """The declared fields of a dataclass, in order."""
    return {f.name: f.metadata["param"] for f in fields(cls) if "param" in f.metadata}


@cache
def defaults(cls: Any) -> Mapping[str, Any]:
    """The defaults of the declared fields that have one."""
    named: Mapping[str, Field[Any]] = {f.name: f for f in fields(cls)}
    return {n: named[n].default for n in declared(cls) if named[n].default is not MISSING}


@cache
def _checks(cls: Any) -> tuple[tuple[str, Check, bool], ...]:
    found = declared(cls).items()
    return tuple((name, p.check, p.takes_none) for name, p in found if p.check is not None)


def check_fields(made: Any) -> None:
    """Check each declared field of a dataclass separately, and store the value to keep.

    Raises:
        InvalidInputError: a value is outside its limits.
    """
    for name, check, takes_none in _checks(made.__class__):
        value = getattr(made, name)
        if value is None and takes_none:
            continue
        kept = check(name, value)
        if kept is not value:
            object.__setattr__(made, name, kept)


def check_field(cls: Any, name: str, value: Any) -> Any:
    """The value to keep of one field; a field that is not declared has no check.

    Raises:
        InvalidInputError: the value is outside its limits.
    """
    known = declared(cls).get(name)
    if known is None or known.check is None or (value is None and known.takes_none):
        return value
    return known.check(name, value)


def takes(
    arguments: Callable[_P, _Args],
) -> Callable[[Callable[[_Self, _Args], None]], Callable[Concatenate[_Self, _P], None]]:
    """Decorator: the ``__init__`` takes the fields of a dataclass as keyword arguments, instead of
    the dataclass. Type checkers, ``inspect.signature`` and ``help`` show names, types and defaults.
    Arguments of other engines are translated (:mod:`.foreign`). None stands for the default.

    Raises (when called):
        UnknownArgumentError: there is no such argument.
    """
    signature = inspect.signature(arguments)
    # None stands for the default, as in vLLM. A default of None is checked as such.
    never_none = {
        name
        for name, p in declared(arguments).items()
        if not p.takes_none and signature.parameters[name].default is not inspect.Parameter.empty
    }

    def decorate(init: Callable[[_Self, _Args], None]) -> Callable[Concatenate[_Self, _P], None]:
        @wraps(init)
        def run(self: _Self, *given: _P.args, **named: _P.kwargs) -> None:
            own = {
                name: value
                for name, value in named.items()
                if name in signature.parameters and not (value is None and name in never_none)
            }
            first = signature.bind_partial(*given).arguments
            # A default says nothing, so that another name of the argument may differ from it.
            said = {k: v for k, v in own.items() if v != signature.parameters[k].default}
            for name in [name for name in named if name not in signature.parameters]:
                from .foreign import translate  # a large table that few calls need

                try:
                    found = translate(name, named[name], {**first, **said})
                    own, said = own | found, said | found
                except KeyError:
                    names = signature.parameters
                    raise UnknownArgumentError(name, named[name], names) from None
            made: Any = arguments  # already checked
            signature.bind(*given, **own)  # a missing argument raises the TypeError of this call
            init(self, made(*given, **own))

        parameters = [next(iter(inspect.signature(init).parameters.values()))]
        parameters += signature.parameters.values()
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__doc__ = f"Args:\n{describe(arguments)}"
        return run

    return decorate


def describe(cls: Any, indent: int = 4) -> str:
    """The declared fields, as the ``Args`` of a docstring."""
    lines = []
    for name, p in declared(cls).items():
        line = " " * indent + f"{name}:"
        for word in f"{p.help} None: {p.absent}.".split() if p.absent else p.help.split():
            if len(line) + len(word) >= 96:
                lines.append(line)
                line = " " * (indent + 3)
            line += f" {word}"
        lines.append(line)
    return "\n".join(lines)
