"""Public exceptions. An InvalidInputError names the field, the value and the limit."""

from __future__ import annotations

from collections.abc import Iterable


class PagespecError(Exception):
    """Base class of every error that pagespec raises on purpose."""


class InvalidInputError(PagespecError, ValueError):
    """A value passed by the caller is refused on entry; no state has changed.

    Attributes:
        field: name of the argument, as the caller spelled it.
        value: the value as passed; the message shows it shortened.
        limit: the accepted values.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(f"{field} = {_shown(value)}: {limit}")

    def renamed(self, field: str, limit: str | None = None) -> InvalidInputError:
        """The same error for a field of another name."""
        return InvalidInputError(field, self.value, self.limit if limit is None else limit)


class ContextLengthError(InvalidInputError):
    """A prompt has more tokens than fit in the context.

    Attributes:
        num_tokens: length of the prompt; a lower bound if ``is_least``.
        max_model_len: maximum number of tokens of prompt plus output.
        is_scored: the prompt is only scored, so it needs no space for an output.
    """

    def __init__(
        self,
        field: str,
        num_tokens: int,
        max_model_len: int,
        *,
        is_least: bool = False,
        is_scored: bool = False,
    ) -> None:
        self.num_tokens, self.max_model_len = num_tokens, max_model_len
        self.is_least, self.is_scored = is_least, is_scored
        value = f"{'at least ' if is_least else ''}{num_tokens} tokens"
        limit = f"must be at most {max_model_len - (not is_scored)} tokens, "
        limit += "" if is_scored else "one less than "
        limit += f"max_model_len = {max_model_len}: the maximum context length is {max_model_len} "
        super().__init__(field, value, f"{limit}tokens. Please reduce the length of the prompt")

    def renamed(self, field: str, limit: str | None = None) -> InvalidInputError:  # noqa: ARG002
        return ContextLengthError(
            field,
            self.num_tokens,
            self.max_model_len,
            is_least=self.is_least,
            is_scored=self.is_scored,
        )


class UnknownArgumentError(InvalidInputError, TypeError):
    """A keyword argument that does not exist; the message suggests the nearest names."""

    def __init__(self, field: str, value: object, known: Iterable[str]) -> None:
        super().__init__(field, value, f"there is no such argument{nearest(field, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at names that are much like an unknown one; empty if there are none."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), 3, 0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def shortened(text: str, length: int) -> str:
    """A text cut to at most ``length`` characters; a cut text ends with three dots."""
    return text if len(text) <= length else text[: length - 3] + "..."


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:  # repr fails for huge integers and for some objects of the caller
        shown = f"<{type(value).__name__}>"
    return shortened(shown, 80)


class UnsupportedModelError(PagespecError):
    """The model needs a feature that this engine does not compute exactly."""


class EngineError(PagespecError):
    """A step failed or was interrupted, possibly a step of another call. All live requests ended
    with finish reason "error". The engine can be used again."""


class RequestError(EngineError):
    """One request failed and ended with finish reason "error"; the others continue."""


class EngineBusyError(PagespecError):
    """The engine has reached its maximum number of live requests; retry later."""


class EngineStoppedError(PagespecError):
    """The engine is shutting down and accepts no requests."""
