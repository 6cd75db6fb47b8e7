"""Tokenizers of GGUF files against llama.cpp's results for the same files.

``python -m tests.coverage.gguf_tokenizers --record FILE`` wrote ``gguf_tokenizers.json``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pagespec.compile.load.gguf_expressions import PRE_TOKENIZERS
from pagespec.compile.load.gguf_tokenizer import build_tokenizer, read_tokenizer
from pagespec.compile.load.gguf_vocabulary import Vocabulary, read_vocabulary
from pagespec.errors import InvalidInputError, UnsupportedModelError
from pagespec.structured.tokens import make_ll_tokenizer
from tests.support.gguf_files import write_vocabulary
from tests.support.gguf_vocabularies import SPECIAL, USER_DEFINED
from tests.support.hard_texts import hard_texts

RECORDED = json.loads((Path(__file__).parent / "gguf_tokenizers.json").read_text())
KINDS = ("gpt2 qwen2", "gpt2 llama-bpe", "gemma4", "llama", "llama, no space")


def _arguments(case: str) -> dict[str, Any]:
    kind = case.split()[0].rstrip(",")
    return RECORDED["vocabularies"][kind] | {"keys": RECORDED["keys"][case]}


def _vocabulary(folder: Path, arguments: dict[str, Any]) -> Vocabulary:
    found = read_vocabulary(write_vocabulary(folder / "a.gguf", **arguments))
    assert found is not None
    return found


def _tokenizer(folder: Path, case: str, **keys: Any) -> PreTrainedTokenizerFast:
    arguments = _arguments(case)
    more = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return build_tokenizer(_vocabulary(folder, arguments | {"keys": arguments["keys"] | more}))


def _with(case: str, **changes: Any) -> dict[str, Any]:
    """Arguments of a case, of which some differ; those in "keys" are added."""
    arguments = _arguments(case)
    keys = arguments["keys"] | changes.pop("keys", {})
    return arguments | changes | {"keys": {k: v for k, v in keys.items() if v is not None}}


def test_each_name_of_pre_was_compared() -> None:
    recorded = {case.split()[1] for case in RECORDED["found"] if case.startswith("gpt2 ")}
    assert recorded == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("case", RECORDED["found"])
def test_ids_are_those_of_llama_cpp(tmp_path: Path, case: str) -> None:
    tokenizer = _tokenizer(tmp_path, case)
    expected = RECORDED["outcomes"][RECORDED["found"][case]]
    for text, ids in zip(RECORDED["texts"], expected, strict=True):
        assert tokenizer(text)["input_ids"] == [*map(int, ids.split())], repr(text)


@pytest.mark.parametrize("case", KINDS)
def test_atomic_tokens_are_one_id_and_their_own_text(tmp_path: Path, case: str) -> None:
    vocabulary = _vocabulary(tmp_path, _arguments(case))
    tokenizer = build_tokenizer(vocabulary)
    plain = [i for i, kind in enumerate(vocabulary.types) if kind == 1 and i > 300]
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in (2, 3, 4):
            continue
        for around in ("", "a", " ", "\n"):
            ids = tokenizer(around + text + around, add_special_tokens=False)["input_ids"]
            assert ids.count(token_id) == 1, (text, around)
        ids = [plain[0], token_id, plain[0]]
        assert text in tokenizer.decode(ids, skip_special_tokens=False)
        assert (text in tokenizer.decode(ids, skip_special_tokens=True)) == (kind == 4), text


@pytest.mark.parametrize("case", KINDS)
def test_text_comes_back(tmp_path: Path, case: str) -> None:
    tokenizer = _tokenizer(tmp_path, case)
    for text in hard_texts(50, seed=7, extra=USER_DEFINED):
        # A mark is a space to SentencePiece.
        if case != "gpt2 qwen2" and ("▁" in text or any(token in text for token in SPECIAL)):
            continue
        # Behind an atomic token SentencePiece adds a space, too.
        if case == "llama" and any(t in text for t in [*USER_DEFINED, "<s>", "</s>", "<unk>"]):
            continue
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_an_unused_token_is_never_made(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "gpt2 qwen2")
    unused = tokenizer.get_vocab()["[PAD0]"]
    assert unused not in tokenizer("[PAD0] a[PAD0]")["input_ids"]
    arguments = _arguments("llama")
    types, tokens = list(arguments["types"]), arguments["tokens"]
    piece = next(i for i, text in enumerate(tokens) if len(text) == 3 and i > 300)
    types[piece] = 5
    tokenizer = build_tokenizer(_vocabulary(tmp_path, arguments | {"types": types}))
    assert piece not in tokenizer(tokens[piece].replace("▁", " "))["input_ids"]


@pytest.mark.parametrize("case", KINDS)
def test_a_saved_tokenizer_is_read_as_it_was(tmp_path: Path, case: str) -> None:
    made = _tokenizer(tmp_path, case)
    made.save_pretrained(tmp_path / "saved")
    again = read_tokenizer(tmp_path / "saved")
    assert again.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    assert again.special_tokens_map == made.special_tokens_map
    assert again.chat_template == made.chat_template


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("adds_bos", [None, False, True])
@pytest.mark.parametrize("adds_eos", [None, False, True])
def test_a_text_gets_the_tokens_that_the_file_says(
    tmp_path: Path, case: str, adds_bos: bool | None, adds_eos: bool | None
) -> None:
    keys = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    tokenizer = _tokenizer(
        tmp_path, case, **{name: value for name, value in keys.items() if value is not None}
    )
    ids = tokenizer("a")["input_ids"]
    usually = case != "gpt2 qwen2"
    has_bos = usually if adds_bos is None else adds_bos
    if case == "gemma4":
        has_bos = True  # whatever the file says
    assert (ids[0] == tokenizer.bos_token_id) == has_bos
    assert (ids[-1] == tokenizer.eos_token_id) == bool(adds_eos)


def test_spaces_behind_special_tokens_of_phi_3_are_swallowed(tmp_path: Path) -> None:
    arguments = _with("llama", keys={"general.name": "Phi-3 mini"})
    tokenizer = build_tokenizer(_vocabulary(tmp_path, arguments))
    [end] = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    ids = [tokenizer(f"<|im_end|>{space}a", add_special_tokens=False)["input_ids"]
           for space in ("", " ", "\n", " \n ")]  # fmt: skip
    assert ids[0][0] == end
    assert ids == [ids[0]] * 4


@pytest.mark.parametrize("case", KINDS)
def test_grammars_read_the_tokenizer(tmp_path: Path, case: str) -> None:
    tokenizer = _tokenizer(tmp_path, case)
    made = make_ll_tokenizer(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    for text in ("a b", "é", "<think>x", "\n\n"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # Behind an atomic token SentencePiece adds a space.
        own = made.decode_bytes(ids).decode().replace("<think> ", "<think>")
        assert own.strip() == text.strip()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"keys": {"tokenizer.ggml.pre": "klingon"}}, ["tokenizer.ggml.pre", "klingon", "qwen2"]),
        ({"keys": {"tokenizer.ggml.pre": "kimi-k2"}}, ["tokenizer.ggml.pre", "kimi-k2"]),
        ({"keys": {"tokenizer.ggml.pre": "default"}}, ["tokenizer.ggml.pre", "default"]),
        ({"keys": {"tokenizer.ggml.pre": None}}, ["tokenizer.ggml.pre", "None"]),
        ({"model": "bert"}, ["tokenizer.ggml.model", "bert", "gpt2", "llama"]),
        ({"model": "t5"}, ["tokenizer.ggml.model", "t5"]),
        ({"model": "rwkv"}, ["tokenizer.ggml.model", "rwkv"]),
        ({"types": None}, ["tokenizer.ggml.token_type"]),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build_tokenizer(_vocabulary(tmp_path, _with("gpt2 qwen2", **changes)))
    assert all(name in str(caught.value) for name in names)


def test_a_token_that_texts_get_must_be_there(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.add_eos_token": True}
    with pytest.raises(InvalidInputError, match="eos_token_id"):
        build_tokenizer(_vocabulary(tmp_path, _with("gpt2 qwen2", keys=keys)))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": []}, "tokenizer.ggml.tokens"),
        ({"merges": ["a zzzz"]}, "a zzzz"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"types": [1, 1]}, "tokenizer.ggml.token_type"),
        ({"scores": [1.0, 1.0]}, "tokenizer.ggml.scores"),
    ],
)
def test_a_damaged_vocabulary_is_refused(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidInputError, match=name):
        build_tokenizer(_vocabulary(tmp_path, _with("gpt2 qwen2", **changes)))


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    arguments = _arguments("gpt2 qwen2")
    tokens = [*arguments["tokens"]]
    tokens[-1] = tokens[300]
    with pytest.raises(InvalidInputError, match="occurs twice"):
        _vocabulary(tmp_path, arguments | {"tokens": tokens})


def test_scores_that_leave_the_order_open_are_refused(tmp_path: Path) -> None:
    arguments = _arguments("llama")
    same = [0.0] * len(arguments["tokens"])
    for scores in (same, None):
        with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.scores"):
            build_tokenizer(_vocabulary(tmp_path, arguments | {"scores": scores}))


def test_a_file_may_have_no_vocabulary(tmp_path: Path) -> None:
    for model in ("none", "no_vocab"):
        assert read_vocabulary(write_vocabulary(tmp_path / "a.gguf", model=model)) is None


def test_an_id_beyond_the_vocabulary_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"padding_token_id": 2**32 - 1, "eot_token_id": 10**6}
    with caplog.at_level(logging.WARNING, "pagespec"):
        tokenizer = _tokenizer(tmp_path, "gpt2 qwen2", **keys)
    assert tokenizer.pad_token is None
    assert [key in caplog.text for key in keys] == [True, True]


def _ends(folder: Path, tokens: dict[str, int], **ids: str) -> set[str]:
    """What ends an answer, with these tokens of these types behind a vocabulary."""
    arguments = _arguments("gpt2 qwen2")
    texts = [*arguments["tokens"][:-11], *tokens]
    types = [*arguments["types"][:-11], *tokens.values()]
    keys: dict[str, Any] = {"tokenizer.ggml.pre": "qwen2"}
    keys |= {f"tokenizer.ggml.{name}": texts.index(text) for name, text in ids.items()}
    found = _vocabulary(folder, arguments | {"tokens": texts, "types": types, "keys": keys})
    return {found.tokens[token_id] for token_id in found.end_ids}


@pytest.mark.parametrize(
    ("tokens", "ids", "ends"),
    [
        ({"<e>": 3, "<t>": 3, "<m>": 3, "<x>": 3},
         {"eos_token_id": "<e>", "eot_token_id": "<t>", "eom_token_id": "<m>"},
         {"<e>", "<t>", "<m>"}),
        ({"<e>": 3, "<|eot_id|>": 3, "<|eom_id|>": 3}, {"eos_token_id": "<e>"},
         {"<e>", "<|eot_id|>", "<|eom_id|>"}),
        ({"<|im_end|>": 3, "<|endoftext|>": 3}, {"eos_token_id": "<|im_end|>"},
         {"<|im_end|>", "<|endoftext|>"}),
        # Types that converters got wrong.
        ({"<end_of_turn>": 1, "<eos>": 4}, {}, {"<end_of_turn>", "<eos>"}),
        # A piece of HTML, and an end.
        ({"<e>": 3, "</s>": 1}, {"eos_token_id": "<e>"}, {"<e>"}),
        ({"</s>": 3}, {}, {"</s>"}),
        # gpt-oss: "<|end|>" ends a message, and the answer goes on.
        ({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, {"eos_token_id": "<|return|>"},
         {"<|return|>", "<|call|>"}),
        ({"<|end|>": 3, "<e>": 3}, {"eos_token_id": "<e>"}, {"<|end|>", "<e>"}),
        ({"<|fim_pad|>": 3, "<|file_sep|>": 3, "<r>": 3}, {"fim_rep_token_id": "<r>"},
         {"<|fim_pad|>", "<|file_sep|>", "<r>"}),
    ],
)  # fmt: skip
def test_what_ends_an_answer(
    tmp_path: Path, tokens: dict[str, int], ids: dict[str, str], ends: set[str]
) -> None:
    assert _ends(tmp_path, tokens, **ids) == ends
