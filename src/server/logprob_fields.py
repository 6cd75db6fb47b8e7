"""Log-probabilities in the formats of the three generating endpoints.

JSON has neither infinities nor NaN: minus infinity is sent as -9999.0, as in vLLM, and NaN as null.
Every other value is the engine's float, the same in all formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine.logprob_lists import Logprob
from ..engine.request_factory import RequestFactory
from ..engine.text.text_offsets import TextOffsets
from ..engine.text.token_bytes import TokenBytes

_MINUS_INFINITY = -9999.0
Entries = Mapping[int, Logprob]


class TokenTexts:
    """The texts and bytes of single tokens of one model.

    Args:
        as_ids: write "token_id:NN" instead of texts, as without a tokenizer.
        skips_special: special tokens are not part of the text.
    """

    def __init__(self, factory: RequestFactory, *, as_ids: bool, skips_special: bool) -> None:
        self._bytes_of, self._decode = factory.token_bytes, factory.decode_one
        self._as_ids, self._skips_special = as_ids, skips_special

    def text(self, token_id: int, *, is_beginning: bool = False) -> str:
        """
        Args:
            is_beginning: at the beginning of the text, where decoders may strip a space.
        """
        if self._as_ids or self._decode is None or self._bytes_of is None:
            return by_id(token_id)
        if is_beginning:
            return self._bytes_of.at_beginning(token_id).decode("utf-8", "replace")
        return self._decode(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """The bytes of one token, possibly part of a character; None without a tokenizer."""
        return None if self._bytes_of is None else list(self._bytes_of(token_id))

    def entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        """A token and its log-probability, in OpenAI's form."""
        text, own_bytes = self.text(token_id), self.bytes(token_id)
        return {"token": text, "logprob": number_of(entry.logprob), "bytes": own_bytes}

    def is_textless(self, token_id: int) -> bool:
        is_special = self._bytes_of is not None and token_id in self._bytes_of.special_ids
        return is_special and self._skips_special

    def prompt_places(self, text: str) -> PromptPlaces | None:
        """The places of a prompt's tokens in its text; None without a tokenizer."""
        return None if self._bytes_of is None else PromptPlaces(self._bytes_of, text)

    def offsets(self, prompt_token_ids: Sequence[int], num_before: int) -> TextOffsets | None:
        """The offsets of tokens in a text after a prompt; None without a tokenizer."""
        if self._bytes_of is None:
            return None
        return TextOffsets(
            self._bytes_of,
            prompt_token_ids,
            skips_special=self._skips_special,
            num_before=num_before,
        )


class PromptPlaces:
    """The places of a prompt's tokens in its text. A tokenizer may add special tokens to a text, a
    space before it, and a space behind its special tokens.

    Attributes:
        is_beginning: the text has no space where the tokenizer may have added one.
    """

    def __init__(self, bytes_of: TokenBytes, text: str) -> None:
        self._bytes_of, self._text = bytes_of, text
        self._offsets = TextOffsets(bytes_of, skips_special=False)
        self.is_beginning = True

    def push(self, token_id: int) -> int:
        """The offset of the next token's first character."""
        if token_id not in self._bytes_of.special_ids:
            self.is_beginning = False
            return self._offsets.push(token_id)
        place = self._offsets.num_chars
        written = self._bytes_of(token_id).decode("utf-8", "replace")
        if self._text.startswith(written, place):
            place = self._offsets.push(token_id)
            end = self._offsets.num_chars
            self.is_beginning = self._text[end : end + 1] != " "
            if self.is_beginning:
                self._offsets = TextOffsets(self._bytes_of, skips_special=False, num_before=end)
        return place


def by_id(token_id: int) -> str:
    """The name of a token whose text is unknown or not unique."""
    return f"token_id:{token_id}"


def number_of(logprob: float) -> float | None:
    """A log-probability as a JSON value; None for NaN."""
    if math.isnan(logprob):
        return None
    return max(logprob, _MINUS_INFINITY)


