from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, TransferEngine
from mooncake_hetero_tp.testing import FakeClock, LoopbackEngine, LoopbackFabric
from tests.handovers import Handovers

FOREVER = Deadline(float("inf"))


class Two:
    """Two loopback engines with a page of memory each."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        fabric = LoopbackFabric()
        self.memory = [np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)]
        self.serving, self.reading = (LoopbackEngine(fabric, clock=self.clock) for _ in self.memory)
        for engine, memory in zip((self.serving, self.reading), self.memory, strict=True):
            engine.register([Buffer(memory.ctypes.data, memory.nbytes)])

    def descriptors(self, number: int = 4, length: int = 64) -> Descriptors:
        offsets = np.arange(number, dtype=np.int64) * 2 * length
        src, dst = (memory.ctypes.data + offsets for memory in self.memory)
        return Descriptors(src, dst, np.full(number, length, np.int64))

    def read(self, deadline: Deadline = FOREVER, number: int = 4) -> object:
        return self.reading.read(self.serving.transport_session, self.descriptors(number), deadline=deadline)


def test_a_read_copies_these_bytes_and_no_others() -> None:
    two = Two()
    engine: TransferEngine = two.reading
    assert two.read()
    assert engine.transport_session != two.serving.transport_session
    expected = np.zeros(4096, np.uint8)
    for start in range(0, 512, 128):
        expected[start : start + 64] = two.memory[0][start : start + 64]
    assert np.array_equal(two.memory[1], expected)


@pytest.mark.parametrize("column,what", [("src", "sources"), ("dst", "destinations")])
def test_memory_that_is_not_registered_is_refused(column: str, what: str) -> None:
    two = Two()
    descriptors = two.descriptors()
    getattr(descriptors, column)[2] += 4096
    with pytest.raises(ReadFailed, match=f"{what}.*not in registered memory"):
        two.reading.read(two.serving.transport_session, descriptors, deadline=FOREVER)
    assert not two.memory[1].any()


def test_it_fails_as_often_as_told() -> None:
    two = Two()
    two.reading.fail(2)
    for _ in range(2):
        with pytest.raises(ReadFailed, match="told to fail"):
            two.read()
    assert not two.memory[1].any()
    two.read()
    assert two.reading.calls == 3


def test_leftovers_write_until_they_are_fenced() -> None:
    two = Two()
    two.reading.fail(keep_writing=True)
    with pytest.raises(ReadFailed) as caught:
        two.read()
    assert caught.value.may_still_write
    assert not two.memory[1].any()
    assert two.reading.write_leftovers() == 1
    assert two.memory[1].any()
    two.reading.fence(two.serving.transport_session)
    assert two.reading.write_leftovers() == 0


def test_a_flipped_byte_is_the_last_one() -> None:
    two = Two()
    two.reading.flip_byte()
    two.read()
    good = two.memory[1].copy()
    two.read()
    assert np.flatnonzero(good != two.memory[1]).tolist() == [3 * 128 + 63]


def test_held_calls_copy_nothing_until_they_are_let_go() -> None:
    two = Two()
    with two.reading.hold():
        call = threading.Thread(target=two.read)
        call.start()
        while not two.reading.running:
            time.sleep(0.001)
        assert not two.memory[1].any()
    call.join(5)
    assert two.memory[1].any()
    assert two.reading.running == 0


def test_delays_and_orders_do_not_change_the_result() -> None:
    two = Two()
    two.reading.reorder(7)
    two.reading.delay(0.02)
    began = time.monotonic()
    two.read(number=16)
    assert time.monotonic() - began >= 0.02
    shuffled = two.memory[1].copy()
    two.reading.reorder(None)
    two.read(number=16)
    assert np.array_equal(shuffled, two.memory[1])


def test_deadlines_and_stops_count_before_and_after() -> None:
    two = Two()
    deadline = Deadline(two.clock() + 1)
    two.clock.advance(1)
    with pytest.raises(ReadFailed, match="past its deadline"):
        two.read(deadline)
    deadline.extend(two.clock() + 1)
    two.read(deadline)
    deadline.stop()
    with pytest.raises(ReadFailed, match="stopped"):
        two.read(deadline)


def test_an_engine_that_has_ended_neither_reads_nor_is_read() -> None:
    two = Two()
    two.serving.close()
    with pytest.raises(ReadFailed, match="no engine"):
        two.read()
    two.serving.close()
    assert two.serving.registered == ()
    with pytest.raises(LocalUsageError, match="closed"):
        two.serving.register([])


def test_a_clock_moves_only_when_told_and_never_back() -> None:
    clock = FakeClock(5.0)
    seen: list[float] = []
    clock.subscribe(lambda: seen.append(clock()))
    assert (clock(), clock.advance(1.5), clock()) == (5.0, 6.5, 6.5)
    assert seen == [6.5]
    with pytest.raises(LocalUsageError, match="does not go back"):
        clock.advance(-1)


def test_a_pair_hands_over() -> None:
    fabric = LoopbackFabric()
    handovers = Handovers(lambda _: LoopbackEngine(fabric))
    load = handovers.load("x", 27)
    with handovers.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        pair.release(load)
        pair.wait_freed(load)
        with pytest.raises(TimeoutError, match=r"not reached within 0\.01 s"):
            pair.wait(lambda ended: False, timeout_s=0.01)
    assert handovers.wrong_bytes(load) == 0
