"""state_layers: regions of states in memory laid out by vLLM's own shapes and specs; unknown layers refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend

from mooncake_hetero_tp.core.regions import Region
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.vllm_adapter.state_layers import StateLayer, state_regions

NAME = "model.layers.0.linear_attn"
BLOCKS, PADDING = 3, 64


@pytest.fixture(params=["DS", "SD"], autouse=True)
def conv_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    mamba_utils.get_conv_state_layout.cache_clear()
    yield request.param
    mamba_utils.get_conv_state_layout.cache_clear()


@dataclass(frozen=True)
class Case:
    """A layer of a model: vLLM's shapes and its module at a TP size, and the components of the whole model."""

    kind: Backend
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    module: Callable[[int], Any]
    components: dict[str, tuple[int, int, int]]
    """Name -> (tensor, units, channels) over all ranks, in vLLM's order."""
    replicated: bool = False


def gdn(tp: int) -> Any:
    return Shapes.gated_delta_net_state_shape(tp, 4, 8, 6, 5, 4)


def mamba2(groups: int) -> Callable[[int], tuple[tuple[int, ...], ...]]:
    return lambda tp: Shapes.mamba2_state_shape(tp, 8 * 6, groups, 8, 6, 5, 4)


def mamba2_module(groups: int) -> Callable[[int], Any]:
    """`MambaMixer2`: its own `n_groups` is extended to TP, that of its norm is the model's."""
    return lambda tp: SimpleNamespace(
        num_heads=8,
        head_dim=6,
        ssm_state_size=5,
        n_groups=groups + Shapes.extra_groups_for_head_shards(groups, tp),
        norm=SimpleNamespace(n_groups=groups),
    )


def kimi(tp: int) -> Any:
    return Shapes.append_kda_recoverssm_record(Shapes.kda_state_shape(tp, 4, 6, num_spec=2), 4, 6, tp, 3)


CASES = {
    "gated delta net": Case(
        Backend.GDN_ATTN,
        gdn,
        lambda _: SimpleNamespace(num_k_heads=4, num_v_heads=8, head_k_dim=6, head_v_dim=5),
        {"conv.q": (0, 4, 6), "conv.k": (0, 4, 6), "conv.v": (0, 8, 5), "ssm": (1, 8, 6)},
    ),
    "kimi delta attention with records": Case(
        Backend.GDN_ATTN,
        kimi,
        lambda _: SimpleNamespace(num_heads=4, head_dim=6),
        {
            "conv.q": (0, 4, 6),
            "conv.k": (0, 4, 6),
            "conv.v": (0, 4, 6),
            "ssm": (1, 4, 6),
            "record1": (2, 4, 6),
            "record2": (3, 4, 12),
        },
    ),
    "mamba": Case(
        Backend.MAMBA1,
        lambda tp: Shapes.mamba1_state_shape(tp, 16, 6, 4),
        lambda _: SimpleNamespace(intermediate_size=16),
        {"conv": (0, 16, 1), "ssm": (1, 16, 6)},
    ),
    "mamba2": Case(
        Backend.MAMBA2,
        mamba2(4),
        mamba2_module(4),
        {"conv.x": (0, 8, 6), "conv.B": (0, 4, 5), "conv.C": (0, 4, 5), "ssm": (1, 8, 5)},
    ),
    "mamba2 with one group": Case(
        Backend.MAMBA2,
        mamba2(1),
        mamba2_module(1),
        {"conv.x": (0, 8, 6), "conv.B": (0, 1, 5), "conv.C": (0, 1, 5), "ssm": (1, 8, 5)},
    ),
    "short convolution": Case(
        Backend.SHORT_CONV,
        lambda tp: Shapes.short_conv_state_shape(tp, 16, 3),
        lambda _: SimpleNamespace(conv_dim=16),
        {"conv": (0, 16, 1)},
    ),
    "short convolution that every rank holds": Case(
        Backend.SHORT_CONV,
        lambda _: Shapes.short_conv_state_shape(1, 16, 3),
        lambda _: SimpleNamespace(hc_hidden_size=16),
        {"conv": (0, 16, 1)},
        replicated=True,
    ),
    "linear attention": Case(
        Backend.LINEAR,
        lambda tp: Shapes.linear_attention_state_shape(8, tp, 6),
        lambda _: SimpleNamespace(num_heads=8, head_dim=6),
        {"state": (0, 8, 6)},
    ),
}


