"""engine_tables: ranks of one engine that disagree are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.core.engine_tables import check_same_engine
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.regions import Group
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.types import Rank
from tests.tables import DST, Dense, producer_tables


def test_ranks_of_one_engine_pass() -> None:
    check_same_engine(producer_tables(Dense(heads=4, tp=4)))
    check_same_engine({})


def test_unlike_block_sizes_are_refused_before_anything_is_planned() -> None:
    """vllm-ascend#15646: configured 128, one rank told 8. vllm#59592 compares the size of one rank only."""
    tables = producer_tables(Dense(heads=2, tp=2, tokens=128, blocks=8))
    odd = Dense(heads=2, tp=2, rank=1, tokens=8, blocks=128)
    tables[Rank(tp=1)] = odd.table()
    consumer = Dense(heads=2, tokens=128, base=DST).table()
    with pytest.raises(
        PeerProtocolError, match=r"block size of group 0: rank dp0.pp0.tp0 .* says 128, its rank dp0.pp0.tp1 says 8;"
    ):
        plan_pulls(consumer, tables)


@pytest.mark.parametrize(
    "changes,fact",
    [
        ({"tp_size": 4}, "tensor parallel size: .* says 2, .* says 4"),
        ({"pp_size": 2}, "pipeline parallel size: .* says 1, .* says 2"),
        ({"dcp_size": 2}, "decode context parallel size: .* says 1, .* says 2"),
        ({"pcp_size": 2}, "prefill context parallel size: .* says 1, .* says 2"),
        ({"groups": ()}, "number of KV cache groups: .* says 1, .* says 0"),
        ({"groups": (Group(0, "sliding_window", 4, 4),)}, "kind of group 0: .* says attention, .* says sliding_window"),
        ({"groups": (Group(0, "attention", 4, 2),)}, "kernel block size of group 0: .* says 4, .* says 2"),
    ],
)
def test_every_shared_fact_is_compared(changes: dict[str, Any], fact: str) -> None:
    tables = producer_tables(Dense(heads=2, tp=2))
    tables[Rank(tp=1)] = msgspec.structs.replace(tables[Rank(tp=1)], **changes)
    with pytest.raises(PeerProtocolError, match=fact):
        check_same_engine(tables)


def test_a_stage_without_layers_of_a_group_has_no_say_in_its_kernel_blocks() -> None:
    table = Dense(heads=2).table()
    first = msgspec.structs.replace(
        table, pp_size=2, groups=(*table.groups, Group(1, "mla", 64, 16)), regions=table.regions
    )
    second = msgspec.structs.replace(first, groups=(*table.groups, Group(1, "mla", 64, 64)))
    check_same_engine({Rank(pp=0): first, Rank(pp=1): second})
