"""The text of a running request as far as it is certain, read piece by piece."""

from __future__ import annotations

from typing import Any

from .detokenizer import Detokenizer, StopStringWatcher
from .inputs import PromptInput
from .request import Request


class GrowingText:
    """Reads what a request's settled tokens add to its text. The pieces together are a prefix of
    the final text; what is missing is certain only at the request's end.

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
        """What is new."""
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
