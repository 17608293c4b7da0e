"""scales: where quantised values and their scales lie, and what is left opaque."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hetero_tp.core.regions import Axis
from mooncake_hetero_tp.vllm_adapter.components import LayerFacts, PageView
from mooncake_hetero_tp.vllm_adapter.encodings import encode
from mooncake_hetero_tp.vllm_adapter.scales import has_inline_scales, has_side_scales
from tests.unit.vllm_adapter.test_encodings import covered, offsets

HEADS, TOKENS, WIDTH = 2, 4, 16
TRITON = LayerFacts(
    layer="model.layers.0.attn",
    backend="TRITON_ATTN",
    isa=None,
    latent=False,
    kv_heads=HEADS,
    head_size=WIDTH,
    head_size_v=WIDTH,
    item_bytes=1,
    dtype="fp8_per_token_head",
    own_slots=False,
    own_content=True,
    quantisation="FP8_PER_TOKEN_HEAD",
)
INLINE = PageView(heads=HEADS, tokens=TOKENS, content_bytes=40, head_stride=160, token_stride=40)
FLASHINFER = replace(TRITON, backend="FLASHINFER", dtype="nvfp4", own_slots=True, quantisation="NVFP4")
SIDES = PageView(heads=2 * HEADS, tokens=TOKENS, content_bytes=9, head_stride=36, token_stride=9)


@pytest.mark.parametrize("mode,width", [("FP8_PER_TOKEN_HEAD", 16), ("INT8_PER_TOKEN_HEAD", 16)])
def test_each_half_of_a_token_ends_with_its_scale(mode: str, width: int) -> None:
    name, parts = encode(replace(TRITON, quantisation=mode), INLINE)
    assert name == "packed.scales"
    assert [part.name for part in parts] == ["k", "k.scale", "v", "v.scale"]
    assert [part.dtype for part in parts] == [None, "float32", None, "float32"]
    assert [offsets(part)[1, 2, 0] - (160 + 2 * 40) for part in parts] == [0, width, width + 4, 2 * width + 4]
    assert covered(parts) == list(range(320))


def test_four_bit_values_fill_half_a_byte() -> None:
    view = replace(INLINE, content_bytes=24, head_stride=96, token_stride=24)
    name, parts = encode(replace(TRITON, quantisation="INT4_PER_TOKEN_HEAD"), view)
    assert name == "packed.scales"
    assert [part.channel.count for part in parts] == [8, 1, 8, 1]
    assert covered(parts) == list(range(192))


def test_scales_follow_token_major_strides() -> None:
    _, parts = encode(TRITON, replace(INLINE, head_stride=40, token_stride=80))
    assert {(part.unit.stride, part.token.stride) for part in parts} == {(40, 80)}
    assert covered(parts) == list(range(320))


@pytest.mark.parametrize(
    "facts,view",
    [
        (replace(TRITON, head_size_v=8), INLINE),
        (replace(TRITON, backend="FLASH_ATTN"), INLINE),
        (replace(TRITON, latent=True, kv_heads=1), replace(INLINE, heads=1)),
        (TRITON, replace(INLINE, content_bytes=36)),
        (TRITON, replace(INLINE, token_stride=42, head_stride=168)),
        (replace(TRITON, quantisation="TURBOQUANT_4BIT_NC"), INLINE),
    ],
)
def test_other_content_with_scales_is_opaque(facts: LayerFacts, view: PageView) -> None:
    assert not has_inline_scales(facts, view)
    assert encode(facts, view)[0] == f"opaque:{facts.backend}"


def test_nvfp4_pieces_lie_one_after_the_other_heads_outermost() -> None:
    """vllm#52516: slot i of an NVFP4 page is not head i."""
    name, parts = encode(FLASHINFER, SIDES)
    assert name == "opaque:FLASHINFER.nvfp4"
    assert [(part.name, part.offset) for part in parts] == [
        ("k.data", 0), ("k.scale", 64), ("v.data", 72), ("v.scale", 136),
    ]  # fmt: skip
    assert [part.unit for part in parts] == [Axis(HEADS, 32), Axis(HEADS, 4)] * 2
    assert covered(parts) == list(range(144))


def test_token_major_nvfp4_has_heads_inside_so_that_no_planner_cuts_it() -> None:
    _, parts = encode(FLASHINFER, replace(SIDES, head_stride=9, token_stride=36))
    assert all(part.unit.stride < part.token.stride for part in parts)
    assert covered(parts) == list(range(144))


@pytest.mark.parametrize(
    "facts,view",
    [
        (FLASHINFER, replace(SIDES, head_stride=40)),
        (replace(FLASHINFER, backend="MINIMAX_M3_MSA"), SIDES),
        (replace(FLASHINFER, kv_heads=4), SIDES),
        (replace(FLASHINFER, own_slots=False), SIDES),
    ],
)
def test_other_nvfp4_pages_are_not_taken_apart(facts: LayerFacts, view: PageView) -> None:
    assert not has_side_scales(facts, view)
