"""Slots of state layers: where each component lies on each rank, checked against numpy arrays cut by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.state_tensors import (
    ConvLayout,
    PlacedPart,
    StatePart,
    StateTensor,
    conv_tensor,
    head_tensor,
    local_shape,
    place,
    qkv_parts,
    xbc_parts,
)
from mooncake_hetero_tp.errors import ConfigError

KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, ROWS = 4, 8, 3, 5, 3


def addresses(part: PlacedPart) -> Int64:
    """Byte offsets [unit, row, channel] of a component's elements."""
    unit, row, channel = (np.arange(axis.count) * axis.stride for axis in (part.unit, part.row, part.channel))
    found: Int64 = part.offset + unit[:, None, None] + row[:, None] + channel
    return found


def conv_of(layout: ConvLayout) -> StateTensor:
    return conv_tensor(qkv_parts(KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH), ROWS, layout, 2, "bfloat16")


@pytest.mark.parametrize("layout", ConvLayout)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_projections_of_a_convolution_are_cut_each_by_itself(layout: ConvLayout, tp: int) -> None:
    for rank in range(tp):
        widths = [KEY_HEADS * KEY_WIDTH // tp, KEY_HEADS * KEY_WIDTH // tp, VALUE_HEADS * VALUE_WIDTH // tp]
        shape = (ROWS, sum(widths)) if layout is ConvLayout.SD else (sum(widths), ROWS)
        slot = 2 * np.arange(np.prod(shape)).reshape(shape)
        by_channel = slot if layout is ConvLayout.SD else slot.T  # [row, channel]
        borders = np.cumsum([0, *widths])
        placed = place([conv_of(layout)], tp, rank)
        assert [part.component for part in placed] == ["conv.q", "conv.k", "conv.v"]
        for part, first, last in zip(placed, borders, borders[1:], strict=False):
            expected = by_channel[:, first:last].reshape(ROWS, part.unit.count, -1).transpose(1, 0, 2)
            assert (addresses(part) == expected).all()
            (span,) = part.spans
            assert span.global_start == rank * span.count


def test_a_second_tensor_follows_the_first_with_its_own_type() -> None:
    tensors = [conv_of(ConvLayout.DS), head_tensor("ssm", VALUE_HEADS, (VALUE_WIDTH, KEY_WIDTH), 4, "float32")]
    *_, state = place(tensors, 2, 1)
    first = local_shape(tensors[0], 2, 1)
    assert first == (2 * 2 * KEY_WIDTH + 4 * VALUE_WIDTH, ROWS, (2 * 2 * KEY_WIDTH + 4 * VALUE_WIDTH) * ROWS * 2)
    expected = first[2] + 4 * np.arange(4 * VALUE_WIDTH * KEY_WIDTH).reshape(4, VALUE_WIDTH, KEY_WIDTH)
    assert (addresses(state) == expected).all()
    assert (state.dtype, state.item_bytes, state.spans[0].global_start) == ("float32", 4, 4)


def test_one_group_of_mamba2_is_on_every_rank_and_heads_are_not() -> None:
    tensor = conv_tensor(xbc_parts(8, 1, 4, 16), 3, ConvLayout.DS, 2, "bfloat16")
    for rank in range(4):
        x, b, c = place([tensor], 4, rank)
        assert [(part.spans[0].global_start, part.unit.count) for part in (x, b, c)] == [(2 * rank, 2), (0, 1), (0, 1)]
        assert (b.offset, c.offset) == (8 * 3 * 2, (8 + 16) * 3 * 2)


def test_groups_that_tp_divides_are_cut() -> None:
    _, b, c = place([conv_tensor(xbc_parts(8, 4, 4, 16), 3, ConvLayout.SD, 2, "bfloat16")], 2, 1)
    assert [(part.spans[0].global_start, part.unit.count) for part in (b, c)] == [(2, 2), (2, 2)]


def test_state_without_inner_axes() -> None:
    (part,) = place([head_tensor("ring.dt", 8, (6,), 4, "float32")], 2, 1)
    assert (part.unit.count, part.row.count, part.channel.count) == (4, 1, 6)
    (part,) = place([head_tensor("scalar", 8, (), 4, "float32")], 2, 1)
    assert (part.unit.count, part.row.count, part.channel.count) == (4, 1, 1)


def test_reported_rows_of_sglang_20655() -> None:
    """TP1 rows K=4, K=4, V=8 of 3 states of 2 bytes: rank 1 of 2 wants [12, 24), [36, 48) and [72, 96)."""
    parts = [StatePart("k1", 4, 1), StatePart("k2", 4, 1), StatePart("v", 8, 1)]
    tensor = conv_tensor(parts, 3, ConvLayout.DS, 2, "bfloat16")
    whole, half = place([tensor], 1, 0), place([tensor], 2, 1)
    wanted = []
    for ours, theirs in zip(half, whole, strict=True):
        first = ours.spans[0].global_start
        wanted.append((theirs.offset + first * theirs.unit.stride, ours.unit.count * theirs.unit.stride))
    assert wanted == [(12, 12), (36, 12), (72, 24)]
    assert sum(length for _, length in wanted) == local_shape(tensor, 2, 1)[2]


def test_tp_that_cannot_cut_a_projection_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot share 6 ssm units"):
        place([head_tensor("ssm", 6, (2, 2), 4, "float32")], 4, 0)
