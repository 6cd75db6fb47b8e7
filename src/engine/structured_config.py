"""The engine argument ``structured_outputs_config``: its keys, values and refusals."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import keyed
from .structured_outputs import BACKENDS, CLOSING_BACKENDS

# Keys of vLLM whose other values are not supported, with their replacement.
_EMPTY = {
    "reasoning_parser": ("", "use reasoning_format"),
    "reasoning_parser_plugin": ("", "use reasoning_format"),
    "enable_in_reasoning": (False, "a constraint applies to the content after the reasoning"),
}


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """Defaults of a model's constraints. Names as in vLLM.

    Attributes:
        backend: "auto", "guidance" or "xgrammar"; llguidance compiles all constraints.
            "xgrammar" sets ``disable_additional_properties``, as that library does.
        disable_any_whitespace: no whitespace between JSON tokens, for every constraint without a
            ``whitespace_pattern``.
        disable_additional_properties: as in ``StructuredOutputs``, for every JSON schema.
        disable_fallback: no effect, because there is one backend.
        reasoning_parser, reasoning_parser_plugin, enable_in_reasoning: only vLLM's defaults.

    Raises:
        InvalidInputError: names the key, the value and the limit.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            limit = f"must be one of {', '.join(BACKENDS)}: llguidance compiles all constraints"
            raise _error("backend", self.backend, limit)
        for key in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
            if not isinstance(getattr(self, key), bool):
                raise _error(key, getattr(self, key), "must be True or False")
        for key, (empty, instead) in _EMPTY.items():
            if getattr(self, key) != empty:
                raise _error(key, getattr(self, key), f"must be {empty!r}: {instead}")
        if self.backend in CLOSING_BACKENDS:
            object.__setattr__(self, "disable_additional_properties", True)


NO_DEFAULTS = StructuredOutputsConfig()


def structured_config(name: str, value: Any) -> StructuredOutputsConfig:
    """Check the argument: a :class:`StructuredOutputsConfig`, a dict of its fields, or JSON text.

    Raises:
        InvalidInputError: names the key, the value and the limit.
    """
    if isinstance(value, StructuredOutputsConfig):
        return value
    keys = [known.name for known in fields(StructuredOutputsConfig)]
    return StructuredOutputsConfig(**keyed(name, value, keys, '{"backend": "guidance"}'))


def _error(key: object, value: object, limit: str) -> InvalidInputError:
    return InvalidInputError(f"structured_outputs_config.{key}", value, limit)
