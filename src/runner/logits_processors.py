"""``logits_processors``: the callers' own functions, whose errors end their request only."""

from __future__ import annotations

import logging
from threading import current_thread, main_thread

from torch import Tensor

from ..engine.request import RequestInfo
from ..errors import shortened
from ..kernels.sampling.edit_logits import processed

logger = logging.getLogger("pagespec")
_MAX_REASON = 300


def has_processors(request: RequestInfo) -> bool:
    return request.edits is not None and bool(request.edits.processors)


def process(
    request: RequestInfo, row: Tensor, output_token_ids: list[int], failures: dict[str, str]
) -> Tensor:
    """A row of logits after the functions of its request.

    Args:
        row: float32 ``[V]`` on the CPU.
        failures: if one raises, or leaves nothing to sample, the reason is added here by the
            request's id, and the row is returned as it was.
    """
    functions = request.edits.processors if request.edits is not None else ()
    try:
        return processed(row, output_token_ids, functions)
    except BaseException as error:
        # The main thread gets signals: there, a KeyboardInterrupt ends the step, as anywhere.
        if not isinstance(error, Exception) and current_thread() is main_thread():
            raise
        if request.request_id not in failures:
            logger.warning("logits_processors of %s failed", request.request_id, exc_info=True)
        reason = shortened(f"{type(error).__name__}: {error}", _MAX_REASON)
        failures[request.request_id] = f"logits_processors: {reason}"
        return row
