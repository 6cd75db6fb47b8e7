"""Folders with their own code, adapters or generation settings: not run, rejected, named."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from pagespec.compile.load.load import load_model
from pagespec.errors import UnsupportedModelError
from tests.support.models import tiny_model
from tests.support.tokenizers import byte_level

CODE = "from pathlib import Path\nPath(__file__).with_name('was_run').touch()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    # A prompt for permission would be answered with yes.
    monkeypatch.setattr(builtins, "input", lambda _: "y")
    return tmp_path


def _change(file: Path, **values: Any) -> None:
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | values))


def _was_run(folder: Path) -> bool:
    return any(folder.rglob("was_run"))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_type_defined_only_in_the_folder_is_refused(folder: Path, load_format: str) -> None:
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    _change(folder / "config.json", model_type="own", auto_map=code)
    with pytest.raises(UnsupportedModelError, match=r"its config needs Python code .* is not run"):
        load_model(folder, load_format=load_format)
    assert not _was_run(folder)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_class_defined_only_in_the_folder_is_refused(folder: Path, load_format: str) -> None:
    """The type is known, and no causal language model."""
    code = {"AutoModelForCausalLM": "own.Model"}
    _change(folder / "config.json", model_type="clip_vision_model", auto_map=code)
    with pytest.raises(UnsupportedModelError, match=r"its class needs Python code .* is not run"):
        load_model(folder, load_format=load_format)
    assert not _was_run(folder)


def test_a_known_type_needs_no_code(folder: Path) -> None:
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    _change(folder / "config.json", auto_map=code)
    assert load_model(folder).architecture == "LlamaForCausalLM"
    assert not _was_run(folder)


def test_a_tokenizer_with_a_class_of_transformers_needs_no_code(folder: Path) -> None:
    byte_level().save_pretrained(folder)
    plain = load_model(folder).tokenizer
    code = {"AutoTokenizer": [None, "own.Tokenizer"]}
    _change(folder / "tokenizer_config.json", auto_map=code)
    tokenizer = load_model(folder).tokenizer
    assert plain is not None
    assert tokenizer is not None
    assert tokenizer("a text").input_ids == plain("a text").input_ids
    assert not _was_run(folder)


def test_a_tokenizer_defined_only_in_the_folder_is_refused(folder: Path) -> None:
    byte_level().save_pretrained(folder)
    code = {"AutoTokenizer": [None, "own.Tokenizer"]}
    _change(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map=code)
    with pytest.raises(UnsupportedModelError, match=r"its tokenizer needs Python .* is not run"):
        load_model(folder)
    assert not _was_run(folder)


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_folder_with_an_adapter_is_refused(folder: Path, has_weights: bool) -> None:
    _change(folder / "adapter_config.json", peft_type="LORA", r=4)
    if not has_weights:
        (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="LoRA"):
        load_model(folder)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"suppress_tokens": [3], "no_repeat_ngram_size": 2, "num_beams": 3, "min_length": 5},
            "min_length, no_repeat_ngram_size, num_beams, suppress_tokens",
        ),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id"),
        ({"max_length": 8}, "max_length"),
        (
            {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 5.0}},
            "watermarking_config",
        ),
        ({"max_length": 8, "max_new_tokens": 8}, None),
        ({"max_length": 512}, None),
        ({"num_beams": 1, "suppress_tokens": [], "guidance_scale": 1.0, "min_length": 0}, None),
        ({"temperature": 0.5, "top_k": 3, "do_sample": True, "repetition_penalty": 1.5}, None),
    ],
)
def test_settings_of_generation_that_are_ignored_are_named(
    folder: Path, settings: dict[str, Any], named: str | None
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert ", ".join(load_model(folder).ignored_settings) == (named or "")


def test_the_end_token_of_the_config_is_the_fallback(folder: Path) -> None:
    _change(folder / "config.json", eos_token_id=[7, 9])
    (folder / "generation_config.json").write_text('{"bos_token_id": 1}')
    assert load_model(folder).eos_token_ids == {7, 9}
