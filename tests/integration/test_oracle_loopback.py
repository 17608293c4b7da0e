"""The value oracle over in-process copies: random hand-overs, exhaustive small ones, refusals, planted faults."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.regions import Buffer, Span
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io.transfer import Deadline
from mooncake_hetero_tp.testing import LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle import (
    BLOCKS,
    HEADS,
    TP_SIZES,
    Case,
    Pull,
    Reader,
    Tally,
    allowed,
    build_consumer,
    build_producers,
    draw_case,
    loopback_reader,
    run_case,
)
from tests.oracle_memory import PAGE_ENCODINGS, VLLM_LAYOUTS, Arena, Layer, SideSpec, build_rank
from tests.tables import planned, region, table

RANDOM_CASES = 2_400
CHUNKS = 8
TWO_LAYERS = (Layer("layers.0.attn", "attention", 2, 2), Layer("layers.1.attn", "attention", 2, 2))


@pytest.fixture(scope="module")
def arenas() -> tuple[Arena, Arena]:
    return Arena(8 << 20), Arena(4 << 20)


@pytest.fixture(scope="module")
def read(arenas: tuple[Arena, Arena]) -> Reader:
    return loopback_reader(*arenas)


@pytest.fixture(scope="module")
def engine_read(arenas: tuple[Arena, Arena]) -> Iterator[Reader]:
    """Through the shipped loopback engine, which copies the descriptors of a call in random order."""
    fabric = LoopbackFabric()
    engines = (LoopbackEngine(fabric), LoopbackEngine(fabric))
    for engine, arena in zip(engines, arenas, strict=True):
        engine.register([Buffer(arena.address, arena.memory.size)])
    engines[1].reorder(seed=1)

    def read(descriptors: Descriptors) -> None:
        engines[1].read(engines[0].transport_session, descriptors, deadline=Deadline(time.monotonic() + 60.0))

    yield read
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_hand_overs_equal_the_oracle(chunk: int, arenas: tuple[Arena, Arena], engine_read: Reader) -> None:
    size = RANDOM_CASES // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        case = draw_case(seed)
        tally = run_case(case, arenas, engine_read)  # the case, with its seed, is in the failure's message
        assert tally.bytes or len(case.layers) < case.consumer.pp


def test_the_random_cases_reach_every_axis() -> None:
    cases = [draw_case(seed) for seed in range(RANDOM_CASES)]
    sides = [side for case in cases for side in (case.producer, case.consumer)]
    pairs = {(case.producer.tp, case.consumer.tp) for case in cases}
    assert pairs == set(itertools.product(TP_SIZES, TP_SIZES))  # one KV head is legal at any TP size
    layouts = {(case.producer.layout, case.consumer.layout) for case in cases}
    assert layouts == set(itertools.product(VLLM_LAYOUTS, VLLM_LAYOUTS))
    encodings = {(case.producer.encoding, case.consumer.encoding) for case in cases}
    assert encodings == set(itertools.product(("packed", *PAGE_ENCODINGS), repeat=2))
    assert {(case.producer.block_size, case.consumer.block_size) for case in cases} == set(
        itertools.product(BLOCKS, BLOCKS)
    )
    assert {case.layers[0].units for case in cases} >= set(HEADS)
    assert {side.pad_bytes for side in sides} == {0, 32}
    assert {side.kernel_pages for side in sides} == {1, 2, 3, 4}
    assert {case.tokens.end for case in cases} >= set(range(1, 49))


@pytest.mark.parametrize("heads", HEADS)
def test_every_tp_pair_and_encoding_pair(heads: int, arenas: tuple[Arena, Arena], read: Reader) -> None:
    """All TP pairs both ways and all encoding pairs; pairs vLLM refuses are refused by name."""
    layers = tuple(replace(layer, units=heads) for layer in TWO_LAYERS)
    encodings = itertools.cycle(itertools.product(("packed", *PAGE_ENCODINGS), repeat=2))
    refused = 0
    for producer_tp, consumer_tp in itertools.product(TP_SIZES, TP_SIZES):
        for (mine, theirs), tokens in zip(encodings, (TokenRange(0, 8), TokenRange(3, 7)), strict=False):
            case = Case(
                producer=SideSpec(tp=producer_tp, encoding=theirs),
                consumer=SideSpec(tp=consumer_tp, encoding=mine),
                layers=layers,
                item_bytes=2,
                tokens=tokens,
                seed=producer_tp * 10 + consumer_tp,
            )
            if allowed(heads, producer_tp) and allowed(heads, consumer_tp):
                assert run_case(case, arenas, read, most_ranks=8).ranks == consumer_tp
                continue
            refused += 1
            wrong = producer_tp if not allowed(heads, producer_tp) else consumer_tp
            with pytest.raises(ConfigError, match=f"TP size {wrong} cannot share {heads} KV heads"):
                run_case(case, arenas, read)
    assert refused == {1: 0, 2: 2 * 11, 4: 2 * 20, 6: 2 * 20, 8: 2 * 20}[heads]


FORMS = [SideSpec(layout=layout, num_blocks=5) for layout in VLLM_LAYOUTS] + [
    SideSpec(encoding=encoding, num_blocks=5) for encoding in PAGE_ENCODINGS
]


def test_two_layers_up_to_two_pages_exhaustively(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """All ranges in two pages, all pairs of layouts and encodings, TP 1/2 both ways; vllm#35444, vllm#46223."""
    ranges = [TokenRange(start, end) for end in range(1, 9) for start in range(end)]
    pulls = 0
    for producer, consumer in itertools.product(FORMS, FORMS):
        for producer_tp, consumer_tp in ((1, 2), (2, 1)):
            case = Case(
                replace(producer, tp=producer_tp),
                replace(consumer, tp=consumer_tp),
                TWO_LAYERS,
                item_bytes=1,
                tokens=TokenRange(0, 8),
                seed=pulls,
            )
            pulls += _all_ranges(case, ranges, arenas, read)
    assert pulls == len(FORMS) ** 2 * 3 * len(ranges)


