"""The token ids that the rows of a step compute, as far as the host knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .plan import InFlightStep
from .request import Request


def row_token_ids(
    requests: Sequence[Request],
    starts: Sequence[int],
    num_tokens: Sequence[int],
    in_flight: Sequence[InFlightStep],
    drafts: Mapping[int, Sequence[int]],
) -> tuple[int, ...]:
    """Settled ids as they are, others by their place among the tokens that steps in flight sample
    (see ``StepPlan.token_ids``).

    Args:
        num_tokens: draft tokens included.
        in_flight: dispatched and not settled, oldest first.
        drafts: the draft tokens of each row that has some, by row; all before them is settled.
    """
    ids: list[int] = []
    places: dict[Request, int] | None = None
    for row, (request, start, n) in enumerate(zip(requests, starts, num_tokens, strict=True)):
        known = request.token_ids
        if start < len(known):
            if n == 1:
                ids.append(known[start])
            else:
                ids += known[start : start + n]
                if row in drafts:
                    ids += drafts[row]
            continue
        if places is None:
            places = _places_in_flight(reversed(in_flight))
        ids.append(-1 - places[request])
    return tuple(ids)


def _places_in_flight(newest_first: Iterable[InFlightStep]) -> dict[Request, int]:
    """Where the steps in flight put each request's latest token, counted from the newest. A row
    with draft tokens has several samples, of which no later row names one before they are settled
    (S42); it counts for the places behind it."""
    places: dict[Request, int] = {}
    num_places = 0
    for plan, requests in newest_first:
        for request, num_samples in zip(requests, plan.num_samples, strict=True):
            if num_samples:
                places.setdefault(request, num_places)
                num_places += num_samples
    return places
