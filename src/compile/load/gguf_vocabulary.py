"""The keys of a GGUF file, and the vocabulary that its ``tokenizer.*`` keys describe, checked.

Types of tokens, and the tokens that end an answer, follow llama.cpp. llama.cpp corrects errors of
old files by the text of some tokens, and so does this module.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidInputError, UnsupportedModelError
from ...startup import is_watched
from ..model.current_step import Scope

logger = logging.getLogger("pagespec")

_QUICK = threading.RLock()
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# Keys of special tokens by transformers' names; the first key that a file has counts.
_ID_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "unk": ("unknown_token_id",),
    "pad": ("padding_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
_SPM_IDS = {"bos": 1, "eos": 2, "unk": 0}  # for a file with the model "llama" that names none

# Texts of tokens that end an answer.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# Tokens of fill-in-the-middle code: control tokens whatever the file says. The last three are end
# tokens.
_FILL_IN = {
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
# If a vocabulary has one of each, "<|end|>" ends a message, but the answer continues.
_GOES_ON = (("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
# In many vocabularies "</s>" is a piece of HTML. It counts unless the file calls it normal.
_OFTEN_TEXT = "</s>"


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """
    Attributes:
        file: the file's name, for refusals. model_name: ``general.name``.
        model, pre: ``tokenizer.ggml.model`` and ``.pre``; None where the file lacks it.
        tokens: texts by id, all different. types: a :class:`TokenType` per token.
        scores: one per token, or empty. merges: by rank, each with a space between its parts.
        ids: of special tokens, by name ("bos", "eos", "unk", "pad", "eot", ...).
        end_ids: tokens that end an answer.
        adds_bos, adds_eos, adds_space: None where the file lacks the key.
        templates: chat templates by name; the unnamed one is "default".
        suppressed: tokens that must not be sampled.
    """

    file: str
    model_name: str
    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    ids: dict[str, int]
    end_ids: frozenset[int]
    adds_bos: bool | None
    adds_eos: bool | None
    adds_space: bool | None
    templates: dict[str, str] = field(default_factory=dict)
    suppressed: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> dict[str, int]:
        """Token ids by text."""
        return {text: token_id for token_id, text in enumerate(self.tokens)}

    def of_type(self, *types: TokenType) -> Iterator[int]:
        """Ids of the tokens of these types."""
        return (token_id for token_id, kind in enumerate(self.types) if kind in types)


def open_gguf(path: Path) -> Any:
    """A :func:`_reader` of a file. Tensors are memory-mapped, so tensors that are not used are not
    read."""
    return _reader()(path)


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Within the context, transformers reads GGUF files with :func:`_reader`, and builds the table
    of tensor names once per model instead of once per module. Its progress bar is shown only if
    stderr is a terminal or a notebook.

    The context replaces names of the package, so only one thread at a time can be in it.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as conversion

    bar = partial(conversion.tqdm, disable=not is_watched())
    reader, table = _reader(), cache(gguf.get_tensor_name_map)
    with _QUICK, Scope() as scope:
        scope.set(gguf, "GGUFReader", reader)
        scope.set(gguf, "get_tensor_name_map", table)
        scope.set(conversion, "tqdm", bar)
        yield


@cache
def _reader() -> Any:
    """A ``gguf.GGUFReader`` that reads a list such as the vocabulary in milliseconds instead of
    seconds. Its fields give the same values, but have no parts with lengths."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            order: Any = ">" if self.byte_order == "S" else "<"
            data: Any = self.data.view(np.ndarray)
            item_type, num_items = struct.unpack_from(f"{order}IQ", data, orig_offs)
            kind, begin = GGUFValueType(item_type), orig_offs + struct.calcsize("<IQ")
            scalar, end = self.gguf_scalar_to_np.get(kind), begin
            if scalar is not None:
                dtype = np.dtype(scalar).newbyteorder(order)
                items = np.frombuffer(data, dtype, num_items, begin)
                parts, end = list(items.reshape(-1, 1)), begin + items.nbytes
            elif kind == GGUFValueType.STRING:
                unpack, parts = struct.Struct(f"{order}Q").unpack_from, []
                for _ in range(num_items):
                    (length,) = unpack(data, end)
                    parts.append(data[end + 8 : end + 8 + length])
                    end += 8 + length
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            return end - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, kind]

    return Reader


def read_values(reader: Any, key: str) -> list[Any]:
    """The values of a key (for a list, those of all items); empty if the file lacks the key.

    Args:
        reader: from :func:`open_gguf`.

    Raises:
        UnicodeDecodeError: the file is damaged at this key.
    """
    field = reader.fields.get(key)
    found = [] if field is None else field.contents()
    return found if isinstance(found, list) else [found]


