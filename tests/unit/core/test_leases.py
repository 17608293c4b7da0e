"""Records of the producer rank: which ranges it can serve, and the two indexes of pulls."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.leases import PullEntry, PullTable, make_transfer, unreadable
from mooncake_hetero_tp.core.messages import GoneReason
from mooncake_hetero_tp.core.regions import STATE, Group
from mooncake_hetero_tp.core.sessions import Session
from mooncake_hetero_tp.core.states import Offer, OfferEvent
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import PullId, RequestId, SessionId, TokenRange, TransferId
from tests.machines import DECODE, identity, kept

ATTENTION = Group(0, "attention", 16, 16)
STATES = Group(0, STATE, 64, 64)
WIDE = Group(0, "attention", 48, 16)


@pytest.mark.parametrize(
    "group,blocks,computed,start,end,reason",
    [
        (ATTENTION, (4, 5, 6), 48, 0, 48, None),
        (ATTENTION, (4, 5, 6), 47, 0, 48, GoneReason.BEYOND_COMPUTED),
        (ATTENTION, (4, 5), 48, 0, 40, GoneReason.BEYOND_COMPUTED),
        (ATTENTION, (4, 5, 6), 48, 40, 40, None),
        (ATTENTION, (4, 5, 6), 48, 60, 60, None),
        (ATTENTION, (0, 5, 6), 48, 0, 40, GoneReason.NULL_PAGE),
        (ATTENTION, (0, 5, 6), 48, 16, 40, None),
        (ATTENTION, (0, 5, 6), 48, 15, 40, GoneReason.NULL_PAGE),
        (ATTENTION, (4, 5, 0), 48, 0, 32, None),
        (ATTENTION, (4, 5, 0), 48, 0, 33, GoneReason.NULL_PAGE),
        (WIDE, (4, 0), 96, 0, 48, None),
        (WIDE, (4, 0), 96, 0, 49, GoneReason.NULL_PAGE),
        (STATES, (9,), 40, 0, 40, None),
        (STATES, (9,), 40, 0, 39, GoneReason.OTHER_STATE),
        (STATES, (9,), 40, 0, 41, GoneReason.BEYOND_COMPUTED),
        (STATES, (0, 0, 9), 140, 0, 140, None),
        (STATES, (0, 0, 0), 140, 0, 140, GoneReason.NULL_PAGE),
        (STATES, (0, 7, 9), 140, 0, 128, GoneReason.OTHER_STATE),
        (STATES, (0, 7, 9), 128, 0, 128, None),
    ],
)
def test_what_can_be_read(
    group: Group, blocks: tuple[int, ...], computed: int, start: int, end: int, reason: GoneReason | None
) -> None:
    """Of a state group only the state after the last computed token.

    An earlier slot need not hold that of its block's end: vLLM checkpoints some in the middle
    (`is_mamba_prefill_checkpoint_valid`).
    """
    transfer = make_transfer(kept(blocks=blocks, tokens=computed), (group,))
    assert unreadable(transfer, (TokenRange(start, end),), (group,), 0) is reason


def test_no_null_block_no_null_page() -> None:
    transfer = make_transfer(kept(blocks=(0, 1)), (ATTENTION,))
    assert unreadable(transfer, (TokenRange(0, 20),), (ATTENTION,), None) is None


def test_blocks_are_packed_once_and_checked() -> None:
    assert make_transfer(kept(blocks=(1, 2)), (ATTENTION,)).packed == (b"\1\0\0\0\2\0\0\0",)
    with pytest.raises(LocalUsageError, match="expected 2 block lists"):
        make_transfer(kept(), (ATTENTION, STATES))
    with pytest.raises(LocalUsageError, match="one-dimensional"):
        make_transfer(kept(blocks=(-1,)), (ATTENTION,))


def entry(number: int, session: Session, transfer: str = "xfer-1") -> PullEntry:
    ids = (TransferId(transfer), RequestId("d"))
    return PullEntry((session.id, PullId(number)), session, b"", *ids, (), never_at=100.0)


def test_both_indexes_and_the_counts_agree() -> None:
    session, pulls = Session(SessionId(1), identity(DECODE), 0), PullTable()
    first, second = entry(1, session), entry(2, session)
    pulls.add(first)
    pulls.add(second)
    assert (len(pulls), pulls.waiting, session.pulls) == (2, 2, 2)
    assert pulls.of(TransferId("xfer-1")) == [first, second]
    assert pulls.step(first, OfferEvent.OFFER)
    assert pulls.waiting == 1
    assert pulls.step(first, OfferEvent.DROP)
    assert pulls.step(second, OfferEvent.DROP)
    assert (len(pulls), pulls.waiting, session.pulls, pulls.of(TransferId("xfer-1"))) == (0, 0, 0, [])


def test_a_refused_event_changes_nothing() -> None:
    session, pulls = Session(SessionId(1), identity(DECODE), 0), PullTable()
    pull = entry(1, session)
    pulls.add(pull)
    assert not pulls.step(pull, OfferEvent.CLAIM)
    assert (pull.state, pulls.waiting) == (Offer.WAITING, 1)


def test_the_last_lease_counts_and_only_live_ones() -> None:
    session, pulls = Session(SessionId(1), identity(DECODE), 0), PullTable()
    for number, until in ((1, 5.0), (2, 9.0), (3, 20.0)):
        pull = entry(number, session, "xfer-1" if number < 3 else "xfer-2")
        pulls.add(pull)
        pulls.step(pull, OfferEvent.OFFER)
        pulls.step(pull, OfferEvent.CLAIM)
        pull.lease_until = until
    assert pulls.leased_until(TransferId("xfer-1"), 1.0) == 9.0
    assert pulls.leased_until(TransferId("xfer-1"), 9.0) == 9.0
    assert pulls.leased_until(TransferId("unknown"), 3.0) == 3.0
