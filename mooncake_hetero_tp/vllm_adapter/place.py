"""What the probe asks about: one worker of an engine, with vLLM's own objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Encoding


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
    backend_encodings: Mapping[str, Encoding] = field(default_factory=dict)
    """The setting: encodings that the operator declared, by backend."""


def module_of(engine: Engine, name: str) -> Any:
    """The attention module of a layer.

    Raises:
        ConfigError: vLLM has none of this name.
    """
    module = engine.vllm_config.compilation_config.static_forward_context.get(name)
    if module is None:
        raise ConfigError(f"{name}: vLLM knows no attention module of this name, so its backend is unknown")
    return module
