"""vllm#53078: a hybrid of linear attention and attention, PP2 x TP2 -> TP4.

A convolution's state is [q, k, v] side by side; one flat cut through all of it crosses their borders, and the tensor
rank of a reader does not tell where in the writer's slot its share begins.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.hybrid_memory import GroupSpec, HybridLayer, HybridSide, StateShape, TokenPart
from tests.hybrid_oracle import HybridCase, build_hybrid_pulls
from tests.oracle import Pull, Tally, loopback_reader
from tests.oracle_memory import Arena, Ints

LAYERS = 8
DELTA_NET = StateShape(kind="gdn", heads=8, groups=4, width=3, kernel_rows=3, conv_item=2, head_item=4)
KV_HEADS = tuple(TokenPart(name, 2, 4, 2) for name in "kv")
MODEL = tuple(
    HybridLayer(f"model.layers.{place}.self_attn.attn", 0, KV_HEADS)
    if place % 4 == 3
    else HybridLayer(f"model.layers.{place}.linear_attn", 1, state=DELTA_NET)
    for place in range(LAYERS)
)
COMPONENTS = {"conv.q", "conv.k", "conv.v", "ssm", "k", "v"}
TOKENS = TokenRange(5, 37)


def engine(tp: int, pp: int, block: int, conv_layout: str) -> HybridSide:
    """Blocks and slots padded to one size, as vLLM pads them; all groups over one another."""
    groups = (GroupSpec(block, block // 2), GroupSpec(block, block, is_state=True))
    return HybridSide(
        tp, (LAYERS // pp,) * pp, MODEL, groups, (0, 1), conv_layout=conv_layout, pad_bytes=32, overlay=True
    )


def bytes_of_a_rank() -> int:
    """What TP4 leaves to one consumer rank: counted from the model, not from any table."""
    columns = 1 * 3 + 1 * 3 + 2 * 2  # one key head twice, two value heads
    state = columns * DELTA_NET.kernel_rows * DELTA_NET.conv_item + 2 * (2 * 3) * DELTA_NET.head_item
    token = 2 * 4 * 2  # K and V of one head
    return 6 * state + 2 * token * TOKENS.count


def check_written_once(found: dict[Rank, Descriptors]) -> None:
    spans = sorted((start, start + size) for one in found.values() for start, size in _spans(one))
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


def _spans(one: Descriptors) -> list[tuple[int, int]]:
    return list(zip(one.dst.tolist(), one.length.tolist(), strict=True))


def check_sources(pull: Pull, plans: dict[Rank, PairPlan]) -> None:
    """Both stages of the one tensor rank that holds the consumer's heads, each for the layers that it runs."""
    writer = pull.consumer.rank.tp // 2
    assert set(plans) == {Rank(0, 0, writer), Rank(0, 1, writer)}
    for rank, plan in plans.items():
        mine = MODEL[rank.pp * LAYERS // 2 : (rank.pp + 1) * LAYERS // 2]
        assert set(plan.layers) == {layer.name for layer in mine}
    read = Counter((pair.consumer.layer, pair.consumer.component) for plan in plans.values() for pair in plan.pairs)
    assert set(read.values()) == {1}
    assert {component for _, component in read} == COMPONENTS


@pytest.mark.parametrize("conv_layouts", [("DS", "DS"), ("SD", "DS"), ("SD", "SD")], ids=str)
def test_pp2_tp2_to_tp4(conv_layouts: tuple[str, str]) -> None:
    arenas = Arena(1 << 20), Arena(1 << 20)
    read = loopback_reader(*arenas)
    case = HybridCase(engine(2, 2, 16, conv_layouts[0]), engine(4, 1, 8, conv_layouts[1]), TOKENS, seed=53078)
    seen = set()
    for pull in build_hybrid_pulls(case, arenas, 4):
        plans, tally = pull.plans(), Tally()
        check_sources(pull, plans)
        check_written_once({rank: pull.bind(plan) for rank, plan in plans.items()})
        pull.run(plans, read, tally)  # compares every byte of the rank's memory, those around the pages too
        assert tally.bytes == bytes_of_a_rank()
        seen.add(pull.consumer.rank.tp)
    assert seen == {0, 1, 2, 3}


def test_a_flat_cut_is_seen() -> None:
    """Planted: the consumer's share taken from the writer's slot in one piece, as if there were no projections."""
    arenas = Arena(1 << 20), Arena(1 << 20)
    read = loopback_reader(*arenas)
    case = HybridCase(engine(2, 2, 16, "DS"), engine(4, 1, 8, "DS"), TOKENS, seed=53078)

    def flat(found: Descriptors) -> None:
        read(Descriptors(_shifted(found), found.dst, found.length))

    pull = next(build_hybrid_pulls(case, arenas, 1))
    with pytest.raises(AssertionError, match="bytes differ"):
        pull.run(pull.plans(), flat, Tally())


def _shifted(found: Descriptors) -> Ints:
    """Each source follows the one before it, where the two destinations do."""
    src = found.src.copy()
    joined = np.flatnonzero(found.dst[1:] == found.dst[:-1] + found.length[:-1]) + 1
    assert joined.size
    for place in joined.tolist():
        src[place] = src[place - 1] + found.length[place - 1]
    return src
