"""The value oracle in staged mode: gathered, packed, scattered, and equal to direct reads byte for byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from mooncake_hetero_tp.core.copies import ByteMap
from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.core.packing import SideTables
from mooncake_hetero_tp.core.regions import RankTable, Span
from mooncake_hetero_tp.native import reference
from mooncake_hetero_tp.types import Rank, TokenRange
from tests import staged
from tests.oracle import BLOCKS, HEADS, TP_SIZES, Case, Pull, Reader, allowed, draw_case, loopback_reader
from tests.oracle_memory import PAGE_ENCODINGS, VLLM_LAYOUTS, Arena, Bytes, Layer, RankMemory, SideSpec
from tests.staged import Stage, StagedTally, run_staged
from tests.tables import planned, region, table

Tables: TypeAlias = tuple[CopyTable, CopyTable]
RANDOM_CASES, CHUNKS = 800, 4
TWO_LAYERS = (Layer("layers.0.attn", "attention", 2, 2), Layer("layers.1.attn", "attention", 2, 2))
FORMS = [SideSpec(layout=layout, num_blocks=5) for layout in VLLM_LAYOUTS] + [
    SideSpec(encoding=encoding, num_blocks=5) for encoding in PAGE_ENCODINGS
]


@pytest.fixture(scope="module")
def arenas() -> tuple[Arena, Arena]:
    return Arena(8 << 20), Arena(4 << 20)


@pytest.fixture(scope="module")
def read(arenas: tuple[Arena, Arena]) -> Reader:
    return loopback_reader(*arenas)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_hand_overs_equal_the_oracle_and_direct_mode(
    chunk: int, arenas: tuple[Arena, Arena], read: Reader
) -> None:
    tally, size = StagedTally(), RANDOM_CASES // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        run_staged(draw_case(seed), arenas, read, tally)  # the case, with its seed, is in the failure's message
    assert tally.bytes > 100_000
    assert min(tally.splits.values()) >= 20  # every way of cutting was met
    assert set(tally.splits) == {"strips", "classes", "runs", "members", "tokens", "state rows"}


@pytest.mark.parametrize("producer", FORMS, ids=lambda form: f"{form.encoding}-{form.layout}")
def test_every_pair_of_layouts_and_encodings(producer: SideSpec, arenas: tuple[Arena, Arena], read: Reader) -> None:
    """K transposed or not among them; a prefix hit and a half-filled last page in each."""
    tally = StagedTally()
    for consumer, (seed, (mine, theirs)) in itertools.product(FORMS, enumerate(((1, 2), (2, 1), (2, 2)))):
        for tokens in (TokenRange(0, 8), TokenRange(3, 7)):
            case = Case(replace(producer, tp=mine), replace(consumer, tp=theirs), TWO_LAYERS, 1, tokens, seed)
            run_staged(case, arenas, read, tally)
    assert tally.ranks == len(FORMS) * 2 * (2 + 1 + 2)


@pytest.mark.parametrize("heads", HEADS)
def test_every_tp_pair(heads: int, arenas: tuple[Arena, Arena], read: Reader) -> None:
    layers = tuple(replace(layer, units=heads) for layer in TWO_LAYERS)
    sizes = [tp for tp in TP_SIZES if allowed(heads, tp)]
    tally = StagedTally()
    for producer, consumer in itertools.product(sizes, sizes):
        sides = SideSpec(tp=producer, layout="LBNHC"), SideSpec(tp=consumer, layout="BLHNC")
        run_staged(Case(*sides, layers, 2, TokenRange(1, 8), producer), arenas, read, tally)
    assert tally.ranks == sum(min(consumer, 2) for _ in sizes for consumer in sizes)


def test_every_block_size_pair(arenas: tuple[Arena, Arena], read: Reader) -> None:
    sizes = [(block, kernel) for block in BLOCKS for kernel in BLOCKS if block % kernel == 0]
    tally = StagedTally()
    for seed, ((block, kernel), (their_block, their_kernel)) in enumerate(itertools.product(sizes, sizes)):
        end = 2 * max(block, their_block) - seed % 3
        case = Case(
            SideSpec(block_size=their_block, kernel_block_size=their_kernel, num_blocks=-(-end // their_block) + 2),
            SideSpec(tp=2, block_size=block, kernel_block_size=kernel, num_blocks=-(-end // block) + 2),
            TWO_LAYERS,
            item_bytes=1,
            tokens=TokenRange(seed % 5, end),
            seed=seed,
        )
        run_staged(case, arenas, read, tally, most_ranks=1)
    assert tally.ranks == len(sizes) ** 2


def test_opaque_pages_move_whole(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """Content whose inner order nobody knows, cut between heads only, several pages a slot."""
    noise = np.random.default_rng(3)
    sides = []
    for arena, heads, first in zip(arenas, (4, 2), (0, 2), strict=True):
        arena.reset()
        address, memory = arena.take(8 * heads * 64)
        memory[:] = noise.integers(0, 256, memory.size, np.uint8)
        made = region(
            "l", "kv", base=address, pages=(8, heads * 64), token=(4, 16), spans=(Span(0, first, heads),), unit=64,
            channels=16, encoding="opaque:X",
        )  # fmt: skip
        sides.append(RankMemory(Rank(), table([made]), address, memory))
    producer, consumer = sides
    expected = consumer.memory.reshape(8, 2, 64).copy()
    expected[[5, 1]] = producer.memory.reshape(8, 4, 64)[[6, 3], 2:]
    plan = planned(consumer.table, {Rank(): producer.table})[Rank()]
    case = Case(SideSpec(), SideSpec(), (), 1, TokenRange(4, 9))
    blocks = [np.array([0, 5, 1])], [np.array([0, 6, 3])]
    pull = Pull(case, consumer, blocks[0], {Rank(): producer}, blocks[1])
    stage = Stage.of(pull, plan, 128, random.Random(1))
    assert [chunk.packed_bytes for chunk in stage.sent.chunks] == [128, 128]
    stage.move(arenas, read)
    assert np.array_equal(consumer.memory.reshape(8, 2, 64), expected)


def test_the_shipped_reference_moves_the_same_bytes(
    arenas: tuple[Arena, Arena], read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables pass its checks (inside registered buffers, no byte twice), and it packs and unpacks what the oracle does."""
    tally, own = StagedTally(), Stage._move_one

    def move_again(self: Stage, tables: Tables, slots: Sequence[tuple[int, Bytes]], *rest: Any) -> ByteMap:
        moved = own(self, tables, slots, *rest)
        (from_address, sent), (to_address, _) = slots
        held, kept = sent.copy(), arenas[1].memory.copy()
        reference.gather(tables[0], from_address, _ranges(self.plan.producer))
        assert np.array_equal(sent, held)
        reference.scatter(tables[1], to_address, _ranges(self.plan.consumer), check_overlap=True)
        assert np.array_equal(arenas[1].memory, kept)
        return moved

    monkeypatch.setattr(Stage, "_move_one", move_again)
    for seed in range(RANDOM_CASES, RANDOM_CASES + 40):
        run_staged(draw_case(seed), arenas, read, tally)
    assert tally.chunks > 300