def state_layer(case: Case, tp: int, rank: int, **changes: Any) -> StateLayer:
    shapes = case.shapes(tp)
    dtypes = (torch.bfloat16, *[torch.float32] * (len(shapes) - 1))
    spec = kinds.MambaSpec(
        shapes=shapes,
        dtypes=dtypes,
        block_size=384,
        page_size_padded=None,
        mamba_type=case.kind,
        tp_replicated=case.replicated,
    )
    values = {"name": NAME, "module": case.module(tp), "spec": spec, "tp_size": tp, "tp_rank": rank}
    return StateLayer(**(values | changes))


def padded_view(spec: Any) -> torch.Tensor:
    """int8 `[B, 1, 1, C]` as vLLM hands it over, slots further apart than they are long."""
    content = spec.state_content_size_bytes
    rows = torch.zeros((BLOCKS, content + PADDING), dtype=torch.int8)
    return rows.as_strided((BLOCKS, 1, 1, content), (content + PADDING, content, content, 1))


def bound(view: torch.Tensor, spec: Any) -> list[torch.Tensor]:
    """Tensors of all slots, by vLLM's own cut of a page (`MambaBase.bind_kv_cache`)."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    layer = SimpleNamespace(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes)
    MambaBase.bind_kv_cache(layer, view)
    return list(layer.kv_cache)


def read(region: Region, view: torch.Tensor) -> torch.Tensor:
    """`[slot, unit, row, channel]` through the Region's own numbers."""
    dtype = getattr(torch, region.dtype)
    raw = view.as_strided((view.untyped_storage().nbytes(),), (1,), 0)
    start = region.base - view.untyped_storage().data_ptr()
    slots = []
    for block in range(region.num_blocks):
        places = start + block * region.block_stride + torch.zeros(1, dtype=torch.int64)
        for axis in (region.unit, region.token, region.channel):
            places = places[..., None] + torch.arange(axis.count) * axis.stride
        places = places[..., None] + torch.arange(region.item_bytes)
        slots.append(raw[places].view(dtype)[0, ..., 0])
    return torch.stack(slots)


