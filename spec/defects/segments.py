"""Defects of the segments of prompts."""

from __future__ import annotations

from typing import Any

from ..model import Machine
from ..state import BASE, Request, Segment, Segments, Template, names, prefixes
from .registry import A, defect
from .states import _SCOPE as _STATES


def _prompt(*segments: Segment) -> Template:
    """A prompt whose tokens are all equal, including placeholders."""
    length = sum(segment.length for segment in segments)
    return Template((0,) * length, 2, segments=segments)


_TOKEN, _ONE, _OTHER = Segment(1), Segment(2, 1), Segment(2, 2)
_ALIKE: dict[str, Any] = {
    "templates": (_prompt(_TOKEN, _ONE, _TOKEN), _prompt(_TOKEN, _OTHER, _TOKEN))
}
_SCOPE: dict[str, Any] = _ALIKE | {"num_blocks": 4}


class KeyOf(Machine):
    """A key computed from other segments than the request's own."""

    def seen(self, segments: Segments) -> Segments:
        raise NotImplementedError

    def block_key(self, request: Request, i: int) -> int:
        return super().block_key(request._replace(segments=self.seen(request.segments)), i)


@defect("key-of-placeholders", "S60 S61 S6 S16", **_SCOPE)
class KeyOfPlaceholders(KeyOf):
    """Two images with the same text form one prefix."""

    def seen(self, _: Segments) -> Segments:
        return ()


@defect(
    "key-without-offset",
    "S60 S61 S6",
    templates=(
        _prompt(Segment(2, 1), _TOKEN),
        _prompt(Segment(1, 1), Segment(1, 1), _TOKEN),
    ),
    num_blocks=4,
)
class KeyWithoutOffset(KeyOf):
    """An image of two positions equals its first half, repeated."""

    def seen(self, segments: Segments) -> Segments:
        parts: list[Segment] = []
        for segment in segments:
            parts += [Segment(1, segment.content_hash)] * segment.length
        return tuple(parts)


@defect(
    "key-of-contents-at-block-starts",
    "S60 S61 S6",
    **_SCOPE | {"templates": (_prompt(_TOKEN, Segment(2, 1)), _prompt(_TOKEN, Segment(2, 2)))},
)
class KeyOfContentsAtBlockStarts(Machine):
    """A segment that begins after the start of a block is omitted from the block's key."""

    def block_key(self, request: Request, i: int) -> int:
        begins, seen = 0, list(request.segments)
        for number, segment in enumerate(request.segments):
            if segment.content_hash is not None and begins % self.block_size:
                rest = self.block_size - begins % self.block_size
                if rest < segment.length:
                    kept = segment._replace(length=segment.length - rest)
                    seen[number : number + 1] = [Segment(rest), kept]
                else:
                    seen[number] = Segment(segment.length)
            begins += segment.length
        return super().block_key(request._replace(segments=tuple(seen)), i)


@defect(
    "key-without-place",
    "S60 S61 S6",
    templates=(
        _prompt(Segment(1, 1), Segment(2)),
        _prompt(_TOKEN, Segment(1, 1), _TOKEN),
    ),
)
class KeyWithoutPlace(Machine):
    """The key contains the contents of a block, but not their positions in it."""

    def block_key(self, request: Request, i: int) -> int:
        end = (i + 1) * self.block_size
        key = prefixes(request.salt, request.tokens[:end], ())[-1]
        begins = 0
        for segment in request.segments:
            if segment.content_hash is not None and begins < end:
                key = key * BASE + segment.content_hash
            begins += segment.length
        return key


@defect(
    "key-of-all-contents",
    "S61 S6",
    templates=(_prompt(Segment(2), _ONE), _prompt(Segment(2), _OTHER)),
    num_blocks=4,
    budget=4,
)
class KeyOfAllContents(Machine):
    """Each key contains all contents of the prompt, like a salt: the text before an image is found
    only with that same image."""

    def block_key(self, request: Request, i: int) -> int:
        contents = sum(segment.content_hash or 0 for segment in request.segments)
        return super().block_key(request._replace(salt=contents), i)


@defect("hit-ends-before-a-segment", "S61", templates=(_prompt(Segment(4, 1)),), num_blocks=4)
class HitEndsBeforeASegment(Machine):
    """As if the positions of an image attended to one another in both directions."""

    def max_hit_blocks(self, request: Request) -> int:
        end = request.segments[0].length if request.segments[0].content_hash is None else 0
        return min(super().max_hit_blocks(request), end // self.block_size)


@defect("chunk-begins-the-content-anew", "S16", templates=(_prompt(Segment(4, 1)),), num_blocks=4)
class ChunkBeginsTheContentAnew(Machine):
    """The runner reads the embeddings of a row from the first one on, wherever the row starts."""

    def computed_names(self, request: Request, start: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        own, begins, seen = names(request, ids), 0, []
        for segment in request.segments:
            if begins < start < begins + segment.length:
                seen.append(segment._replace(length=start - begins))
                segment = segment._replace(length=segment.length - (start - begins))
            seen.append(segment)
            begins += segment.length
        anew = names(request._replace(segments=tuple(seen)), ids)
        return own[:start] + anew[start:]


@defect("preempted-request-loses-its-content", "S62", **_SCOPE | {"num_blocks": 3, "depth": 1})
class PreemptedRequestLosesItsContent(Machine):
    """It waits again as a request of its token ids only."""

    def send_back(self, r: int) -> None:
        super().send_back(r)
        self.update(r, segments=(Segment(self.requests[r].num_prompt),))


@defect("resumed-request-loses-its-content", "S62", **_ALIKE)
class ResumedRequestLosesItsContent(Machine):
    def resume(self, r: int) -> None:
        super().resume(r)
        self.update(r, segments=(Segment(self.requests[r].num_prompt),))


@defect(
    "sibling-without-content",
    "S60 S33",
    templates=(_prompt(Segment(3, 1))._replace(n=2),),
    num_blocks=4,
)
class SiblingWithoutContent(Machine):
    def add(self, template: Template) -> None:
        first = len(self.requests)
        super().add(template)
        for r in range(first + 1, len(self.requests)):
            self.update(r, segments=(Segment(self.requests[r].num_prompt),))


@defect(
    "empty-segment-is-admitted", "S59", templates=(A._replace(segments=(Segment(2), Segment(0))),)
)
class EmptySegmentIsAdmitted(Machine):
    def covers(self, prompt: tuple[int, ...], segments: Segments) -> bool:
        return sum(segment.length for segment in segments) == len(prompt)


@defect("segment-behind-the-prompt", "S59", templates=(A._replace(segments=(Segment(3, 1),)),))
class SegmentBehindThePrompt(Machine):
    """The prompt was truncated, but its segments were not."""

    def covers(self, prompt: tuple[int, ...], segments: Segments) -> bool:
        return sum(segment.length for segment in segments) >= len(prompt)


@defect("state-of-placeholders", "S45", **_STATES | {"templates": (_prompt(_TOKEN, _ONE),)})
class StateOfPlaceholders(Machine):
    """Recurrent layers read the placeholders' own embeddings."""

    def write_states(self, r: int, start: int, n: int, ids: tuple[int, ...]) -> None:
        segments = self.requests[r].segments
        self.update(r, segments=())
        super().write_states(r, start, n, ids)
        self.update(r, segments=segments)
