"""The tokens that end an answer of a conversation, beside the end tokens of the model's configs."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Any

logger = logging.getLogger("pagespec")

_CONTENT = "pagespec"
_MAX_KEPT = 32  # templates: requests may bring their own


class TurnEnds:
    """Finds the end of a turn, once for each template. Threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str | None, frozenset[int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, chat_template: str | None) -> frozenset[int]:
        """The tokenizer's ``eos_token``, and the special token that follows the assistant's content
        in a conversation of one turn, such as ``<|im_end|>``; empty if there is neither.

        Args:
            chat_template: as of ``apply_chat_template``; None: the tokenizer's own.
        """
        with self._lock:
            kept = self._kept.get(chat_template)
            if kept is not None:
                self._kept.move_to_end(chat_template)
                return kept
        found = self._find(chat_template) | self._own_end()
        with self._lock:
            self._kept[chat_template] = found
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _own_end(self) -> frozenset[int]:
        own = getattr(self._tokenizer, "eos_token_id", None)
        return frozenset({own}) if type(own) is int else frozenset()

    def _find(self, chat_template: str | None) -> frozenset[int]:
        for content in (_CONTENT, [{"type": "text", "text": _CONTENT}]):
            conversation = [
                {"role": "user", "content": content if isinstance(content, list) else "a"},
                {"role": "assistant", "content": content},
            ]
            try:
                text = self._tokenizer.apply_chat_template(
                    conversation,
                    tokenize=False,
                    chat_template=chat_template,
                    add_generation_prompt=False,
                )
            except Exception as error:  # a template refuses with whatever Jinja raises
                logger.debug("the end of a turn is not known: %s", error)
                continue
            if isinstance(text, str) and _CONTENT in text:
                tail = text[text.rindex(_CONTENT) + len(_CONTENT) :].lstrip()
                return self._special_at_the_beginning(tail)
        return frozenset()

    def _special_at_the_beginning(self, text: str) -> frozenset[int]:
        decoder = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        longest = max(
            (
                (len(token.content), token_id)
                for token_id, token in decoder.items()
                if token.special and text.startswith(token.content)
            ),
            default=None,
        )
        return frozenset() if longest is None else frozenset({longest[1]})
