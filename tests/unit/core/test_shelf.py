"""Staging at the producer rank, Stage by Stage, through its machine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.core.codec import engine_tag
from mooncake_hetero_tp.core.effects import FinishedSending, Gather, GatherId, GatherOutcome, Kept, Level, Notice
from mooncake_hetero_tp.core.messages import (
    Cancel,
    Claim,
    Gone,
    GoneReason,
    Grant,
    Hello,
    Offer,
    PairCut,
    Pull,
    Release,
    Renew,
    Stage,
    Staged,
    Waiting,
    Welcome,
)
from mooncake_hetero_tp.core.regions import STATE, Group, RankTable
from mooncake_hetero_tp.core.shelf import Ring
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import Nonce, PullId, RequestId, SessionId, TokenRange, TransferId
from tests.machines import DECODE, PREFILL, identity, kept, only, producer_machine, replies, ring
from tests.tables import DST, Dense

XFER = TransferId("xfer-1")
SESSION = SessionId(1000)
OURS = Dense(4, layers=2, tokens=16).table()
THEIRS = Dense(4, tp=2, layers=2, tokens=16, base=DST).table()
RANGES = (TokenRange(0, 40),)
CUTS = (PairCut(0, 0, 0, 2),)
RING = ring(100, 2)
OFFER = Offer(64, 8)


class Bench:
    """A producer machine with a ring, a consumer that has been welcomed, and a transfer that is kept."""

    def __init__(
        self,
        *,
        ours: Ring | None = RING,
        theirs: Offer | None = OFFER,
        table: RankTable = OURS,
        item: Kept | None = None,
    ) -> None:
        self.machine = producer_machine(table=table, ring=ours)
        self.now = 0.0
        self.serial = 0
        hello = Hello(1, 1, (), identity(DECODE), PREFILL, None, 1, THEIRS, theirs)
        (self.welcome,) = replies(self.do("receive", b"d0", hello))
        self.do("keep", item or kept())

    def do(self, method: str, *args: Any) -> list[Any]:
        effects: list[Any] = getattr(self.machine, method)(*args, self.now)
        return effects

    def receive(self, message: Any) -> list[Any]:
        return self.do("receive", b"d0", message)

    def lease(self, number: int = 1) -> None:
        self.receive(Pull(SESSION, PullId(number), XFER, RequestId("d-1"), RANGES))
        (grant,) = replies(self.receive(Claim(SESSION, PullId(number), Nonce(9))))
        assert isinstance(grant, Grant)

    def stage(self, *wanted: int, number: int = 1, serial: int | None = None, **changes: Any) -> list[Any]:
        self.serial = self.serial + 1 if serial is None else serial
        fields = {"wanted": wanted, "ranges": RANGES, "cuts": CUTS, **changes}
        return self.receive(Stage(SESSION, PullId(number), self.serial, **fields))

    def gathered(self, gather: Gather, **outcome: Any) -> list[Any]:
        return self.do("gathered", gather.gather_id, GatherOutcome(**{"length_bytes": 60, "gather_us": 7, **outcome}))

    def staged(self, *wanted: int, number: int = 1) -> list[Gather]:
        """Ask, and let every gather return well."""
        gathers = only(self.stage(*wanted, number=number), Gather)
        for gather in gathers:
            self.gathered(gather)
        return gathers


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.lease()
    return bench


def told(chunk: int, slot: int, number: int = 1) -> Staged:
    return Staged(SESSION, PullId(number), chunk, 1000 * (slot + 1), 60, 7)


def slots_of(effects: list[Any]) -> list[tuple[int, int]]:
    return [(gather.chunk, gather.slot) for gather in only(effects, Gather)]


def gone(reason: GoneReason, number: int = 1) -> Gone:
    return Gone(SESSION, PullId(number), reason)


WAITING = Waiting(SESSION, PullId(1))

# --- asking -----------------------------------------------------------------------------------------------------------


def test_the_ring_is_offered_in_the_welcome(bench: Bench) -> None:
    assert isinstance(bench.welcome, Welcome)
    assert bench.welcome.staging == Offer(100, 2)


def test_a_gather_has_all_that_a_worker_needs(bench: Bench) -> None:
    (gather,) = only(bench.stage(3), Gather)
    assert (gather.request_id, gather.consumer, gather.consumer_table) == ("p-1", identity(DECODE), THEIRS)
    assert (gather.chunk, gather.slot, gather.chunk_bytes) == (3, 0, 64)
    assert (gather.ranges, gather.cuts) == (RANGES, CUTS)
    assert [blocks.tolist() for blocks in gather.blocks] == [[4, 5, 6]]
    assert replies(bench.gathered(gather)) == [told(3, 0)]


def test_the_ring_is_filled_and_the_rest_waits_for_what_is_not_wanted_any_more(bench: Bench) -> None:
    first = bench.stage(0, 1, 2)
    assert slots_of(first) == [(0, 0), (1, 1)]
    for gather in only(first, Gather):
        bench.gathered(gather)
    assert slots_of(bench.stage(1, 2)) == [(2, 0)]
    assert slots_of(bench.stage(2)) == []


def test_every_stage_is_answered(bench: Bench) -> None:
    gathers = only(bench.stage(0, 1), Gather)
    assert replies(bench.stage(0, 1, serial=1)) == [WAITING], "repeated while the gathers run"
    bench.gathered(gathers[0])
    assert replies(bench.stage(0, 1, serial=1)) == [told(0, 0)], "repeated because an answer was lost"
    assert replies(bench.stage(0)) == [WAITING], "a change that wants nothing new"
    assert replies(bench.stage()) == [WAITING]


def test_older_stages_are_ignored(bench: Bench) -> None:
    bench.staged(0)
    bench.stage(serial=5)
    assert bench.stage(0, serial=4) == []


def test_pulls_take_turns(bench: Bench) -> None:
    bench.lease(2)
    bench.staged(0, 1)
    assert replies(bench.stage(0, 1, number=2)) == [Waiting(SESSION, PullId(2))]
    bench.serial = 1
    effects = bench.stage(1, 2)
    assert [(gather.chunk, gather.slot) for gather in only(effects, Gather)] == [(0, 0)], "the other pull's"
    assert replies(effects) == [WAITING]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"theirs": None}, {"ours": None}], ids=["theirs", "ours"])
def test_without_a_ring_on_both_sides_nothing_is_staged(options: dict[str, Any]) -> None:
    bench = Bench(**options)
    bench.lease()
    assert replies(bench.stage(0)) == [gone(GoneReason.NO_STAGING)]


@pytest.mark.parametrize(
    "changes",
    [
        {"ranges": (TokenRange(0, 41),)},
        {"ranges": ()},
        {"cuts": (PairCut(99, 0, 0, 1),)},
        {"cuts": (PairCut(0, 99, 0, 1),)},
    ],
    ids=["beyond the pull", "too few ranges", "no such consumer region", "no such producer region"],
)
def test_what_the_pull_did_not_ask_for_is_refused(bench: Bench, changes: dict[str, Any]) -> None:
    for _ in range(2):
        assert replies(bench.stage(0, **changes)) == [gone(GoneReason.BAD_RANGES)]
    assert slots_of(bench.stage(0)) == [(0, 0)]


def test_a_pull_asks_for_the_same_all_along(bench: Bench) -> None:
    bench.stage(0)
    assert replies(bench.stage(0, ranges=(TokenRange(0, 39),))) == [gone(GoneReason.BAD_RANGES)]


def test_a_part_of_the_pull_may_be_staged(bench: Bench) -> None:
    assert slots_of(bench.stage(0, ranges=(TokenRange(16, 39),))) == [(0, 0)]


def test_a_state_is_staged_whole() -> None:
    """The state kept is that of one token, so no shorter range of it means anything."""
    table = msgspec.structs.replace(OURS, groups=(Group(0, STATE, 16, 16),))
    bench = Bench(table=table, item=kept(tokens=40))
    bench.lease()
    assert replies(bench.stage(0, ranges=(TokenRange(0, 39),))) == [gone(GoneReason.BAD_RANGES)]
    assert slots_of(bench.stage(0)) == [(0, 0)]


def test_a_failed_gather_refuses_the_pull_but_leaves_what_may_be_being_read(bench: Bench) -> None:
    gathers = only(bench.stage(0, 1, 2), Gather)
    bench.gathered(gathers[0])
    effects = bench.gathered(gathers[1], error="no kernel for it")
    assert replies(effects) == [gone(GoneReason.NO_STAGING)]
    (notice,) = only(effects, Notice)
    assert notice.level is Level.WARNING
    assert "chunk 1 cannot be staged: no kernel for it" in notice.text
    bench.lease(2)
    bench.serial = 0
    assert slots_of(bench.stage(5, 6, number=2)) == [(5, 1)], "slot 0 is still being read"
    bench.serial = 1
    again = bench.stage(0)
    assert (replies(again), slots_of(again)) == ([gone(GoneReason.NO_STAGING)], [])
    assert slots_of(bench.stage()) == [(6, 0)]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_stages_are_answered_as_renewals_are_where_nothing_is_granted() -> None:
    bench = Bench()
    assert replies(bench.stage(0)) == [gone(GoneReason.EXPIRED)]
    bench.receive(Pull(SESSION, PullId(1), XFER, RequestId("d-1"), RANGES))
    assert bench.stage(0) == [], "not claimed"
    stale = Stage(SessionId(7), PullId(1), 1, (0,), RANGES, CUTS)
    assert replies(bench.receive(stale)) == [Gone(SessionId(7), PullId(1), GoneReason.UNKNOWN_SESSION)]
    bench.lease()
    bench.do("abort", XFER, RequestId("p-1"))
    assert replies(bench.stage(0)) == [gone(GoneReason.ABORTED)]


def test_a_chunk_that_comes_after_the_lease_is_told_when_the_lease_lives_again(bench: Bench) -> None:
    bench.lease(2)
    (gather,) = only(bench.stage(0), Gather)
    bench.now = 9.0
    bench.receive(Renew(SESSION, PullId(2), Nonce(10)))
    bench.now = 11.0
    assert bench.gathered(gather) == []
    assert bench.stage(0, serial=1) == []
    bench.receive(Renew(SESSION, PullId(1), Nonce(11)))
    assert replies(bench.stage(0, serial=1)) == [told(0, 0)]


def test_a_lease_that_is_over_gives_way_to_those_who_wait_and_is_not_renewed(bench: Bench) -> None:
    """Its consumer may be stopped and not know yet; renewed, it would count what it reads from another's chunk."""
    bench.lease(2)
    bench.staged(0, 1)
    bench.now = 9.0
    bench.receive(Renew(SESSION, PullId(2), Nonce(10)))
    assert slots_of(bench.stage(0, number=2, serial=1)) == []
    assert bench.machine.next_deadline() == pytest.approx(10.02)
    bench.now = 10.1
    assert slots_of(bench.do("tick")) == [(0, 0)]
    assert replies(bench.receive(Renew(SESSION, PullId(1), Nonce(11)))) == [gone(GoneReason.EXPIRED)]