def held(units: int, tp: int, rank: int) -> list[int]:
    return list(range(rank * units // tp, rank * units // tp + units // tp)) if units >= tp else [rank * units // tp]


def fill(case: Case, layer: StateLayer, view: torch.Tensor, conv_layout: str) -> dict[str, torch.Tensor]:
    """Write numbered elements of the whole model into one rank's tensors; what each component must then read."""
    tensors, wanted = bound(view, layer.spec), {}
    tp, rank = (1, 0) if case.replicated else (layer.tp_size, layer.tp_rank)
    for number, tensor in enumerate(tensors):
        parts = {name: part for name, part in case.components.items() if part[0] == number}
        is_conv = "conv" in next(iter(parts))
        columns = []
        for place, (name, (_, units, channels)) in enumerate(parts.items()):
            rows = tensor.shape[1 + (conv_layout == "DS")] if is_conv else tensor[0, 0].numel() // channels
            count = BLOCKS * units * rows * channels
            whole = (torch.arange(count) + 17 * place).remainder(251).to(tensor.dtype)
            mine = whole.reshape(BLOCKS, units, rows, channels)[:, held(units, tp, rank)]
            wanted[name] = mine
            columns.append(mine.transpose(2, 3).flatten(1, 2) if is_conv else mine)
        if not is_conv:
            tensor.copy_(columns[0].reshape(tensor.shape))
        else:
            conv = torch.cat(columns, dim=1)
            tensor.copy_(conv if conv_layout == "DS" else conv.transpose(1, 2))
    return wanted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_regions_read_what_vllms_tensors_hold(name: str, tp: int, conv_layout: str) -> None:
    """vllm#53078, sglang#20655: a convolution's projections are cut each by itself."""
    case = CASES[name]
    for rank in range(tp):
        layer = state_layer(case, tp, rank)
        view = padded_view(layer.spec)
        wanted = fill(case, layer, view, conv_layout)
        regions = state_regions(layer, 2, view)
        assert [region.component for region in regions] == list(case.components)
        for region in regions:
            assert torch.equal(read(region, view), wanted[region.component]), region.component
            assert (region.group, region.num_blocks) == (2, BLOCKS)
            assert region.block_stride == layer.spec.state_content_size_bytes + PADDING
            _, units, _ = case.components[region.component]
            globals_ = [span.global_start + unit for span in region.spans for unit in range(span.count)]
            assert globals_ == held(units, *((1, 0) if case.replicated else (tp, rank)))


def test_orders_are_named(conv_layout: str) -> None:
    layer = state_layer(CASES["gated delta net"], 1, 0)
    encodings = {region.component: region.encoding for region in state_regions(layer, 0, padded_view(layer.spec))}
    assert encodings == dict.fromkeys(("conv.q", "conv.k", "conv.v"), f"conv.{conv_layout.lower()}") | {"ssm": "state"}


def refused(layer: StateLayer, view: torch.Tensor | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        state_regions(layer, 0, padded_view(layer.spec) if view is None else view)
    assert str(caught.value).startswith(f"{NAME}: the state of this layer cannot be transferred: ")
    return str(caught.value)


def test_other_shapes_than_the_modules_are_refused() -> None:
    module = SimpleNamespace(num_k_heads=2, num_v_heads=8, head_k_dim=6, head_v_dim=5)
    said = refused(state_layer(CASES["gated delta net"], 2, 1, module=module))
    assert "TP rank 1 of 2" in said
    assert "vLLM allocated the shapes" in said


def test_a_module_that_does_not_say_its_heads_is_refused() -> None:
    said = refused(state_layer(CASES["linear attention"], 2, 0, module=SimpleNamespace()))
    assert "does not say its num_heads" in said


def test_groups_are_not_guessed_from_the_extended_number() -> None:
    """At TP4 a Mamba2 module with 4 groups may be one of 4 or one of 1."""
    case = CASES["mamba2 with one group"]
    module = case.module(4)
    del module.norm
    assert "how many groups share B and C" in refused(state_layer(case, 4, 0, module=module))


def test_a_ring_with_its_position_elsewhere_is_refused() -> None:
    case = CASES["mamba2"]
    layer = state_layer(case, 1, 0)
    spec = kinds.MambaSpec(
        shapes=(*layer.spec.shapes, (8, 16, 6), (8, 16), (4, 16, 5)),
        dtypes=(*layer.spec.dtypes, torch.bfloat16, torch.float32, torch.bfloat16),
        block_size=384,
        mamba_type=Backend.MAMBA2,
    )
    assert "--use-replayssm" in refused(state_layer(case, 1, 0, spec=spec))


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    layer = state_layer(CASES["mamba"], 1, 0)
    spec = SimpleNamespace(
        shapes=layer.spec.shapes,
        dtypes=layer.spec.dtypes,
        mamba_type=SimpleNamespace(name="NEW_KIND"),
        tp_replicated=False,
        state_content_size_bytes=layer.spec.state_content_size_bytes,
    )
    assert "its kind NEW_KIND is not one of GDN_ATTN, LINEAR, MAMBA1" in refused(
        state_layer(CASES["mamba"], 1, 0, spec=spec), padded_view(layer.spec)
    )


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 1, 8), (3, 1, 1, 9)])
def test_another_view_is_refused(shape: Sequence[int]) -> None:
    layer = state_layer(CASES["linear attention"], 1, 0)
    assert "expected a view [blocks, 1, 1, 576 bytes]" in refused(
        state_layer(CASES["linear attention"], 1, 0), torch.zeros(tuple(shape), dtype=torch.int8)
    ), layer
