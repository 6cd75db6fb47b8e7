"""Build the tokenizer of a GGUF file from the file's own keys.

The reference is llama.cpp: the same ids for each text, and the same text for each id. A file for
which this is not possible is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from ...errors import InvalidInputError, UnsupportedModelError
from .gguf_expressions import PRE_TOKENIZERS
from .gguf_vocabulary import TokenType, Vocabulary

_SPACE = "▁"  # represents a space in the tokens of SentencePiece
_SPECIAL = (TokenType.UNKNOWN, TokenType.CONTROL)
_ATOMIC = (*_SPECIAL, TokenType.USER_DEFINED)
# Special tokens of a model remove the white space after them, except in these models.
_STRIPPING_MODELS = ("phi-3", "phi3")
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
_MAX_NAMED = 3


def build_tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the ids, special tokens and chat templates of a GGUF file.

    Raises:
        InvalidInputError: merges are invalid, or required special tokens are missing.
        UnsupportedModelError: ``tokenizer.ggml.model`` or ``.pre`` is unknown, or no fast tokenizer
            has the same meaning as the file's scores.
    """
    build = _MODELS.get(vocabulary.model)
    if build is None:
        raise UnsupportedModelError(
            f"{vocabulary.file}: tokenizer.ggml.model is {vocabulary.model!r}; supported: "
            f"{list(_MODELS)}"
        )
    backend, adds_bos = build(vocabulary)
    backend.add_tokens([*_added_tokens(vocabulary)])
    ids = vocabulary.ids
    # The same flags again: transformers would set others for a plain string.
    special = {
        f"{name}_token": _added_token(vocabulary, ids[name], is_special=True)
        for name in ("bos", "eos", "unk", "pad")
        if name in ids
    }
    backend.post_processor = _ends_of_texts(vocabulary, adds_bos)
    templates: Any = vocabulary.templates
    if set(templates) == {"default"}:
        templates = templates["default"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,  # decoding is lossless, as in :func:`read_tokenizer`
        chat_template=templates or None,
        **special,
    )


