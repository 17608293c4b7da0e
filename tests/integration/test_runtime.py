"""TP1 -> TP2 and back over everything real but vLLM: machines, ZMQ, HTTP, Mooncake TCP; bytes compared, nothing left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.types import Rank
from tests.handovers import CONSUMER, PRODUCER, SENTINEL, Handovers
from tests.oracle_memory import SideSpec

pytest.importorskip("mooncake.engine")

MakeEngine = Callable[[bool], MooncakeEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    made: list[MooncakeEngine] = []

    def make(serves: bool) -> MooncakeEngine:
        made.append(MooncakeEngine("127.0.0.1", lease_s=30, protocol="tcp", serves=serves, reads=not serves))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


RING = RingSize(slot_bytes=2048, slots=3)
WAYS = [pytest.param({"transfer_mode": mode, "staging": RING}, id=mode) for mode in Mode]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "producer,consumer",
    [
        pytest.param(PRODUCER, CONSUMER, id="TP1-TP2"),
        pytest.param(SideSpec(tp=2, block_size=16, kernel_block_size=16, num_blocks=24), PRODUCER, id="TP2-TP1"),
    ],
)
def test_a_hand_over_is_exact_and_both_sides_end_clean(
    make_engine: MakeEngine, producer: SideSpec, consumer: SideSpec, way: dict[str, Any]
) -> None:
    handovers = Handovers(make_engine, producer=producer, consumer=consumer, **way)
    loads = [handovers.load("first", 27), handovers.load("one", 1), handovers.load("hit", 61, skip=24)]
    with handovers.pair as pair:
        pair.pull(loads[0])
        pair.keep(loads[0])
        for load in loads[1:]:
            pair.keep(load)
            pair.pull(load)
        assert [pair.wait_loaded(load) for load in loads] == [True] * 3
        for load in loads:
            pair.release(load)
            pair.wait_freed(load)
        stats = [runtime.stats() for runtime in pair.consumers.values()]
    assert handovers.wrong_bytes(*loads) == 0
    per_token = 3 * 2 * 4 * 8 * 2 // consumer.tp
    assert [taken.bytes_pulled for taken in stats] == [(27 + 1 + 61 - 24) * per_token] * consumer.tp
    if way["transfer_mode"] is not Mode.AUTO:
        pulls = 3 * producer.tp if way["transfer_mode"] is Mode.STAGED else 0
        assert [taken.pulls_staged for taken in stats] == [pulls] * consumer.tp


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_session_poisoned_on_purpose_is_replaced_without_a_restart(
    make_engine: MakeEngine, way: dict[str, Any]
) -> None:
    engines: list[MooncakeEngine] = []

    def keep_engines(serves: bool) -> MooncakeEngine:
        engines.append(make_engine(serves))
        return engines[-1]

    consumer = SideSpec(tp=1, block_size=8, kernel_block_size=8, num_blocks=32, layout="BLHNC")
    handovers = Handovers(keep_engines, consumer=consumer, **way)
    first, second = handovers.load("first", 27), handovers.load("second", 27)
    with handovers.pair as pair:
        for load in (first, second):
            if load is second:
                _break_session(engines)
            pair.keep(load)
            pair.pull(load)
            assert pair.wait_loaded(load)
            pair.release(load)
            pair.wait_freed(load)
        (stats,) = (runtime.stats() for runtime in pair.consumers.values())
    handovers.consumers[Rank()].memory[0] = SENTINEL  # where the oversized batches went
    assert handovers.wrong_bytes(first, second) == 0
    assert (stats.loads_done, stats.replaced_sessions) == (2, 1)


def _break_session(engines: list[MooncakeEngine]) -> None:
    """Oversized batches past the adapter, of one byte again and again, until one leaves the session broken."""
    serving, reading = engines
    peer = serving.transport_session
    session = reading._sessions.current(peer)
    assert serving._buffers
    assert reading._buffers
    source, target = serving._buffers[0].address, reading._buffers[0].address
    for _ in range(60):
        if session.read(peer, _same_byte(source, target, 100_000)) != 0:
            time.sleep(0.2)
            if session.read(peer, _same_byte(source, target, 1)) != 0:
                return
    raise AssertionError("the session did not break")


def _same_byte(source: int, target: int, count: int) -> Descriptors:
    columns = [np.full(count, value, np.int64) for value in (source, target, 1)]
    return Descriptors(*columns)


def test_a_producer_that_stops_answering_fails_the_load_in_time(make_engine: MakeEngine) -> None:
    handovers = Handovers(make_engine, consumer_config=ConsumerConfig(silence_s=1.0, connect_timeout_s=2.0))
    first, second = handovers.load("first", 27), handovers.load("second", 27)
    with handovers.pair as pair:
        pair.keep(first)
        pair.pull(first)
        assert pair.wait_loaded(first)
        pair.release(first)
        pair.wait_freed(first)
        for runtime in pair.producers.values():
            runtime.close()
        pair.pull(second)
        assert not pair.wait_loaded(second)
