"""Incremental detokenization, token by token, and the search for stop strings.

The text of an answer is defined here, once, for ``generate``, ``generate_iter`` and ``stream``:

* It is what follows the prompt in the text of prompt and output together: after the longest prefix
  that this text shares with the prompt's own. A character that the prompt left incomplete and the
  output completes belongs to the answer; one that stays incomplete belongs to the prompt.
* Bytes that form no character are shown as U+FFFD, as many as the tokenizer shows for them. The
  characters beside them are unchanged. That is what byte-level tokenizers and SentencePiece
  do. The byte fallback of the ``tokenizers`` library is stricter: its ``decode`` shows *all* bytes
  of a run as U+FFFD if one of them is wrong. A stream could not be true to that, as a later token
  would change characters that were sent long ago.
* So a character that ``max_tokens`` cuts ends the text as U+FFFD, as with transformers' ``decode``
  (vLLM leaves it out).
* Special tokens have no text, and neither has the stop token that ended the request, unless
  ``skip_special_tokens`` and ``include_stop_str_in_output`` say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ..inputs import PromptInput
from ..request import Request
from .reasoning import Phase, ReasoningTracker

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that can share one character: UTF-8 has at most four bytes, and each has one at least.
_MAX_CHARACTER_TOKENS = 4
# Tokens of which each ends inside a character and the next completes it. Text has no longer chains.
_MAX_GROUP_TOKENS = 16
_NUM_CONTEXT_TOKENS = 8
# Decoded at once where an output holds incomplete characters, but few.
_CHUNK_TOKENS = 16


class Detokenizer:
    """Decodes the output of one request as it grows, in constant time per token.

    Tokens are decoded in groups, each as small as possible: a token, or as many as share a
    character. A token may join the one before it (by a space, or as the end of a word). So a group
    is decoded behind its context, the end of the group before it, whose text is cut off again.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt; its tail is the first context.
        skip_special_tokens: whether special tokens have no text.

    Attributes:
        num_chars: of the text that was returned.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        # Tokens with some text and no U+FFFD in it; none as long as there was no text at all.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []  # tokens whose text is not settled
        self.num_chars = 0
        self._num_prompt_pending = 0  # how many of them, the first ones, are the prompt's
        num_tokens = _NUM_CONTEXT_TOKENS
        while True:
            self.push_all(prompt_token_ids[-num_tokens:])
            if self._context or num_tokens >= len(prompt_token_ids):
                break
            num_tokens *= 2  # nothing but special tokens, which are no context: look further back
            self._pending.clear()
        self._num_prompt_pending, self.num_chars = len(self._pending), 0

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became complete with it, possibly none."""
        if (self._pending or not self._context) and self._is_textless(token_id):
            return ""
        self._pending.append(token_id)
        return self._settle(is_last=False)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """As pushing one after the other, but ids of complete characters are decoded at once."""
        whole = self._push_complete(token_ids)
        if whole is not None:
            return whole
        pieces: list[str] = []
        for begin in range(0, len(token_ids), _CHUNK_TOKENS):
            chunk = token_ids[begin : begin + _CHUNK_TOKENS]
            piece = self._push_complete(chunk)
            pieces += map(self.push, chunk) if piece is None else [piece]
        return "".join(pieces)

    def _push_complete(self, token_ids: Sequence[int]) -> str | None:
        """Add ids that end with a character, all of whose characters are complete; else None."""
        group = [*self._pending, *token_ids]
        text = self._text_of(group)
        if not text or _INCOMPLETE in text:
            return None
        self._pending = group
        return self._commit(len(group), text)

    def flush(self) -> str:
        """Returns what was kept back, complete or not. Nothing may be pushed after."""
        return self._settle(is_last=True)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
        return text

    def _text_of(self, token_ids: list[int]) -> str:
        """The text that ``token_ids`` add to the context's."""
        text = self._decode(self._context + token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # Byte fallback: wrong bytes spoiled those of the context before them. As the context ends
        # in a byte and not in a word, the next byte does not depend on it.
        return self._decode(token_ids)

    def _is_textless(self, token_id: int) -> bool:
        # Special tokens must not count among those of one character, nor as a beginning of the
        # text. Twice, as a single space may vanish at the beginning, too.
        return self._decode([*self._context, token_id, token_id]) == self._context_text

    def _settle(self, *, is_last: bool) -> str:
        pieces: list[str] = []
        while self._pending:
            num_tokens, text = self._next_group(is_last)
            if not num_tokens:
                break
            pieces.append(self._commit(num_tokens, text))
        return "".join(pieces)

    def _next_group(self, is_last: bool) -> tuple[int, str]:
        """How many pending tokens can be settled now, and their text."""
        pending = self._pending
        for num_tokens in range(1, len(pending) + 1):
            text = self._text_of(pending[:num_tokens])
            if _INCOMPLETE not in text:
                return num_tokens, text
        may_grow = not is_last and text.endswith(_INCOMPLETE)
        if may_grow and len(pending) < _MAX_CHARACTER_TOKENS:
            return 0, ""
        # The first token is in no complete character. It is settled alone, or with those that share
        # U+FFFD with it.
        num_tokens = max(n for n in range(1, len(pending) + 1) if self._is_one(pending[:n]))
        if may_grow and num_tokens == len(pending) < _MAX_GROUP_TOKENS:
            return 0, ""
        return num_tokens, self._text_of(pending[:num_tokens])

    def _is_one(self, token_ids: list[int]) -> bool:
        """Whether any cut through these tokens would give more U+FFFD than they have."""
        num_now = self._text_of(token_ids).count(_INCOMPLETE)
        for cut in range(1, len(token_ids)):
            left, right = self._text_of(token_ids[:cut]), self._text_of(token_ids[cut:])
            if (left + right).count(_INCOMPLETE) <= num_now:
                return False
        return True

    def _commit(self, num_tokens: int, text: str) -> str:
        """Settle the first pending tokens, whose text is ``text``; returns the answer's part."""
        group = self._pending[:num_tokens]
        num_prompt = min(self._num_prompt_pending, num_tokens)
        if num_prompt:
            prompt_text = self._text_of(group[:num_prompt])
            shared = takewhile(
                lambda pair: pair[0] == pair[1], zip(prompt_text, text, strict=False)
            )
            text = text[len(list(shared)) :]
        del self._pending[:num_tokens]
        self._num_prompt_pending -= num_prompt
        self.num_chars += len(text)
        for context in (group[-_NUM_CONTEXT_TOKENS:], group):
            if self._take_context(context):
                return text
        if not self._context:
            # Any letter: what comes next is not at the beginning of the text any more.
            self._take_context(self._tokenizer("a", add_special_tokens=False)["input_ids"])
        return text

    def _take_context(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids)
        if not text or _INCOMPLETE in text:
            return False
        self._context, self._context_text = token_ids, text
        return True


class StopStringWatcher:
    """Searches the text of a request, as it grows, for stop strings.

    Called with each settled output id (``Request.on_token``); True ends the request. The text is
    then cut before the earliest stop string, or behind it.

    Args:
        include: keep the stop string.
        min_tokens: a stop string does not count that is complete with so many tokens.
        tracker: of an answer that may begin with reasoning. Stop strings that begin before the
            content do not count, unless ``stops_inside``; none lies on both sides of its beginning.

    Attributes:
        settled_pieces: text that no later token can take back: no stop string begins in it.
        found: the stop string, once there is one.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        include: bool = False,
        min_tokens: int = 0,
        tracker: ReasoningTracker | None = None,
        stops_inside: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._tracker, self._stops_inside = tracker, stops_inside
        self._undecided: list[int] = []  # tokens that are reasoning or content
        self._stop_strings = tuple(stop_strings)
        self._num_tail_chars = max(len(s) for s in stop_strings) - 1
        self._tail = ""  # the end of the text, in which a stop string may have begun
        self._num_exempt = 0  # characters of the tail that end no stop string
        self._include = include
        self._num_free_tokens = min_tokens
        self.settled_pieces: list[str] = []
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def __call__(self, token_id: int) -> bool:
        if self._tracker is not None:
            return self._before_content(self._tracker, token_id)
        return self._search(self._detokenizer.push(token_id))

    def pass_over(self, token_id: int) -> None:
        """Add a token in whose text no stop string counts."""
        self._num_free_tokens = max(0, self._num_free_tokens - 1)
        self.settled_pieces.append(self._detokenizer.push(token_id))

    def begin_content(self) -> None:
        """Settle all text so far: no stop string that has begun in it counts any more."""
        self.settled_pieces.append(self._tail + self._detokenizer.flush())
        self._tail, self._num_exempt = "", 0

    def _before_content(self, tracker: ReasoningTracker, token_id: int) -> bool:
        self._undecided.append(token_id)
        phase = tracker.push(token_id)
        if phase is Phase.UNDECIDED:
            return False
        token_ids, self._undecided = self._undecided, []
        if phase is Phase.CONTENT:
            self._tracker = None
        if (phase is Phase.CONTENT and not tracker.num_skipped) or self._stops_inside:
            if any(self._search(self._detokenizer.push(i)) for i in token_ids):
                return True
        else:
            for each in token_ids:
                self.pass_over(each)
        if phase is Phase.CONTENT and tracker.num_skipped:
            self.begin_content()
        return False

    def _search(self, piece: str) -> bool:
        text = self._tail + piece
        if self._num_free_tokens > 0:
            self._num_free_tokens -= 1
            self._num_exempt = len(text)
        # A string that is complete within what is exempt begins before its first place here.
        exempt = self._num_exempt
        places = [
            (place, s)
            for s in self._stop_strings
            if (place := text.find(s, max(0, exempt - len(s) + 1))) >= 0
        ]
        if places:
            num_settled, self.found = min(places, key=lambda found: found[0])
            if self._include:
                num_settled += len(self.found)
            self._tail = ""
        else:
            num_settled = max(0, len(text) - self._num_tail_chars)
            self._tail = text[num_settled:]
            self._num_exempt = max(0, exempt - num_settled)
        self.settled_pieces.append(text[:num_settled])
        return self.is_stopped

    def finish(self, stop_token_id: int | None = None) -> str:
        """The final text. ``is_stopped`` may become true here: U+FFFD can be a stop string.

        Args:
            stop_token_id: the stop token that ended the request, if it has text.
        """
        for token_id in self._undecided:
            if not self.is_stopped:
                self._search(self._detokenizer.push(token_id))
        self._undecided = []
        if not self.is_stopped:
            is_inside = self._tracker is not None and self._tracker.phase is Phase.REASONING
            piece = "" if stop_token_id is None else self._detokenizer.push(stop_token_id)
            piece += self._detokenizer.flush()
            if is_inside and not self._stops_inside:
                self.settled_pieces.append(piece)
            else:
                self._search(piece)
        return "".join(self.settled_pieces) + self._tail


class GrowingText:
    """Reads what a request's settled tokens add to its text. The pieces together are a prefix of
    the final text; the rest is certain only at the request's end.

    Another thread may settle tokens meanwhile.

    Args:
        request: made from ``prompt``, with ``detokenize``.
        tokenizer: a transformers tokenizer.

    Attributes:
        num_read: characters.
    """

    def __init__(self, request: Request, prompt: PromptInput, tokenizer: Any) -> None:
        self._request, self._watcher = request, request.on_token
        params = request.sampling_params
        self._detokenizer = Detokenizer(
            tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens
        )
        is_watched = isinstance(self._watcher, StopStringWatcher)
        self._position = 0 if is_watched else request.num_prompt_tokens  # of pieces, or of tokens
        self.num_read = 0

    def read(self) -> str:
        """The text that was added since the last call."""
        if isinstance(self._watcher, StopStringWatcher):
            # Read once: another thread may append meanwhile.
            new = self._watcher.settled_pieces[self._position :]
            piece = "".join(new)
            self._position += len(new)
        else:
            ids = self._request.token_ids[self._position :]
            # The text of a stop token comes at the end, if at all.
            stops = self._request.stop_token_ids
            piece = self._detokenizer.push_all([i for i in ids if i not in stops])
            self._position += len(ids)
        self.num_read += len(piece)
        return piece


def decode_output(
    tokenizer: Any,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Text of a whole output at once; equal to pushing it a token at a time."""
    detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return detokenizer.push_all(output_token_ids) + detokenizer.flush()
