"""The results of a request: outputs and metrics. Names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request.

    Attributes:
        queue_time_s: from arrival until its first tokens were scheduled, seconds.
        time_to_first_token_s: from arrival until its first token was settled, seconds; None if it
            ended before.
        total_time_s: from arrival until it finished, seconds.
        tokens_per_second: output tokens after the first, over the time they took; None with fewer
            than two tokens.
        num_cached_tokens: prompt tokens found in the prefix cache on first admission.
        num_preemptions: how often its blocks were taken and its tokens computed again.
    """

    queue_time_s: float | None = None
    time_to_first_token_s: float | None = None
    total_time_s: float | None = None
    tokens_per_second: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: position among the request's continuations (0).
        text: decoded text, cut before a stop string, without special tokens and without the stop
            token that ended it (as in vLLM; see ``engine.detokenizer`` for incomplete characters);
            "" if the model has no tokenizer.
        token_ids: every generated id, the end or stop token included.
        finish_reason: "stop" (end token, stop token or stop string), "length" (max_tokens or
            max_model_len) or "abort". (A request of reason "error" has no output: its call raises
            EngineError.)
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended it; None for
            the model's end tokens and every other end.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request. ``prompt`` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = True
