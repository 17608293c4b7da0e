"""The Mooncake adapter on real Mooncake over TCP: bytes, credits, poison, replacement, peers that go away."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import TransferError
from mooncake_hetero_tp.io.engine import Deadline, MooncakeEngine, ReadFailed
from tests.integration.mooncake_peer import SIZE, pattern

pytest.importorskip("mooncake.engine")

ROOT = Path(__file__).parents[2]


class Peer:
    """A serving process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.mooncake_peer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        session, address = self.process.stdout.readline().split()
        self.session, self.address = session, int(address)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.close()


class Side:
    """A reading engine with memory of its own."""

    def __init__(self, lease_s: float = 30.0) -> None:
        self.memory = np.zeros(SIZE, np.uint8)
        self.engine = MooncakeEngine("127.0.0.1", lease_s=lease_s, protocol="tcp", serves=False)
        self.engine.register([Buffer(self.memory.ctypes.data, self.memory.nbytes)])

    def descriptors(self, peer: Peer, count: int, length: int, gap: int = 0) -> Descriptors:
        offsets = np.arange(count, dtype=np.int64) * (length + gap)
        return Descriptors(peer.address + offsets, self.memory.ctypes.data + offsets, np.full(count, length, np.int64))

    def read(self, peer: Peer, count: int, length: int, seconds: float = 30.0) -> object:
        deadline = Deadline(time.monotonic() + seconds)
        return self.engine.read(peer.session, self.descriptors(peer, count, length), deadline=deadline)

    def poison(self, peer: Peer) -> None:
        """Oversized batches past the adapter, until the session that it reads from this peer in stays broken.

        Not every one does it: a refusal must fall on the moment in which the peer's queue needs its pump.
        The larger the batch, the longer it is refused, and the likelier that is.
        """
        session = self.engine._sessions.current(peer.session)
        for _ in range(40):
            if session.read(peer.session, self.descriptors(peer, 100_000, 64)) != 0:
                time.sleep(0.2)
                if session.read(peer.session, self.descriptors(peer, 1, 64)) != 0:
                    return
        raise AssertionError("40 batches of 100,000 descriptors did not poison the session")


@pytest.fixture
def side() -> Iterator[Side]:
    one = Side()
    yield one
    one.engine.close()


def test_bytes_arrive_and_nothing_else_changes(side: Side, peer: Peer) -> None:
    length, gap = 1024, 512
    descriptors = side.descriptors(peer, 3000, length, gap)
    tally = side.engine.read(peer.session, descriptors, deadline=Deadline(time.monotonic() + 30))
    assert (tally.bytes, tally.descriptors, tally.batches) == (3000 * length, 3000, 6)
    expected = np.zeros(SIZE, np.uint8)
    used = 3000 * (length + gap)
    rows = expected[:used].reshape(3000, -1)
    rows[:, :length] = pattern()[:used].reshape(3000, -1)[:, :length]
    assert np.array_equal(side.memory, expected)


def test_many_threads_stay_within_the_credits(side: Side, peer: Peer) -> None:
    """6 readers of 2,000 descriptors each: more than a session takes at once (2,048)."""
    with ThreadPoolExecutor(6) as threads:
        reads = [threads.submit(side.read, peer, 2000, 4096) for _ in range(6)]
        for read in reads:
            read.result(60)
    assert np.array_equal(side.memory[: 2000 * 4096], pattern()[: 2000 * 4096])


def test_a_poisoned_session_is_replaced_and_the_read_succeeds(side: Side, peer: Peer) -> None:
    side.read(peer, 10, 4096)
    poisoned = side.engine._sessions.current(peer.session)
    side.poison(peer)
    side.memory[:] = 0
    deadline = Deadline(time.monotonic() + 30)
    tally = side.engine.read(peer.session, side.descriptors(peer, 700, 4096), deadline=deadline)
    assert (tally.descriptors, tally.retries, tally.replaced_sessions) == (700, 2, 1)
    assert np.array_equal(side.memory[: 700 * 4096], pattern()[: 700 * 4096])
    assert poisoned.wait_dead(0)
    assert side.engine.read(peer.session, side.descriptors(peer, 5, 64), deadline=deadline).retries == 0


