"""``structured_outputs_config``: its forms, and its refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import InvalidInputError
from pagespec.engine.config import EngineConfig
from pagespec.engine.structured_config import NO_DEFAULTS, StructuredOutputsConfig

TIGHT = StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (None, NO_DEFAULTS),
        ({}, NO_DEFAULTS),
        ({"backend": "auto", "reasoning_parser": ""}, NO_DEFAULTS),
        (TIGHT, TIGHT),
        ({"backend": "guidance", "disable_any_whitespace": True}, TIGHT),
        ('{"backend": "guidance", "disable_any_whitespace": true}', TIGHT),
        (
            {"backend": "xgrammar"},
            StructuredOutputsConfig("xgrammar", disable_additional_properties=True),
        ),
    ],
)
def test_a_dict_json_text_or_a_config(value: Any, made: StructuredOutputsConfig) -> None:
    config = EngineConfig(structured_outputs_config=value)
    assert config.structured == made
    again = EngineConfig(**config.arguments())
    assert again == config
    assert hash(again) == hash(config)
    # Ranks besides the first compile no constraint.
    assert "structured_outputs_config" not in config.build_arguments()


REFUSED: list[tuple[Any, str]] = [
    (3, "structured_outputs_config = 3: must be a dict or JSON text"),
    ("xgrammar", "structured_outputs_config = 'xgrammar': is not JSON"),
    ({"backend": "outlines"}, r"config\.backend = 'outlines': must be one of auto, guidance, xgr"),
    ({"backend": ["auto"]}, r"config\.backend = "),
    ({"disable_any_whitespace": 1}, r"config\.disable_any_whitespace = 1: must be True or False"),
    ({"reasoning_parser": "qwen3"}, r"config\.reasoning_parser = 'qwen3'.*use reasoning_format"),
    ({"enable_in_reasoning": True}, r"config\.enable_in_reasoning = True"),
    ({"_backend": "auto"}, r"config\._backend = 'auto': there is no such key"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=str)
def test_what_has_no_effect_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        EngineConfig(structured_outputs_config=value)
