"""End tokens from a model's files, checked against its vocabulary."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, InvalidInputError, SamplingParams, StructuredOutputs
from pagespec.compile.load.load import load_model
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.structured import END, save_byte_model


def save(folder: Path, **named: Any) -> Path:
    """``named``: ``eos_token_id`` of the file "config" and "generation_config"."""
    tiny_model("qwen2").save_pretrained(folder)
    for name in ("config", "generation_config"):
        file = folder / f"{name}.json"
        said = json.loads(file.read_text()) if file.exists() else {}
        said["eos_token_id"] = named.get(name)
        file.write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("generation_config", "config", "expected", "dropped"),
    [
        (VOCAB_SIZE, None, set(), [VOCAB_SIZE]),
        ([7, VOCAB_SIZE + 5], None, {7}, [VOCAB_SIZE + 5]),
        ([-1, 3], 9, {3}, [-1]),
        ([7, 7], 9, {7}, []),
        ([VOCAB_SIZE, -100], 9, {9}, [-100, VOCAB_SIZE]),
        ([], 9, {9}, []),
        (None, [9, 1 << 40], {9}, [1 << 40]),
        (0, None, {0}, []),
        (VOCAB_SIZE - 1, None, {VOCAB_SIZE - 1}, []),
    ],
)
def test_ids_are_checked_against_the_vocabulary(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    generation_config: Any,
    config: Any,
    expected: set[int],
    dropped: list[int],
) -> None:
    save(tmp_path, generation_config=generation_config, config=config)
    with caplog.at_level(logging.WARNING, "pagespec"):
        loaded = load_model(tmp_path)
    assert loaded.eos_token_ids == expected
    warned = [r.getMessage() for r in caplog.records if "eos_token_id" in r.getMessage()]
    assert len(warned) == bool(dropped)
    for token_id in dropped:
        assert str(token_id) in warned[0]


@pytest.mark.parametrize("eos", [True, 2.0, [[2]], [2, True], [2, None], "2", {"id": 2}])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_what_is_no_id_is_refused(tmp_path: Path, file: str, eos: Any) -> None:
    save(tmp_path, **{file: eos})
    with pytest.raises(InvalidInputError):
        load_model(tmp_path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    save_byte_model(folder)
    file = folder / "generation_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"eos_token_id": [END, 1_000_000]}))
    return LLM(folder, device="cpu", max_model_len=64, num_blocks=32)


def test_min_tokens_and_constraints_work_beside_an_id_that_is_none(llm: LLM) -> None:
    early = SamplingParams(max_tokens=8, min_tokens=4, seed=1)
    plain = SamplingParams(max_tokens=8, seed=2)
    asked = SamplingParams(max_tokens=8, seed=3, structured_outputs=StructuredOutputs(regex="ab"))
    outputs = llm.generate(["a", "b", "c"], [early, plain, asked], use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) >= 4
    assert outputs[2].outputs[0].text == "ab"


def test_the_tokenizers_own_end_ends_conversations_alone(tmp_path: Path) -> None:
    """If the configs name another end token. A completion is as long as that of ``generate``."""
    save_byte_model(tmp_path)
    file = tmp_path / "generation_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"eos_token_id": 5}))
    llm = LLM(tmp_path, device="cpu", max_model_len=64, num_blocks=32)
    assert llm.tokenizer.eos_token_id == END
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    conversation = [{"role": "user", "content": "a"}]
    forced = {"max_tokens": 8, "allowed_token_ids": [END], "seed": 1}
    (output,) = llm.chat(conversation, SamplingParams(**forced), use_tqdm=False)
    (answer,) = output.outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([END], "stop", None)
    (output,) = llm.chat(conversation, SamplingParams(**forced, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == [END] * 8
    (output,) = llm.generate("a", SamplingParams(**forced), use_tqdm=False)
    assert output.outputs[0].token_ids == [END] * 8