class CompletionLogprobs:
    """The ``logprobs`` of one choice of ``/v1/completions``. Reading in pieces gives the same
    result as reading at once.

    ``text_offset`` counts characters of the choice's text. Keys of ``top_logprobs`` are texts. If
    several tokens have the same text, the position's own token gets the key, else the most
    likely one; the others get "token_id:NN".

    Args:
        num_top: ``logprobs`` of the request.
        shows_all: each token of the answer has all its entries: the request has
            ``logprob_token_ids``.
        prompt_token_ids: the prompt before the answer.
        num_before: number of characters of the echoed prompt.
    """

    def __init__(
        self,
        num_top: int,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int] = (),
        num_before: int = 0,
        *,
        shows_all: bool = False,
    ) -> None:
        self._num_top, self._texts = num_top, texts
        self._num_top_of_answer = -1 if shows_all else num_top
        self._is_beginning = all(map(texts.is_textless, prompt_token_ids))
        self._of_answer = texts.offsets(prompt_token_ids, num_before)

    def read_prompt(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None], text: str
    ) -> dict[str, list[Any]]:
        """The log-probabilities of an echoed prompt with the text ``text``; see :meth:`read`."""
        places = self._texts.prompt_places(text)
        return self._read(token_ids, entries, places, is_beginning=True)

    def read(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None]
    ) -> dict[str, list[Any]]:
        """
        Args:
            entries: one per token; None for the first token of a prompt.
        """
        is_beginning = self._is_beginning
        self._is_beginning = is_beginning and all(map(self._texts.is_textless, token_ids))
        return self._read(token_ids, entries, self._of_answer, is_beginning=is_beginning)

    def _read(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entries | None],
        places: TextOffsets | PromptPlaces | None,
        *,
        is_beginning: bool,
    ) -> dict[str, list[Any]]:
        num_top = self._num_top_of_answer if places is self._of_answer else self._num_top
        tokens: list[str] = []
        offsets: list[int] = []
        own: list[float | None] = []
        top: list[dict[str, float | None] | None] = []
        for token_id, found in zip(token_ids, entries, strict=True):
            text = self._texts.text(token_id, is_beginning=is_beginning)
            tokens.append(text)
            offsets.append(0 if places is None else places.push(token_id))
            is_beginning = is_beginning and self._texts.is_textless(token_id)
            if isinstance(places, PromptPlaces):
                is_beginning = places.is_beginning
            own.append(None if found is None else number_of(found[token_id].logprob))
            top.append(None if found is None else self._top(token_id, text, found, num_top))
        return {
            "text_offset": offsets,
            "token_logprobs": own,
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _top(
        self, token_id: int, own_text: str, found: Entries, num_top: int
    ) -> dict[str, float | None]:
        """The token's entry, then the most likely other tokens by rank, with distinct keys."""
        top = {own_text: number_of(found[token_id].logprob)}
        for other, entry in top_of(found, num_top):
            if other != token_id:
                text = self._texts.text(other)
                top[by_id(other) if text in top else text] = number_of(entry.logprob)
        return top


def joined_logprobs(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Concatenate the ``logprobs`` of two adjacent parts of a choice."""
    return {name: [*values, *other[name]] for name, values in one.items()}


def content_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entries],
    num_top: int,
    shown: Callable[[int, Logprob], dict[str, Any]],
    *,
    own_at_least: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """The ``logprobs`` of a choice of ``/v1/chat/completions`` or ``/inference/v1/generate``.

    Args:
        shown: formats one token: :meth:`TokenTexts.entry`, or :func:`id_entry`.
        own_at_least: ``top_logprobs`` has the sampled token if it would be empty.
    """
    content = [
        {
            **shown(token_id, found[token_id]),
            "top_logprobs": [
                shown(*item)
                for item in top_of(found, num_top)
                or ([(token_id, found[token_id])] if own_at_least else [])
            ],
        }
        for token_id, found in zip(token_ids, entries, strict=True)
    ]
    return {"content": content}


def prompt_logprobs(entries: Sequence[Entries | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: in the engine's own form, by token id."""
    if entries is None:
        return None
    return [
        None
        if found is None
        else {
            str(token_id): {
                "logprob": number_of(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in found.items()
        }
        for found in entries
    ]


def top_of(found: Entries, num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens, in descending order; all entries with ``num_top`` -1."""
    most = math.inf if num_top < 0 else num_top
    chosen = [item for item in found.items() if 0 < (item[1].rank or 0) <= most]
    return sorted(chosen, key=lambda item: item[1].rank or 0)


def id_entry(token_id: int, entry: Logprob) -> dict[str, Any]:
    """A token shown as its id, in vLLM's form with two more fields."""
    logprob = number_of(entry.logprob)
    form = {"token": by_id(token_id), "logprob": logprob, "bytes": None}
    return {**form, "token_id": token_id, "rank": entry.rank}
