"""Incremental detokenization, token by token, and the search for stop strings.

The text of an answer is defined here, once, for ``generate``, ``generate_iter`` and ``stream``:

* It is the part of the text of prompt and output together that follows the prompt, that is, the
  longest prefix shared with the prompt's own text. A character that the prompt leaves incomplete
  belongs to the answer if the output completes it, otherwise to the prompt.
* Bytes that form no character are shown as U+FFFD, as many as the tokenizer shows for them. The
  characters next to them are unchanged, as with byte-level tokenizers and SentencePiece.
  The byte fallback of the ``tokenizers`` library differs: its ``decode`` shows *all* bytes
  of a run as U+FFFD if one of them is invalid. A stream cannot reproduce that, because a later
  token would change characters that were sent before.
* A character that ``max_tokens`` cuts ends the text as U+FFFD, as with transformers' ``decode``
  (vLLM omits it).
* Special tokens, and the stop token that ended the request, have no text unless
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
# Maximum number of tokens that share one character: UTF-8 has at most four bytes per character.
_MAX_CHARACTER_TOKENS = 4
# Longest chain of tokens that each end inside a character which the next token completes.
_MAX_GROUP_TOKENS = 16
_NUM_CONTEXT_TOKENS = 8
# Chunk size for decoding an output that has a few incomplete characters.
_CHUNK_TOKENS = 16


class Detokenizer:
    """Decodes the output of one request as it grows, in constant time per token.

    Tokens are decoded in minimal groups: one token, or the tokens that share a character. The text
    of a token can depend on the token before it (by a space, or as the end of a word). A group is
    therefore decoded after its context, the end of the previous group, whose text is then removed.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt; its last tokens are the first context.
        skip_special_tokens: whether special tokens have no text.

    Attributes:
        num_chars: number of characters returned so far.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        # Tokens with some text and no U+FFFD in it; empty until there is any text.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []  # tokens whose text is not final
        self.num_chars = 0
        self._num_prompt_pending = 0  # how many of them, at the start, are prompt tokens
        num_tokens = _NUM_CONTEXT_TOKENS
        while True:
            self.push_all(prompt_token_ids[-num_tokens:])
            if self._context or num_tokens >= len(prompt_token_ids):
                break
            num_tokens *= 2  # only special tokens, which give no context: look further back
            self._pending.clear()
        self._num_prompt_pending, self.num_chars = len(self._pending), 0

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became complete with it, possibly empty."""
        if (self._pending or not self._context) and self._is_textless(token_id):
            return ""
        self._pending.append(token_id)
        return self._settle(is_last=False)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Like pushing one by one, but ids of complete characters are decoded together."""
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
        """Add ids whose characters are all complete; None, without adding them, otherwise."""
        group = [*self._pending, *token_ids]
        text = self._text_of(group)
        if not text or _INCOMPLETE in text:
            return None
        self._pending = group
        return self._commit(len(group), text)

    def flush(self) -> str:
        """Returns the remaining text, complete or not. Nothing may be pushed afterwards."""
        return self._settle(is_last=True)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
        return text

    def _text_of(self, token_ids: list[int]) -> str:
        """The text that ``token_ids`` add to the context's text."""
        text = self._decode(self._context + token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # Byte fallback: invalid bytes changed the text of bytes in the context. The context then
        # ends in a byte token, not in a word, so the next byte does not depend on it.
        return self._decode(token_ids)

    def _is_textless(self, token_id: int) -> bool:
        # Special tokens must not count as tokens of a shared character, nor as the beginning of
        # the text. Decoded twice, because a single space may also vanish at the beginning.
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
        """How many pending tokens are final now, and their text."""
        pending = self._pending
        for num_tokens in range(1, len(pending) + 1):
            text = self._text_of(pending[:num_tokens])
            if _INCOMPLETE not in text:
                return num_tokens, text
        may_grow = not is_last and text.endswith(_INCOMPLETE)
        if may_grow and len(pending) < _MAX_CHARACTER_TOKENS:
            return 0, ""
        # The first token is part of no complete character. It becomes final alone, or together with
        # the tokens that share its U+FFFD.
        num_tokens = max(n for n in range(1, len(pending) + 1) if self._is_one(pending[:n]))
        if may_grow and num_tokens == len(pending) < _MAX_GROUP_TOKENS:
            return 0, ""
        return num_tokens, self._text_of(pending[:num_tokens])

    def _is_one(self, token_ids: list[int]) -> bool:
        """Whether every cut through these tokens would give more U+FFFD than they have."""
        num_now = self._text_of(token_ids).count(_INCOMPLETE)
        for cut in range(1, len(token_ids)):
            left, right = self._text_of(token_ids[:cut]), self._text_of(token_ids[cut:])
            if (left + right).count(_INCOMPLETE) <= num_now:
                return False
        return True

    def _commit(self, num_tokens: int, text: str) -> str:
        """Make the first pending tokens final, with ``text``; returns the answer's part of it."""
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
            # Any letter will do: the following text is no longer at the beginning.
            self._take_context(self._tokenizer("a", add_special_tokens=False)["input_ids"])
        return text

    def _take_context(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids)
        if not text or _INCOMPLETE in text:
            return False
        self._context, self._context_text = token_ids, text
        return True


class StopStringWatcher:
    """Searches the growing text of a request for stop strings.

    Called with each settled output id (``Request.on_token``); True ends the request. The text is
    then cut before the earliest stop string, or after it with ``include``.

    Args:
        include: keep the stop string.
        min_tokens: a stop string that is complete within this many tokens does not count.
        tracker: for answers that may begin with reasoning. Stop strings that begin before the
            content do not count, unless ``stops_inside``. No stop string spans its beginning.

    Attributes:
        settled_pieces: final text: no stop string can begin in it.
        found: the stop string, once it was found.
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
        self._undecided: list[int] = []  # tokens that may be reasoning or content
        self._stop_strings = tuple(stop_strings)
        self._num_tail_chars = max(len(s) for s in stop_strings) - 1
        self._tail = ""  # the end of the text, in which a stop string may have begun
        self._num_exempt = 0  # leading characters of the tail in which no stop string may end
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
        """Add a token whose text is not searched for stop strings."""
        self._num_free_tokens = max(0, self._num_free_tokens - 1)
        self.settled_pieces.append(self._detokenizer.push(token_id))

    def begin_content(self) -> None:
        """Make all text so far final: stop strings that begin in it no longer count."""
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
        # A stop string that is complete within the exempt part would begin before this position.
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
        """The final text. It may set ``is_stopped``, since U+FFFD can be a stop string.

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
    """Reads the text that a request's settled tokens add. The pieces, joined, are a prefix of the
    final text; the rest is known only at the request's end.

    Another thread may settle tokens at the same time.

    Args:
        request: made from ``prompt``, with ``detokenize``.
        tokenizer: a transformers tokenizer.

    Attributes:
        num_read: number of characters read.
    """

    def __init__(self, request: Request, prompt: PromptInput, tokenizer: Any) -> None:
        self._request, self._watcher = request, request.on_token
        params = request.sampling_params
        self._detokenizer = Detokenizer(
            tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens
        )
        is_watched = isinstance(self._watcher, StopStringWatcher)
        self._position = 0 if is_watched else request.num_prompt_tokens  # in pieces, or in tokens
        self.num_read = 0

    def read(self) -> str:
        """The text added since the last call."""
        if isinstance(self._watcher, StopStringWatcher):
            # Slice once: another thread may append at the same time.
            new = self._watcher.settled_pieces[self._position :]
            piece = "".join(new)
            self._position += len(new)
        else:
            ids = self._request.token_ids[self._position :]
            # The text of a stop token, if any, is added at the end.
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
    """Text of a whole output; equal to pushing its tokens one by one."""
    detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return detokenizer.push_all(output_token_ids) + detokenizer.flush()
