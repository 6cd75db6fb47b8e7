"""Log-probabilities in the forms of the three endpoints.

JSON has neither infinities nor NaN: minus infinity is -9999.0, as in vLLM, and NaN is null. Every
other number is the engine's float, the same wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.outputs import Logprob
from ..engine.request_factory import RequestFactory
from ..engine.text_offsets import TextOffsets

_MINUS_INFINITY = -9999.0
Entries = Mapping[int, Logprob]


class TokenTexts:
    """What the tokens of one model are shown as.

    Args:
        as_ids: as "token_id:NN" in place of their texts, as without a tokenizer.
        skips_special: special tokens have no part in the text that is given back.
    """

    def __init__(self, factory: RequestFactory, *, as_ids: bool, skips_special: bool) -> None:
        self._bytes_of, self._decode = factory.token_bytes, factory.decode_one
        self._as_ids, self._skips_special = as_ids, skips_special

    def text(self, token_id: int, *, is_beginning: bool = False) -> str:
        """
        Args:
            is_beginning: of the text, where decoders may strip a space.
        """
        if self._as_ids or self._decode is None or self._bytes_of is None:
            return by_id(token_id)
        if is_beginning:
            return self._bytes_of.at_beginning(token_id).decode("utf-8", "replace")
        return self._decode(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """Its own bytes, also where they are a part of a character; None without a tokenizer."""
        return None if self._bytes_of is None else list(self._bytes_of(token_id))

    def is_textless(self, token_id: int) -> bool:
        is_special = self._bytes_of is not None and token_id in self._bytes_of.special_ids
        return is_special and self._skips_special

    def offsets(self, prompt_token_ids: Sequence[int], num_before: int) -> TextOffsets | None:
        """The places of tokens in a text behind a prompt; None without a tokenizer."""
        if self._bytes_of is None:
            return None
        return TextOffsets(
            self._bytes_of,
            prompt_token_ids,
            skips_special=self._skips_special,
            num_before=num_before,
        )


def by_id(token_id: int) -> str:
    """A token whose text does not tell it from others, or is not known."""
    return f"token_id:{token_id}"


def number_of(logprob: float) -> float | None:
    """A log-probability as JSON can say it."""
    if math.isnan(logprob):
        return None
    return max(logprob, _MINUS_INFINITY)


class CompletionLogprobs:
    """The ``logprobs`` of one choice of ``/v1/completions``, token after token: what is read in
    pieces joins to what is read at once.

    ``text_offset`` counts characters of the choice's text. Keys of ``top_logprobs`` are texts; the
    token of the place has its own value there, and of other tokens with one text the likeliest.
    Those that are left are "token_id:NN".

    Args:
        num_top: as asked for.
        prompt_token_ids: what the answer follows.
        num_before: characters of the prompt that the choice's text begins with.
    """

    def __init__(
        self,
        num_top: int,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int] = (),
        num_before: int = 0,
    ) -> None:
        self._num_top, self._texts = num_top, texts
        self._is_beginning = all(map(texts.is_textless, prompt_token_ids))
        self._of_answer = texts.offsets(prompt_token_ids, num_before)

    def read_prompt(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None]
    ) -> dict[str, list[Any]]:
        """Of a prompt that the choice's text begins with; as :meth:`read`."""
        return self._read(token_ids, entries, self._texts.offsets((), 0), is_beginning=True)

    def read(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None]
    ) -> dict[str, list[Any]]:
        """
        Args:
            entries: of each token; None for one that follows nothing.
        """
        is_beginning = self._is_beginning
        self._is_beginning = is_beginning and all(map(self._texts.is_textless, token_ids))
        return self._read(token_ids, entries, self._of_answer, is_beginning=is_beginning)

    def _read(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entries | None],
        places: TextOffsets | None,
        *,
        is_beginning: bool,
    ) -> dict[str, list[Any]]:
        tokens: list[str] = []
        offsets: list[int] = []
        own: list[float | None] = []
        top: list[dict[str, float | None] | None] = []
        for token_id, found in zip(token_ids, entries, strict=True):
            text = self._texts.text(token_id, is_beginning=is_beginning)
            is_beginning = is_beginning and self._texts.is_textless(token_id)
            tokens.append(text)
            offsets.append(0 if places is None else places.push(token_id))
            own.append(None if found is None else number_of(found[token_id].logprob))
            top.append(None if found is None else self._top(token_id, text, found))
        return {
            "text_offset": offsets,
            "token_logprobs": own,
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _top(self, token_id: int, own_text: str, found: Entries) -> dict[str, float | None]:
        """Of the token itself and of the likeliest, the likeliest first; no two share a key."""
        top = {own_text: number_of(found[token_id].logprob)}
        for other, entry in top_of(found, self._num_top):
            if other != token_id:
                text = self._texts.text(other)
                top[by_id(other) if text in top else text] = number_of(entry.logprob)
        return top


def joined_logprobs(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What two parts of a choice make together."""
    return {name: [*values, *other[name]] for name, values in one.items()}


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entries],
    num_top: int,
    texts: TokenTexts,
) -> list[dict[str, Any]]:
    """The ``logprobs.content`` of a choice of ``/v1/chat/completions``."""
    return [
        {
            **_chat_token(token_id, found[token_id], texts),
            "top_logprobs": [
                _chat_token(other, entry, texts) for other, entry in top_of(found, num_top)
            ],
        }
        for token_id, found in zip(token_ids, entries, strict=True)
    ]


def generate_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entries], num_top: int
) -> list[dict[str, Any]]:
    """The ``logprobs.content`` of a choice of ``/inference/v1/generate``."""
    return [
        {
            **_bare_token(token_id, found[token_id]),
            "top_logprobs": [_bare_token(*item) for item in top_of(found, num_top)],
        }
        for token_id, found in zip(token_ids, entries, strict=True)
    ]


def prompt_logprobs(entries: Sequence[Entries | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: the engine's own form, by token id."""
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
    """The likeliest tokens, the likeliest first."""
    chosen = [(token_id, entry) for token_id, entry in found.items() if _is_top(entry, num_top)]
    return sorted(chosen, key=lambda item: item[1].rank or 0)


def _is_top(entry: Logprob, num_top: int) -> bool:
    return entry.rank is not None and entry.rank <= num_top


def _chat_token(token_id: int, entry: Logprob, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.text(token_id),
        "logprob": number_of(entry.logprob),
        "bytes": texts.bytes(token_id),
    }


def _bare_token(token_id: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": number_of(entry.logprob), "rank": entry.rank}
