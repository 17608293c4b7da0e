"""ranges: the tokens that the next token still reads, as vLLM's own managers count them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager

from mooncake_hetero_tp.types import TokenRange
from mooncake_hetero_tp.vllm_adapter.ranges import GroupReach, load_ranges, reach_of

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}


def reach(spec: Any) -> GroupReach:
    return reach_of(kinds.KVCacheGroupSpec(["layer"], spec))


def test_full_attention_reads_everything() -> None:
    full = reach(kinds.FullAttentionSpec(**COMMON))
    assert not full.is_partial
    assert load_ranges([full], 32, 69, whole_pages=True) == (TokenRange(32, 69),)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("extra", [0, 3])
def test_windows_agree_with_vllm(window: int, extra: int) -> None:
    spec = kinds.SlidingWindowSpec(**COMMON, sliding_window=window, extra_retained_tokens=extra)
    manager = SimpleNamespace(sliding_window=window, extra_retained_tokens=extra, kv_cache_spec=spec)
    for end in range(1, 100):
        skipped = SlidingWindowManager.get_num_skipped_tokens(manager, end)
        assert reach(spec).first_read(end) == skipped, end


@pytest.mark.parametrize("chunk", [16, 24, 64])
def test_chunks_agree_with_vllm(chunk: int) -> None:
    spec = kinds.ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=chunk)
    manager = SimpleNamespace(attention_chunk_size=chunk, kv_cache_spec=spec)
    for end in range(1, 200):
        skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(manager, end)
        assert reach(spec).first_read(end) == skipped, end


def test_a_window_is_loaded_exactly_or_from_the_start_of_its_page() -> None:
    """A page that prefix caching will offer to others must be whole."""
    window = GroupReach(block_size=16, window=24)
    assert window.is_partial
    assert load_ranges([window], 0, 69, whole_pages=False) == (TokenRange(46, 69),)
    assert load_ranges([window], 0, 69, whole_pages=True) == (TokenRange(32, 69),)
    assert load_ranges([window], 64, 69, whole_pages=True) == (TokenRange(64, 69),)


def test_a_chunk_that_begins_with_the_next_token_needs_nothing() -> None:
    assert load_ranges([GroupReach(block_size=16, chunk=64)], 0, 64, whole_pages=True) == (TokenRange(64, 64),)


def test_a_state_is_loaded_whole_and_ends_a_prefill_exactly() -> None:
    states = GroupReach(block_size=384, is_state=True)
    assert states.is_partial
    assert load_ranges([states], 100, 1000, whole_pages=True) == (TokenRange(100, 1000),)
    assert load_ranges([states], 1000, 1000, whole_pages=True)[0].count == 0
