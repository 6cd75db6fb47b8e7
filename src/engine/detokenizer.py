"""Token ids to text, a token at a time, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A tokenizer may join a token to the one before it (a space, the bytes of one character), so
# outputs are decoded behind a few tokens of prompt and the prompt's part is cut off again.
_NUM_CONTEXT_TOKENS = 6
_INCOMPLETE = "�"


class Detokenizer:
    """Decodes the output of one request as it grows.

    Only a window of tokens is decoded each time: from the last place where the text was known to
    be complete. Text that ends in an incomplete character is kept back until it is complete.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt; its tail gives the first tokens their context.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._window_start = 0
        self._window_read = len(self._token_ids)
        self.text = ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became complete with it, possibly none."""
        self._token_ids.append(token_id)
        return self._advance(is_last=False)

    def flush(self) -> str:
        """Returns what was kept back, complete or not. Nothing may be pushed after."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        known = self._decode(self._token_ids[self._window_start : self._window_read])
        text = self._decode(self._token_ids[self._window_start :])
        if len(text) <= len(known) or (text.endswith(_INCOMPLETE) and not is_last):
            return ""
        self._window_start = self._window_read
        self._window_read = len(self._token_ids)
        piece = text[len(known) :]
        self.text += piece
        return piece


class StopStringWatcher:
    """Tells when the text of a request contains one of its stop strings.

    Called with each settled output id (``Request.on_token``); True ends the request. ``text`` is
    then cut before the earliest stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop_strings)
        self._num_tail_chars = max(len(s) for s in stop_strings) - 1
        self._stop_at: int | None = None
        self._num_settled = 0

    def __call__(self, token_id: int) -> bool:
        num_chars = len(self._detokenizer.text)
        self._detokenizer.push(token_id)
        # A stop string may have begun in text that is already there.
        begin = max(0, num_chars - self._num_tail_chars)
        found = [self._detokenizer.text.find(s, begin) for s in self._stop_strings]
        places = [place for place in found if place >= 0]
        if places:
            self._stop_at = min(places)
        # Set last, and alone: another thread may be reading.
        num_chars = len(self._detokenizer.text) - self._num_tail_chars
        self._num_settled = max(0, num_chars) if self._stop_at is None else self._stop_at
        return bool(places)

    @property
    def settled_text(self) -> str:
        """Text that no later token can take back: it holds no beginning of a stop string."""
        num_settled = self._num_settled
        return self._detokenizer.text[:num_settled]

    def finish(self) -> str:
        """The final text."""
        if self._stop_at is None:
            self._detokenizer.flush()
            return self._detokenizer.text
        return self._detokenizer.text[: self._stop_at]


def decode_output(
    tokenizer: Any, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> str:
    """Text of a whole output at once; equal to pushing it a token at a time."""
    context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
    known = tokenizer.decode(context, skip_special_tokens=True)
    text = tokenizer.decode(context + list(output_token_ids), skip_special_tokens=True)
    return text[len(known) :]
