"""connector: every hook on real connector objects, two engines in one process, every byte checked."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.request import Request, RequestStatus

from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError
from mooncake_hetero_tp.vllm_adapter import worker as worker_module
from tests.unit.connector_pair import (
    Bench,
    RankEngine,
    admit,
    assert_request,
    connector_bench,
    region_values,
    write_request,
)
from tests.unit.vllm_adapter.doubles import Model, stub_vllm_config
from tests.unit.vllm_adapter.requests import PREFILL, finish, make_request

P_BLOCKS, D_BLOCKS = [3, 9, 4, 7, 11], [5, 2, 1]
TOKENS = 70


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with connector_bench(monkeypatch) as made:
        yield made


def producer_model(_rank: int) -> Model:
    """TP1, blocks of 16, CPU attention's halves."""
    return Model(heads=4, head_size=8, block_size=16, num_blocks=12, backend="CPU_ATTN", isa="vec")


def consumer_model(rank: int) -> Model:
    """TP2, blocks of 32, K and V packed, block-outermost."""
    return Model(heads=4, head_size=8, block_size=32, num_blocks=6, layout="BLHNC", tp_size=2, tp_rank=rank)


@pytest.fixture
def pair(bench: Bench) -> tuple[RankEngine, RankEngine]:
    producer = bench.add(producer_model, 1, "kv_producer", "P")
    return producer, bench.add(consumer_model, 2, "kv_consumer", "D")


def prefill(producer: RankEngine, name: str = "p", transfer_id: str = "t1") -> dict[str, Any]:
    """Run a prefill and hand it over; the answer that a proxy gives to the consumer."""
    request = make_request(name, TOKENS, PREFILL | {"transfer_id": transfer_id})
    assert admit(producer, request, P_BLOCKS) == 0
    write_request(producer, P_BLOCKS, TOKENS)
    done = finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
    kept, reply = producer.scheduler.request_finished_all_groups(done, (P_BLOCKS,))
    assert kept
    assert reply is not None
    return reply


def decode(consumer: RankEngine, reply: dict[str, Any], name: str = "d", local: int = 0) -> Request:
    request = make_request(name, TOKENS, reply)
    assert admit(consumer, request, D_BLOCKS, local=local) == TOKENS - 1 - local
    return request