def read_vocabulary(path: Path) -> Vocabulary | None:
    """The vocabulary of a GGUF file; None if the file declares that it has none.

    Raises:
        InvalidInputError: a key is missing or has an impossible value.
        UnsupportedModelError: the file does not give the types of its tokens.
    """
    reader = open_gguf(path)

    def one(key: str) -> Any:
        found = read_values(reader, key)
        return found[0] if found else None

    model = one(f"{_PREFIX}model")
    if model in ("none", "no_vocab"):
        return None
    if not isinstance(model, str):
        raise InvalidInputError("model", str(path), f"must have the key {_PREFIX}model")
    # Names as in llama.cpp.
    tokens = [
        text or f"[EMPTY_{token_id}]"
        for token_id, text in enumerate(read_values(reader, f"{_PREFIX}tokens"))
    ]
    if not tokens:
        raise InvalidInputError("model", str(path), f"must have the key {_PREFIX}tokens")
    ids_of = {text: token_id for token_id, text in enumerate(tokens)}
    if len(ids_of) != len(tokens):
        [twice, *_] = (text for token_id, text in enumerate(tokens) if ids_of[text] != token_id)
        limit = f"{_PREFIX}tokens must be different texts; {twice!r} occurs twice"
        raise InvalidInputError("model", str(path), limit)
    types = read_values(reader, f"{_PREFIX}token_type")
    if not types:
        raise UnsupportedModelError(
            f"{path.name}: lacks the key {_PREFIX}token_type, so its special tokens are unknown"
        )
    scores = read_values(reader, f"{_PREFIX}scores")
    for name, found in (("token_type", types), ("scores", scores)):
        if found and len(found) < len(tokens):
            limit = f"{_PREFIX}{name} must have {len(tokens)} items, as tokens; has {len(found)}"
            raise InvalidInputError("model", str(path), limit)
    by_text = dict(ids_of)
    if types[ids_of.get(_OFTEN_TEXT, 0)] == TokenType.NORMAL:
        by_text.pop(_OFTEN_TEXT, None)
    ids = _special_ids(path.name, one, len(tokens), _SPM_IDS if model == "llama" else {})
    control = _control_ids(ids, by_text)
    end_ids = _end_ids(ids, by_text)
    types = [
        TokenType.CONTROL if token_id in control or token_id in end_ids else kind
        for token_id, kind in enumerate(types[: len(tokens)])
    ]
    return Vocabulary(
        path.name,
        one("general.name") or "",
        model,
        one(f"{_PREFIX}pre"),
        tokens,
        types,
        scores[: len(tokens)],
        read_values(reader, f"{_PREFIX}merges"),
        ids,
        end_ids,
        one(f"{_PREFIX}add_bos_token"),
        one(f"{_PREFIX}add_eos_token"),
        one(f"{_PREFIX}add_space_prefix"),
        _templates(reader, one),
        [token_id for token_id in read_values(reader, f"{_PREFIX}suppress_tokens")
         if 0 <= token_id < len(tokens)],
    )  # fmt: skip


def _special_ids(file: str, one: Any, num_tokens: int, default: dict[str, int]) -> dict[str, int]:
    ids = {name: token_id for name, token_id in default.items() if token_id < num_tokens}
    for name, keys in _ID_KEYS.items():
        for key in keys:
            token_id = one(_PREFIX + key)
            if token_id is None:
                continue
            if 0 <= token_id < num_tokens:
                ids[name] = token_id
                break
            # As in llama.cpp; files without such a token have 2**32 - 1.
            logger.warning(
                "%s: %s%s is %d and the vocabulary has %d tokens: ignored",
                file, _PREFIX, key, token_id, num_tokens,
            )  # fmt: skip
    return ids


def _control_ids(ids: dict[str, int], ids_of: dict[str, int]) -> set[int]:
    """Tokens that are control tokens by their text."""
    return {
        ids_of[text]
        for name, texts in _FILL_IN.items()
        if name not in ids
        for text in texts
        if text in ids_of
    }


def _end_ids(ids: dict[str, int], ids_of: dict[str, int]) -> frozenset[int]:
    found = {ids_of[text] for text in _ENDS if text in ids_of}
    for name in ("fim_pad", "fim_rep", "fim_sep"):
        if name in ids:
            found.add(ids[name])
        else:
            found.update(ids_of[text] for text in _FILL_IN[name] if text in ids_of)
    found.update(ids[name] for name in ("eos", "eot", "eom") if name in ids)
    if all(any(text in ids_of for text in texts) for texts in _GOES_ON):
        found.discard(ids_of.get("<|end|>", -1))
    return frozenset(found)


def _templates(reader: Any, one: Any) -> dict[str, str]:
    found = {}
    for key in reader.fields:
        if key == _TEMPLATE:
            found["default"] = one(key)
        elif key.startswith(f"{_TEMPLATE}."):
            found[key.removeprefix(f"{_TEMPLATE}.")] = one(key)
    return found
