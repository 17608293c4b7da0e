"""The value oracle over models with several KV cache groups: all axes of `hybrid_oracle.py` together, both modes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mooncake_hetero_tp.core import cover
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.hybrid_memory import DRAFT, GroupSpec, HybridLayer, HybridSide, StateShape, TokenPart
from tests.hybrid_oracle import ORDERS, HybridCase, build_hybrid_pulls, draw_hybrid
from tests.oracle import BLOCKS, TP_SIZES, Reader, loopback_reader, run_pulls
from tests.oracle_memory import Arena, Ints
from tests.staged import StagedTally, run_staged_pulls

RANDOM_CASES, STAGED_CASES, CHUNKS = 1_200, 400, 4


@pytest.fixture(scope="module")
def arenas() -> tuple[Arena, Arena]:
    return Arena(16 << 20), Arena(8 << 20)


@pytest.fixture(scope="module")
def read(arenas: tuple[Arena, Arena]) -> Reader:
    return loopback_reader(*arenas)


@pytest.fixture(params=[64, cover.SHARE_BYTES], ids=["shared", "one rank"])
def share_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """These models are small: with the real number no replica would share."""
    monkeypatch.setattr(cover, "SHARE_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_hand_overs_equal_the_oracle(
    chunk: int, share_bytes: int, arenas: tuple[Arena, Arena], read: Reader
) -> None:
    moved, size = 0, RANDOM_CASES // CHUNKS // 2
    start = (2 * chunk + (share_bytes == 64)) * size
    for seed in range(start, start + size):
        moved += run_pulls(build_hybrid_pulls(draw_hybrid(seed), arenas, 2), read).bytes
    assert moved > 100_000


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_staged_hand_overs_equal_the_oracle_and_direct_mode(
    chunk: int, share_bytes: int, arenas: tuple[Arena, Arena], read: Reader
) -> None:
    tally, size = StagedTally(), STAGED_CASES // CHUNKS // 2
    start = 50_000 + (2 * chunk + (share_bytes == 64)) * size
    for seed in range(start, start + size):
        pulls = build_hybrid_pulls(draw_hybrid(seed), arenas, 2)
        run_staged_pulls(pulls, random.Random(seed), arenas, read, tally)
    assert tally.bytes > 50_000
    assert tally.splits["state rows"] > 0


def test_the_random_cases_reach_every_axis() -> None:
    cases = [draw_hybrid(seed) for seed in range(RANDOM_CASES)]
    sides = [side for case in cases for side in (case.producer, case.consumer)]
    states = [layer.state for side in sides for layer in side.layers if layer.state]
    assert {side.tp for side in sides} == set(TP_SIZES)
    assert {(case.producer.tp < case.consumer.tp) for case in cases} == {True, False}
    assert {len(side.stages) for side in sides} == {1, 2, 3}
    assert any(0 in side.stages for side in sides)
    assert {len(side.groups) for side in sides} == {2, 3, 4}
    assert {sum(group.is_state for group in side.groups) for side in sides} >= {0, 1, 2, 3}
    assert {group.block_size for side in sides for group in side.groups} == set(BLOCKS)
    assert {group.kernel_pages for side in sides for group in side.groups} == {1, 2, 3, 4}
    assert any(group.window for side in sides for group in side.groups)
    assert {(state.kind, state.tensors) for state in states} == {
        (kind, count) for kind in ("gdn", "mamba2") for count in (1, 2, 3)
    }
    assert any(state.conv_item != state.head_item for state in states)
    assert {(case.producer.conv_layout, case.consumer.conv_layout) for case in cases} >= {("DS", "SD"), ("SD", "DS")}
    assert any(
        state.groups < side.tp for side in sides for layer in side.layers if (state := layer.state)
    )  # held by several ranks
    components = Counter(part.component for side in sides for layer in side.layers for part in layer.parts)
    assert set(components) == {"k", "v", "k.scale", "v.scale", "latent", "index"}
    assert {order for side in sides for order in side.orders.values()} == set(ORDERS)
    assert {(DRAFT in case.one_sided, case.producer.overlay) for case in cases} == {
        (one, other) for one in (True, False) for other in (True, False)
    }


QWEN = StateShape(kind="gdn", heads=8, groups=4, width=3, kernel_rows=3, conv_item=2, head_item=4)
NEMOTRON = StateShape(kind="mamba2", heads=8, groups=2, width=3, kernel_rows=3, conv_item=2, head_item=4, tensors=2)


def _hybrid(state: StateShape, tp: int, pp: int, block: int, **changes: object) -> HybridSide:
    """Six state layers of two groups and two attention layers; blocks follow from TP as vLLM's do."""
    heads = tuple(TokenPart(name, 2, 4, 2) for name in "kv")
    layers = tuple(
        HybridLayer(f"layers.{place}", 0, heads) if place % 4 == 3 else
        HybridLayer(f"layers.{place}", 1 + place // 4, state=state)
        for place in range(8)
    )  # fmt: skip
    groups = (GroupSpec(block, block // 2), GroupSpec(block, block, True), GroupSpec(block, block, True))
    return replace(HybridSide(tp, (8 // pp,) * pp, layers, groups, (0, 1, 2), pad_bytes=32), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [QWEN, NEMOTRON], ids=["gdn", "mamba2"])
@pytest.mark.parametrize("producer", [(1, 1), (2, 1), (4, 1), (2, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("consumer", [(1, 1), (2, 1), (4, 1), (4, 2), (8, 1)], ids=str)
def test_hybrids_at_unlike_tp_and_pp(
    state: StateShape,
    producer: tuple[int, int],
    consumer: tuple[int, int],
    arenas: tuple[Arena, Arena],
    read: Reader,
) -> None:
    """vllm#53078 (PP2TP2 -> TP4 among them), vllm#42895: blocks of unlike size, DS against SD, every rank."""
    for seed, (mine, theirs) in enumerate((("DS", "DS"), ("SD", "DS"), ("SD", "SD"))):
        case = HybridCase(
            _hybrid(state, *producer, 16 if producer[0] < 4 else 8, conv_layout=theirs),
            _hybrid(state, *consumer, 16 if consumer[0] < 4 else 8, conv_layout=mine, overlay=True),
            TokenRange(8, 37),
            seed,
        )
        assert run_pulls(build_hybrid_pulls(case, arenas, 8), read).ranks == consumer[0] * consumer[1]


@pytest.mark.parametrize("producer_tp, consumer_tp", [(8, 1), (8, 4), (1, 8), (4, 1)])
def test_latents_and_indexers_come_from_all_ranks_that_hold_them(
    producer_tp: int, consumer_tp: int, arenas: tuple[Arena, Arena], read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two components of one layer with unlike bytes a token, staged and direct (vllm#55523)."""
    monkeypatch.setattr(cover, "SHARE_BYTES", 1)
    parts = (TokenPart("latent", 1, 4, 2), TokenPart("index", 1, 3, 1))
    layers = tuple(HybridLayer(f"layers.{place}", 0, parts) for place in range(16))
    sides = [
        HybridSide(tp, (16,), layers, (GroupSpec(block, 4),), (0,), block_first=tp > 1)
        for tp, block in ((producer_tp, 8), (consumer_tp, 12))
    ]
    case = HybridCase(sides[0], sides[1], TokenRange(5, 30), seed=1)
    readers: Counter[Rank] = Counter()
    for pull in build_hybrid_pulls(case, arenas, consumer_tp):
        readers.update(list(pull.plans()))
    assert set(readers.values()) == {max(consumer_tp // producer_tp, 1)}
    assert len(readers) == producer_tp
    assert run_pulls(build_hybrid_pulls(case, arenas, consumer_tp), read).ranks == consumer_tp
    tally = StagedTally()
    run_staged_pulls(build_hybrid_pulls(case, arenas, consumer_tp), random.Random(1), arenas, read, tally)
    assert tally.ranks == consumer_tp


@pytest.mark.parametrize(
    "change",
    [
        lambda found: (found.src[:-1], found.dst[:-1], found.length[:-1]),
        lambda found: (found.src + 1, found.dst, found.length),
        lambda found: (found.src[::-1], found.dst, found.length),
    ],
    ids=["one lost", "shifted", "swapped"],
)
def test_the_oracle_sees_planted_faults(
    change: Callable[[Descriptors], tuple[Ints, Ints, Ints]], arenas: tuple[Arena, Arena], read: Reader
) -> None:
    case = HybridCase(_hybrid(QWEN, 1, 1, 16), _hybrid(QWEN, 2, 1, 16), TokenRange(3, 9), seed=0)
    run_pulls(build_hybrid_pulls(case, arenas, 1), read)
    with pytest.raises(AssertionError, match="bytes differ"):
        run_pulls(build_hybrid_pulls(case, arenas, 1), lambda found: read(Descriptors(*change(found))))


def test_cases_are_reproducible(arenas: tuple[Arena, Arena]) -> None:
    assert draw_hybrid(7) == draw_hybrid(7)
    pulls = [next(build_hybrid_pulls(draw_hybrid(7), arenas, 1)) for _ in range(2)]
    assert np.array_equal(pulls[0].expected(), pulls[1].expected())


@pytest.mark.parametrize(
    "sizes", [((4192, 32), (2112, 64)), ((2112, 64), (4192, 32)), ((1056, 32), (4176, 16))], ids=str
)
@pytest.mark.parametrize("end", [2112, 2113, 40])
def test_block_sizes_that_follow_from_tp(
    sizes: tuple[tuple[int, int], tuple[int, int]], end: int, arenas: tuple[Arena, Arena], read: Reader
) -> None:
    """Reported pairs of logical and kernel blocks: vllm#49612, vllm#42895, vllm#41037; state and attention groups."""
    heads = tuple(TokenPart(name, 2, 2, 1) for name in "kv")
    layers = (HybridLayer("layers.0", 0, heads), HybridLayer("layers.1", 1, state=QWEN))
    sides = [
        HybridSide(tp, (2,), layers, (GroupSpec(block, kernel), GroupSpec(block, block, True)), (0, 1), num_blocks=6)
        for tp, (block, kernel) in zip((1, 2), sizes, strict=True)
    ]
    for tokens in (TokenRange(0, end), TokenRange(33, end)):
        case = HybridCase(sides[0], sides[1], tokens, seed=end)
        assert run_pulls(build_hybrid_pulls(case, arenas, 2), read).ranks == 2


def test_any_order_of_groups_gives_the_same_bytes(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """vllm#43765, vllm#52592, vllm#32204: (state, state, full) and (indexer, gqa) on one side, any other order there."""
    index, heads = (TokenPart("index", 1, 3, 1),), tuple(TokenPart(name, 4, 2, 2) for name in "kv")
    sparse = (HybridLayer("a.indexer", 1, index), HybridLayer("a.attn", 0, heads))
    of_sparse = (GroupSpec(8, 4), GroupSpec(16, 16))
    seen = set()
    for consumer, producer in itertools.product(itertools.permutations(range(3)), repeat=2):
        sides = [_hybrid(QWEN, 2, 1, 16, order=producer), _hybrid(QWEN, 4, 1, 8, order=consumer)]
        tally = run_pulls(build_hybrid_pulls(HybridCase(sides[0], sides[1], TokenRange(8, 37), 1), arenas, 4), read)
        seen.add(tally.bytes)
    assert len(seen) == 1
    for order in ((0, 1), (1, 0)):
        sides = [HybridSide(4, (2,), sparse, of_sparse, order), HybridSide(1, (2,), sparse, of_sparse, (1, 0))]
        tally = run_pulls(build_hybrid_pulls(HybridCase(sides[0], sides[1], TokenRange(8, 37), 1), arenas, 4), read)
        assert tally.bytes == 29 * (3 + 4 * 2 * 2 * 2)


def test_a_window_is_loaded_only_as_far_as_it_reaches(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """Two windows and full attention in one request; null blocks before each window keep later pages in place."""
    heads = tuple(TokenPart(name, 2, 2, 2) for name in "kv")
    layers = tuple(HybridLayer(f"layers.{group}", group, heads) for group in range(3))
    sides = [
        HybridSide(tp, (3,), layers, tuple(GroupSpec(block, 4, window=window) for window in (None, 10, 3)), (0, 1, 2))
        for tp, block in ((1, 8), (2, 4))
    ]
    case = HybridCase(sides[0], sides[1], TokenRange(4, 41), seed=3)
    assert case.ranges == [TokenRange(4, 41), TokenRange(31, 41), TokenRange(38, 41)]
    (pull, _) = build_hybrid_pulls(case, arenas, 2)
    assert [int((blocks == 0).sum()) for blocks in pull.producer_blocks] == [0, 3, 4]
    assert run_pulls(build_hybrid_pulls(case, arenas, 2), read).bytes == (37 + 10 + 3) * 2 * 2 * 2 * 2
