"""Totals over ended requests: counters and histograms, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence

from .histograms import (
    BETWEEN_TOKENS_S,
    CONTINUATIONS,
    FIRST_TOKEN_S,
    REQUEST_S,
    Histogram,
    one_two_five,
)
from .outputs import RequestMetrics
from .request import Request

FINISH_REASONS = ("stop", "length", "abort", "error")

OF_REQUESTS = {
    "first_token_s": ("time_to_first_token_seconds", "From arrival to the first token."),
    "token_s": (
        "request_time_per_output_token_seconds",
        "Mean time between a request's tokens.",
    ),
    "whole_s": ("e2e_request_latency_seconds", "From arrival to the end."),
    "queue_s": ("request_queue_time_seconds", "From arrival to the first step."),
    "inference_s": ("request_inference_time_seconds", "From first step to the end."),
    "prefill_s": ("request_prefill_time_seconds", "From first step to first token."),
    "decode_s": ("request_decode_time_seconds", "From first token to the end."),
    "prompt_tokens": ("request_prompt_tokens", "Tokens per prompt."),
    "generated_tokens": ("request_generation_tokens", "Tokens generated per request."),
    "continuations": ("request_params_n", "The parameter n."),
    "max_tokens": ("request_params_max_tokens", "The parameter max_tokens."),
}
"""The histograms by attribute: name without ``vllm:``, and description."""
GAUGES = {
    "num_running": ("num_requests_running", "Running requests."),
    "num_waiting": ("num_requests_waiting", "Waiting requests."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1."),
}
COUNTERS = {
    "num_queried_tokens": ("prefix_cache_queries", "Prefix-cache look-ups, tokens."),
    "num_hit_tokens": ("prefix_cache_hits", "Prefix-cache hits, tokens."),
    "num_preemptions": ("num_preemptions", "Preemptions."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens processed."),
    "num_generated_tokens": ("generation_tokens", "Tokens generated."),
}
DRAFTS = {
    "num_drafts": ("spec_decode_num_drafts", "Rows with draft tokens."),
    "num_draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens."),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Accepted draft tokens."),
}
"""Values of the engine by attribute, declared likewise."""
ENDED = ("request_success", "Requests that ended.")
ACCEPTED = (
    "spec_decode_num_accepted_tokens_per_pos",
    "Accepted draft tokens by their place in the draft.",
)


class RequestTotals:
    """
    ``prompt_tokens``, ``continuations`` and ``max_tokens`` have one value per prompt, the others
    one per continuation. Times include only requests that ended by "stop" or "length".

    Args:
        max_model_len: the context, in tokens.
        between: additional boundaries of ``first_token_s``, for finer quantiles.

    Attributes:
        num_ended: number of ended requests, by finish reason.
        num_prompt_tokens, num_generated_tokens: counted by the caller, or by :meth:`add_result`.
    """

    def __init__(self, max_model_len: int, between: Sequence[float] = ()) -> None:
        self._max_model_len = max_model_len
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_ended = dict.fromkeys(FINISH_REASONS, 0)
        self.first_token_s = Histogram(FIRST_TOKEN_S, between)
        self.token_s = Histogram(BETWEEN_TOKENS_S)
        self.whole_s, self.queue_s = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prefill_s, self.decode_s = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.continuations = Histogram(CONTINUATIONS)
        lengths = one_two_five(max_model_len)
        self.prompt_tokens, self.generated_tokens = Histogram(lengths), Histogram(lengths)
        self.max_tokens = Histogram(lengths)

    def add_result(self, requests: Sequence[Request], metrics: Sequence[RequestMetrics]) -> None:
        """Count the ended continuations of a prompt, the leader first, with their tokens."""
        self.num_prompt_tokens += requests[0].num_prompt_tokens
        for request, times in zip(requests, metrics, strict=True):
            self.num_generated_tokens += len(request.token_ids) - request.num_prompt_tokens
            if times.time_to_first_token_s is not None:
                self.first_token_s.observe(times.time_to_first_token_s)
            self.add_end(request, times, is_leader=request is requests[0])

    def add_end(self, request: Request, times: RequestMetrics, *, is_leader: bool) -> None:
        """Count an ended request.

        Args:
            times: its metrics.
            is_leader: it is the first continuation of its prompt.
        """
        reason, params = request.finish_reason or "abort", request.sampling_params
        self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
        if is_leader:
            self.prompt_tokens.observe(request.num_prompt_tokens)
            self.continuations.observe(params.n)
            if params.max_tokens is not None:
                # Values above the context are equivalent.
                self.max_tokens.observe(min(params.max_tokens, self._max_model_len))
        if reason not in ("stop", "length"):
            return
        num_tokens = len(request.token_ids) - request.num_prompt_tokens
        self.generated_tokens.observe(num_tokens)
        whole, first = times.total_time_s, times.time_to_first_token_s
        if whole is None or first is None:
            return
        queued = times.queue_time_s or 0.0
        self.whole_s.observe(whole)
        self.queue_s.observe(queued)
        self.inference_s.observe(whole - queued)
        self.prefill_s.observe(first - queued)
        self.decode_s.observe(whole - first)
        if num_tokens > 1:
            self.token_s.observe((whole - first) / (num_tokens - 1))
