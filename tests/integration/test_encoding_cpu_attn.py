"""The encoding table against the backends: they write, our Regions read, every value must come back.

The CPU backend runs its real kernels. The GPU backends' own slicing runs too; only the last step, the
CUDA op that stores into the slices it is given, is replaced by its definition.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

from mooncake_hetero_tp.core.regions import RankTable, Region
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from tests.unit.vllm_adapter.doubles import Model

pytestmark = pytest.mark.vllm

TOKENS = 70
LAYER = SimpleNamespace(_k_scale=None, _v_scale=None, _k_scale_float=1.0, _v_scale_float=1.0)


def values(model: Model, salt: int) -> torch.Tensor:
    """`[token, head, channel]`, exact in 8 bits of mantissa and different per (token, head, channel) nearby."""
    token, head, channel = torch.meshgrid(
        torch.arange(TOKENS), torch.arange(model.local_heads), torch.arange(model.head_size), indexing="ij"
    )
    return ((token * 37 + head * 101 + channel * 11 + salt * 53) % 251 - 125).to(model.dtype)


def pages_of(model: Model) -> list[int]:
    """Logical blocks of the written request: out of order, with gaps."""
    return [4, 1, 5, 2, 3][: -(-TOKENS // model.block_size)]


def slots(model: Model, kernel_block_size: int) -> torch.Tensor:
    """Slot of each token, as vLLM numbers them: kernel page * kernel block size + offset."""
    token = torch.arange(TOKENS)
    block = torch.tensor(pages_of(model))[token // model.block_size]
    ratio = model.block_size // kernel_block_size
    page = block * ratio + token % model.block_size // kernel_block_size
    return page * kernel_block_size + token % kernel_block_size


def read_back(table: RankTable, region: Region, blocks: list[int], storage: torch.Tensor) -> torch.Tensor:
    """`[token, unit, channel]` of the request in `blocks`, through the Region's own numbers."""
    group = table.groups[region.group]
    item = region.item_bytes
    start = (region.base - storage.data_ptr()) // item
    axes = (region.unit, region.token, region.channel)
    pages = storage.as_strided(
        (region.num_blocks, *(axis.count for axis in axes)),
        (region.block_stride // item, *(axis.stride // item for axis in axes)),
        start,
    )
    kernel_pages = [block * group.kernel_pages + part for block in blocks for part in range(group.kernel_pages)]
    return pages[kernel_pages].permute(0, 2, 1, 3).flatten(0, 1)[:TOKENS]


def storage_of(view: torch.Tensor) -> torch.Tensor:
    return view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("block_size,kernel", [(32, 32), (64, 32)])
@pytest.mark.parametrize("head_size", [32, 80])
def test_cpu_attention(dtype: torch.dtype, isa: str, block_size: int, kernel: int, head_size: int) -> None:
    model = Model(
        backend="CPU_ATTN",
        isa=isa,
        heads=2,
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        kernel_block_size=kernel,
    )
    config = model.cache_config()
    views = model.allocate(config)
    table = build_table(model.engine(config), views)
    validate_table(table)
    assert {region.encoding for region in table.regions} == {"halves.transposed_k"}

    backend = cpu_impl()
    layer = SimpleNamespace(**vars(LAYER), isa=isa)
    for salt, name in enumerate(model.names):
        key, value = values(model, 2 * salt), values(model, 2 * salt + 1)
        backend.do_kv_cache_update(layer, key, value, views[name], slots(model, kernel))
    for region in table.regions:
        salt = 2 * model.names.index(region.layer) + (region.component == "v")
        found = read_back(table, region, pages_of(model), storage_of(views[region.layer]))
        assert torch.equal(found, values(model, salt)), region.name


def cpu_impl() -> Any:
    """The real implementation class; its constructor would ask for a running engine's configuration."""
    backend = object.__new__(CPUAttentionBackendImpl)
    backend.attn_type = AttentionType.DECODER
    backend.kv_cache_dtype = "auto"
    return backend


def test_the_isa_that_vllm_chooses_here_for_float32_is_a_known_one() -> None:
    """`make demo` relies on it: float32 with blocks of 32 converts between block sizes."""
    assert _get_attn_isa(torch.float32, 32, 64, "auto") in {"vec", "vec16"}


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="no AMX in this CPU")
def test_amx_pages_are_not_strided_so_opaque_is_right() -> None:
    """With isa amx token 16 does not follow the step of tokens 0..15: no Region can say that."""
    model = Model(backend="CPU_ATTN", isa="amx", heads=1, head_size=64, dtype=torch.bfloat16, block_size=32)
    config = model.cache_config()
    views = model.allocate(config)
    table = build_table(model.engine(config), views)
    assert {region.encoding for region in table.regions} == {"opaque:CPU_ATTN.amx"}
    key = torch.zeros(32, 1, 64, dtype=torch.bfloat16)
    key[:, 0, 0] = torch.arange(1, 33)
    layer = SimpleNamespace(**vars(LAYER), isa="amx")
    cpu_impl().do_kv_cache_update(layer, key, torch.zeros_like(key), views[model.names[0]], torch.arange(32))
    page = views[model.names[0]][0].flatten()
    where = [int((page == token).nonzero()[0, 0]) for token in range(1, 33)]
    assert where[1] - where[0] == where[15] - where[14] != where[16] - where[15]


