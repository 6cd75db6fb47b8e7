"""Replicas on a real Ray cluster, with work that needs no model: order, losses, limits."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagespec.distributed.replicas import MAX_STARTS, ReplicaPool
from pagespec.errors import PagespecError
from tests.distributed.replica_work import die_at_start, lines_of, make_work, refuse_work
from tests.distributed.replicas import ray_cluster


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with ray_cluster(num_cpus=2):
        yield


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make_pool(tmp_path: Path, notes: list[str]) -> Iterator[Callable[..., ReplicaPool]]:
    pools = []

    def make(work: Callable[[Path], Any] = make_work, **settings: Any) -> ReplicaPool:
        given = {
            "num_replicas": 2,
            "resources": {"num_cpus": 1},
            "has_room": lambda: True,
            "chunk_size": 4,
            "num_chunks": 3,
            "note": notes.append,
        }
        pool = ReplicaPool(
            partial(work, tmp_path), lambda item, why: f"{item}: {why}", **(given | settings)
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def test_a_killed_replica_is_replaced_and_each_result_comes_once(
    make_pool: Callable[..., ReplicaPool], tmp_path: Path, notes: list[str]
) -> None:
    pool = make_pool()
    pool.start()
    results = pool.map(range(400))
    first = [next(results) for _ in range(100)]
    killed = int(lines_of(tmp_path / "started")[-1])
    os.kill(killed, signal.SIGKILL)
    assert first + list(results) == [2 * i for i in range(400)]
    assert list(pool.map([])) == []
    (said,) = notes
    assert re.match(r"a replica has ended, with [1-9]\d* unfinished rows", said)
    done = Counter(map(int, lines_of(tmp_path / "done")))
    assert set(done) == set(range(400))
    assert max(done) == 399


@pytest.mark.parametrize(
    ("word", "num_replicas"),
    [
        ("die", 1),
        pytest.param("die", 2, marks=pytest.mark.nightly),
        pytest.param("fail", 1, marks=pytest.mark.nightly),
        pytest.param("fail", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_row_that_kills_its_replicas_is_abandoned_alone(
    make_pool: Callable[..., ReplicaPool], tmp_path: Path, word: str, num_replicas: int
) -> None:
    pool = make_pool(num_replicas=num_replicas)
    pool.start()
    items: list[Any] = list(range(30))
    items[10] = word
    results = list(pool.map(items))
    expected: list[Any] = [2 * i for i in range(30)]
    expected[10] = results[10]
    assert results == expected
    assert results[10].startswith(f"{word}: given up: 4 replicas ended while processing it")
    assert ("a step failed" in results[10]) == (word == "fail")
    assert len(lines_of(tmp_path / "started")) <= num_replicas + 4


@pytest.mark.nightly
def test_rows_that_all_end_their_replicas_end_the_run(
    make_pool: Callable[..., ReplicaPool],
) -> None:
    pool = make_pool(num_replicas=1, chunk_size=1)
    pool.start()
    with pytest.raises(PagespecError, match="9 replicas have ended since the last answer"):
        list(pool.map(["die"] * 40))


def test_a_refusal_keeps_its_own_message(make_pool: Callable[..., ReplicaPool]) -> None:
    with pytest.raises(PagespecError, match=r"^model = 'x': must be a model$"):
        make_pool(refuse_work).start()


@pytest.mark.nightly
def test_starts_that_fail_are_bounded(
    make_pool: Callable[..., ReplicaPool], tmp_path: Path
) -> None:
    with pytest.raises(PagespecError, match="no replica starts"):
        make_pool(die_at_start).start()
    assert len(lines_of(tmp_path / "started")) <= 2 * MAX_STARTS


@pytest.mark.nightly
def test_a_bug_is_no_loss(make_pool: Callable[..., ReplicaPool]) -> None:
    pool = make_pool()
    pool.start()
    with pytest.raises(ValueError, match="a bug"):
        list(pool.map([1, "bug"]))


def test_a_cluster_that_lost_its_room_ends_the_run(
    make_pool: Callable[..., ReplicaPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagespec.distributed.replicas._WAIT_S", 0.2)
    pool = make_pool(resources={"num_cpus": 99}, has_room=lambda: False)
    with pytest.raises(PagespecError, match="no room"):
        pool.start()
