"""Two engines' runtimes wired over real ZMQ and HTTP, with loopback memory: what vLLM's worker sees of them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.effects import Kept, PullRequest
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError, NativeError, TransferError
from mooncake_hetero_tp.io import runtime as runtime_module
from mooncake_hetero_tp.io.packer import Packer
from mooncake_hetero_tp.io.runtime import Finished, Handover, RuntimeConfig, StepWork, WorkerRuntime
from mooncake_hetero_tp.io.staging import RingSize, StagingRing, host_ring
from mooncake_hetero_tp.testing import FakeClock, LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange, TransferId
from tests.handovers import CONSUMER, PRODUCER, Handovers
from tests.oracle_memory import Arena, Layer, SideSpec, build_rank
from tests.tables import DST, Dense

pytestmark = pytest.mark.usefixtures("leaves_nothing")

QUICK = ConsumerConfig(resend_s=0.02, resend_max_s=0.1, silence_s=1.0, connect_timeout_s=15.0)


class Bench(Handovers):
    """Handovers whose loopback engines are at hand: reading ones of consumers, serving ones of producers."""

    def __init__(self, **options: Any) -> None:
        self.fabric = LoopbackFabric()
        self.serving: list[LoopbackEngine] = []
        self.reading: list[LoopbackEngine] = []
        clock = options.get("clock", time.monotonic)

        def make(serves: bool) -> LoopbackEngine:
            engine = LoopbackEngine(self.fabric, clock=clock)
            (self.serving if serves else self.reading).append(engine)
            return engine

        options.setdefault("consumer_config", QUICK)
        options.setdefault("close_timeout_s", 0.1)
        super().__init__(make, **options)

    def wait_reading(self) -> None:
        until(lambda: any(engine.running for engine in self.reading))


def until(done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "producer,consumer",
    [
        (PRODUCER, CONSUMER),
        (CONSUMER, PRODUCER),
        (
            SideSpec(tp=4, block_size=16, kernel_block_size=4, num_blocks=16, encoding="cpu"),
            SideSpec(tp=2, pp=3, num_blocks=64),
        ),
    ],
)
@pytest.mark.parametrize("pull_first", [True, False])
def test_loads_arrive_whichever_side_is_first(producer: SideSpec, consumer: SideSpec, *, pull_first: bool) -> None:
    bench = Bench(producer=producer, consumer=consumer)
    loads = [bench.load("a", 27), bench.load("b", 1), bench.load("c", 40, skip=16)]
    with bench.pair as pair:
        for load in loads:
            first, second = (pair.pull, pair.keep) if pull_first else (pair.keep, pair.pull)
            first(load)
            second(load)
        assert [pair.wait_loaded(load) for load in loads] == [True] * 3
        for load in loads:
            pair.release(load)
            pair.wait_freed(load)
    assert bench.wrong_bytes(*loads) == 0


STAGED: dict[str, Any] = {"transfer_mode": Mode.STAGED, "staging": RingSize(slot_bytes=1024, slots=2)}
"""Slots of a few pieces each, so that every pull takes several turns through the ring."""


@pytest.mark.parametrize("producer,consumer", [(PRODUCER, CONSUMER), (CONSUMER, PRODUCER)])
def test_staged_loads_arrive_through_a_ring_smaller_than_any(
    producer: SideSpec, consumer: SideSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = Bench(producer=producer, consumer=consumer, **STAGED)
    loads = [bench.load("a", 27), bench.load("b", 60), bench.load("c", 40, skip=16)]
    with bench.pair as pair:
        for load in loads:
            pair.pull(load)
        for load in loads:
            pair.keep(load)
        assert [pair.wait_loaded(load) for load in loads] == [True] * 3
        for load in loads:
            pair.release(load)
            pair.wait_freed(load)
        stats = [runtime.stats() for runtime in pair.consumers.values()]
        packed = [runtime.stats() for runtime in pair.producers.values()]
    assert bench.wrong_bytes(*loads) == 0
    assert sum(taken.pulls_staged for taken in stats) == 3 * len(stats) * max(1, producer.tp // consumer.tp)
    assert sum(taken.chunks for taken in stats) == sum(taken.chunks_packed for taken in packed) > 20
    assert all(pull.bytes == pull.tokens * 3 * 2 * 2 * 8 * 2 for taken in stats for pull in taken.pulls)
    assert any("mode=staged" in line and "why='staged, as set" in line for line in caplog.messages)


def test_a_peer_without_a_ring_is_read_directly_though_staging_is_set() -> None:
    bench = Bench(**STAGED, stages_for_others=False)
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        stats = [runtime.stats() for runtime in pair.consumers.values()]
    assert bench.wrong_bytes(load) == 0
    assert [taken.pulls_staged for taken in stats] == [0, 0]


def test_chunks_that_cannot_be_packed_are_read_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise NativeError("no")

    monkeypatch.setattr(Packer, "pack", refuse)
    bench = Bench(**STAGED)
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        failed = sum(runtime.stats().gathers_failed for runtime in pair.producers.values())
    assert bench.wrong_bytes(load) == 0
    assert failed >= 1


def test_a_pull_that_was_staged_in_part_counts_as_what_it_became(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Packer.pack

    def refuse_late(self: Packer, key: Any, pull: Any, chunk: int, slot: Any) -> int:
        if chunk > 1:
            raise NativeError("no")
        return pack(self, key, pull, chunk, slot)

    monkeypatch.setattr(Packer, "pack", refuse_late)
    bench = Bench(**STAGED)
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        stats = [runtime.stats() for runtime in pair.consumers.values()]
    assert bench.wrong_bytes(load) == 0
    for taken in stats:
        (pull,) = taken.pulls
        assert (pull.mode, taken.pulls_staged, pull.bytes) == ("direct", 0, 27 * 3 * 2 * 2 * 8 * 2)
        assert "could not pack it" in pull.why


def test_chunks_that_cannot_be_unpacked_fail_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise NativeError("no")

    monkeypatch.setattr(Packer, "unpack", refuse)
    bench = Bench(**STAGED)
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert not pair.wait_loaded(load)
        pair.release(load)
        pair.wait_freed(load)


def test_a_failed_staged_read_is_reported_before_its_fence_for_it_writes_no_page() -> None:
    bench = Bench(**STAGED)
    load = bench.load("a", 27)
    with bench.pair as pair:
        for engine in bench.reading:
            engine.fail(100, keep_writing=True)
        pair.keep(load)
        pair.pull(load)
        assert not pair.wait_loaded(load)
        pages = [memory.memory.copy() for memory in bench.consumers.values()]
        for engine in bench.reading:
            engine.write_leftovers()
        assert all(
            np.array_equal(memory.memory, page) for memory, page in zip(bench.consumers.values(), pages, strict=True)
        )


def test_blocks_are_read_only_when_the_gpu_has_written_them() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.pull(load)
        pair.keep(load, ready=False)
        time.sleep(0.2)
        assert bench.reading[0].calls == 0
        for runtime in pair.producers.values():
            runtime.submit(StepWork(ready=[Handover(load.transfer_id, load.producer_request)]))
        assert pair.wait_loaded(load)
    assert bench.wrong_bytes(load) == 0


def test_counters_and_one_line_per_pull(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    load = bench.load("a", 27)
    caplog.set_level("INFO")
    with bench.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        pair.release(load)
        pair.wait_freed(load)
        stats = [runtime.stats() for runtime in pair.consumers.values()]
        sent = [runtime.stats() for runtime in pair.producers.values()]
        assert all(runtime.stats().is_empty for runtime in pair.consumers.values())
    bytes_per_token_and_rank = 3 * 2 * 2 * 8 * 2
    assert [taken.bytes_pulled for taken in stats] == [27 * bytes_per_token_and_rank] * 2
    assert [(taken.loads_done, len(taken.pulls)) for taken in stats] == [(1, 1)] * 2
    assert [(taken.sends_done, taken.sends_expired) for taken in sent] == [(1, 0)]
    lines = [line for line in caplog.messages if line.startswith("pulled request=d-a bytes=5184 descriptors=")]
    assert len(lines) == 2


def test_an_aborted_prefill_fails_the_load_at_once() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.pull(load)
        time.sleep(0.1)
        began = time.monotonic()
        for runtime in pair.producers.values():
            runtime.submit(StepWork(aborted=[Handover(load.transfer_id, load.producer_request)]))
        assert not pair.wait_loaded(load)
        assert time.monotonic() - began < 2
    assert bench.wrong_bytes() == 0


def test_a_cancelled_load_is_reported_when_its_read_has_returned() -> None:
    """sglang#24527: the pages are not free while a read may still write into them."""
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        holds = [engine.hold() for engine in bench.reading]
        for hold in holds:
            hold.__enter__()
        pair.pull(load)
        until(lambda: all(engine.running for engine in bench.reading))
        for runtime in pair.consumers.values():
            runtime.submit(StepWork(cancelled=[load.consumer_request]))
        time.sleep(0.2)
        assert not any(pair.collect().recving.values())
        for hold in holds:
            hold.__exit__(None, None, None)
        pair.wait_loaded(load)
        assert not any(pair.ended.failed.values())
        assert [runtime.stats().loads_cancelled for runtime in pair.consumers.values()] == [1, 1]


