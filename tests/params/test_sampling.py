"""Uses of the declared sampling parameters: HTTP bodies, options, and data sent to a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pagespec import SamplingParams
from pagespec.cli.options import SamplingOptions
from pagespec.engine.sampling_params import UNSUPPORTED
from pagespec.params.declare import declared
from pagespec.runner.row_params import CUTS, truncated_fields
from pagespec.server.protocol.endpoints import ChatRequest, CompletionRequest


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest])
def test_a_body_has_every_parameter_that_is_declared_for_it(body: type[ChatRequest]) -> None:
    known = declared(SamplingParams)
    assert {n for n, p in known.items() if p.wire == "field"} <= set(body.model_fields)
    assert not {n for n, p in known.items() if p.wire is None} & set(body.model_fields)
    assert not UNSUPPORTED & set(body.model_fields)
    assert body.model_fields["top_p"].description == known["top_p"].help


def test_every_parameter_has_its_help() -> None:
    assert all(p.help.endswith(".") for p in declared(SamplingParams).values())
    assert all(
        f"        {name}: " in str(SamplingParams.__doc__) for name in declared(SamplingParams)
    )


def test_options_have_the_defaults_of_the_parameters_or_leave_them_to_the_model() -> None:
    params = SamplingOptions().params(0)
    assert (params.seed, params.max_tokens) == (0, 256)
    assert params == SamplingParams(seed=0, max_tokens=256)


def test_rows_that_cut_are_sent_and_no_others() -> None:
    rows = [
        SamplingParams(),
        SamplingParams(top_k=-1),
        SamplingParams(top_k=1 << 40),
        None,
        SamplingParams(top_k=3, temperature=0.0),
        SamplingParams(top_p=0.25),
        SamplingParams(min_p=0.5, top_k=-1),
    ]
    fields = truncated_fields(rows)
    assert {n for n, p in declared(SamplingParams).items() if p.stage == "cut"} == set(CUTS)
    assert fields[0].tolist() == [2, 5, 6]
    assert fields[1].tolist() == [(1 << 31) - 1, 0, 0]
    assert fields[2].view(np.float32).tolist() == [1.0, 0.25, 1.0]
    distances = fields[3].view(np.float32).tolist()
    assert distances[:2] == [math.inf, math.inf]
    assert distances[2] == np.float32(math.log(2))
    assert truncated_fields([SamplingParams()]).shape == (len(fields), 0)
