"""Which pulls a producer rank takes in: every obstacle, in the order in which they count."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.admission import Admission, ProducerConfig
from mooncake_hetero_tp.core.leases import PullEntry, PullTable, make_transfer
from mooncake_hetero_tp.core.messages import GoneReason, Pull
from mooncake_hetero_tp.core.regions import Group
from mooncake_hetero_tp.core.sessions import Session
from mooncake_hetero_tp.core.states import Hold
from mooncake_hetero_tp.core.tombstones import Tombstones
from mooncake_hetero_tp.types import PullId, RequestId, SessionId, TokenRange, TransferId
from tests.machines import DECODE, identity, kept

GROUPS = (Group(0, "attention", 16, 16),)
SESSION = Session(SessionId(1), identity(DECODE), tag=7)
XFER = TransferId("xfer-1")


@pytest.fixture
def desk() -> Admission:
    config = ProducerConfig(max_pulls=3, max_waiting=2)
    return Admission(config, GROUPS, {}, PullTable(), Tombstones(8, 100.0))


def pull(number: int = 1, ranges: int = 1, end: int = 40) -> Pull:
    asked = (TokenRange(0, end),) * ranges
    return Pull(SESSION.id, PullId(number), XFER, RequestId("d"), asked)


def crowd(desk: Admission, count: int, transfer: str = "other") -> None:
    for number in range(count):
        ids = (TransferId(transfer), RequestId("d"))
        desk.pulls.add(PullEntry((SESSION.id, PullId(100 + number)), SESSION, b"", *ids, (), never_at=0.0))


def keep(desk: Admission) -> None:
    desk.kept[XFER] = make_transfer(kept(), GROUPS)  # type: ignore[index]


def test_unknown_transfers_wait(desk: Admission) -> None:
    assert desk.obstacle(SESSION, pull()) is None


def test_one_range_per_group_of_ours(desk: Admission) -> None:
    assert desk.obstacle(SESSION, pull(ranges=2)) is GoneReason.BAD_RANGES


@pytest.mark.parametrize("count,reason", [(1, None), (2, GoneReason.OVERLOADED)])
def test_waiting_is_bounded(desk: Admission, count: int, reason: GoneReason | None) -> None:
    crowd(desk, count)
    assert desk.obstacle(SESSION, pull()) is reason


@pytest.mark.parametrize("count,reason", [(2, None), (3, GoneReason.OVERLOADED)])
def test_kept_transfers_are_served_while_others_crowd(desk: Admission, count: int, reason: GoneReason | None) -> None:
    keep(desk)
    crowd(desk, count)
    assert desk.obstacle(SESSION, pull()) is reason


def test_what_cannot_be_read(desk: Admission) -> None:
    keep(desk)
    assert desk.obstacle(SESSION, pull(end=49)) is GoneReason.BEYOND_COMPUTED


def test_what_is_ending(desk: Admission) -> None:
    keep(desk)
    desk.kept[XFER].state = Hold.ENDING
    desk.kept[XFER].end_reason = GoneReason.ABORTED
    assert desk.obstacle(SESSION, pull()) is GoneReason.ABORTED


def test_what_its_engine_released(desk: Admission) -> None:
    keep(desk)
    desk.kept[XFER].add_release(7)
    assert desk.obstacle(SESSION, pull()) is GoneReason.RELEASED


@pytest.mark.parametrize(
    "reason,released_by,early,expected",
    [
        (GoneReason.EXPIRED, set(), False, GoneReason.EXPIRED),
        (GoneReason.RELEASED, {7}, False, GoneReason.RELEASED),
        (GoneReason.RELEASED, {7}, True, GoneReason.RELEASED),
        (GoneReason.RELEASED, {8}, True, None),
    ],
    ids=["expired", "released", "released early by us", "released early by another engine"],
)
def test_what_has_ended(
    desk: Admission, reason: GoneReason, released_by: set[int], early: bool, expected: GoneReason | None
) -> None:
    desk.tombs.put(XFER, reason, 0.0, released_by=released_by, early=early)
    assert desk.obstacle(SESSION, pull()) is expected
