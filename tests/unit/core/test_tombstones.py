"""The bounded memory of ended transfers."""

from __future__ import annotations

from mooncake_hetero_tp.core.messages import GoneReason
from mooncake_hetero_tp.core.tombstones import MAX_RELEASED, Tombstones
from mooncake_hetero_tp.types import TransferId


def put(stones: Tombstones, name: str, now: float) -> None:
    stones.put(TransferId(name), GoneReason.EXPIRED, now, released_by=set())


def test_bounded_in_number_oldest_first() -> None:
    stones = Tombstones(limit=2, seconds=10.0)
    for name in "abc":
        put(stones, name, 0.0)
    assert stones.get(TransferId("a")) is None
    assert stones.get(TransferId("c")) is not None
    assert len(stones) == 2


def test_bounded_in_time() -> None:
    stones = Tombstones(limit=9, seconds=10.0)
    put(stones, "a", 0.0)
    put(stones, "b", 1.0)
    assert stones.next_due() == 10.0
    stones.expire(10.5)
    assert stones.get(TransferId("a")) is None
    assert stones.next_due() == 11.0
    stones.expire(11.0)
    assert stones.next_due() is None


def test_a_new_end_replaces_the_old_one_and_its_time() -> None:
    stones = Tombstones(limit=9, seconds=10.0)
    put(stones, "a", 0.0)
    put(stones, "b", 1.0)
    put(stones, "a", 5.0)
    assert stones.next_due() == 11.0
    stones.expire(12.0)
    assert stones.get(TransferId("a")) is not None


def test_releasing_engines_are_bounded() -> None:
    stones = Tombstones(limit=9, seconds=10.0)
    put(stones, "a", 0.0)
    stone = stones.pop(TransferId("a"))
    assert stone is not None
    for tag in range(MAX_RELEASED + 50):
        stone.add_release(tag)
    assert len(stone.released_by) == MAX_RELEASED
