"""Our layouts against the memory that the installed vLLM really allocates, and its rule for pipeline stages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from mooncake_hetero_tp.cli.case import read_case
from mooncake_hetero_tp.cli.memory import engine_memory, refusals, stage_layers
from mooncake_hetero_tp.core.layout import DIMS, VLLM_LAYOUTS, KVLayout
from mooncake_hetero_tp.types import Rank

pytestmark = pytest.mark.vllm

LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
BLOCKS = 5
ITEM_BYTES = 2


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    return VllmConfig()


def allocate(
    vllm_config: Any, layout: str, heads: int, block_size: int, kernel: int | None = None, padded: int | None = None
) -> dict[str, torch.Tensor]:
    """What a worker's `register_kv_caches` gets for one group of like layers (head size 8, bf16)."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16, page_size_padded=padded
    )
    vllm_config.cache_config.kv_cache_layout = layout
    memory = spec.page_size_bytes * len(LAYERS) * BLOCKS
    config = get_kv_cache_config_from_groups(vllm_config, [KVCacheGroupSpec(list(LAYERS), spec)], memory)
    assert config.num_blocks == BLOCKS
    views: dict[str, torch.Tensor] = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout[layout], None if kernel is None else [kernel]
    )
    return views


def strides_of(views: dict[str, torch.Tensor]) -> dict[str, int]:
    """Byte strides of the views; L from the distance of the layers' first elements."""
    starts = [views[name].data_ptr() for name in LAYERS]
    gaps = {right - left for left, right in pairwise(starts)}
    assert len(gaps) == 1
    return {"L": gaps.pop(), **dict(zip("BHNC", (s * ITEM_BYTES for s in views[LAYERS[0]].stride()), strict=True))}


def counts_of(views: dict[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(DIMS, (len(LAYERS), *views[LAYERS[0]].shape), strict=True))


def test_we_know_vllms_layouts() -> None:
    assert tuple(KVCacheLayout.__members__) == VLLM_LAYOUTS
    for name, member in KVCacheLayout.__members__.items():
        layout = KVLayout.from_name(name)
        assert tuple(DIMS.index(dim) for dim in layout.order) == member.stride_order
        assert layout.is_page_outermost == member.is_block_compact


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_strides_are_those_of_the_real_allocation(vllm_config: Any, layout: str, heads: int, block_size: int) -> None:
    views = allocate(vllm_config, layout, heads, block_size)
    ours = KVLayout.from_name(layout).strides(counts_of(views), ITEM_BYTES)
    assert ours == strides_of(views)


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_elements_lie_where_the_strides_say(vllm_config: Any, layout: str) -> None:
    """Write through vLLM's views, read through our strides."""
    views = allocate(vllm_config, layout, 2, 16)
    counts = counts_of(views)
    strides = KVLayout.from_name(layout).strides(counts, ITEM_BYTES)
    total = len(LAYERS) * BLOCKS * 2 * 16 * 16
    ids = torch.arange(total, dtype=torch.int16).view(torch.bfloat16).reshape(tuple(counts.values()))
    for place, name in enumerate(LAYERS):
        views[name].copy_(ids[place])
    raw = views[LAYERS[0]].untyped_storage()
    flat = torch.tensor([], dtype=torch.bfloat16).set_(raw)
    read = torch.as_strided(flat, tuple(counts.values()), [strides[dim] // ITEM_BYTES for dim in DIMS])
    assert torch.equal(read.view(torch.int16), ids.view(torch.int16))


def plan_memory(side: dict[str, object]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Shape and strides of the same cache in the memory of `mooncake-hetero-tp plan`; None where it refuses."""
    layers = [{"name": name, "kind": "attention", "kv_heads": 2, "head_size": 8} for name in LAYERS]
    full = {"tp": 1, "block_size": 16, "num_blocks": BLOCKS, **side}
    case = read_case({"producer": full, "consumer": full, "dtype": "bfloat16", "layers": layers})
    if refusals(case):
        return None
    array = engine_memory(case, "producer")[Rank()].arrays[0]
    return array.shape, array.strides


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_padded_pages(vllm_config: Any, layout: str) -> None:
    ours = plan_memory({"layout": layout, "page_size_padded": 1280})
    try:
        views = allocate(vllm_config, layout, 2, 16, padded=1280)
    except AssertionError:
        assert ours is None
        return
    assert ours == (counts_of(views), strides_of(views))


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_kernel_blocks(vllm_config: Any, layout: str) -> None:
    ours = plan_memory({"layout": layout, "kernel_block_size": 4})
    try:
        views = allocate(vllm_config, layout, 2, 16, kernel=4)
    except ValueError:
        assert ours is None
        return
    assert ours == (counts_of(views), strides_of(views))


def test_stages_hold_the_layers_that_vllm_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for count in (1, 2, 3, 5, 8, 12, 31, 61, 80):
        for pp in range(1, 10):
            assert [(stage.start, stage.stop) for stage in stage_layers(count, pp)] == [
                get_pp_indices(count, rank, pp) for rank in range(pp)
            ]
