"""Content segments of prompts: block keys, cache hits and input checks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import xxhash

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine import block_manager
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.invariants import InvariantError, check_state
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.segments import Segment, contents_of
from tests.support.content_runner import ContentRunner, stream_alone

PARAMS = SamplingParams()


def make_request(segments: Sequence[Segment], *, name: str = "r", tokens=None, **given) -> Request:
    """All tokens are alike, placeholders among them."""
    length = sum(segment.length for segment in segments)
    given = {"max_num_tokens": length + 8} | given
    return Request(name, tokens or [7] * length, PARAMS, segments=segments, **given)


def keys_of(request: Request, block_size: int) -> list[bytes]:
    """Of all full blocks of the prompt."""
    pool = BlockManager(64, block_size)
    pool._extend_keys(request, request.num_prompt_tokens // block_size)
    return [key for key, _ in request.block_keys]


def positions_of(segments: Sequence[Segment]) -> list[tuple[bytes | None, int]]:
    """What each position holds beside its token: the content itself, and which part of it."""
    return [
        (content_hash, 0 if content_hash is None else i)
        for length, content_hash, _ in segments
        for i in range(length)
    ]


def all_segments(length: int, contents: Sequence[bytes | None]) -> Iterator[list[Segment]]:
    """All lists of segments of a prompt of that length."""
    if not length:
        yield []
    for first in range(1, length + 1):
        for content in contents:
            for rest in all_segments(length - first, contents):
                yield [Segment(first, content), *rest]


@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_keys_are_equal_exactly_if_the_content_up_to_the_block_is(block_size: int) -> None:
    """Of all prompts of five positions, whose tokens are alike, with three contents and tokens. One
    content's hash begins as another's does."""
    contents_by_key: dict[bytes, list[tuple[bytes | None, int]]] = {}
    keys_by_content: dict[tuple[tuple[bytes | None, int], ...], bytes] = {}
    num_prompts = 0
    for segments in all_segments(5, [None, b"a", b"ab", b"\x00"]):
        num_prompts += 1
        positions = positions_of(segments)
        for i, key in enumerate(keys_of(make_request(segments), block_size), 1):
            held = positions[: i * block_size]
            assert contents_by_key.setdefault(key, held) == held
            assert keys_by_content.setdefault(tuple(held), key) == key
    assert num_prompts == 4 * 5**4
    assert len(contents_by_key) == len(keys_by_content) > 100 // block_size


@pytest.mark.parametrize("cuts", [(20,), (1, 19), (7, 6, 7)])
def test_prompts_of_tokens_have_the_keys_of_their_tokens(cuts: tuple[int, ...]) -> None:
    """Those that they had before there were segments, wherever one ends."""
    tokens = [3 * i for i in range(20)]
    parent, expected = xxhash.xxh3_128_digest(b"pagespec prefix root:salt"), []
    for begin in range(0, 20, 4):
        parent = xxhash.xxh3_128_digest(parent + array("i", tokens[begin : begin + 4]).tobytes())
        expected.append(parent)
    given = {"tokens": tokens, "cache_salt": b"salt"}
    assert keys_of(make_request([Segment(n) for n in cuts], **given), 4) == expected
    plain = Request("r", tokens, PARAMS, max_num_tokens=30, cache_salt=b"salt")
    assert keys_of(plain, 4) == expected
    assert plain.info.segments == (Segment(20),)
    assert plain.contents == ()


def fill(pool: BlockManager, segments: Sequence[Segment]) -> Request:
    """A request whose every position is computed, settled and published."""
    request = make_request(segments)
    pool.acquire(request, pool.match(request))
    pool.allocate(request, pool.num_blocks_for(request.num_total) - len(request.block_table))
    request.num_computed = request.num_total
    pool.publish(request)
    return request


A, B = b"a picture", b"another"


@pytest.mark.parametrize(
    ("segments", "num_hits"),
    [
        ([Segment(3), Segment(6, A), Segment(4)], 6),  # equal
        ([Segment(3), Segment(6, A), Segment(9)], 6),
        ([Segment(3), Segment(6, B), Segment(4)], 1),  # as far as the text before
        ([Segment(13)], 1),
        ([Segment(4), Segment(6, A), Segment(3)], 1),  # one position later
        ([Segment(2), Segment(6, A), Segment(5)], 1),
        ([Segment(3), Segment(5, A), Segment(5)], 4),  # its beginning alone
        ([Segment(3), Segment(3, A), Segment(3, A), Segment(4)], 3),  # its beginning, twice
        ([Segment(3), Segment(6, A), Segment(4, A)], 4),  # more of it behind
        ([Segment(3), Segment(4, A)], 3),  # the prompt ends inside it: a position is computed
    ],
)
def test_a_hit_goes_as_far_as_content_is_equal(segments: list[Segment], num_hits: int) -> None:
    pool = BlockManager(32, 2)
    first = fill(pool, [Segment(3), Segment(6, A), Segment(4)])
    assert pool.match(make_request(segments)) == first.block_table[:num_hits]


def test_colliding_keys_are_told_apart_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "block_key", lambda parent, held: b"same")
    pool = BlockManager(8, 2)
    fill(pool, [Segment(2, A), Segment(1)])
    assert pool.match(make_request([Segment(2, B), Segment(1)])) == []
    assert pool.match(make_request([Segment(2, A), Segment(1)])) == [0]


def test_the_content_of_a_prompt_is_found_in_its_place() -> None:
    segments = [Segment(2), Segment(3, A), Segment(1, B), Segment(4)]
    assert [tuple(content) for content in contents_of(segments)] == [(2, 5, A), (5, 6, B)]


def scheduler_of(num_blocks: int = 40, block_size: int = 2, **given) -> Scheduler:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 8} | given
    return Scheduler(BlockManager(num_blocks, block_size), **given)


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([Segment(2), Segment(0, A), Segment(1)], r"^segments\[1\].length = 0: must be at least 1"),
        ([Segment(4), Segment(-1)], r"^segments\[1\].length = -1: must be at least 1"),
        ([Segment(2), Segment(1, b"")], r"^segments\[1\].content_hash = b'': must not be empty"),
        ([Segment(2)], "^segments = '2 positions': must have the 3 positions of the prompt"),
        ([Segment(2), Segment(2, A)], "^segments = '4 positions': must have the 3 positions"),
        ([], "^segments = '0 positions': must have the 3 positions"),
    ],
)
def test_segments_that_are_not_the_prompt_are_refused(segments: list[Segment], words: str) -> None:
    scheduler = scheduler_of()
    request = make_request(segments, tokens=[7] * 3, max_num_tokens=9)
    with pytest.raises(InvalidInputError, match=words):
        scheduler.add(request)
    assert not scheduler.requests
    check_state(scheduler)


def test_an_engine_refuses_content_that_its_runner_does_not_compute() -> None:
    """By name, for siblings as well, and without disturbing the others."""
    scheduler = scheduler_of()
    engine = Engine(scheduler, ContentRunner(num_blocks=40, block_size=2, vocab_size=50))
    served = make_request([Segment(5)], name="served")
    engine.add(served)
    engine.step()
    refused = make_request([Segment(2), Segment(3, A)], name="refused")
    words = r"^segments\[1\] = .*a picture.*: must be tokens: no other content is supported"
    for siblings in ([], [refused.sibling("sibling", 0, None)]):
        with pytest.raises(InvalidInputError, match=words):
            engine.add(refused, siblings=siblings)
        assert list(scheduler.requests) == ["served"]
    while engine.has_work:
        engine.step()
    assert served.finish_reason == "length"


def engine_of(scheduler: Scheduler) -> Engine:
    """With the content runner, whose tokens tell what the KV cache held."""
    blocks = scheduler.blocks
    runner = ContentRunner(
        num_blocks=blocks.num_blocks, block_size=blocks.block_size, vocab_size=50
    )
    return Engine(scheduler, runner, takes_contents=True)


def expected_of(request: Request) -> list[int]:
    return stream_alone(
        request.token_ids[: request.num_prompt_tokens],
        request.max_num_tokens,
        seed=request.seed,
        vocab_size=50,
        segments=request.info.segments,
    )


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("budget", [4, 5, 40])
def test_requests_of_unlike_content_have_their_own_streams(block_size: int, budget: int) -> None:
    """In chunks that end inside a content segment, with hits that do, and with siblings that share
    one in part."""
    prompts = [
        [Segment(3), Segment(9, A), Segment(2)],
        [Segment(3), Segment(9, B), Segment(2)],
        [Segment(14)],
        [Segment(3), Segment(9, A), Segment(2)],
        [Segment(3), Segment(9, A), Segment(3, A), Segment(1)],
    ]
    requests = [make_request(s, name=str(i), seed=1) for i, s in enumerate(prompts)]
    sibling = requests[3].sibling("sibling", 1, None)
    engine = engine_of(
        scheduler_of(block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=2)
    )
    for i, request in enumerate(requests):
        engine.add(request, siblings=[sibling] if i == 3 else [])
    while engine.has_work:
        engine.step()
        check_state(engine.scheduler)
    for request in (*requests, sibling):
        assert request.output_token_ids == expected_of(request)
    streams = [tuple(request.output_token_ids) for request in requests]
    assert streams[0] == streams[3] == tuple(sibling.output_token_ids)
    assert len(set(streams)) == 4


def test_a_request_that_was_preempted_has_the_same_keys() -> None:
    """And finds its own blocks again."""
    prompts = [[Segment(2), Segment(6, A)], [Segment(2), Segment(6, B)], [Segment(8)]]
    requests = [make_request(s, name=str(i), max_num_tokens=20) for i, s in enumerate(prompts)]
    scheduler = scheduler_of(num_blocks=12, max_num_batched_tokens=24)
    engine = engine_of(scheduler)
    for request in requests:
        engine.add(request)
    keys: dict[Request, list[list[bytes]]] = {request: [] for request in requests}
    while engine.has_work:
        engine.step()
        for request in requests:
            keys[request].append([key for key, _ in request.block_keys])
    assert scheduler.queues.num_preemptions > 0
    assert any(request.num_preemptions for request in requests if request.contents)
    for request in requests:
        assert request.output_token_ids == expected_of(request)
        for before, after in pairwise(keys[request]):
            assert after[: len(before)] == before
        rest = len(request.token_ids) - request.num_prompt_tokens
        longer = make_request([*request.info.segments, Segment(rest)], tokens=request.token_ids)
        assert keys_of(longer, 2)[: len(keys[request][-1])] == keys[request][-1]


def test_a_block_that_is_shared_across_content_breaks_an_invariant() -> None:
    scheduler = scheduler_of()
    requests = [make_request([Segment(6, h), Segment(1)], name=h.decode()) for h in (A, B)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.commit(plan, [1] * plan.num_sampled)
    check_state(scheduler)
    blocks = scheduler.blocks
    first, second = requests
    lost = second.block_table[0]
    second.block_table[0] = first.block_table[0]
    blocks.ref_counts[first.block_table[0]] += 1
    blocks.ref_counts[lost] -= 1
    key = blocks.keys[lost]
    if key is not None:
        del blocks.index[key]
        blocks.keys[lost] = None
    blocks.free.append(lost)
    second.block_keys[0] = first.block_keys[0]  # as a key that does not see the content
    with pytest.raises(InvariantError, match=r"^S60"):
        check_state(scheduler)