def test_a_pull_converts_everything_and_frees_the_producer(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, consumer = pair
    request = decode(consumer, prefill(producer))
    output = bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    assert (output.finished_recving, output.failed_recving) == ({"d"}, set())
    assert_request(consumer, D_BLOCKS, TOKENS - 1)
    assert bench.until(lambda out: bool(out.finished_sending), producer).finished_sending == {"p"}
    assert bench.stats["bytes_pulled"] == (TOKENS - 1) * 2 * 4 * 2 * 8 * 4, "layers x heads x (K, V) x size x item"
    assert bench.stats["loads_done"] == 2, "one a rank"
    done = finish(request, RequestStatus.FINISHED_STOPPED)
    assert consumer.scheduler.request_finished_all_groups(done, (D_BLOCKS,)) == (False, None)


def test_a_prefix_hit_keeps_what_is_there(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, consumer = pair
    for table, views in zip(consumer.tables(), consumer.views, strict=True):
        for index in range(len(table.regions)):
            region_values(table, index, views).fill_(7.0)
    decode(consumer, prefill(producer), local=32)
    bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    assert_request(consumer, D_BLOCKS, TOKENS - 1, first=32)
    for table, views in zip(consumer.tables(), consumer.views, strict=True):
        for index in range(len(table.regions)):
            assert bool((region_values(table, index, views)[D_BLOCKS[0]] == 7.0).all())


def test_the_consumer_may_come_first(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    """Proxies call both sides at once."""
    producer, consumer = pair
    reply = {
        "do_remote_prefill": True,
        "transfer_id": "t1",
        "remote_engine_id": "P",
        "remote_bootstrap_addr": producer_bootstrap(producer),
    }
    decode(consumer, reply)
    for _ in range(20):
        assert not consumer.step().finished_recving
    prefill(producer)
    bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    assert_request(consumer, D_BLOCKS, TOKENS - 1)


def producer_bootstrap(producer: RankEngine) -> str:
    side = producer.scheduler._scheduler_side
    assert side is not None
    assert side._producer is not None
    return side._producer._bootstrap


def test_a_failed_read_is_reported_with_the_request(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    """As failed_recving plus finished_recving; the producer is let go all the same."""
    producer, consumer = pair
    for transport in bench.transports[1:]:
        transport.fail(100)
    request = decode(consumer, prefill(producer))
    output = bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    assert (output.finished_recving, output.failed_recving) == ({"d"}, {"d"})
    assert output.invalid_block_ids == set()
    assert bench.until(lambda out: bool(out.finished_sending), producer).finished_sending == {"p"}
    assert consumer.scheduler.get_num_new_matched_tokens(request, 0) == (0, False), "single use"


def test_abort_while_loading_is_reported_once(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, consumer = pair
    with bench.transports[1].hold(), bench.transports[2].hold():
        request = decode(consumer, prefill(producer))
        bench.until(lambda _: all(transport.running for transport in bench.transports[1:]), consumer, producer)
        aborted = finish(request, RequestStatus.FINISHED_ABORTED)
        assert consumer.scheduler.request_finished_all_groups(aborted, (D_BLOCKS,)) == (False, None)
        for _ in range(20):
            assert not consumer.step().finished_recving, "a read is still running"
    output = bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    assert output.finished_recving == {"d"}
    assert bench.until(lambda out: bool(out.finished_sending), producer).finished_sending == {"p"}


@pytest.mark.parametrize("how", ["abort before schedule", "full local hit"])
def test_what_needs_no_load_frees_the_producer(bench: Bench, pair: tuple[RankEngine, RankEngine], how: str) -> None:
    """vllm#50425: the producer held such blocks for 480 s."""
    producer, consumer = pair
    request = make_request("d", TOKENS, prefill(producer))
    if how == "full local hit":
        assert admit(consumer, request, D_BLOCKS, local=TOKENS - 1) == 0
    else:
        consumer.scheduler.on_new_request(request)
        consumer.scheduler.request_finished_all_groups(finish(request, RequestStatus.FINISHED_ABORTED), ([],))
    assert bench.until(lambda out: bool(out.finished_sending), producer).finished_sending == {"p"}
    assert not consumer.step().finished_recving


def test_an_aborted_prefill_fails_the_waiting_load_at_once(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, consumer = pair
    request = make_request("p", TOKENS, PREFILL)
    admit(producer, request, P_BLOCKS)
    decode(
        consumer,
        {
            "do_remote_prefill": True,
            "transfer_id": "t1",
            "remote_engine_id": "P",
            "remote_bootstrap_addr": producer_bootstrap(producer),
        },
    )
    for _ in range(10):
        consumer.step()
    aborted = finish(request, RequestStatus.FINISHED_ABORTED, computed=32)
    assert producer.scheduler.request_finished_all_groups(aborted, (P_BLOCKS,)) == (False, None)
    output = bench.until(lambda out: bool(out.finished_recving), producer, consumer)
    assert output.failed_recving == {"d"}
    assert not producer.step().finished_sending, "never for one it was not told to keep"


def test_children_of_one_request_each_load(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, consumer = pair
    reply = prefill(producer)
    tokens, blocks = 63, ([1, 2], [3, 4])
    for index, mine in enumerate(blocks):
        admit(consumer, make_request(f"{index}_d", tokens, reply), mine)
    ended: set[str] = set()
    while len(ended) < 2:
        output = bench.until(lambda out: bool(out.finished_recving), consumer, producer)
        ended |= output.finished_recving or set()
        assert not output.failed_recving
    for mine in blocks:
        assert_request(consumer, mine, tokens - 1)
    assert bench.until(lambda out: bool(out.finished_sending), producer).finished_sending == {"p"}


def test_a_restarted_producer_is_found_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#49238: every transfer failed until the survivor restarted too."""
    monkeypatch.setattr(worker_module, "ConsumerConfig", functools.partial(ConsumerConfig, silence_s=0.5))
    producer = bench.add(producer_model, 1, "kv_producer", "P")
    consumer = bench.add(consumer_model, 2, "kv_consumer", "D")
    decode(consumer, prefill(producer))
    bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    producer.workers[0].unregister_kv_caches()
    producer.workers[0].unregister_kv_caches()
    bench.place = (0, 1)
    producer.workers[0].restore_kv_caches()
    producer.workers[0].restore_kv_caches()
    for views in consumer.views:
        for view in views.values():
            view.zero_()
    decode(consumer, prefill(producer, "p2", "t2"), "d2")
    output = bench.until(lambda out: bool(out.finished_recving), consumer, producer)
    assert (output.finished_recving, output.failed_recving) == ({"d2"}, set())
    assert_request(consumer, D_BLOCKS, TOKENS - 1)


def test_shutdown_is_idempotent_and_leaves_no_thread(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    del pair
    for _ in range(2):
        for engine in bench.engines:
            engine.shutdown()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("mht-")]
    assert left == []
    assert all(not transport.registered for transport in bench.transports)


def test_an_engine_whose_runtime_is_gone_stays_up(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, consumer = pair
    reply = prefill(producer)
    producer.step()
    for worker in consumer.workers:
        worker.unregister_kv_caches()
    decode(consumer, reply)
    output = bench.until(lambda out: bool(out.finished_recving), consumer)
    assert (output.finished_recving, output.failed_recving) == ({"d"}, {"d"})
    producer.workers[0].unregister_kv_caches()
    prefill(producer, "p2", "t2")
    assert "p2" in (bench.until(lambda out: bool(out.finished_sending), producer).finished_sending or ())


# --- the class ------------------------------------------------------------------------------------


def test_vllm_loads_it_by_module_path() -> None:
    transfer = stub_vllm_config(Model()).kv_transfer_config
    transfer.kv_connector_module_path = "mooncake_hetero_tp.connector"
    assert KVConnectorFactory.get_connector_class(transfer) is MooncakeHeteroTPConnector
    assert base.supports_hma(MooncakeHeteroTPConnector)


def test_every_hook_takes_what_vllm_passes() -> None:
    assert not inspect.isabstract(MooncakeHeteroTPConnector)
    for name, theirs in inspect.getmembers(base.KVConnectorBase_V1, callable):
        ours = getattr(MooncakeHeteroTPConnector, name)
        if name.startswith("_") or ours is theirs or getattr(ours, "__func__", None) is theirs:
            continue
        wanted = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted, name


def test_it_wishes_for_a_head_major_layout_but_not_for_mla() -> None:
    config = stub_vllm_config(Model())
    assert MooncakeHeteroTPConnector.get_required_kvcache_layout(config) == "LBHNC"
    config.model_config.use_mla = True
    assert MooncakeHeteroTPConnector.get_required_kvcache_layout(config) is None
    assert MooncakeHeteroTPConnector.get_required_kvcache_layout(SimpleNamespace(model_config=None)) is None


def test_it_does_not_sleep_and_needs_no_piecewise_graphs() -> None:
    assert MooncakeHeteroTPConnector.supports_sleep_mode(None) is False
    assert MooncakeHeteroTPConnector.requires_piecewise_for_cudagraph({}) is False


def test_all_transfer_groups_are_loaded(bench: Bench) -> None:
    engine = bench.add(producer_model, 1, "kv_both", "E")
    assert engine.scheduler.get_loaded_kv_cache_group_ids(make_request("r")) == (0,)


def test_an_unknown_setting_stops_the_start() -> None:
    config = stub_vllm_config(Model(), "kv_both", "E", mooncake_protocoll="tcp")
    for role in base.KVConnectorRole:
        with pytest.raises(ConfigError, match="Did you mean 'mooncake_protocol'"):
            MooncakeHeteroTPConnector(config, role, Model().cache_config())


def test_a_hook_of_the_other_role_is_named(bench: Bench) -> None:
    engine = bench.add(producer_model, 1, "kv_both", "E")
    with pytest.raises(LocalUsageError, match="worker-side hook"):
        engine.scheduler.register_kv_caches({})
    with pytest.raises(LocalUsageError, match="scheduler-side hook"):
        engine.workers[0].on_new_request(make_request("r"))
    assert engine.scheduler.get_kv_connector_stats() is None


def test_the_older_hook_gives_the_same_sets(bench: Bench, pair: tuple[RankEngine, RankEngine]) -> None:
    producer, _ = pair
    prefill(producer)
    producer.step()
    assert producer.workers[0].get_finished(set()) == (None, None)
