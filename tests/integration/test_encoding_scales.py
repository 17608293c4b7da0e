"""Quantised caches against the backends' own views: they write, our Regions read; and what unlike engines may exchange.

Triton's and FlashInfer's kernels need a GPU; the functions that say where values and scales lie run here as they are.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.b12x import B12xPagedAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode

from mooncake_hetero_tp.core.handshake import Sides, agree
from mooncake_hetero_tp.core.plan import plan_pulls, prove
from mooncake_hetero_tp.core.regions import RankTable, Region
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import IncompatiblePeer
from mooncake_hetero_tp.types import Rank
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from tests.unit.vllm_adapter.doubles import Model

pytestmark = pytest.mark.vllm

BYTES = torch.uint8


def quantised(model: Model, mode: KVQuantMode, dtype_name: str, **spec: Any) -> tuple[RankTable, dict[str, Any]]:
    """A rank's table and views; every layer's module says its cache dtype."""
    config = model.cache_config(model.spec(kv_quant_mode=mode, **spec))
    engine, views = model.engine(config), model.allocate(config)
    for module in engine.vllm_config.compilation_config.static_forward_context.values():
        module.kv_cache_dtype = dtype_name
    table = build_table(engine, views)
    validate_table(table)
    return table, views


def triton(layout: str, mode: KVQuantMode, dtype_name: str, **changes: Any) -> tuple[RankTable, dict[str, Any]]:
    model = Model(backend="TRITON_ATTN", head_size=32, layout=layout, layers=1, **changes)
    spec = TritonAttentionBackend.customize_spec(model.spec(kv_quant_mode=mode))
    return quantised(model, mode, dtype_name, state_content_bytes=spec.state_content_bytes)


def read(region: Region, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[page, token, unit, channel]` through the Region's own numbers."""
    raw = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0).view(dtype)
    item = region.item_bytes
    axes = (region.token, region.unit, region.channel)
    return raw.as_strided(
        (region.num_blocks, *(axis.count for axis in axes)),
        (region.block_stride // item, *(axis.stride // item for axis in axes)),
        (region.base - view.untyped_storage().data_ptr()) // item,
    )


def fill(view: torch.Tensor) -> None:
    view.view(BYTES).copy_(torch.randint(0, 120, view.view(BYTES).shape, dtype=BYTES))


MODES = [
    (KVQuantMode.FP8_PER_TOKEN_HEAD, "fp8_per_token_head", BYTES),
    (KVQuantMode.INT8_PER_TOKEN_HEAD, "int8_per_token_head", torch.int8),
    (KVQuantMode.INT4_PER_TOKEN_HEAD, "int4_per_token_head", BYTES),
]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("mode,name,dtype", MODES, ids=[row[1] for row in MODES])
def test_tritons_scales_are_where_it_looks_for_them(
    layout: str, mode: KVQuantMode, name: str, dtype: torch.dtype
) -> None:
    table, views = triton(layout, mode, name, dtype=dtype)
    ((layer, view),) = views.items()
    impl = object.__new__(TritonAttentionImpl)
    impl._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD  # the views as they are stored, not retyped to fp8
    keys, values = impl._pth_key_value_caches(view)
    scales = {"k.scale": impl._k_scale_cache, "v.scale": impl._v_scale_cache}
    fill(view)
    found = {region.component: region for region in table.regions}
    assert {region.encoding for region in table.regions} == {"packed.scales"}
    assert {region.layer for region in table.regions} == {layer}
    for component, cache in (("k", keys), ("v", values)):
        width = found[component].channel.count
        assert torch.equal(read(found[component], view, dtype), cache[..., :width])
    for component, scale in scales.items():
        assert torch.equal(read(found[component], view, torch.float32)[..., 0], scale)
    assert {component: region.dtype for component, region in found.items()} == {
        "k": name, "k.scale": "float32", "v": name, "v.scale": "float32",
    }  # fmt: skip


def test_a_head_takes_its_scales_along() -> None:
    producer, _ = triton("LBHNC", *MODES[0][:2], dtype=BYTES)
    consumer, _ = triton("BLNHC", *MODES[0][:2], dtype=BYTES, tp_size=2, tp_rank=1, block_size=32)
    plans = plan_pulls(consumer, {Rank(): producer})
    prove(consumer, plans)
    assert {(pair.consumer.component, pair.units) for pair in plans[Rank()].pairs} == {
        ("k", 2), ("k.scale", 2), ("v", 2), ("v.scale", 2),
    }  # fmt: skip


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


def flashinfer_views() -> Any:
    """`_nvfp4_kv_views` as vLLM has it; its module does not import without the flashinfer package."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "v1" / "attention" / "backends" / "flashinfer.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    function = next(node for node in tree.body if getattr(node, "name", None) == "_nvfp4_kv_views")
    scope: dict[str, Any] = {
        "torch": torch, "nvfp4_split_data_scale": nvfp4_split_data_scale, "_KVPair": tuple[torch.Tensor, torch.Tensor],
    }  # fmt: skip
    exec(compile(ast.Module([function], []), str(source), "exec"), scope)
    return scope["_nvfp4_kv_views"]


def nvfp4(layout: str = "LBHNC", **changes: Any) -> tuple[RankTable, dict[str, Any]]:
    model = replace(Model(backend="FLASHINFER", head_size=64, layers=1, dtype=BYTES, layout=layout), **changes)
    content = nvfp4_kv_cache_full_dim(model.head_size)
    slots = {"num_head_slots": 2 * model.local_heads, "state_content_bytes": content}
    return quantised(model, KVQuantMode.NVFP4, "nvfp4", **slots)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_nvfp4_pieces_are_where_flashinfer_looks_for_them(layout: str) -> None:
    table, views = nvfp4(layout)
    (view,) = views.values()
    fill(view)
    (k, v), (k_scale, v_scale), order = flashinfer_views()(view, 4)
    for region in table.regions:
        piece = {"k.data": k, "k.scale": k_scale, "v.data": v, "v.scale": v_scale}[region.component].view(BYTES)
        by_token = piece.transpose(1, 2) if order == "HND" else piece
        assert torch.equal(read(region, view, BYTES), by_token), region.component


def test_nvfp4_is_cut_between_heads_with_data_and_scales_together() -> None:
    """vllm#52516's review: a slot taken for a head moved scales to where data belong."""
    producer, _ = nvfp4()
    for rank in range(2):
        consumer, _ = nvfp4(tp_size=2, tp_rank=rank)
        plans = plan_pulls(consumer, {Rank(): producer})
        prove(consumer, plans)
        pairs = plans[Rank()].pairs
        assert sorted(pair.consumer.component for pair in pairs) == ["k.data", "k.scale", "v.data", "v.scale"]
        assert {cut for pair in pairs for cut in pair.cuts if (cut.global_start, cut.count) != (2 * rank, 2)} == set()


@pytest.mark.parametrize(
    "producer,consumer,field",
    [
        ({"layout": "LBNHC"}, {"layout": "LBNHC", "tp_size": 2}, "units of an opaque page"),
        ({"layout": "LBNHC"}, {}, "strides"),
        ({}, {"block_size": 32}, "kernel block size"),
    ],
)
def test_nvfp4_that_cannot_be_cut_or_converted_is_refused_by_name(
    producer: dict[str, Any], consumer: dict[str, Any], field: str
) -> None:
    with pytest.raises(
        IncompatiblePeer, match=rf"model.layers.0.self_attn.attn/k.data and [13] more: {field}"
    ) as caught:
        plan_pulls(nvfp4(**consumer)[0], {Rank(): nvfp4(**producer)[0]})
    assert all(mismatch.remedy for mismatch in caught.value.mismatches)


# --- slots, and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_b12x_finds_heads_where_our_regions_do_and_converts_to_packed(layout: str) -> None:
    model = Model(backend="B12X", head_size=64, layout=layout, layers=1, dtype=torch.bfloat16)
    content = model.local_heads * 64 * 2
    table, views = quantised(model, KVQuantMode.NONE, "auto", num_head_slots=2, state_content_bytes=content)
    (view,) = views.values()
    view.copy_(torch.randn(view.shape))
    stub = SimpleNamespace(num_kv_heads=4, head_size=64, kv_cache_dtype="auto", kv_torch_dtype=torch.bfloat16)
    for region, cache in zip(table.regions, B12xPagedAttentionImpl._kv_cache_views(stub, view), strict=True):
        assert torch.equal(read(region, view, torch.bfloat16), cache)
    packed = Model(backend="FLASH_ATTN", head_size=64, layers=1, dtype=torch.bfloat16, tp_size=2, block_size=32)
    config = packed.cache_config()
    consumer = build_table(packed.engine(config), packed.allocate(config))
    prove(consumer, plan_pulls(consumer, {Rank(): table}))
    assert agree(table, consumer).encodings == (Sides("slots", "packed"),)


@pytest.mark.parametrize("one,other", [("fp8_e4m3", "fp8_e5m2"), ("fp8", "fp8_e5m2")])
def test_unlike_dtypes_of_equal_length_are_refused(one: str, other: str) -> None:
    """Both are stored as bytes; `--kv-cache-dtype-skip-layers` can make them differ in one layer alone."""
    model = Model(backend="FLASH_ATTN", dtype=BYTES)
    producer, _ = quantised(model, KVQuantMode.FP8_PER_TENSOR, one)
    consumer, _ = quantised(model, KVQuantMode.FP8_PER_TENSOR, other)
    with pytest.raises(IncompatiblePeer, match=r"dtype: producer has fp8_e4m3, consumer has fp8_e5m2"):
        plan_pulls(consumer, {Rank(): producer})


def test_two_names_of_one_dtype_are_one() -> None:
    model = Model(backend="FLASH_ATTN", dtype=BYTES)
    producer, _ = quantised(model, KVQuantMode.FP8_PER_TENSOR, "fp8")
    consumer, _ = quantised(model, KVQuantMode.FP8_PER_TENSOR, "fp8_e4m3")
    assert agree(producer, consumer).layers == tuple(model.names)
