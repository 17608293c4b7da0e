"""What vLLM's KV cache specs mean for a transfer: which kinds are carried, which are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1 import kv_cache_interface as kinds

from mooncake_hetero_tp.errors import ConfigError

_CARRIED = (kinds.FullAttentionSpec, kinds.SlidingWindowSpec, kinds.ChunkedLocalAttentionSpec)
_REFUSED = (kinds.SinkFullAttentionSpec, kinds.HiddenStateCacheSpec)
"""Subclasses of the carried ones whose pages hold something else."""
_STATE_MODES = ("none", "align")
"""`mamba_cache_mode`s in which the state after `end` tokens is in the slot of the last of them."""


def layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """(layer name, its own spec) of a KVCacheGroupSpec, `UniformTypeKVCacheSpecs` taken apart."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for name in group.layer_names:
        yield name, per_layer.get(name, group.kv_cache_spec)


def kind_of(group: Any) -> str:
    """A group's kind by vLLM's own name, e.g. `full_attention`."""
    return str(kinds.get_kv_cache_spec_kind(group.kv_cache_spec).value)


def is_latent(spec: Any) -> bool:
    """MLA: one latent row a token, the same on every TP rank."""
    return isinstance(spec, kinds.MLAAttentionSpec | kinds.SlidingWindowMLASpec)


def is_state(spec: Any) -> bool:
    """Mamba, linear attention, short convolution: one state a request instead of a row a token."""
    return isinstance(spec, kinds.MambaSpec)


def is_state_group(group: Any) -> bool:
    """Whether the blocks of a group are slots of states."""
    return any(is_state(spec) for _, spec in layer_specs(group))


def window_of(group: Any) -> int | None:
    """Tokens before the next one that a sliding-window group still reads, itself included; None: all."""
    specs = [spec for _, spec in layer_specs(group) if isinstance(spec, kinds.SlidingWindowSpec)]
    if not specs:
        return None
    return max(int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0)) for spec in specs)


def chunk_of(group: Any) -> int | None:
    """Chunk length of a chunked-local-attention group; None: not chunked."""
    specs = [spec for _, spec in layer_specs(group) if isinstance(spec, kinds.ChunkedLocalAttentionSpec)]
    return int(specs[0].attention_chunk_size) if specs else None


def refuse_unsupported(kv_cache_config: Any) -> None:
    """Refuse, at start-up and by name, every layer kind this connector cannot carry yet.

    Raises:
        ConfigError: names the layer, its kind, the reason and what to do.
    """
    for group in kv_cache_config.transfer_groups:
        for name, spec in layer_specs(group):
            if reason := _why_not(group, spec):
                raise ConfigError(
                    f"{name}: {type(spec).__name__} KV cache cannot be transferred by this connector: {reason}. "
                    "Serve this model without KV transfer, or with a connector that carries it"
                )


def _why_not_state(spec: Any) -> str | None:
    """Slots are found by the end of the load, so only the newest state of a request may count."""
    if spec.mamba_cache_mode not in _STATE_MODES:
        return f"only the newest state of a request moves, not those of --mamba-cache-mode {spec.mamba_cache_mode}"
    return None


def _why_not(group: Any, spec: Any) -> str | None:
    """The reason why a layer is refused, or None."""
    if is_state(spec):
        return _why_not_state(spec)
    if getattr(group, "host_resident", False):
        return "its blocks live in a host pool"
    if not getattr(spec, "has_layer_views", True):
        return "vLLM hands it over as a raw buffer without a layout"
    if not isinstance(spec, _CARRIED) or isinstance(spec, _REFUSED):
        return "its pages do not hold consecutive prompt tokens"
    if spec.tokens_per_state != 1:
        return f"it keeps one state for {spec.tokens_per_state} tokens"
    if getattr(spec, "model_version", None) is not None:
        return f"its page layout is that of {spec.model_version}"
    return None
