"""environment: vLLM's variables and rank rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_hetero_tp.config import Environment, HeteroTPConfig, HostPort
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Rank
from mooncake_hetero_tp.vllm_adapter.environment import (
    advertised_bootstrap,
    bootstrap_target,
    launches_bootstrap,
    read_config,
    read_environment,
    refuse_context_parallelism,
    registered_dp_rank,
)

OWN = HeteroTPConfig.from_extra_config({})
SHARED = HeteroTPConfig.from_extra_config({"bootstrap_server_address": "boot:9000"})


def config(**parallel: Any) -> Any:
    values = {
        "data_parallel_index": 0,
        "data_parallel_rank_local": 0,
        "data_parallel_master_ip": "127.0.0.1",
        "master_addr": "10.0.0.9",
        "local_engines_only": False,
        "nnodes_within_dp": 1,
    } | parallel
    return SimpleNamespace(parallel_config=SimpleNamespace(**values))


def test_vllms_variables_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ABORT_REQUEST_TIMEOUT", "CONNECTOR_TIMEOUT", "BOOTSTRAP_PORT"):
        monkeypatch.delenv(f"VLLM_MOONCAKE_{name}", raising=False)
    assert read_environment() == Environment()
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "60")
    monkeypatch.setenv("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "2.5")
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9998")
    assert read_environment() == Environment(keep_s=60.0, connector_timeout_s=2.5, bootstrap_port=9998)


def test_a_variable_that_does_not_parse_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "many")
    with pytest.raises(ConfigError, match="VLLM_MOONCAKE_BOOTSTRAP_PORT: expected a number"):
        read_environment()


def test_settings_come_from_the_transfer_config() -> None:
    transfer = SimpleNamespace(kv_connector_extra_config={"mooncake_protocol": "tcp"})
    assert read_config(SimpleNamespace(kv_transfer_config=transfer)).mooncake_protocol == "tcp"


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2"):
        refuse_context_parallelism(config(**{name: 2}))
    refuse_context_parallelism(config(**{name: 1}))


@pytest.mark.parametrize(
    "parallel,settings,expected",
    [
        ({"data_parallel_index": 5, "data_parallel_rank_local": 1}, OWN, 5),
        ({"data_parallel_index": 5, "data_parallel_rank_local": 1, "local_engines_only": True}, OWN, 1),
        ({"data_parallel_index": 5, "data_parallel_rank_local": 1, "local_engines_only": True}, SHARED, 5),
        ({"data_parallel_index": 5, "data_parallel_rank_local": None, "local_engines_only": True}, OWN, 5),
    ],
)
def test_dp_rank_is_local_only_at_an_own_server(
    parallel: dict[str, Any], settings: HeteroTPConfig, expected: int
) -> None:
    """vllm#51531: sixteen engines on two nodes, local ranks 0..7 twice, one server."""
    assert registered_dp_rank(config(**parallel), settings) == expected


def test_sixteen_engines_on_two_nodes_register_apart() -> None:
    ranks = [
        registered_dp_rank(
            config(data_parallel_index=index, data_parallel_rank_local=index % 8, local_engines_only=True), SHARED
        )
        for index in range(16)
    ]
    assert sorted(ranks) == list(range(16))


@pytest.mark.parametrize(
    "rank,parallel,settings,expected",
    [
        (Rank(), {}, OWN, True),
        (Rank(), {}, SHARED, False),
        (Rank(tp=1), {}, OWN, False),
        (Rank(pp=1), {}, OWN, False),
        (Rank(), {"data_parallel_index": 1}, OWN, False),
        (Rank(), {"data_parallel_index": 8, "local_engines_only": True}, OWN, True),
    ],
)
def test_one_worker_launches_the_bootstrap_server(
    rank: Rank, parallel: dict[str, Any], settings: HeteroTPConfig, expected: bool
) -> None:
    assert launches_bootstrap(config(**parallel), settings, rank) is expected


def test_where_workers_register_and_consumers_ask() -> None:
    assert bootstrap_target(config(), OWN) == HostPort("127.0.0.1", 8998)
    assert bootstrap_target(config(), SHARED) == HostPort("boot", 9000)
    assert bootstrap_target(config(nnodes_within_dp=2), OWN) == HostPort("10.0.0.9", 8998)
    assert bootstrap_target(config(data_parallel_master_ip="10.0.0.3"), OWN) == HostPort("10.0.0.3", 8998)
    assert bootstrap_target(config(local_engines_only=True, nnodes_within_dp=2), OWN).host == "127.0.0.1"
    assert advertised_bootstrap(config(), OWN, "10.1.1.1") == "http://10.1.1.1:8998"
    assert advertised_bootstrap(config(), OWN, "fd00::1") == "http://[fd00::1]:8998"
    assert advertised_bootstrap(config(), SHARED, "10.1.1.1") == "http://boot:9000"
