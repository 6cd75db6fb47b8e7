"""Makes a request from a checked prompt, and a ``RequestOutput`` from a finished request."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import xxhash

from ..errors import InvalidInputError
from .detokenizer import Detokenizer, StopStringWatcher, decode_output
from .inputs import PromptInput
from .logprob_output import add_logprobs
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .request import Request
from .sampling_params import SamplingParams


class RequestFactory:
    """Makes requests for one model and numbers them.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: token ids are below it.
        eos_token_ids: end a request unless it ignores them.
        max_model_len: most tokens of prompt plus output.
        seed: engine seed, from which requests without a seed get theirs.
        can_score: whether the runner gives log-probabilities of prompts.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        seed: int,
        can_score: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._seed = seed
        self._can_score = can_score
        self._numbers = itertools.count()  # threads share it

    def make(self, prompt: PromptInput, params: SamplingParams) -> Request:
        """Raises InvalidInputError if ``params`` do not suit the model."""
        if not isinstance(params, SamplingParams):
            raise InvalidInputError("sampling_params", params, "must be a SamplingParams")
        for token_id in params.stop_token_ids or ():
            if token_id >= self._vocab_size:
                raise InvalidInputError(
                    "stop_token_ids", token_id, f"ids must be below {self._vocab_size}"
                )
        if params.prompt_logprobs is not None and not self._can_score:
            limit = "must be None: this model's head is not found behind its hidden states"
            raise InvalidInputError("prompt_logprobs", params.prompt_logprobs, limit)
        watcher = None
        if params.stop_strings:
            if self._tokenizer is None:
                raise InvalidInputError("stop", params.stop, "this model has no tokenizer")
            detokenizer = Detokenizer(self._tokenizer, prompt.token_ids)
            watcher = StopStringWatcher(detokenizer, params.stop_strings)
        max_num_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(prompt.token_ids) + params.max_tokens)
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        number = next(self._numbers)
        seed = params.seed
        if seed is None:
            seed = xxhash.xxh3_64_intdigest(struct.pack("<qq", self._seed, number))
        return Request(
            str(number),
            prompt.token_ids,
            params,
            max_num_tokens=max_num_tokens,
            stop_token_ids=stop_token_ids,
            on_token=watcher,
            seed=seed,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
        )

    def output(
        self, request: Request, prompt: PromptInput, metrics: RequestMetrics
    ) -> RequestOutput:
        """What the caller of a finished ``request`` gets."""
        watcher, finish_reason = request.on_token, request.finish_reason
        if isinstance(watcher, StopStringWatcher):
            text = watcher.finish()
            if watcher.is_stopped and finish_reason == "length":
                finish_reason = "stop"  # by U+FFFD: incomplete until it was the end
        elif self._tokenizer is not None:
            text = decode_output(self._tokenizer, prompt.token_ids, request.text_token_ids)
        else:
            text = ""
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[CompletionOutput(0, text, request.output_token_ids, finish_reason)],
            metrics=metrics,
        )
        if request.logprobs is not None:
            add_logprobs(output, request, self.decode_one)
        return output

    @property
    def decode_one(self) -> Callable[[int], str] | None:
        """The text of a token by itself; None without a tokenizer."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else lambda token_id: str(tokenizer.decode([token_id]))