def store(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, *rest: Any) -> None:
    """What `reshape_and_cache_flash` does: token i of K and V to slot i of caches `[B, N, H, D]`."""
    slot = rest[0]
    keys[slot // keys.shape[1], slot % keys.shape[1]] = key
    rows[slot // rows.shape[1], slot % rows.shape[1]] = value


def store_diffkv(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot: torch.Tensor, *_: Any) -> None:
    """What `triton_reshape_and_cache_flash_diffkv` does: K then V in one row of `[B, N, H, C]`."""
    row = torch.cat([key, value], dim=-1)
    cache[slot // cache.shape[1], slot % cache.shape[1]] = row


PACKED_IMPLS = [
    ("flash_attn", "FlashAttentionImpl", "FLASH_ATTN", "reshape_and_cache_flash", store),
    ("flash_attn_diffkv", "FlashAttentionDiffKVImpl", "FLASH_ATTN_DIFFKV", None, store_diffkv),
    ("triton_attn", "TritonAttentionImpl", "TRITON_ATTN", "triton_reshape_and_cache_flash", store),
    ("triton_attn_diffkv", "TritonAttentionDiffKVImpl", "TRITON_ATTN_DIFFKV", None, store_diffkv),
    ("flex_attention", "FlexAttentionImpl", "FLEX_ATTENTION", "torch", store),
]


@pytest.fixture(params=PACKED_IMPLS, ids=[row[2] for row in PACKED_IMPLS])
def packed_impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """(backend name, implementation whose storing op is its definition)."""
    module_name, class_name, backend, op, definition = request.param
    module = importlib.import_module(f"vllm.v1.attention.backends.{module_name}")
    if op == "torch":
        cache_ops = SimpleNamespace(reshape_and_cache_flash=definition)
        fake_torch = SimpleNamespace(ops=SimpleNamespace(_C_cache_ops=cache_ops))
        monkeypatch.setattr(module, "torch", fake_torch)
    else:
        monkeypatch.setattr(module, op or "triton_reshape_and_cache_flash_diffkv", definition, raising=False)
    impl = object.__new__(getattr(module, class_name))
    impl.attn_type = AttentionType.DECODER
    impl.kv_cache_dtype = "auto"
    impl.head_size = 32
    impl._is_per_token_head_quant = False
    return backend, impl


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_backends_that_pack_k_and_v(packed_impl: tuple[str, Any], layout: str) -> None:
    backend, impl = packed_impl
    model = Model(backend=backend, heads=2, head_size=32, dtype=torch.bfloat16, block_size=16, layout=layout)
    config = model.cache_config()
    views = model.allocate(config)
    table = build_table(model.engine(config), views)
    validate_table(table)
    assert {region.encoding for region in table.regions} == {"packed"}
    for salt, name in enumerate(model.names):
        key, value = values(model, 2 * salt), values(model, 2 * salt + 1)
        impl.do_kv_cache_update(LAYER, key, value, views[name], slots(model, 16))
    for region in table.regions:
        salt = 2 * model.names.index(region.layer) + (region.component == "v")
        found = read_back(table, region, pages_of(model), storage_of(views[region.layer]))
        assert torch.equal(found, values(model, salt)), region.name


def test_cpu_mla_writes_latent_rows() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    model = Model(backend="CPU_MLA", heads=1, block_size=16)
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    config = model.cache_config(spec)
    views = model.allocate(config)
    table = build_table(model.engine(config), views)
    rows = torch.arange(TOKENS * 576, dtype=torch.float32).reshape(TOKENS, 576)
    impl = object.__new__(CPUMLAImpl)
    view = views[model.names[0]]
    impl.do_kv_cache_update(
        rows[:, :512], rows[:, None, 512:], view.squeeze(1), slots(model, 16), "auto", torch.tensor(1.0)
    )
    (region,) = (region for region in table.regions if region.layer == model.names[0])
    found = read_back(table, region, pages_of(model), storage_of(view))
    assert torch.equal(found[:, 0], rows)
