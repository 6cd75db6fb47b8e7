"""Fields of answers that are null unless a request or a feature gives them a value.

vLLM and OpenAI send every field of their response models, so clients read such a field without a
check: openai's Python client raises AttributeError for an unknown field that was not sent.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_OPENAI = ("service_tier", "system_fingerprint", *_TRANSFERS, "metrics")

COMPLETION: Mapping[str, None] = dict.fromkeys(_OPENAI)
COMPLETION_CHOICE: Mapping[str, None] = dict.fromkeys(("prompt_logprobs", "routed_experts"))
CHAT: Mapping[str, None] = dict.fromkeys(
    (*_OPENAI, "prompt_logprobs", "prompt_token_ids", "prompt_text")
)
CHAT_CHOICE: Mapping[str, None] = dict.fromkeys(("token_ids", "routed_experts"))
CHAT_MESSAGE: Mapping[str, None] = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call")
)
GENERATE: Mapping[str, None] = dict.fromkeys((*_TRANSFERS, "prompt_token_ids"))
GENERATE_CHOICE: Mapping[str, None] = dict.fromkeys(("routed_experts",))
