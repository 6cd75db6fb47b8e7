"""Converts a transformers tokenizer to llguidance's: the bytes of each token, and the end tokens.

llguidance recognises a byte-level vocabulary by its decoder. If the decoder is a sequence that also
has a byte fallback (tokenizers made from GGUF files), llguidance does not map the letters of a
byte-level vocabulary to bytes. So its token bytes are compared with the tokenizer's own text.

llguidance encodes text that a constraint forces. Text that spells a special token would become that
token: ``choice=["x</s>"]`` would end after the x. So special tokens get names that no text can
spell.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from typing import Any

from ..errors import InvalidInputError

_FIELD = "structured_outputs"
_NUM_COMPARED = 4096
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def make_ll_tokenizer(
    tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int], *, has_names: bool = False
) -> Any:
    """An ``llguidance.LLTokenizer`` with at least ``vocab_size`` tokens. Ids that the tokenizer
    does not have are never allowed.

    Args:
        tokenizer: the model's tokenizer, or None.
        eos_token_ids: the tokens that may follow a complete text.
        has_names: whether special tokens keep their names, for grammars that refer to them.

    Raises:
        InvalidInputError: there is no tokenizer, llguidance does not read it correctly, the model
            has no end token, or llguidance is not installed.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        limit = "needs the llguidance package: pip install llguidance"
        raise InvalidInputError(_FIELD, None, limit) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        missing = "no tokenizer" if tokenizer is None else "no fast tokenizer"
        raise InvalidInputError(_FIELD, type(tokenizer).__name__, f"this model has {missing}")
    if not eos_token_ids:
        raise InvalidInputError(_FIELD, None, "this model has no end-of-sequence token")
    token_ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    num_tokens = max(vocab_size, token_ids[-1] + 1)
    reason = ""
    for text in _descriptions(backend):
        hidden: set[int] = set()
        for _ in range(2):
            try:
                made = LLTokenizer(
                    text if has_names else _without_names(text, {*eos_token_ids, *hidden}),
                    n_vocab=num_tokens,
                    eos_token=sorted(eos_token_ids),
                )
            except Exception as error:  # an exception type of its own, from Rust
                reason = str(error)
                break
            wrong = _wrong_tokens(made, backend, token_ids)
            if not wrong:
                return made
            reason = f"token {wrong[0]} has different bytes there"
            # For example "ø", which is also a letter for a byte: other tokens spell its text.
            if hidden or has_names or not backend.get_added_tokens_decoder().keys() >= {*wrong}:
                break
            hidden.update(wrong)
    limit = f"llguidance does not read this model's tokenizer: {reason}"
    raise InvalidInputError(_FIELD, type(tokenizer).__name__, limit)


def _descriptions(backend: Any) -> Iterator[str]:
    """The tokenizer as JSON: unchanged, then with a plain byte-level decoder."""
    from tokenizers import decoders

    own = copy(backend)
    # Batch settings do not affect the tokens.
    own.no_padding()
    own.no_truncation()
    yield own.to_str()
    own.decoder = decoders.ByteLevel()
    yield own.to_str()


def _without_names(text: str, special_ids: Collection[int]) -> str:
    """A tokenizer's JSON with names of special tokens that no text can spell: their ids, enclosed
    in the noncharacters U+FDD0 and U+FDD1. End tokens are always treated as special.

    Args:
        special_ids: those tokens, and others that text must not be encoded to.
    """
    described = json.loads(text)
    model = described["model"]
    names: dict[str, str] = {}
    for token in described["added_tokens"]:
        if token["special"] or token["id"] in special_ids:
            name = f"\ufdd0{token['id']}\ufdd1"
            names[token["content"]], token["content"], token["special"] = name, name, True
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
    else:  # Unigram: a list, by id
        model["vocab"] = [[names.get(name, name), *rest] for name, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    described["post_processor"] = None  # it adds special tokens, by name
    return json.dumps(described)


def _wrong_tokens(made: Any, backend: Any, token_ids: Sequence[int]) -> list[int]:
    """Tokens whose bytes differ from their text, among all added tokens and many others."""
    some = token_ids[:: -(-len(token_ids) // _NUM_COMPARED)]
    compared = [*some, *backend.get_added_tokens_decoder()]
    compared = [token_id for token_id in compared if not made.is_special_token(token_id)]
    # After another token: at the beginning of a text some decoders strip a space.
    (first, *_) = backend.encode("a", add_special_tokens=False).ids or [0]
    before = backend.decode([first], skip_special_tokens=False)
    pairs = [[first, token_id] for token_id in compared]
    texts = backend.decode_batch(pairs, skip_special_tokens=False)
    found = []
    for token_id, text in zip(compared, texts, strict=True):
        own = text.removeprefix(before)
        if _INCOMPLETE not in own and made.decode_bytes([token_id]) != own.encode():
            found.append(token_id)
    return found
