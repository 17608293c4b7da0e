from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mooncake_hetero_tp.core.releaser import ReleaserConfig
from mooncake_hetero_tp.io.release import ReleaseClient
from mooncake_hetero_tp.testing import FakeClock, LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.types import EngineId, TransferId
from tests.handovers import Handovers
from tests.oracle_memory import SideSpec

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TP2 = SideSpec(tp=2, block_size=4, num_blocks=64)


def bench() -> Handovers:
    fabric = LoopbackFabric()
    return Handovers(lambda _: LoopbackEngine(fabric), producer=TP2)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.002)


def test_a_release_reaches_every_rank_read_from_or_not() -> None:
    handovers = bench()
    load = handovers.load("a", 9)
    with handovers.pair as pair:
        pair.keep(load)
        pair.release(load)
        pair.release(load)
        pair.wait_freed(load)
        assert len(pair.ended.sending) == 2


def test_a_release_before_the_prefill_ends_frees_its_blocks_on_arrival() -> None:
    handovers = bench()
    load = handovers.load("a", 9)
    with handovers.pair as pair:
        pair.release(load)
        time.sleep(0.1)
        pair.keep(load)
        pair.wait_freed(load)


def test_many_releases_at_once_arrive() -> None:
    handovers = bench()
    with handovers.pair as pair:
        loads = [handovers.load(f"a{number}", 1) for number in range(20)]
        for load in loads:
            pair.keep(load)
            pair.release(load)
        for load in loads:
            pair.wait_freed(load)


def test_the_end_waits_a_little_for_what_is_outstanding() -> None:
    handovers = bench()
    load = handovers.load("a", 9)
    with handovers.pair as pair:
        pair.keep(load)
        pair.release(load)
        pair.releases.close()
        pair.wait_freed(load)


def test_a_producer_that_is_gone_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    client = ReleaseClient(EngineId("d"), ReleaserConfig(deadline_s=60.0), connector_timeout_s=0.2, clock=clock)
    clock.subscribe(client.wake)
    client.start()
    client.start()
    client.release(TransferId("t"), EngineId("p"), "http://127.0.0.1:1")
    time.sleep(0.1)
    clock.advance(61)
    until(lambda: "given up" in caplog.text)
    client.close()


def test_a_release_without_a_thread_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    client = ReleaseClient(EngineId("d"))
    client.release(TransferId("t1"), EngineId("p"), "http://127.0.0.1:1")
    client.start()
    client.close()
    client.close()
    client.release(TransferId("t2"), EngineId("p"), "http://127.0.0.1:1")
    assert "release of transfer t1: the release thread is not started" in caplog.text
    assert "release of transfer t2: the release thread has ended" in caplog.text


def test_the_end_is_bounded_when_nobody_answers() -> None:
    client = ReleaseClient(EngineId("d"), connector_timeout_s=0.2, close_timeout_s=0.3)
    client.start()
    client.release(TransferId("t"), EngineId("p"), "http://127.0.0.1:1")
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 5