def test_slots_stay_with_a_lease_that_is_over_while_nobody_waits(bench: Bench) -> None:
    bench.lease(2)
    bench.staged(0, 1)
    bench.now = 9.0
    bench.receive(Renew(SESSION, PullId(2), Nonce(10)))
    bench.now = 11.0
    bench.do("tick")
    bench.receive(Renew(SESSION, PullId(1), Nonce(11)))
    assert replies(bench.stage(0, 1, serial=1)) == [told(0, 0), told(1, 1)]


# --- ends -------------------------------------------------------------------------------------------------------------


def end(bench: Bench, how: str) -> list[Any]:
    match how:
        case "cancel":
            return bench.receive(Cancel(SESSION, PullId(1)))
        case "release":
            return bench.receive(Release(7, engine_tag(DECODE), XFER))
        case _:
            bench.now = 11.0
            return bench.do("tick")


@pytest.mark.parametrize("how", ["cancel", "release", "expiry"])
def test_the_end_of_a_pull_frees_its_slots_but_for_those_that_are_being_filled(bench: Bench, how: str) -> None:
    bench.staged(0)
    (running,) = only(bench.stage(0, 1, 2), Gather)
    end(bench, how)
    bench.do("keep", kept("p-2", "xfer-2"))
    bench.receive(Pull(SESSION, PullId(2), TransferId("xfer-2"), RequestId("d-2"), RANGES))
    bench.receive(Claim(SESSION, PullId(2), Nonce(9)))
    assert slots_of(bench.stage(0, 1, number=2, serial=1)) == [(0, 0)]
    late = bench.gathered(running)
    assert (replies(late), slots_of(late)) == ([], [(1, 1)])


def test_a_chunk_that_is_not_wanted_any_more_is_not_told(bench: Bench) -> None:
    (gather,) = only(bench.stage(0), Gather)
    bench.stage()
    assert bench.gathered(gather, error="whatever") == []
    assert slots_of(bench.stage(1, 2)) == [(1, 1), (2, 0)]


def test_blocks_do_not_wait_for_gathers_but_closing_does(bench: Bench) -> None:
    (gather,) = only(bench.stage(0), Gather)
    assert only(bench.receive(Release(7, engine_tag(DECODE), XFER)), FinishedSending)
    bench.do("close")
    drained = [bench.machine.drained]
    bench.gathered(gather)
    assert [*drained, bench.machine.drained] == [False, True]


def test_an_unknown_gather_is_the_drivers_fault(bench: Bench) -> None:
    with pytest.raises(LocalUsageError, match="expected one that runs"):
        bench.do("gathered", GatherId(99), GatherOutcome(1))
