from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_hetero_tp.errors import TransferError
from mooncake_hetero_tp.io.reading import EngineLimits, Reader
from mooncake_hetero_tp.io.sessions import Session, SessionTable
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed
from mooncake_hetero_tp.testing import FakeClock
from tests.unit.io.foreign import BUFFERS, FakeForeign, descriptors

pytestmark = pytest.mark.usefixtures("quick_burial")


class Bench:
    """A reader over fake engines; `codes[i]` are the answers of the i-th engine that is made."""

    def __init__(self, *codes: Iterable[int], timeout_s: float = 20.0, **limits: int) -> None:
        self.clock = FakeClock()
        self.made: list[FakeForeign] = []
        self._codes = [list(answers) for answers in codes]
        self.there = True
        self.sessions = SessionTable(self._make, per_peer=True, max_sessions=8, answers=lambda *_: self.there)
        self.reader = Reader(self.sessions, EngineLimits(**limits), self.clock, timeout_s)

    def _make(self) -> Session:
        number = len(self.made)
        self.made.append(FakeForeign(self._codes[number] if number < len(self._codes) else ()))
        return Session(self.made[-1], "127.0.0.1", BUFFERS)

    def read(self, number: int, deadline_in: float = 30.0, peer: str = "peer") -> object:
        return self.reader.read(peer, descriptors(number), Deadline(self.clock() + deadline_in))


def test_4608_descriptors_go_in_5_calls() -> None:
    """Mooncake#4209: Qwen3-8B, 2,048 tokens, block 16, 36 layers, against queues of 1,024."""
    bench = Bench(batch_descriptors=1000)
    tally = bench.reader.read("peer", descriptors(4608), Deadline(bench.clock() + 30))
    assert bench.made[0].reads == [1000, 1000, 1000, 1000, 608]
    assert (tally.descriptors, tally.batches, tally.bytes, tally.retries) == (4608, 5, 4608 * 16, 0)


def test_nothing_to_read_makes_no_call() -> None:
    bench = Bench()
    assert bench.reader.read("peer", descriptors(0), Deadline(bench.clock() + 30)).batches == 0
    assert bench.made == []


def test_a_failed_batch_is_retried_once_in_its_session_and_no_other_is_repeated() -> None:
    bench = Bench([0, -1, 0, 0], batch_descriptors=10)
    tally = bench.reader.read("peer", descriptors(30), Deadline(bench.clock() + 30))
    assert bench.made[0].reads == [10, 10, 10, 10]
    assert (tally.batches, tally.retries, tally.replaced_sessions) == (3, 1, 0)


def test_a_session_with_a_failed_call_is_dead_before_the_read_comes_back() -> None:
    """What a failed batch left in Mooncake's queue goes on writing until the engine is destroyed."""
    bench = Bench([-1, 0])
    first = bench.sessions.current("peer")
    bench.read(5)
    assert first.wait_dead(0)
    assert bench.sessions.current("peer") is not first


def test_a_poisoned_session_is_replaced_and_the_batch_retried_there() -> None:
    bench = Bench([0, -1, -1, -1], batch_descriptors=10)
    tally = bench.reader.read("peer", descriptors(20), Deadline(bench.clock() + 30))
    assert [foreign.reads for foreign in bench.made] == [[10, 10, 10], [10]]
    assert (tally.batches, tally.descriptors, tally.retries, tally.replaced_sessions) == (2, 20, 2, 1)
    assert bench.made[0].unregistered == bench.made[0].registered


def test_a_peer_that_always_fails_ends_the_read_within_three_calls() -> None:
    bench = Bench([-1] * 9, [-1] * 9)
    with pytest.raises(
        ReadFailed, match=r"reading 5 descriptors, 80 bytes, from peer returned -1 .*fresh session"
    ) as caught:
        bench.read(5)
    assert [foreign.reads for foreign in bench.made] == [[5, 5], [5]]
    assert not caught.value.may_still_write
    assert all(foreign.unregistered == foreign.registered for foreign in bench.made)


def test_a_fresh_session_is_not_opened_with_a_peer_that_is_not_there() -> None:
    bench = Bench([-1] * 9, [-1] * 9)
    bench.there = False
    with pytest.raises(TransferError, match="answers no handshake"):
        bench.read(5)
    assert [foreign.reads for foreign in bench.made] == [[5, 5]]
    assert bench.made[0].unregistered == bench.made[0].registered


def test_a_failure_is_no_other_peers_business() -> None:
    bench = Bench([0], [-1, -1])
    bench.read(5, peer="good")
    good = bench.sessions.current("good")
    bench.read(5, peer="bad")
    assert bench.sessions.current("good") is good


