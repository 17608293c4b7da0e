"""Damaged region tables: each gets one error that names the region and both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.core.regions import Axis, Buffer, Group, RankTable, Span, whole_span
from mooncake_hetero_tp.core.tables import MAX_ADDRESS, validate_table
from mooncake_hetero_tp.errors import PeerProtocolError
from tests.tables import Dense, region, table


@pytest.fixture
def good() -> RankTable:
    return Dense(heads=4, layers=2, layout="BLHNC", page_bytes=100).table()


def _with_region(good: RankTable, **changes: Any) -> RankTable:
    first, *others = good.regions
    return msgspec.structs.replace(good, regions=(msgspec.structs.replace(first, **changes), *others))


def test_good_tables_pass(good: RankTable) -> None:
    validate_table(good)
    for layout in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"):
        validate_table(Dense(heads=4, layers=3, layout=layout).table())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_blocks": 0}, "num_blocks of at least 1, seen 0"),
        ({"token": Axis(0, 4)}, "tokens of at least 1, seen 0"),
        ({"token": Axis(1 << 63, 4)}, "tokens of at least 1"),
        ({"channel": Axis(1 << 40, 1)}, "elements a page"),
        ({"item_bytes": 0}, "item_bytes of at least 1"),
        ({"base": -8}, "0 <= base"),
        ({"group": 1}, "a group below 1, seen 1"),
        ({"token": Axis(8, 4)}, r"pages of 4 tokens \(kernel block size\), seen 8"),
        ({"spans": ()}, "spans that cover units 0..3 once"),
        ({"spans": (Span(0, 0, 3),)}, "spans that cover units 0..3 once"),
        ({"spans": (Span(0, 0, 3), Span(2, 5, 2))}, "spans that cover units 0..3 once"),
        ({"spans": (Span(0, 0, 2), Span(2, 1, 2))}, "each global unit at most once"),
        ({"unit": Axis(4, 13)}, "a unit stride of at least 14 bytes"),
        ({"unit": Axis(4, 15)}, "bytes of its own beside layers.0/v"),
        ({"block_stride": 1 << 70, "num_blocks": 1}, "strides from 0 to"),
        ({"token": Axis(4, 0)}, "stride of at least"),
        ({"token": Axis(4, -4)}, "strides from 0 to"),
        ({"channel": Axis(2, 0)}, "a channel stride of at least 1"),
        ({"block_stride": 2}, "stride of at least"),
        ({"base": 5}, r"all pages inside one registered buffer, seen bytes \[5, "),
        ({"num_blocks": 9}, "all pages inside one registered buffer"),
    ],
)
def test_a_damaged_region_is_named(good: RankTable, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PeerProtocolError, match=message) as caught:
        validate_table(_with_region(good, **changes))
    assert "layers.0/k" in str(caught.value)


def test_channels_must_not_lie_outside_of_units() -> None:
    # A layout such as LBCNH: C is not innermost.
    spans = (Span(0, 0, 4),)
    upside_down = region("l", "kv", base=0, pages=(2, 64), token=(4, 4), spans=spans, unit=1, channels=4, channel=16)
    with pytest.raises(PeerProtocolError, match=r"tokens innermost \(C last in the layout\), seen units"):
        table([upside_down])


def test_pages_must_not_be_innermost() -> None:
    upside_down = region("l", "kv", base=0, pages=(2, 1), token=(4, 8), channels=4, channel=2)
    with pytest.raises(PeerProtocolError, match="seen pages innermost"):
        table([upside_down])


def test_two_components_must_not_share_a_byte() -> None:
    key = region("l", "k", base=0, pages=(2, 64), token=(4, 16), channels=8)
    inside = region("l", "v", base=7, pages=(2, 64), token=(4, 16), channels=8)
    with pytest.raises(PeerProtocolError, match=r"l/v: expected bytes of its own beside l/k, seen both at address 7"):
        table([key, inside])
    validate_table(table([key, region("l", "v", base=8, pages=(2, 64), token=(4, 16), channels=8)]))


def test_last_pages_of_unlike_strides_must_not_meet() -> None:
    wide = region("l", "a", base=0, pages=(4, 32), token=(4, 4), channels=4)
    narrow = region("l", "b", base=16, pages=(4, 26), token=(4, 2), channels=2)
    with pytest.raises(PeerProtocolError, match="expected bytes of its own beside"):
        table([wide, narrow])


def test_a_layer_component_must_not_come_twice() -> None:
    # vllm#56033: the same layer name twice would be paired by position.
    twice = [region("l", "k", base=base, pages=(2, 16), token=(4, 4), channels=4) for base in (0, 64)]
    with pytest.raises(PeerProtocolError, match="each layer component once"):
        table(twice)


@pytest.mark.parametrize(
    "groups, message",
    [
        ((Group(1, "attention", 4, 4),), "has index 1"),
        ((Group(0, "attention", 6, 4),), "the kernel block dividing the logical one"),
        ((Group(0, "attention", 0, 4),), "positive sizes"),
        ((Group(0, "attention", 4, 0),), "positive sizes"),
        ((Group(0, "attention", 12, 4),), "a multiple of 3 kernel pages, seen 8"),
    ],
)
def test_damaged_groups(good: RankTable, groups: tuple[Group, ...], message: str) -> None:
    with pytest.raises(PeerProtocolError, match=message):
        validate_table(msgspec.structs.replace(good, groups=groups))


@pytest.mark.parametrize("buffer", [Buffer(-1, 5), Buffer(0, 0), Buffer(5, MAX_ADDRESS)])
def test_damaged_buffers(good: RankTable, buffer: Buffer) -> None:
    with pytest.raises(PeerProtocolError, match="expected address >= 0, length >= 1"):
        validate_table(msgspec.structs.replace(good, buffers=(buffer,)))


def test_absurd_numbers_of_regions_are_refused_before_any_work(good: RankTable) -> None:
    with pytest.raises(PeerProtocolError, match="table with 65538 regions: expected at most 65536"):
        validate_table(msgspec.structs.replace(good, regions=good.regions[:2] * 32_769))


def test_absurdly_scattered_pages_are_refused_before_memory_runs_out() -> None:
    scattered = region("l", "k", base=0, pages=(1, 1 << 60), token=(1 << 13, 1 << 20), channels=1 << 12, channel=2)
    made = RankTable(1, 1, "LBHNC", {}, (Group(0, "a", 1 << 13, 1 << 13),), (scattered,), (Buffer(0, MAX_ADDRESS),))
    with pytest.raises(PeerProtocolError, match="page runs: expected at most"):
        validate_table(made)


def test_state_rows_need_not_match_the_block_size() -> None:
    conv = region("l", "conv.q", base=0, pages=(4, 24), token=(3, 8), spans=whole_span(4), unit=2, item=2)
    made = RankTable(1, 1, "LBHNC", {}, (Group(0, "state", 64, 64),), (conv,), (Buffer(0, 96),))
    validate_table(made)
