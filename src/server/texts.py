"""Texts that no context bounds: those that are only counted, or cut to their last tokens."""

from __future__ import annotations

from ..errors import InvalidInputError
from .context import ServerContext

# All of such a text is tokenised: some 100 bytes of memory per token until it is done.
MAX_TEXT_BYTES = 2 << 20
# Most bytes of ordinary text per token.
_BYTES_PER_TOKEN = 8


def require_bounded(
    field: str, num_bytes: int, truncate: int | None, context: ServerContext
) -> None:
    """Refuse a text whose length nothing else bounds.

    Args:
        num_bytes: of the text, or somewhat less.
        truncate: to how many tokens it is cut; None: a text that does not fit the context is
            refused later on.

    Raises:
        InvalidInputError: it is too long.
    """
    if truncate is None:
        return
    most = max(MAX_TEXT_BYTES, _BYTES_PER_TOKEN * context.engine.llm.max_model_len)
    if num_bytes > most:
        limit = f"must be at most {most} bytes of text to be cut to its last tokens, or counted"
        raise InvalidInputError(field, f"{num_bytes} bytes", limit)