def test_a_failed_read_is_fenced_before_it_is_reported() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        bench.reading[0].fail(keep_writing=True)
        pair.pull(load)
        assert not pair.wait_loaded(load)
        assert bench.reading[0].write_leftovers() == 0
        other = bench.load("b", 27)
        pair.keep(other)
        pair.pull(other)
        assert pair.wait_loaded(other)


def test_a_lease_that_ends_during_a_read_is_a_failed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    bench = Bench(clock=clock, producer_config=ProducerConfig(lease_s=30.0))
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        with bench.reading[0].hold(), bench.reading[1].hold():
            pair.pull(load)
            until(lambda: all(engine.running for engine in bench.reading))
            for runtime in pair.consumers.values():  # no Renew leaves any more
                assert runtime._driver is not None
                monkeypatch.setattr(runtime._driver._around.channel, "send", lambda *_: True)
            clock.advance(31)
        assert not pair.wait_loaded(load)


def test_blocks_nobody_claims_expire() -> None:
    clock = FakeClock()
    bench = Bench(clock=clock, producer_config=ProducerConfig(keep_s=100.0))
    load = bench.load("a", 27)
    with bench.pair as pair:
        pair.keep(load)
        time.sleep(0.05)
        clock.advance(99)
        time.sleep(0.05)
        assert not any(pair.collect().sending.values())
        clock.advance(2)
        pair.wait_freed(load)
        assert [runtime.stats().sends_expired for runtime in pair.producers.values()] == [1]


