"""Arguments of vLLM's ``generate`` and ``chat`` besides the prompts and the sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import is_int, is_list
from .inputs import PromptInput, check_priority, truncation_of

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation_side": (None, "left"),
    "padding": (None, False, "do_not_pad"),
    "pad_prompt_tokens": (None,),
    "do_lower_case": (None, False),
    "needs_detokenization": (None, False, True),
}
"""Options of ``tokenization_kwargs`` with a fixed meaning here, and the values that have it."""
_TRUNCATES = (True, "longest_first")
_KEEPS = (None, False, "do_not_truncate")


def refuse_unserved(
    lora_request: Any = None, mm_processor_kwargs: Any = None, content_format: str = "auto"
) -> None:
    """Refuse adapters, arguments of multi-modal processors, and forms of content.

    Raises:
        InvalidInputError: names the argument.
    """
    loras = lora_request if is_list(lora_request) else [lora_request]
    if any(lora is not None for lora in loras):
        limit = "must be None: LoRA adapters are not supported; merge the adapter into the model"
        raise InvalidInputError("lora_request", lora_request, limit)
    if mm_processor_kwargs is not None and mm_processor_kwargs != {}:
        limit = "must be None: a prompt has tokens only"
        raise InvalidInputError("mm_processor_kwargs", mm_processor_kwargs, limit)
    if content_format != "auto":
        limit = "must be 'auto': content is converted to the form that the template reads"
        raise InvalidInputError("chat_template_content_format", content_format, limit)


def truncations(tokenization_kwargs: Any, params: Sequence[Any]) -> list[int | None]:
    """Per prompt, the number of last tokens to keep, see ``PromptReader.read``.

    Args:
        tokenization_kwargs: vLLM's options. ``truncate_prompt_tokens`` (an integer >= 1, or -1),
            and ``truncation=True`` with ``max_length``, replace the value of the parameters.
        params: one set of sampling parameters per prompt, unchecked.

    Raises:
        InvalidInputError: an option is refused; names it.
    """
    own = [truncation_of(one) for one in params]
    if not tokenization_kwargs:
        return own
    if not isinstance(tokenization_kwargs, Mapping):
        limit = "must be a dict of options"
        raise InvalidInputError("tokenization_kwargs", tokenization_kwargs, limit)
    given = dict(tokenization_kwargs)
    for name, values in _NEUTRAL.items():
        value = given.pop(name, values[0])
        if value not in values:
            _refuse(name, value, "must be " + " or ".join(map(repr, values)))
    truncate = given.pop("truncate_prompt_tokens", None)
    length, rule = given.pop("max_length", None), given.pop("truncation", None)
    if rule not in (*_TRUNCATES, *_KEEPS):
        _refuse("truncation", rule, "must be True or False")
    if (rule in _TRUNCATES) != (length is not None):
        _refuse("max_length", length, "must be given with truncation=True, and only then")
    name = "truncate_prompt_tokens" if length is None else "max_length"
    truncate = truncate if length is None else length
    given.pop("add_special_tokens", None)  # see adds_special_tokens
    for unknown, value in given.items():
        _refuse(unknown, value, "is not supported")
    if truncate is None:
        return own
    if not is_int(truncate) or (truncate < 1 and truncate != -1):
        _refuse(name, truncate, "must be an integer >= 1, or -1")
    return [truncate] * len(own)


def adds_special_tokens(tokenization_kwargs: Any, *, in_template: bool = False) -> bool:
    """Whether the tokenizer adds special tokens to texts.

    Args:
        tokenization_kwargs: checked by :func:`truncations`.
        in_template: the text comes from a chat template, which writes its own special tokens.

    Raises:
        InvalidInputError: the option is refused.
    """
    value = (tokenization_kwargs or {}).get("add_special_tokens", not in_template)
    if in_template and value is not False:
        _refuse("add_special_tokens", value, "must be False: the chat template writes them")
    if not isinstance(value, bool):
        _refuse("add_special_tokens", value, "must be True or False")
    return bool(value)


def _refuse(name: str, value: Any, limit: str) -> None:
    raise InvalidInputError(f"tokenization_kwargs.{name}", value, limit)


def with_priorities(prompts: Sequence[PromptInput], priority: Any) -> list[PromptInput]:
    """The prompts with vLLM's ``priority``, a list with one integer per prompt. None keeps the
    priorities of the prompts.

    Raises:
        InvalidInputError: it is no such list, or an item is outside the limits.
    """
    if priority is None:
        return list(prompts)
    if not is_list(priority):
        raise InvalidInputError("priority", priority, "must be a list with one integer per prompt")
    if len(priority) != len(prompts):
        limit = f"{len(priority)} given for {len(prompts)} prompts"
        raise InvalidInputError("priority", priority, limit)
    checked = [check_priority(f"priority[{i}]", value) for i, value in enumerate(priority)]
    return [replace(p, priority=value) for p, value in zip(prompts, checked, strict=True)]