def _ranges(held: RankTable) -> list[tuple[int, int]]:
    return [(buffer.address, buffer.length_bytes) for buffer in held.buffers]


def _rows_swapped(table: CopyTable) -> CopyTable:
    copies = table.copies.copy()
    copies["packed_offset"] = copies["packed_offset"][::-1]
    return replace(table, copies=copies)


def _row_lost(table: CopyTable) -> CopyTable:
    return replace(table, copies=table.copies[:-1])


def _base_shifted(table: CopyTable) -> CopyTable:
    copies = table.copies.copy()
    copies["base"][-1] += 1
    return replace(table, copies=copies)


def _axes_turned(table: CopyTable) -> CopyTable:
    """Other order of the segments: as if one side sorted its axes by its own strides."""
    copies = table.copies.copy()
    for row in copies:
        count = int(row["axis_count"])
        row["axes"][:count] = row["axes"][:count][::-1].copy()
    return replace(table, copies=copies)


@pytest.mark.parametrize("fault", [_rows_swapped, _row_lost, _base_shifted, _axes_turned])
def test_the_oracle_sees_planted_faults(
    fault: Callable[[CopyTable], CopyTable], arenas: tuple[Arena, Arena], read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(SideSpec(encoding="cpu"), SideSpec(tp=2, layout="BLNHC"), TWO_LAYERS, 2, TokenRange(1, 7))
    monkeypatch.setattr(staged, "draw_slot", lambda rng, plan: 1_000)
    run_staged(case, arenas, read, StagedTally())
    made = SideTables.table
    monkeypatch.setattr(
        SideTables, "table", lambda self, index: fault(made(self, index)) if self.side == "src" else made(self, index)
    )
    with pytest.raises(AssertionError):
        run_staged(case, arenas, read, StagedTally())