def test_what_a_failed_batch_left_behind_writes_no_more_once_the_read_is_back(side: Side, peer: Peer) -> None:
    """One bad source fails the batch at once while the rest goes on; the engine's end stops it."""
    descriptors = side.descriptors(peer, 500, 32 * 1024)
    descriptors.src[0] = peer.address + 4 * SIZE
    with pytest.raises(ReadFailed, match="fresh session"):
        side.engine.read(peer.session, descriptors, deadline=Deadline(time.monotonic() + 30))
    side.memory[:] = 0
    time.sleep(0.5)
    assert not side.memory.any()
    assert side.read(peer, 500, 32 * 1024)


@pytest.mark.usefixtures("leaves_nothing")
def test_an_engine_leaves_nothing_behind(peer: Peer) -> None:
    for _ in range(2):
        one = Side()
        one.read(peer, 10, 64)
        one.engine.close()
        one.engine.close()
        with pytest.raises(TransferError, match="closed"):
            one.read(peer, 1, 64)


def test_two_engines_of_one_process_read_from_each_other() -> None:
    memory = [np.full(4096, value, np.uint8) for value in (1, 2)]
    engines = [MooncakeEngine("127.0.0.1", lease_s=30, protocol="tcp") for _ in memory]
    for engine, buffer in zip(engines, memory, strict=True):
        engine.register([Buffer(buffer.ctypes.data, buffer.nbytes)])
    assert engines[0].transport_session != engines[1].transport_session
    for mine, other in ((0, 1), (1, 0)):
        part = slice(0, 1024) if mine == 0 else slice(2048, 3072)
        descriptors = Descriptors(
            np.array([memory[other].ctypes.data + part.start]),
            np.array([memory[mine].ctypes.data + part.start]),
            np.array([1024]),
        )
        engines[mine].read(engines[other].transport_session, descriptors, deadline=Deadline(time.monotonic() + 10))
        assert (memory[mine][part] == other + 1).all()
    for engine in engines:
        engine.close()


def test_a_killed_peer_fails_reads_within_seconds_and_its_successor_serves() -> None:
    side = Side(lease_s=8.0)
    first = Peer()
    side.read(first, 10, 4096)
    first.close()
    began = time.monotonic()
    with pytest.raises(TransferError, match=f"{first.session} failed before and answers no handshake"):
        side.read(first, 10, 4096)
    assert time.monotonic() - began < 20
    second = Peer()
    side.read(second, 10, 4096)
    second.close()
    side.engine.close()


def test_a_stopped_peer_holds_up_nobody_else_and_its_read_ends_by_the_timeout(peer: Peer) -> None:
    side = Side(lease_s=8.0)
    frozen = Peer()
    side.read(frozen, 10, 4096)
    frozen.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        began = time.monotonic()
        stuck = threads.submit(side.read, frozen, 10, 4096, 8.0)
        time.sleep(0.2)
        for _ in range(20):
            side.read(peer, 10, 4096)
        assert not stuck.done()
        with pytest.raises(TransferError, match="answers no handshake within 5 s"):
            stuck.result(30)
        assert 5 <= time.monotonic() - began < 20
        with pytest.raises(TransferError, match="answers no handshake within 5 s"):
            side.read(frozen, 10, 4096)
    side.memory[:] = 0
    frozen.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert not side.memory.any()
    assert side.read(frozen, 10, 4096)
    frozen.close()
    side.engine.close()


def longest_silence(during: Callable[[], object]) -> float:
    """Seconds for which no other Python thread ran, at most."""
    gaps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not stop.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    during()
    stop.set()
    ticker.join(30)
    return max(gaps)


def test_replacing_a_session_lets_other_threads_run(side: Side, peer: Peer) -> None:
    """Mooncake's destructor holds the GIL, nearly a second for a young session, if one does not wait.

    A busy machine silences threads too, so one good run of several is enough.
    """
    silences: list[float] = []
    while len(silences) < 5 and min(silences, default=1.0) > 0.5:
        side.read(peer, 1, 64)
        silences.append(longest_silence(lambda: side.engine.fence(peer.session)))
    assert min(silences) <= 0.5
