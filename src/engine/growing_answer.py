"""One continuation, read part by part while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .inputs import PromptInput
from .logprob_output import logprob_entries
from .outputs import CompletionOutput
from .request import Request
from .text.detokenizer import GrowingText


class GrowingAnswer:
    """Reads what is new of a continuation. Another thread may settle tokens at the same time.

    Args:
        index: index of the answer, from 0.
        request: made from ``prompt``.
        tokenizer: a transformers tokenizer; None: parts have no text.
        decode: decodes a token of log-probabilities; None: it has no text.

    Attributes:
        index, request: as given.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        prompt: PromptInput,
        tokenizer: Any,
        decode: Callable[[int], str] | None,
    ) -> None:
        self.request = request
        self.index, self._decode = index, decode
        is_text = request.sampling_params.detokenize and tokenizer is not None
        self._text = GrowingText(request, prompt, tokenizer) if is_text else None
        self._num_tokens = 0

    def empty(self) -> CompletionOutput:
        """The answer before its first part."""
        return self._unread(CompletionOutput(self.index, "", []))

    def read(self) -> CompletionOutput | None:
        """The new part, without ``cumulative_logprob``; None if nothing is new.

        A character completed by several tokens is in the part of the last one, or a later part.
        """
        token_ids = self.request.output_token_ids
        text = "" if self._text is None else self._text.read()
        if not text and len(token_ids) == self._num_tokens:
            return None
        return self._unread(CompletionOutput(self.index, text, token_ids))

    def cut(self, answer: CompletionOutput) -> CompletionOutput:
        """Drop from the complete answer what was read before. Returns ``answer``."""
        if self._text is not None:
            answer.text = answer.text[self._text.num_read :]
        return self._unread(answer)

    def _unread(self, answer: CompletionOutput) -> CompletionOutput:
        """``answer`` without the tokens that were read before."""
        begin, self._num_tokens = self._num_tokens, len(answer.token_ids)
        answer.token_ids = answer.token_ids[begin:]
        answer.logprobs = logprob_entries(self.request, begin, self._num_tokens, self._decode)
        return answer
