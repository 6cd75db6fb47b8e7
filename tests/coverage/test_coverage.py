"""A few entries of the sweep, one per class of outcome; `nox -s coverage` runs all entries."""

from __future__ import annotations

import pytest

from pagespec import UnsupportedModelError
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from tests.coverage.entry import built, run_entry
from tests.coverage.page import class_of
from tests.coverage.sweep import ENTRIES
from tests.coverage.tiny_config import VOCAB_SIZE, WINDOW, shrunk, tiny_config

HAS_DORY = pytest.mark.skipif("dory" not in ENTRIES, reason="it came with transformers 5.24")


# What sets them apart: hands no arguments down to its attention; counts positions itself; has
# layers with copies of the config; writes its attention out, with ALiBi or a mask of its own; has
# chunks; calls a module twice; has a vision tower; has a cache with a window
# that hides nothing; sets a buffer to itself; has short convolutions; has indexers; runs some of
# its layers several times, with keys of their own.
@pytest.mark.parametrize(
    "model_type",
    [
        "stablelm",
        "bart",
        "mvp",
        "bloom",
        "gpt_neo",
        "lfm2",
        "diffllama",
        pytest.param("glm_moe_dsa", marks=pytest.mark.nightly),
        pytest.param("granite_swa", marks=pytest.mark.nightly),
        pytest.param("openai-gpt", marks=pytest.mark.nightly),
        pytest.param("llama4_text", marks=pytest.mark.nightly),
        pytest.param("got_ocr2", marks=pytest.mark.nightly),
        pytest.param("ctrl", marks=pytest.mark.nightly),
        pytest.param("mistral3", marks=pytest.mark.nightly),
        pytest.param("moshi", marks=pytest.mark.nightly),
        pytest.param("dory", marks=[pytest.mark.nightly, HAS_DORY]),
    ],
)
def test_entries_that_are_equal(model_type: str) -> None:
    entry = run_entry(model_type)
    assert (entry.outcome, entry.reason) == ("equal", "")
    assert entry.longest > WINDOW


@pytest.mark.parametrize(
    ("model_type", "class_"),
    [
        ("recurrent_gemma", "Layers without attention"),
        ("inkling_text", "Attention with an extra input tensor"),
        ("doge", "A mask or bias that the layer adds itself"),
        ("deepseek_v4", "Attention over tokens outside the forward pass"),
        ("prophetnet", "Hand-written attention that is not a plain masked softmax"),
    ],
)
def test_entries_that_are_refused(model_type: str, class_: str) -> None:
    entry = run_entry(model_type)
    assert entry.outcome == "refused", entry
    assert class_of(entry.reason) == class_, entry.reason


def test_a_layer_of_each_kind_stays_in_each_section() -> None:
    kinds = ["sliding", "mlp", "sliding", "mlp", "full", "mlp"]
    counts = {"num_hidden_layers": 18, "n_input_layers": 6, "n_output_layers": 12}
    small = shrunk({**counts, "layer_types": kinds * 3})
    assert small["layer_types"] == ["sliding", "mlp", "full", "mlp"] * 2
    assert {name: small[name] for name in counts} == {
        "num_hidden_layers": 8,
        "n_input_layers": 4,
        "n_output_layers": 4,
    }


@HAS_DORY
def test_loops_that_read_the_keys_of_the_last_are_refused() -> None:
    config = tiny_config("dory")
    config.recurrent_kv_cache_mode = "last_loop"
    with pytest.raises(UnsupportedModelError, match="keeps the keys of 6 of its 8 attention calls"):
        probe_model(load_model(built(config)))


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(_: object) -> None:
        raise ImportError("requires the PIL library")

    monkeypatch.setattr("tests.coverage.entry.built", lacks)
    entry = run_entry("llama")
    assert (entry.outcome, class_of(entry.reason)) == ("refused", "Missing packages")
    assert "PIL" in entry.reason


def test_a_config_is_shrunk_to_one_layer_of_each_kind() -> None:
    small = shrunk(
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "num_hidden_layers": 6,
            "layer_types": ["sliding"] * 5 + ["full"],
            "sliding_window": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "eos_token_id": 2,
            "num_experts": 2,
            "rope_theta": 10_000.0,
        }
    )
    assert small["layer_types"] == ["sliding", "full"]
    assert small["num_hidden_layers"] == 2
    assert (small["vocab_size"], small["sliding_window"]) == (VOCAB_SIZE, WINDOW)
    assert small["num_attention_heads"] == small["num_key_value_heads"]
    assert (small["eos_token_id"], small["num_experts"]) == (None, 2)
    assert small["rope_theta"] == 10_000.0
