"""Log-probabilities in the forms of the three endpoints.

JSON has neither infinities nor NaN: minus infinity is -9999.0, as in vLLM, and NaN is null. Every
other number is the engine's float, the same wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine.outputs import Logprob
from ..engine.request_factory import RequestFactory

_MINUS_INFINITY = -9999.0
Entries = Mapping[int, Logprob]


def token_texts(factory: RequestFactory, *, as_ids: bool) -> Callable[[int], str]:
    """What tokens are shown as: their text, or "token_id:NN" where that was asked for or the model
    has no tokenizer."""
    decode = factory.decode_one
    return (lambda token_id: f"token_id:{token_id}") if as_ids or decode is None else decode


def number_of(logprob: float) -> float | None:
    """A log-probability as JSON can say it."""
    if math.isnan(logprob):
        return None
    return max(logprob, _MINUS_INFINITY)


class CompletionLogprobs:
    """The ``logprobs`` of one choice of ``/v1/completions``, token after token: what is read in
    pieces joins to what is read at once.

    Args:
        num_top: as asked for.
        text_of: the text of a token by itself.
    """

    def __init__(self, num_top: int, text_of: Callable[[int], str]) -> None:
        self._num_top, self._text_of = num_top, text_of
        self._offset = 0  # characters of the tokens before

    def read(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None]
    ) -> dict[str, list[Any]]:
        """
        Args:
            entries: of each token; None for one that follows nothing.
        """
        tokens: list[str] = []
        offsets: list[int] = []
        own: list[float | None] = []
        top: list[dict[str, float | None] | None] = []
        for token_id, found in zip(token_ids, entries, strict=True):
            text = self._text_of(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            own.append(None if found is None else number_of(found[token_id].logprob))
            top.append(None if found is None else self._top(token_id, found))
        return {
            "text_offset": offsets,
            "token_logprobs": own,
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _top(self, token_id: int, found: Entries) -> dict[str, float | None]:
        """Of the likeliest tokens and the token itself, by text. Of tokens with the same text the
        likeliest counts: the largest value is always that of the greedy choice."""
        top: dict[str, float | None] = {}
        for other, entry in found.items():
            if other == token_id or _is_top(entry, self._num_top):
                text, number = self._text_of(other), number_of(entry.logprob)
                before = top.get(text)
                if before is None or (number is not None and number > before):
                    top[text] = number
        return top


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entries],
    num_top: int,
    text_of: Callable[[int], str],
) -> list[dict[str, Any]]:
    """The ``logprobs.content`` of a choice of ``/v1/chat/completions``."""
    return [
        {
            **_chat_token(token_id, found[token_id], text_of),
            "top_logprobs": [
                _chat_token(other, entry, text_of) for other, entry in top_of(found, num_top)
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


def _chat_token(token_id: int, entry: Logprob, text_of: Callable[[int], str]) -> dict[str, Any]:
    text = text_of(token_id)
    return {
        "token": text,
        "logprob": number_of(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _bare_token(token_id: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": number_of(entry.logprob), "rank": entry.rank}