def _ends_of_texts(vocabulary: Vocabulary, adds_bos: bool) -> Any:
    """The tokens that are added before and after a text."""
    if vocabulary.adds_bos is not None and vocabulary.model != "gemma4":  # which always adds BOS
        adds_bos = vocabulary.adds_bos
    added = []
    for name, is_added in (("bos", adds_bos), ("eos", vocabulary.adds_eos)):
        if not is_added:
            continue
        if name not in vocabulary.ids:
            limit = f"must have tokenizer.ggml.{name}_token_id, because texts get that token"
            raise InvalidInputError("model", vocabulary.file, limit)
        token_id = vocabulary.ids[name]
        added.append({"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]})
    before, behind = ("bos " if adds_bos else ""), (" eos" if vocabulary.adds_eos else "")
    return processors.TemplateProcessing(
        single=f"{before}$A{behind}",
        pair=f"{before}$A{behind} {before}$B:1{behind}",
        special_tokens=added,
    )


def read_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """A saved tokenizer of :func:`build_tokenizer`. ``AutoTokenizer`` chooses classes by the type
    of the model, and some of them build another tokenizer from the same vocabulary."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        str(folder), clean_up_tokenization_spaces=False
    )
    return tokenizer


def _added_tokens(vocabulary: Vocabulary) -> Iterator[AddedToken]:
    for token_id in vocabulary.of_type(*_ATOMIC):
        is_special = vocabulary.types[token_id] in _SPECIAL
        yield _added_token(vocabulary, token_id, is_special=is_special)


def _added_token(vocabulary: Vocabulary, token_id: int, *, is_special: bool) -> AddedToken:
    text = vocabulary.tokens[token_id]
    strips = any(name in vocabulary.model_name.lower() for name in _STRIPPING_MODELS)
    strips = strips and text not in _NOT_STRIPPING
    return AddedToken(text, normalized=False, special=is_special, rstrip=strips)


def _byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    known = PRE_TOKENIZERS.get(vocabulary.pre or "")
    if known is None:
        raise UnsupportedModelError(
            f"{vocabulary.file}: tokenizer.ggml.pre is {vocabulary.pre!r}; supported: "
            f"{sorted(PRE_TOKENIZERS)}"
        )
    token_ids = vocabulary.token_ids
    merges = _merges(vocabulary, token_ids)
    backend = Tokenizer(models.BPE(token_ids, merges, ignore_merges=known.ignores_merges))
    cut = [pre_tokenizers.Split(Regex(text), "isolated") for text in known.expressions]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, letters])
    own_texts = [*_own_texts(vocabulary)]
    backend.decoder = decoders.ByteLevel()
    if own_texts:
        backend.decoder = decoders.Sequence([*own_texts, decoders.ByteLevel()])
    return backend, known.adds_bos


def _merges(vocabulary: Vocabulary, token_ids: dict[str, int]) -> list[tuple[str, str]]:
    """The file's merges by rank; of equal merges the first."""
    merges = dict.fromkeys(map(_parts, vocabulary.merges))
    unknown = [
        f"{left} {right}"
        for left, right in merges
        if left not in token_ids or right not in token_ids or left + right not in token_ids
    ]
    if unknown or not merges:
        limit = "tokenizer.ggml.merges must join tokens to tokens"
        raise InvalidInputError("model", vocabulary.file, f"{limit}: {unknown[:_MAX_NAMED]}")
    return [*merges]


def _parts(merge: str) -> tuple[str, str]:
    # A part may begin with the space.
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def _own_texts(vocabulary: Vocabulary) -> Iterator[Any]:
    """Texts of atomic tokens such as "ø", whose characters a decoder would treat as encoded
    bytes."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    for token_id in vocabulary.of_type(*_ATOMIC):
        text = vocabulary.tokens[token_id]
        if not text.isascii() and letters.issuperset(text):
            [(encoded, _)] = encode(text)
            yield decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), encoded)


def _sentencepiece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    merges = [*_ranked_merges(vocabulary, vocabulary.token_ids)]
    return _marking_spaces(vocabulary, merges, vocabulary.adds_space is not False), True


def _gemma4(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    backend = _marking_spaces(vocabulary, _merges(vocabulary, vocabulary.token_ids), False)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return backend, True


_MODELS = {"gemma4": _gemma4, "gpt2": _byte_level, "llama": _sentencepiece}
"""By ``tokenizer.ggml.model``: the tokenizer, and whether a text begins with the BOS token."""


def _marking_spaces(
    vocabulary: Vocabulary, merges: list[tuple[str, str]], adds_space: bool
) -> Tokenizer:
    """A BPE whose tokens have a mark for a space, and tokens for the bytes of other characters."""
    unknown = vocabulary.tokens[vocabulary.ids["unk"]] if "unk" in vocabulary.ids else None
    settings = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocabulary.token_ids, merges, **settings))
    # For each text between two atomic tokens.
    spaces: list[Any] = [normalizers.Prepend(_SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        text.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(text)
    return backend


def _ranked_merges(vocabulary: Vocabulary, token_ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of tokens whose concatenation is a token, in descending order of its score.

    Of pairs with the same score, the leftmost is merged first. A rank cannot express this, except
    for runs of one character, where merging the longest first is equivalent.
    """
    scores = vocabulary.scores
    found: list[tuple[float, str, list[tuple[str, str]]]] = []
    for text, token_id in token_ids.items():
        if not _is_merged(text, vocabulary.types[token_id]):
            continue
        halves = [(text[:cut], text[cut:]) for cut in range(len(text) - 1, 0, -1)]
        pairs = [pair for pair in halves if pair[0] in token_ids and pair[1] in token_ids]
        if pairs:
            found.append((scores[token_id] if scores else 0.0, text, pairs))
    found.sort(key=lambda one: (-one[0], -len(one[1])))
    _check_ties(vocabulary.file, found)
    for _, _, pairs in found:
        yield from pairs


def _is_merged(text: str, kind: int) -> bool:
    # Other atomic tokens are cut out of a text before spaces become marks.
    return kind != TokenType.UNUSED and (kind not in _ATOMIC or _SPACE in text)


def _check_ties(file: str, found: Sequence[tuple[float, str, Iterable[object]]]) -> None:
    for _, tied in groupby(found, key=lambda one: one[0]):
        texts = [text for _, text, _ in tied]
        if len(texts) == 1:
            continue
        # Two merges conflict if the end of one text is the start of another.
        heads = {text[:cut] for text in texts for cut in range(1, len(text))}
        tails = {text[cut:] for text in texts for cut in range(1, len(text))}
        shared = heads & tails
        meeting = [
            text
            for text in texts
            if len(set(text)) > 1
            and any(text[:cut] in shared or text[cut:] in shared for cut in range(1, len(text)))
        ]
        if meeting:
            raise UnsupportedModelError(
                f"{file}: tokenizer.ggml.scores has one score for several tokens, so that merges "
                f"have no order: {sorted(meeting)[:_MAX_NAMED]}"
            )
