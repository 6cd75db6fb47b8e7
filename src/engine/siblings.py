"""Chooses whose blocks a request shares at its admission, of several that continue one prompt."""

from __future__ import annotations

from collections.abc import Iterable

from .request import Request


def find_source(
    elders: Iterable[Request], request: Request, num_cached_tokens: int
) -> Request | None:
    """The eldest that continues the prompt of ``request`` and has settled what they share, if that
    is more than ``request`` finds in the cache.

    Args:
        elders: running requests elder than ``request``, in rank order. Younger ones may be
            preempted for its admission, and what they have is then gone.
        request: a sibling; others have a prompt of their own.
    """
    num_shared = request.num_shared_tokens
    if not request.reads_cache or num_shared <= num_cached_tokens:
        return None
    for other in elders:
        is_alike = other is request.leader or other.leader is request.leader
        if is_alike and other.num_computed >= num_shared:
            return other
    return None
