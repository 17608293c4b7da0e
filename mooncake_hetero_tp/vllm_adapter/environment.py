"""vLLM's variables and parallel configuration: what this engine is told, and where it stands."""

from __future__ import annotations

import importlib
from typing import Any

from mooncake_hetero_tp.config import Environment, HeteroTPConfig, HostPort
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Rank

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})  # noqa: S104  # compared with, not bound to


def read_environment() -> Environment:
    """VLLM_MOONCAKE_* as this vLLM reads them; a vLLM without one of them gives its default.

    Raises:
        ConfigError: a variable that does not parse, by name.
    """
    default = Environment()
    return Environment(
        keep_s=float(_variable("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", default.keep_s)),
        connector_timeout_s=float(_variable("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", default.connector_timeout_s)),
        bootstrap_port=int(_variable("VLLM_MOONCAKE_BOOTSTRAP_PORT", default.bootstrap_port)),
    )


def _variable(name: str, default: float) -> float:
    envs = importlib.import_module("vllm.envs")
    try:
        value = getattr(envs, name, None)
    except ValueError as error:
        raise ConfigError(f"{name}: expected a number, got a value that is none ({error}); correct it") from error
    return default if value is None else float(value)


def read_config(vllm_config: Any) -> HeteroTPConfig:
    """The connector's settings out of vLLM's configuration and variables."""
    return HeteroTPConfig.from_extra_config(
        vllm_config.kv_transfer_config.kv_connector_extra_config, read_environment()
    )


def refuse_context_parallelism(vllm_config: Any) -> None:
    """Context parallelism spreads one page's tokens over ranks, which no table here says.

    Raises:
        ConfigError: names the setting.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name}={size}: this connector needs 1; remove the setting")


def registered_dp_rank(vllm_config: Any, config: HeteroTPConfig) -> int:
    """The data-parallel rank an engine goes by at its bootstrap server.

    An engine with a server of its own uses the node-local rank, as vLLM does and routers expect; at a
    shared server those would collide (vllm#51531), so the global rank is used there.
    """
    parallel = vllm_config.parallel_config
    local = getattr(parallel, "data_parallel_rank_local", None)
    if _local_engines_only(parallel) and config.bootstrap_server_address is None and local is not None:
        return int(local)
    return int(parallel.data_parallel_index)


def launches_bootstrap(vllm_config: Any, config: HeteroTPConfig, rank: Rank) -> bool:
    """Whether this worker runs the engine's bootstrap server: the first rank of the first engine of its kind."""
    if config.bootstrap_server_address is not None or rank.tp != 0 or rank.pp != 0:
        return False
    return registered_dp_rank(vllm_config, config) == 0


def bootstrap_target(vllm_config: Any, config: HeteroTPConfig) -> HostPort:
    """Where the workers of this engine register."""
    if config.bootstrap_server_address is not None:
        return config.bootstrap_server_address
    parallel = vllm_config.parallel_config
    port = config.environment.bootstrap_port
    if _local_engines_only(parallel):
        return HostPort("127.0.0.1", port)
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        return HostPort(str(parallel.master_addr), port)
    return HostPort(str(parallel.data_parallel_master_ip), port)


def advertised_bootstrap(vllm_config: Any, config: HeteroTPConfig, own_host: str) -> str:
    """The bootstrap's URL for consumers: a loopback target becomes this host's own address."""
    target = bootstrap_target(vllm_config, config)
    host = own_host if target.host in _LOOPBACK else target.host
    return f"http://{HostPort(host, target.port)}"


def _local_engines_only(parallel: Any) -> bool:
    return bool(getattr(parallel, "local_engines_only", False))
