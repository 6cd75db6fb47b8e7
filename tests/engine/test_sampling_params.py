"""Which sampling parameters are refused, and with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams

HUGE = 10**400  # too large for a float, and too long for a message


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": HUGE}, "temperature"),
        ({"temperature": -HUGE}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": HUGE}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": HUGE}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": b""}, "stop"),
        ({"stop": bytearray()}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"stop_token_ids": bytearray(b"a")}, "stop_token_ids"),
        ({"stop_token_ids": memoryview(b"a")}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_sampling_params_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**kwargs)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")
    assert len(str(caught.value)) < 200


def test_an_unknown_sampling_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="presence_penality"):
        SamplingParams(presence_penality=1.0)  # type: ignore[call-arg]


def test_sampling_params_are_frozen_and_normalised() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3])
    assert params.stop_strings == ("x",)
    assert params.stop_token_ids == (3,)
    with pytest.raises(AttributeError):
        params.temperature = 0.5  # type: ignore[misc]
