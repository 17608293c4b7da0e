"""scheduler: roles, group selection and vLLM's hook order."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.request import RequestStatus

from mooncake_hetero_tp.config import HeteroTPConfig
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import TokenRange
from mooncake_hetero_tp.vllm_adapter.scheduler import SchedulerSide
from tests.unit.vllm_adapter.doubles import Model
from tests.unit.vllm_adapter.requests import DECODE, PREFILL, Blocks, NotedReleases, finish, make_request

SETTINGS = HeteroTPConfig.from_extra_config({})


def engine_config(role: str, **parallel: Any) -> Any:
    values = {"data_parallel_index": 0, "data_parallel_master_ip": "127.0.0.1"} | parallel
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector="X", kv_role=role, engine_id="E"),
        parallel_config=SimpleNamespace(**values),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def side(role: str, kv_cache_config: Any = None) -> tuple[SchedulerSide, NotedReleases]:
    releases = NotedReleases()
    config = Model().cache_config() if kv_cache_config is None else kv_cache_config
    return SchedulerSide(engine_config(role), config, SETTINGS, "10.0.0.1", releases), releases


def finished(*, sending: set[str] | None = None, recving: set[str] | None = None) -> Any:
    return SimpleNamespace(finished_sending=sending, finished_recving=recving)


def test_a_producer_keeps_and_lets_go() -> None:
    producer, _ = side("kv_producer")
    request = make_request("r", 40, PREFILL)
    producer.on_new_request(request)
    assert producer.get_num_new_matched_tokens(request, 0) == (0, False)
    producer.update_state_after_alloc(request, Blocks([1, 2, 3]), 0)
    assert producer.build_connector_meta().is_empty
    kept, reply = producer.request_finished(finish(request, RequestStatus.FINISHED_LENGTH_CAPPED), ([1, 2, 3],))
    assert kept
    assert reply is not None
    assert reply["remote_engine_id"] == "E"
    assert reply["remote_bootstrap_addr"] == "http://10.0.0.1:8998"
    step = producer.build_connector_meta()
    assert [fact.request_id for fact in step.kept] == ["r"]
    assert producer.build_connector_meta().is_empty, "told once"
    producer.update_connector_output(finished(sending={"r"}))


def test_a_consumer_loads_and_releases() -> None:
    consumer, releases = side("kv_consumer")
    request = make_request("r", 40, DECODE)
    consumer.on_new_request(request)
    assert consumer.get_num_new_matched_tokens(request, 16) == (23, True)
    consumer.update_state_after_alloc(request, Blocks([1, 2, 3]), 23)
    (pull,) = consumer.build_connector_meta().pulls
    assert pull.ranges == (TokenRange(16, 39),)
    consumer.update_connector_output(finished(recving={"r"}))
    assert releases.sent == [("t1", "P", "http://p0:8998")]
    assert consumer.request_finished(finish(request, RequestStatus.FINISHED_STOPPED), ([1, 2, 3],)) == (False, None)


def test_both_roles_in_one_engine() -> None:
    both, releases = side("kv_both")
    first, second = make_request("p", 40, PREFILL), make_request("d", 40, DECODE)
    both.on_new_request(first)
    both.on_new_request(second)
    assert both.get_num_new_matched_tokens(first, 0) == (0, False)
    assert both.get_num_new_matched_tokens(second, 0) == (39, True)
    assert both.request_finished(finish(first, RequestStatus.FINISHED_STOPPED), ([1, 2, 3],))[0]
    assert both.request_finished(finish(second, RequestStatus.FINISHED_ABORTED), ([],)) == (False, None)
    assert len(releases.sent) == 1


@pytest.mark.parametrize(
    "role,params,words",
    [
        ("kv_producer", DECODE, "ask for a remote prefill, which this engine's kv_role"),
        ("kv_consumer", PREFILL, "ask for a prefill for another engine"),
        ("kv_both", DECODE | {"transfer_id": None}, "transfer_id is missing"),
        ("kv_both", ["do_remote_prefill"], "expected an object, got list"),
    ],
)
def test_what_cannot_be_transferred_is_served_without_and_said_once(
    caplog: pytest.LogCaptureFixture, role: str, params: Any, words: str
) -> None:
    served, releases = side(role)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "second"):
            request = make_request(name, 40, params)
            served.on_new_request(request)
            assert served.get_num_new_matched_tokens(request, 0) == (0, False)
            served.update_state_after_alloc(request, Blocks([1, 2, 3]), 0)
            assert served.request_finished(finish(request, RequestStatus.FINISHED_STOPPED), ([1],)) == (False, None)
    assert words in caplog.text
    assert caplog.text.count("served without KV transfer") == 1
    assert served.build_connector_meta().is_empty
    assert releases.sent == []


def test_plain_requests_pass_by(caplog: pytest.LogCaptureFixture) -> None:
    both, _ = side("kv_both")
    request = make_request("r", 40)
    with caplog.at_level(logging.WARNING):
        both.on_new_request(request)
    assert caplog.text == ""
    assert both.request_finished(finish(request, RequestStatus.FINISHED_STOPPED), ([1],)) == (False, None)


def test_groups_that_vllm_does_not_transfer_are_left_out() -> None:
    model = Model()
    config = model.cache_config()
    ring = kinds.CircularBufferSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=model.dtype)
    config.kv_cache_groups.insert(0, kinds.KVCacheGroupSpec(["ring"], ring, enable_kv_transfer=False))
    both, _ = side("kv_both", config)
    for request in (make_request("p", 40, PREFILL), make_request("d", 40, DECODE)):
        both.on_new_request(request)
        if request.request_id == "d":
            both.update_state_after_alloc(
                request, Blocks([9], [1, 2, 3]), both.get_num_new_matched_tokens(request, 0)[0]
            )
        else:
            both.request_finished(finish(request, RequestStatus.FINISHED_STOPPED), ([9], [4, 5, 6]))
    step = both.build_connector_meta()
    assert [ids.tolist() for ids in step.kept[0].blocks] == [[4, 5, 6]]
    assert [ids.tolist() for ids in step.pulls[0].blocks] == [[1, 2, 3]]


def test_null_blocks_keep_their_positions() -> None:
    """The unhashed list drops nulls and with them positions."""
    both, _ = side("kv_both", Model(window=20).cache_config())
    prefill, decode = make_request("p", 60, PREFILL), make_request("d", 60, DECODE)
    both.on_new_request(prefill)
    assert prefill.num_prompt_tokens == 59, "window groups: one token less, once"
    both.request_finished(finish(prefill, RequestStatus.FINISHED_LENGTH_CAPPED), ([0, 0, 7, 8],))
    both.on_new_request(decode)
    count, _ = both.get_num_new_matched_tokens(decode, 0)
    both.update_state_after_alloc(decode, Blocks([0, 0, 5, 6]), count)
    step = both.build_connector_meta()
    assert step.kept[0].blocks[0].tolist() == [0, 0, 7, 8]
    assert step.kept[0].computed_tokens == 59
    assert step.pulls[0].blocks[0].tolist() == [0, 0, 5, 6]
    assert step.pulls[0].ranges == (TokenRange(32, 59),)


def test_models_that_cannot_be_carried_stop_the_start() -> None:
    model = Model()
    mamba = kinds.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(model.dtype,), mamba_cache_mode="all")
    config = replace(model.cache_config(), kv_cache_groups=[kinds.KVCacheGroupSpec(model.names, mamba)])
    with pytest.raises(ConfigError, match="MambaSpec KV cache cannot be transferred"):
        side("kv_both", config)


def test_context_parallelism_stops_the_start() -> None:
    config = engine_config("kv_both", decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match="decode_context_parallel_size=2"):
        SchedulerSide(config, Model().cache_config(), SETTINGS, "10.0.0.1", NotedReleases())