def test_a_restarted_producer_is_found_again() -> None:
    """vllm#49238: another process at the same engine id; the survivors go on by themselves."""
    bench = Bench()
    with bench.pair as pair:
        first = bench.load("a", 27)
        pair.keep(first)
        pair.pull(first)
        assert pair.wait_loaded(first)
        pair.release(first)
        pair.wait_freed(first)
        (rank,) = pair.producers
        old = pair.producers[rank]
        new = WorkerRuntime(
            dataclasses.replace(old._config, bootstrap_bind=None, bootstrap_address=old.bootstrap),
            Identity(pair.producer_id, Incarnation("f" * 16), rank),
            bench.producers[rank].table,
            LoopbackEngine(bench.fabric),
        )
        assert old._loop is not None
        old._loop.stop(5)
        old._engine.close()
        new.start()
        pair.producers[rank] = new
        second = bench.load("b", 27)
        pair.keep(second)
        pair.pull(second)
        assert pair.wait_loaded(second)
        old.close()
    assert bench.wrong_bytes(first, second) == 0


def test_a_producer_that_is_not_there_fails_loads_in_time() -> None:
    bench = Bench(consumer_config=dataclasses.replace(QUICK, connect_timeout_s=1.0))
    load = bench.load("a", 27)
    with bench.pair as pair:
        gone = dataclasses.replace(load, transfer_id=TransferId("gone"))
        for runtime in pair.consumers.values():
            runtime.submit(
                StepWork(
                    pulls=[
                        PullRequest(
                            gone.consumer_request,
                            gone.transfer_id,
                            EngineId("nobody"),
                            "http://127.0.0.1:1",
                            gone.ranges,
                            gone.consumer_blocks,
                        )
                    ]
                )
            )
        assert not pair.wait_loaded(gone)


# --- the engine step -----------------------------------------------------------------------------


def test_submit_and_collect_never_wait() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        runtime = next(iter(pair.consumers.values()))
        with bench.reading[0].hold(), bench.reading[1].hold():
            pair.keep(load)
            pair.pull(load)
            bench.wait_reading()
            began = time.monotonic()
            for _ in range(200):
                runtime.submit(StepWork())
                runtime.collect()
                runtime.stats()
            assert time.monotonic() - began < 1
        assert pair.wait_loaded(load)


