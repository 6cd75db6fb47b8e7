"""The token ids that the rows of a step compute, as far as the host knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .plan import InFlightStep
from .request import Request


def row_token_ids(
    requests: Sequence[Request],
    starts: Sequence[int],
    num_tokens: Sequence[int],
    in_flight: Sequence[InFlightStep],
) -> tuple[int, ...]:
    """Settled ids as they are, others by their place among the tokens that steps in flight sample
    (see ``StepPlan.token_ids``).

    Args:
        in_flight: dispatched and not settled, oldest first.
    """
    ids: list[int] = []
    places: dict[Request, int] | None = None
    for request, start, n in zip(requests, starts, num_tokens, strict=True):
        known = request.token_ids
        if start < len(known):
            if n == 1:
                ids.append(known[start])
            else:
                ids += known[start : start + n]
            continue
        if places is None:
            places = _places_in_flight(reversed(in_flight))
        ids.append(-1 - places[request])
    return tuple(ids)


def _places_in_flight(newest_first: Iterable[InFlightStep]) -> dict[Request, int]:
    """Where the steps in flight put each request's latest token, counted from the newest."""
    places: dict[Request, int] = {}
    num_places = 0
    for plan, requests in newest_first:
        for request, is_sampled in zip(requests, plan.sampled, strict=True):
            if is_sampled:
                places.setdefault(request, num_places)
                num_places += 1
    return places
