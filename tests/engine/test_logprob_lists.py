"""Lists of log-probabilities: lists to every user although filled late, and flat lists."""

from __future__ import annotations

import copy
import json
import pickle
import random
from array import array
from collections.abc import Callable, Sequence
from operator import add, eq
from typing import Any

import pytest

from pagespec.engine.logprob_lists import (
    FlatLogprobs,
    Logprob,
    LogprobList,
    LogprobPositions,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from pagespec.engine.logprobs import KeptRows

TOKENS = [3, 1, 2]


class Rows:
    """Position i has its own log-probability -i and most likely tokens 0, 1, ..."""

    def logprob(self, index: int) -> float:
        return 0.0 - index

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        return 0.0 - index, 7, list(range(num_top)), [0.0 - 0.5 * i for i in range(num_top)]


def positions(num_top: int = 2, has_first: bool = False) -> LogprobPositions:
    kept = KeptRows()
    kept.rows, kept.places = [Rows()] * len(TOKENS), array("i", range(len(TOKENS)))
    return LogprobPositions(TOKENS, kept, num_top, str, has_first=has_first)


def lazy() -> LogprobList:
    return LogprobList(positions())


WHOLE: list[Any] = [
    {3: Logprob(0.0, 7, "3"), 0: Logprob(0.0, 1, "0"), 1: Logprob(-0.5, 2, "1")},
    {1: Logprob(-1.0, 7, "1"), 0: Logprob(0.0, 1, "0")},
    {2: Logprob(-2.0, 7, "2"), 0: Logprob(0.0, 1, "0"), 1: Logprob(-0.5, 2, "1")},
]


def assigned(found: list[Any]) -> list[Any]:
    whole = [0]
    whole[1:] = found
    return whole


def grown(found: list[Any]) -> list[Any]:
    whole: list[Any] = []
    whole.extend(found)
    return whole


USES: dict[str, Callable[[list[Any]], Any]] = {
    "len": len,
    "bool": bool,
    "list": list,
    "tuple": tuple,
    "iter": lambda found: [*found],
    "unpack": lambda found: (lambda a, b, c: (a, b, c))(*found),
    "index": lambda found: (found[0], found[-1]),
    "slice": lambda found: found[1:],
    "reversed": lambda found: list(reversed(found)),
    "repr": repr,
    "str": str,
    "==": lambda found: (found == WHOLE, eq(WHOLE, found), found != WHOLE, found == lazy()),
    "+": lambda found: add(found, [0]),
    "right of +": lambda found: add([0], found),
    "+ itself": lambda found: found + lazy(),
    "*": lambda found: (found * 2, 2 * found),
    "in": lambda found: WHOLE[1] in found,
    "index of": lambda found: found.index(WHOLE[2]),
    "count": lambda found: found.count(WHOLE[2]),
    "copy": lambda found: found.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda found: pickle.loads(pickle.dumps(found)),
    "json": lambda found: json.dumps(found, default=vars_of),
    "zip": lambda found: list(zip(found, TOKENS, strict=True)),
    "assigned to a slice": assigned,
    "extends": grown,
    "+=": lambda found: found.__iadd__([0]),
    "append": lambda found: (found.append(0), found[:]),
    "insert": lambda found: (found.insert(0, 5), found[:]),
    "pop": lambda found: (found.pop(), found[:]),
    "set": lambda found: (found.__setitem__(0, 5), found[:]),
    "del": lambda found: (found.__delitem__(0), found[:]),
    "clear": lambda found: (found.clear(), found[:]),
    "reverse": lambda found: (found.reverse(), found[:]),
}


def vars_of(entry: Logprob) -> list[Any]:
    return [entry.logprob, entry.rank, entry.decoded_token]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_first_use_is_that_of_a_list(use: Callable[[list[Any]], Any]) -> None:
    found = lazy()
    assert isinstance(found, list)
    assert use(found) == use(copy.deepcopy(WHOLE))


def test_every_method_of_a_list_fills() -> None:
    plain = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__doc__", "__hash__"}
    assert vars(list).keys() - plain <= vars(LogprobList).keys()
    found = lazy()
    assert found[0] is found[0]
    assert list.__len__(lazy()) == 0  # not filled by the constructor


def test_the_first_token_of_a_prompt_has_no_entries() -> None:
    found = LogprobList(positions(has_first=True))
    assert len(found) == 4
    assert found == [None, *WHOLE]
    flat = positions(has_first=True).flat()
    assert (len(flat), flat[0], list(flat)[1:]) == (4, {}, WHOLE)


def test_flat_lists_are_a_sequence_of_dicts() -> None:
    flat = positions().flat()
    assert list(flat) == WHOLE
    assert flat[-1] == WHOLE[-1]
    assert (flat.start_indices, flat.end_indices) == ([0, 3, 5], [3, 5, 8])
    assert flat.token_ids == [3, 0, 1, 1, 0, 2, 0, 1]
    again = FlatLogprobs()
    again.extend(WHOLE)
    assert again == flat
    again.extend(flat)
    assert list(again) == WHOLE * 2
    with pytest.raises(IndexError):
        flat[3]
    for change in (
        lambda: flat.insert(0, {}),
        lambda: flat.__setitem__(0, {}),
        lambda: flat.__delitem__(0),
    ):
        with pytest.raises(TypeError, match="can only grow"):
            change()
    assert list(flat) == WHOLE


def test_slices_of_flat_lists_are_those_of_the_list() -> None:
    rng = random.Random(1)
    flat, whole = FlatLogprobs(), []
    for _ in range(6):
        whole.append({i: Logprob(-float(i), i) for i in range(rng.randrange(3))})
        flat.append(whole[-1])
    for _ in range(100):
        ends = [rng.choice([None, *range(-7, 8)]) for _ in range(2)]
        part = slice(*ends, rng.choice([None, 1, 2, -1]))
        assert list(flat[part]) == whole[part]
        assert flat[part].start_indices[:1] in ([], [0])


@pytest.mark.parametrize("is_flat", [False, True])
def test_positions_are_appended_with_ranks(is_flat: bool) -> None:
    found = create_sample_logprobs(is_flat)
    assert isinstance(found, FlatLogprobs if is_flat else list)
    append_logprobs_for_next_position(found, [4], [0.1], ["a"], rank=10, num_logprobs=-1)
    append_logprobs_for_next_position(found, [5, 6, 7], [0.2] * 3, "abc", rank=2, num_logprobs=1)
    assert list(found) == [
        {4: Logprob(0.1, 10, "a")},
        {5: Logprob(0.2, 2, "a"), 6: Logprob(0.2, 1, "b")},
    ]
    of_prompt = create_prompt_logprobs(is_flat)
    assert len(of_prompt) == 1
    assert not of_prompt[0]