def test_work_for_a_role_that_a_worker_does_not_have_is_refused() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        consumer, producer = next(iter(pair.consumers.values())), next(iter(pair.producers.values()))
        kept = Kept(load.producer_request, load.transfer_id, load.producer_blocks, 27, ready=True)
        with pytest.raises(LocalUsageError, match="no producer"):
            consumer.submit(StepWork(kept=[kept]))
        with pytest.raises(LocalUsageError, match="no consumer"):
            producer.submit(StepWork(cancelled=[load.consumer_request]))


def test_loads_that_do_not_fit_the_table_fail_alone() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    wrong = dataclasses.replace(load, transfer_id=TransferId("w"), ranges=(TokenRange(0, 27),))
    with bench.pair as pair:
        pair.pull(wrong)
        assert not pair.wait_loaded(wrong)
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)


# --- a driver thread that fails ------------------------------------------------------------------


def test_a_failing_consumer_thread_fails_its_loads_and_refuses_more(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(consumer=SideSpec(tp=1, block_size=8, kernel_block_size=8, num_blocks=32))
    waiting, reading = bench.load("waiting", 9), bench.load("reading", 27)
    with bench.pair as pair:
        (runtime,) = pair.consumers.values()
        pair.pull(waiting)
        pair.keep(reading)
        with bench.reading[0].hold():
            pair.pull(reading)
            bench.wait_reading()
            assert runtime._loop is not None
            runtime._loop.post(_fail)
            until(lambda: waiting.consumer_request in pair.collect().failed[Rank()])
            assert reading.consumer_request not in pair.ended.recving[Rank()]
            with pytest.raises(LocalUsageError, match=r"driver-dp0\.pp0\.tp0 has ended: a bug"):
                pair.pull(bench.load("more", 9))
        assert not pair.wait_loaded(reading)
        assert "d-more" not in pair.ended.recving[Rank()]
        assert "loads nothing any more" in caplog.text


def test_a_failing_producer_thread_frees_what_it_kept_after_nobody_can_read_it() -> None:
    bench = Bench()
    load = bench.load("a", 27)
    with bench.pair as pair:
        (runtime,) = pair.producers.values()
        pair.keep(load)
        assert runtime._loop is not None
        runtime._loop.post(_fail)
        pair.wait_freed(load)
        assert bench.serving[0].registered == ()
        with pytest.raises(LocalUsageError, match="a bug"):
            runtime.submit(StepWork())


def _fail(_: float) -> None:
    raise RuntimeError("a bug")


# --- start and end -------------------------------------------------------------------------------

IDENTITY = Identity(EngineId("e"), Incarnation("aa"), Rank())


def lone(config: RuntimeConfig, engine: Any = None) -> WorkerRuntime:
    rank = build_rank(SideSpec(), [Layer("a")], 2, Rank(), Arena(1 << 16))
    return WorkerRuntime(config, IDENTITY, rank.table, engine or LoopbackEngine(LoopbackFabric()))


def producing(**changes: Any) -> RuntimeConfig:
    fields: dict[str, Any] = {
        "host": "127.0.0.1",
        "producer": ProducerConfig(),
        "bootstrap_bind": HostPort("127.0.0.1", 0),
    }
    return RuntimeConfig(**(fields | changes))


def test_start_and_close_may_be_repeated() -> None:
    runtime = lone(producing())
    with pytest.raises(LocalUsageError, match="not started"):
        runtime.submit(StepWork())
    runtime.start()
    address = runtime.control_address
    runtime.start()
    assert runtime.control_address == address
    runtime.close()
    runtime.close()
    with pytest.raises(LocalUsageError, match="was closed"):
        runtime.submit(StepWork())
    with pytest.raises(LocalUsageError, match="a new incarnation"):
        runtime.start()
    assert runtime.collect() == Finished()


def test_a_runtime_that_never_started_can_be_closed() -> None:
    lone(producing()).close()


def test_a_start_that_fails_leaves_nothing() -> None:
    class Broken(LoopbackEngine):
        def register(self, buffers: Any) -> None:
            raise TransferError("buffer 1 of 1")

    with pytest.raises(TransferError, match="buffer 1"):
        lone(producing(), Broken(LoopbackFabric())).start()
    with pytest.raises(ConfigError, match="needs a bootstrap server"):
        lone(producing(bootstrap_bind=None)).start()
    engine = LoopbackEngine(LoopbackFabric())
    unreachable = producing(
        bootstrap_bind=None,
        bootstrap_address=HostPort("127.0.0.1", 1),
        connector_timeout_s=1.0,
        registration_bound_s=0.3,
    )
    with pytest.raises(ConfigError, match="could not register"):
        lone(unreachable, engine).start()
    assert engine.registered == ()


def test_a_port_in_use_is_a_start_error_that_names_the_setting() -> None:
    first = lone(producing())
    first.start()
    assert first.bootstrap is not None
    with pytest.raises(ConfigError, match="VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        lone(producing(bootstrap_bind=first.bootstrap)).start()
    first.close()


def test_neither_producer_nor_consumer_is_refused() -> None:
    with pytest.raises(LocalUsageError, match="neither"):
        lone(RuntimeConfig(host="127.0.0.1"))


def test_a_worker_can_be_both() -> None:
    runtime = lone(producing(consumer=ConsumerConfig()))
    runtime.start()
    runtime.submit(
        StepWork(
            pulls=[
                PullRequest(
                    RequestId("d"),
                    TransferId("t"),
                    EngineId("e"),
                    f"http://{runtime.bootstrap}",
                    (TokenRange(0, 0),) * 2,
                    (np.array([1]),) * 2,
                )
            ]
        )
    )
    until(lambda: runtime.collect().recving == {"d"})
    runtime.close()


def test_the_end_waits_for_a_read_that_runs_and_is_bounded() -> None:
    bench = Bench(close_timeout_s=1.5)
    load = bench.load("a", 27)
    pair = bench.pair.__enter__()
    pair.keep(load)
    with bench.reading[0].hold(), bench.reading[1].hold():
        pair.pull(load)
        until(lambda: all(engine.running for engine in bench.reading))
        closing = threading.Thread(target=pair.close)
        closing.start()
        time.sleep(0.2)
        assert closing.is_alive()
    closing.join(20)
    assert not closing.is_alive()
    assert not any(engine.running for engine in bench.reading)


def test_threads_that_pack_end_although_a_read_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "_READ_JOIN_S", 0.1)
    runtime, go_on = lone(producing(consumer=ConsumerConfig(), staging=STAGED["staging"])), threading.Event()
    runtime.start()
    runtime._read_pool.submit(lambda: until(go_on.is_set))
    runtime._gather_pool.submit(lambda: None)
    runtime.close()
    assert not any(thread.name.startswith("mht-gather") for thread in threading.enumerate())
    go_on.set()


@pytest.mark.parametrize("dead", [True, False])
def test_rings_go_only_when_the_engine_has_let_go_of_them(*, dead: bool) -> None:
    class Lingering(LoopbackEngine):
        def close(self) -> bool:
            return super().close() and dead

    freed: list[RingSize] = []

    def make_ring(size: RingSize) -> StagingRing:
        return StagingRing(host_ring(size).address_of(0), size, lambda: freed.append(size))

    rank = build_rank(SideSpec(), [Layer("a")], 2, Rank(), Arena(1 << 16))
    config = producing(consumer=ConsumerConfig(), staging=STAGED["staging"])
    runtime = WorkerRuntime(config, IDENTITY, rank.table, Lingering(LoopbackFabric()), make_ring=make_ring)
    runtime.start()
    runtime.close()
    assert len(freed) == (2 if dead else 0)


def test_draft_layers_the_producer_lacks_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """vllm#49230: only the decode engine drafts."""
    like = Dense(heads=2, layers=2)
    draft = msgspec.structs.replace(Dense(heads=2, layers=3, base=DST).table(), draft_layers=("layers.2",))
    runtime = WorkerRuntime(
        RuntimeConfig(host="127.0.0.1", consumer=ConsumerConfig()), IDENTITY, draft, LoopbackEngine(LoopbackFabric())
    )
    with caplog.at_level("WARNING"):
        plans = runtime._plan(draft, {Rank(): like.table()})
    assert [plan.layers for plan in plans.values()] == [("layers.0", "layers.1")]
    assert [record.getMessage().count("no draft layers layers.2") for record in caplog.records] == [1]
    caplog.clear()
    runtime._plan(draft, {Rank(): Dense(heads=2, layers=3).table()})
    assert caplog.records == []
