"""specs: what a group still needs, by vLLM's own spec classes."""

from __future__ import annotations

import torch
from vllm.v1 import kv_cache_interface as kinds

from mooncake_hetero_tp.vllm_adapter.specs import chunk_of, is_latent, is_state_group, kind_of, layer_specs, window_of

COMMON = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}


def group(spec: kinds.KVCacheSpec) -> kinds.KVCacheGroupSpec:
    return kinds.KVCacheGroupSpec(["a", "b"], spec)


def test_full_attention_needs_everything() -> None:
    full = group(kinds.FullAttentionSpec(**COMMON))
    assert (kind_of(full), window_of(full), chunk_of(full)) == ("full_attention", None, None)
    assert [name for name, _ in layer_specs(full)] == ["a", "b"]


def test_a_full_attention_group_that_computes_a_window_still_needs_everything() -> None:
    """With the hybrid allocator off vLLM keeps all blocks of window layers."""
    assert window_of(group(kinds.FullAttentionSpec(**COMMON, sliding_window=24))) is None


def test_window_and_retained_tokens() -> None:
    window = group(kinds.SlidingWindowSpec(**COMMON, sliding_window=24, extra_retained_tokens=3))
    assert (kind_of(window), window_of(window)) == ("sliding_window", 27)


def test_chunks() -> None:
    chunked = group(kinds.ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=64))
    assert (kind_of(chunked), chunk_of(chunked)) == ("chunked_local_attention", 64)


def test_uniform_groups_are_taken_apart() -> None:
    specs = {
        "a": kinds.MLAAttentionSpec(**COMMON),
        "b": kinds.MLAAttentionSpec(**(COMMON | {"head_size": 16})),
    }
    uniform = group(kinds.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    assert dict(layer_specs(uniform)) == specs
    assert all(is_latent(spec) for spec in specs.values())
    assert kind_of(uniform) == "mla_attention"


def test_states_are_known_by_their_spec() -> None:
    states = group(kinds.MambaSpec(block_size=384, shapes=((3, 8),), dtypes=(torch.float32,)))
    assert (is_state_group(states), window_of(states), chunk_of(states)) == (True, None, None)
    assert not is_state_group(group(kinds.FullAttentionSpec(**COMMON)))
