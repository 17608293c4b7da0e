"""What the probe asks about: one worker of an engine, with vLLM's own objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mooncake_hetero_tp.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker stands in its engine."""

    tp_size: int
    tp_rank: int
    pp_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """vLLM's configuration, the connector's KVCacheConfig and the place."""

    vllm_config: Any
    kv_cache_config: Any
    """The one the connector was given; the model runner's copy has KV-sharing aliases added."""
    place: Place


def module_of(engine: Engine, name: str) -> Any:
    """The attention module of a layer.

    Raises:
        ConfigError: vLLM has none of this name.
    """
    module = engine.vllm_config.compilation_config.static_forward_context.get(name)
    if module is None:
        raise ConfigError(f"{name}: vLLM knows no attention module of this name, so its backend is unknown")
    return module
