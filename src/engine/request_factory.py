"""Makes requests from a checked prompt, and a ``RequestOutput`` from finished requests."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import xxhash

from ..errors import InvalidInputError
from .detokenizer import Detokenizer, StopStringWatcher, decode_output
from .inputs import PromptInput
from .outputs import CompletionOutput, RequestMetrics, RequestOutput, joined
from .request import Request
from .sampling_params import SamplingParams

_SEED_SPAN = 1 << 64


class RequestFactory:
    """Makes requests for one model and numbers them.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: token ids are below it.
        eos_token_ids: end a request unless it ignores them.
        max_model_len: most tokens of prompt plus output.
        seed: engine seed, from which requests without a seed get theirs.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._seed = seed
        self._numbers = itertools.count()  # threads share it

    def make(self, prompt: PromptInput, params: SamplingParams) -> list[Request]:
        """The continuations of a prompt, the leader first; mostly one.

        Raises:
            InvalidInputError: ``params`` do not suit the model.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidInputError("sampling_params", params, "must be a SamplingParams")
        for token_id in params.stop_token_ids or ():
            if token_id >= self._vocab_size:
                raise InvalidInputError(
                    "stop_token_ids", token_id, f"ids must be below {self._vocab_size}"
                )
        if params.stop_strings and self._tokenizer is None:
            raise InvalidInputError("stop", params.stop, "this model has no tokenizer")
        max_num_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(prompt.token_ids) + params.max_tokens)
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        number = next(self._numbers)
        leader = Request(
            str(number),
            prompt.token_ids,
            params,
            max_num_tokens=max_num_tokens,
            stop_token_ids=stop_token_ids,
            on_token=self._watcher(prompt, params),
            seed=self._seed_of(params, 0, number),
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
        )
        requests = [leader]
        for index in range(1, params.n):
            number = next(self._numbers)
            seed = self._seed_of(params, index, number)
            requests.append(leader.sibling(str(number), seed, self._watcher(prompt, params)))
        return requests

    def _watcher(self, prompt: PromptInput, params: SamplingParams) -> StopStringWatcher | None:
        if not params.stop_strings:
            return None
        detokenizer = Detokenizer(self._tokenizer, prompt.token_ids)
        return StopStringWatcher(detokenizer, params.stop_strings)

    def _seed_of(self, params: SamplingParams, index: int, number: int) -> int:
        """Of continuation ``index``, which is request ``number``."""
        if params.seed is None:
            return xxhash.xxh3_64_intdigest(struct.pack("<qq", self._seed, number))
        seed = params.seed + index
        return seed if seed < _SEED_SPAN else seed - _SEED_SPAN

    def output(
        self, requests: Sequence[Request], prompt: PromptInput, metrics: Sequence[RequestMetrics]
    ) -> RequestOutput:
        """What the caller gets of ``requests``, the finished continuations of a prompt."""
        return RequestOutput(
            request_id=requests[0].request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[self._completion(i, request, prompt) for i, request in enumerate(requests)],
            metrics=joined(metrics) if len(metrics) > 1 else metrics[0],
        )

    def _completion(self, index: int, request: Request, prompt: PromptInput) -> CompletionOutput:
        watcher, finish_reason = request.on_token, request.finish_reason
        if isinstance(watcher, StopStringWatcher):
            text = watcher.finish()
            if watcher.is_stopped and finish_reason == "length":
                finish_reason = "stop"  # by U+FFFD: incomplete until it was the end
        elif self._tokenizer is not None:
            text = decode_output(self._tokenizer, prompt.token_ids, request.text_token_ids)
        else:
            text = ""
        return CompletionOutput(index, text, request.output_token_ids, finish_reason)