def hang(foreign: FakeForeign, seconds: float = 0.1) -> None:
    """Let the next call into this engine take so long."""
    foreign.gate = threading.Event()
    threading.Timer(seconds, foreign.gate.set).start()


def test_a_call_that_timed_out_is_tried_once_more_in_a_fresh_session() -> None:
    """Seen over TCP: a connection hangs, and the peer is well."""
    bench = Bench([-1], timeout_s=0.05)
    bench.sessions.current("peer")
    hang(bench.made[0])
    tally = bench.reader.read("peer", descriptors(5), Deadline(bench.clock() + 30))
    assert [foreign.reads for foreign in bench.made] == [[5], [5]]
    assert (tally.retries, tally.replaced_sessions) == (1, 1)


def test_a_peer_that_hangs_is_not_asked_a_second_time() -> None:
    """A fresh session would wait 60 s for its handshake (measured against a stopped process)."""
    bench = Bench([-1], timeout_s=0.05)
    bench.sessions.current("peer")
    hang(bench.made[0])
    bench.there = False
    with pytest.raises(TransferError, match="answers no handshake"):
        bench.read(5)
    assert [foreign.reads for foreign in bench.made] == [[5]]


def test_a_call_that_times_out_twice_is_the_end() -> None:
    bench = Bench([-1], [-1], timeout_s=0.0)
    with pytest.raises(ReadFailed, match="does not answer"):
        bench.read(5)
    assert [foreign.reads for foreign in bench.made] == [[5], [5]]


def test_no_batch_starts_after_the_deadline() -> None:
    bench = Bench(batch_descriptors=10)
    with pytest.raises(ReadFailed, match="past its deadline"):
        bench.read(30, deadline_in=0.0)
    assert sum(len(foreign.reads) for foreign in bench.made) == 0


def test_a_call_that_comes_back_late_does_not_count() -> None:
    bench = Bench(batch_descriptors=10)
    bench.sessions.current("peer")
    gate = bench.made[0].gate = threading.Event()

    def late() -> None:
        while not bench.made[0].inside:
            time.sleep(0.001)
        bench.clock.advance(31)
        gate.set()

    threading.Thread(target=late).start()
    with pytest.raises(ReadFailed, match=r"1\.000 s past its deadline"):
        bench.read(30)
    assert bench.made[0].reads == [10]


def test_an_extended_deadline_counts() -> None:
    bench = Bench()
    deadline = Deadline(bench.clock() + 1)
    deadline.extend(bench.clock() + 10)
    bench.clock.advance(5)
    assert bench.reader.read("peer", descriptors(1), deadline).descriptors == 1


def test_a_stopped_read_starts_no_further_batch() -> None:
    bench = Bench()
    deadline = Deadline(bench.clock() + 30)
    deadline.stop()
    with pytest.raises(ReadFailed, match="stopped"):
        bench.reader.read("peer", descriptors(1), deadline)


def test_credits_hold_over_all_threads() -> None:
    bench = Bench(batch_descriptors=100, peer_descriptors=300, peer_calls=8)
    bench.sessions.current("peer")
    gate = bench.made[0].gate = threading.Event()
    with ThreadPoolExecutor(8) as threads:
        reads = [threads.submit(bench.read, 400) for _ in range(8)]
        time.sleep(0.1)
        assert bench.made[0].inside == 300
        gate.set()
        for read in reads:
            read.result(10)
    assert bench.made[0].most_inside == 300
    assert sum(bench.made[0].reads) == 8 * 400


def test_a_short_read_passes_between_the_batches_of_a_long_one() -> None:
    bench = Bench(batch_descriptors=10, peer_descriptors=10, peer_calls=1)
    bench.sessions.current("peer")
    foreign = bench.made[0]
    gate = foreign.gate = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(bench.read, 200)
        while not foreign.inside:
            time.sleep(0.001)
        short = threads.submit(bench.read, 3)
        while len(bench.reader._credits._peers["peer"].waiting) < 1:
            time.sleep(0.001)
        gate.set()
        short.result(10)
        long.result(10)
    assert foreign.reads.index(3) <= 2


def test_a_read_whose_burial_takes_too_long_says_that_it_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_hetero_tp.io.reading._BURIAL_S", 0.05)
    bench = Bench([0, -1, -1, 0], peer_calls=2)
    bench.sessions.current("peer")
    foreign = bench.made[0]
    gate = foreign.gate = threading.Event()
    stuck = threading.Thread(target=bench.read, args=(1,))
    stuck.start()
    while not foreign.inside:
        time.sleep(0.001)
    foreign.gate = None
    with pytest.raises(ReadFailed, match="still runs others") as caught:
        bench.read(2)
    assert caught.value.may_still_write
    gate.set()
    stuck.join(10)
    assert bench.sessions.fence("peer", 30)
