"""Engine settings that are rejected before a model is loaded, and their error messages."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, InvalidInputError
from pagespec.engine.config import EngineConfig

HUGE = 10**400  # too large for a float, and too long for a message


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_blocks": 1 << 70}, "num_blocks"),
        ({"max_num_seqs": HUGE, "max_num_batched_tokens": 4}, "max_num_seqs"),
        ({"memory_utilization": 1.5}, "memory_utilization"),
        ({"memory_utilization": True}, "memory_utilization"),
        ({"memory_utilization": math.nan}, "memory_utilization"),
        ({"dtype": "int8"}, "dtype"),
        ({"compile": "maybe"}, "compile"),
        ({"device": "cpu:3"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"device": "cuda:-1"}, "device"),
        ({"device": "cuda:" + "9" * 5000}, "device"),
        ({"policy": "random"}, "policy"),
        ({"policy": []}, "policy"),
        ({"graph_batch_sizes": 5}, "graph_batch_sizes"),
        ({"graph_batch_sizes": b"a"}, "graph_batch_sizes"),
        ({"graph_batch_sizes": [1, 65]}, "graph_batch_sizes"),
        ({"load_format": "magic"}, "load_format"),
        ({"seed": 1 << 63}, "seed"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
        ({"mla_latent_cache": 1}, "mla_latent_cache"),
        ({"num_state_slots": -1}, "num_state_slots"),
        ({"num_state_slots": 64, "state_interval": 16}, "num_state_slots"),
        ({"state_interval": 24}, "state_interval"),
    ],
)
def test_engine_settings_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        EngineConfig(**kwargs)
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


def test_the_default_of_max_num_seqs_is_at_most_the_tokens_of_a_step() -> None:
    found = [EngineConfig(max_num_batched_tokens=n).max_num_seqs for n in (None, 8192, 64, 32)]
    assert found == [64, 64, 64, 32]


def test_a_number_of_blocks_precedes_a_share_of_the_memory() -> None:
    config = EngineConfig(gpu_memory_utilization=0.25, num_blocks=4)
    assert (config.num_blocks, config.memory_utilization) == (4, 0.25)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", [None, 5, b"x", object(), math]),
        ("trace", [True, 1.5, [], "", b"t", "/no/x", "/", "t\0", "t" * 300, __file__ + "/t"]),
        ("check_invariants", ["no", 0]),
        ("on_logits", [5, "print"]),
    ],
)
def test_other_arguments_are_refused_before_anything_is_loaded(
    field: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(InvalidInputError) as caught:
            LLM(**({"model": "m"} | {field: value}))
        assert (caught.value.field, caught.value.value) == (field, value)


def test_a_trace_path_is_not_touched_by_its_check(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, str(old), new, os.devnull):
        EngineConfig(trace=path)
    assert old.read_text() == "kept"
    assert not new.exists()


def test_batch_sizes_are_kept_as_a_tuple() -> None:
    assert EngineConfig(graph_batch_sizes=[1, 2]).graph_batch_sizes == (1, 2)
    assert EngineConfig(graph_batch_sizes=range(1, 3)).for_gpu().graph_batch_sizes == (1, 2)