def test_every_layout_pair_with_many_heads_and_tokens(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """vllm#46223, TensorRT-LLM#6507: 4 heads, 16 tokens, head size 8, TP1 -> TP2; every (head, token, channel)."""
    layers = (Layer("layers.0.attn", "attention", 4, 8), Layer("layers.1.attn", "attention", 4, 8))
    for seed, (producer, consumer) in enumerate(itertools.product(VLLM_LAYOUTS, VLLM_LAYOUTS)):
        sides = [
            SideSpec(tp=tp, layout=layout, block_size=16, kernel_block_size=16, num_blocks=5)
            for tp, layout in ((1, producer), (2, consumer))
        ]
        tally = run_case(Case(sides[0], sides[1], layers, 2, TokenRange(0, 40), seed), arenas, read)
        assert (tally.ranks, tally.bytes) == (2, 2 * 2 * 40 * 4 * 8 * 2)


def test_equal_tp_exhaustively(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """The same at equal TP sizes, where pages are most often copied whole."""
    ranges = [TokenRange(start, end) for end in range(1, 9) for start in range(end)]
    pulls = 0
    for producer, consumer in itertools.product(FORMS[:6], FORMS[:6]):
        for tp in (1, 2):
            case = Case(replace(producer, tp=tp), replace(consumer, tp=tp), TWO_LAYERS, 1, TokenRange(0, 8), pulls)
            pulls += _all_ranges(case, ranges, arenas, read)
    assert pulls == 36 * 3 * len(ranges)


def test_every_block_size_pair_exhaustively(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """All ranges in up to two pages of the larger block, all block and kernel block pairs; vllm#59592, vllm#26744."""
    sizes = [(block, kernel) for block in BLOCKS for kernel in BLOCKS if block % kernel == 0]
    cases = 0
    for (block, kernel), (their_block, their_kernel) in itertools.product(sizes, sizes):
        end = 2 * max(block, their_block)
        case = Case(
            SideSpec(block_size=their_block, kernel_block_size=their_kernel, num_blocks=-(-end // their_block) + 2),
            SideSpec(tp=2, block_size=block, kernel_block_size=kernel, num_blocks=-(-end // block) + 2),
            TWO_LAYERS,
            item_bytes=1,
            tokens=TokenRange(0, end),
            seed=cases,
        )
        ranges = [TokenRange(start, stop) for stop in (end, end - 1, end // 2 + 1) for start in range(0, stop, 3)]
        cases += _all_ranges(case, ranges, arenas, read)
    assert cases > 2_000


def _all_ranges(case: Case, ranges: list[TokenRange], arenas: tuple[Arena, Arena], read: Reader) -> int:
    """Every range over every consumer rank, the consumer's memory fresh noise each time."""
    producers, producer_blocks = build_producers(case, arenas[0])
    moved = 0
    for tp in range(case.consumer.tp):
        consumer, blocks = build_consumer(case, Rank(tp=tp), arenas[1])
        noise = consumer.memory.copy()
        plans = Pull(case, consumer, blocks, producers, producer_blocks).plans()
        for tokens in ranges:
            consumer.memory[:] = noise
            pull = Pull(replace(case, tokens=tokens), consumer, blocks, producers, producer_blocks)
            pull.run(plans, read, Tally())
            moved += 1
    return moved


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_field_case_is_exact_under_either_layout(layout: str, arenas: tuple[Arena, Arena], read: Reader) -> None:
    """Two KV heads, block 1,568, 12 layers, TP1 -> TP2 (vllm#59594); the head size is cut down to 2 to be quick."""
    layers = tuple(Layer(f"layers.{i}.attn", "attention", 2, 2) for i in range(12))
    producer = SideSpec(layout=layout, block_size=1_568, kernel_block_size=1_568, num_blocks=4)
    case = Case(producer, replace(producer, tp=2), layers, 2, TokenRange(700, 3_000))
    tally = run_case(case, arenas, read)
    assert tally.bytes == 2_300 * 12 * 2 * 2 * 2 * 2
    assert tally.descriptors == 2 * 12 * (2 if layout == "BLHNC" else 2_300)


def test_opaque_pages_arrive_byte_for_byte(arenas: tuple[Arena, Arena], read: Reader) -> None:
    """Content whose inner order nobody knows: whole pages, the half-filled last one included, cut between heads."""
    noise = np.random.default_rng(3)
    tables = []
    for arena, heads, first in zip(arenas, (4, 2), (0, 2), strict=True):
        arena.reset()
        address, memory = arena.take(8 * heads * 64)
        memory[:] = noise.integers(0, 256, memory.size, np.uint8)
        spans = (Span(0, first, heads),)
        held = region(
            "l",
            "kv",
            base=address,
            pages=(8, heads * 64),
            token=(4, 16),
            spans=spans,
            unit=64,
            channels=16,
            encoding="opaque:X",
        )
        tables.append(table([held]))
    pages = arenas[0].memory[: 8 * 256].reshape(8, 4, 64)
    expected = arenas[1].memory[: 8 * 128].reshape(8, 2, 64).copy()
    expected[[5, 1]] = pages[[6, 3], 2:]
    plan = planned(tables[1], {Rank(): tables[0]})[Rank()]
    read(bind(plan, [TokenRange(4, 9)], [np.array([0, 6, 3])], [np.array([0, 5, 1])]))
    assert np.array_equal(arenas[1].memory[: 8 * 128].reshape(8, 2, 64), expected)


def test_producer_to_consumer_and_back_is_the_identity(arenas: tuple[Arena, Arena]) -> None:
    """P's pages arrive at D; D's pages pulled into an empty P give P's pages again, byte for byte."""
    there, back = loopback_reader(arenas[0], arenas[1]), loopback_reader(arenas[1], arenas[0])
    for seed in range(150):
        case = replace(draw_case(seed), producer=replace(draw_case(seed).producer, tp=1, pp=1))
        case = replace(case, consumer=replace(case.consumer, tp=1, pp=1), tokens=TokenRange(0, case.tokens.end))
        producers, producer_blocks = build_producers(case, arenas[0])
        consumer, blocks = build_consumer(case, Rank(), arenas[1])
        pull = Pull(case, consumer, blocks, producers, producer_blocks)
        pull.run(pull.plans(), there, Tally())
        sent = producers[Rank()].memory.copy()
        arenas[0].reset()
        origin = build_rank(case.producer, case.layers, case.item_bytes, Rank(), arenas[0])
        origin.memory[:] = ~sent
        turned = replace(case, producer=case.consumer, consumer=case.producer)
        returned = Pull(turned, origin, producer_blocks, {Rank(): consumer}, blocks)
        returned.run(returned.plans(), back, Tally())
        assert np.count_nonzero(origin.memory == sent) == _live_bytes(case)


def _live_bytes(case: Case) -> int:
    """Bytes of tokens `[0, end)` and of one slot, over all layers at TP 1."""
    total = 0
    for layer in case.layers:
        if layer.kind == "state":
            total += layer.units * (3 * 1 + 3 * 1 + 3 * 2 + 2 * layer.channels)
        else:
            total += case.tokens.end * layer.units * layer.channels * (2 if layer.kind == "attention" else 1)
    return total * case.item_bytes


def _drop_last(found: Descriptors) -> Descriptors:
    return Descriptors(found.src[:-1], found.dst[:-1], found.length[:-1])


def _shift_source(found: Descriptors) -> Descriptors:
    return Descriptors(found.src + 1, found.dst, found.length)


def _one_byte_more(found: Descriptors) -> Descriptors:
    length = found.length.copy()
    length[-1] += 1
    return Descriptors(found.src, found.dst, length)


def _swap_sources(found: Descriptors) -> Descriptors:
    return Descriptors(found.src[::-1], found.dst, found.length)


@pytest.mark.parametrize("fault", [_drop_last, _shift_source, _one_byte_more, _swap_sources])
def test_the_oracle_sees_planted_faults(
    fault: Callable[[Descriptors], Descriptors], arenas: tuple[Arena, Arena], read: Reader
) -> None:
    case = Case(
        SideSpec(layout="LBHNC", pad_bytes=32),
        SideSpec(tp=2, layout="LBNHC", pad_bytes=32),
        TWO_LAYERS,
        2,
        TokenRange(1, 7),
    )
    run_case(case, arenas, read)
    with pytest.raises(AssertionError, match="bytes differ"):
        run_case(case, arenas, lambda found: read(fault(found)))


def test_cases_are_reproducible() -> None:
    seed = random.Random(5).randrange(10_000)
    assert draw_case(seed) == draw_case(seed)
