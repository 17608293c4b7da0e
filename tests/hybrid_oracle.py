"""Random hand-overs of models with several KV cache groups, all axes together: drawn, planned, moved, compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mooncake_hetero_tp.types import Rank, TokenRange
from tests.hybrid_memory import (
    DRAFT,
    GroupSpec,
    HybridLayer,
    HybridMemory,
    HybridSide,
    StateShape,
    TokenPart,
    build_hybrid,
)
from tests.oracle import BLOCKS, TP_SIZES, Pull, allowed
from tests.oracle_memory import Arena, Ints

ORDERS = ("HNC", "NHC", "HCN")


@dataclass(frozen=True)
class HybridCase:
    """One hand-over: two engines of one model, and a token range."""

    producer: HybridSide
    consumer: HybridSide
    tokens: TokenRange
    seed: int

    @property
    def ranges(self) -> list[TokenRange]:
        """Per group of the consumer's table: the whole range, or the window's end of it."""
        return [self.consumer.groups[number].clip(self.tokens) for number in self.consumer.order]

    @property
    def one_sided(self) -> frozenset[str]:
        names = [{layer.name for layer in side.layers} for side in (self.producer, self.consumer)]
        return frozenset(names[0] ^ names[1])


def draw_blocks(rng: random.Random, side: HybridSide, tokens: TokenRange) -> list[Ints]:
    """Block ids per table group: groups that lie over one another never share one; null before windows and slots."""
    pool = rng.sample(range(1, side.num_blocks), side.num_blocks - 1)
    lists = []
    for number in side.order:
        spec = side.groups[number]
        count = -(-tokens.end // spec.block_size)
        first = count - 1 if spec.is_state else spec.clip(tokens).start // spec.block_size
        if not side.overlay:
            pool = rng.sample(range(1, side.num_blocks), side.num_blocks - 1)
        ids = np.zeros(count, np.int64)
        ids[first:] = [pool.pop() for _ in range(count - first)]
        lists.append(ids)
    return lists


def build_hybrid_pulls(case: HybridCase, arenas: tuple[Arena, Arena], most_ranks: int) -> Iterator[Pull]:
    """Up to `most_ranks` of the consumer's ranks, in the same memory one after the other."""
    rng, noise = random.Random(case.seed), np.random.default_rng(case.seed)
    arenas[0].reset()
    producers: dict[Rank, HybridMemory] = {}
    everything = TokenRange(0, case.tokens.end)
    blocks = draw_blocks(rng, case.producer, everything)
    for rank in _ranks(case.producer):
        memory = producers[rank] = build_hybrid(case.producer, rank, arenas[0])
        memory.memory[:] = noise.integers(0, 256, memory.memory.size, np.uint8)
        memory.fill(blocks, [case.producer.groups[number].clip(everything) for number in case.producer.order])
    for rank in rng.sample(_ranks(case.consumer), min(most_ranks, len(_ranks(case.consumer)))):
        arenas[1].reset()
        consumer = build_hybrid(case.consumer, rank, arenas[1], case.one_sided)
        consumer.memory[:] = noise.integers(0, 256, consumer.memory.size, np.uint8)
        yield Pull(case, consumer, draw_blocks(rng, case.consumer, case.tokens), producers, blocks)


def _ranks(side: HybridSide) -> list[Rank]:
    return [Rank(0, pp, tp) for pp in range(len(side.stages)) for tp in range(side.tp)]


# --- drawing --------------------------------------------------------------------------------------


def draw_hybrid(seed: int) -> HybridCase:
    """A random legal hand-over; the same seed gives the same case."""
    rng = random.Random(seed)
    heads = rng.choice((1, 2, 4, 6, 8))
    model = [_draw_group(rng, number, heads) for number in range(rng.randint(2, 4))]
    rng.shuffle(model)
    layers = [
        HybridLayer(f"layers.{number}.{place}", number, parts, state)
        for number, (_, kinds) in enumerate(model)
        for place, (parts, state) in enumerate(kinds)
    ]
    rng.shuffle(layers)
    draft = None
    tokens = [layer for layer in layers if layer.parts]
    if tokens and rng.random() < 0.4:
        like = rng.choice(tokens)
        draft = HybridLayer(DRAFT, like.group, like.parts)
    end = rng.choice((1, rng.randint(1, 8), rng.randint(1, 40), rng.choice(BLOCKS) * rng.randint(1, 3)))
    windows = [window for window, _ in model]
    sides = [_draw_side(rng, heads, layers, draft, windows) for _ in range(2)]
    skips = [skip for skip in (0, 0, 4, 8, 16, rng.randrange(end)) if skip < end]
    return HybridCase(sides[0], sides[1], TokenRange(rng.choice(skips), end), seed)


Kinds = list[tuple[tuple[TokenPart, ...], StateShape | None]]


def _draw_group(rng: random.Random, number: int, heads: int) -> tuple[int | None, Kinds]:
    """(window, layers) of one group of the model; a window of -1 marks a state group."""
    count = rng.randint(1, 3)
    if number == 0 or rng.random() < 0.5:
        window = rng.choice((None, None, rng.randint(1, 24)))
        return window, [(_draw_parts(rng, heads), None)] * count
    return -1, [((), _draw_state(rng, heads))] * count


def _draw_parts(rng: random.Random, heads: int) -> tuple[TokenPart, ...]:
    channels, item = rng.choice((2, 4)), rng.choice((1, 2, 4))
    if rng.random() < 0.3:
        latent = (TokenPart("latent", 1, channels, item),)
        return latent if rng.random() < 0.5 else (*latent, TokenPart("index", 1, 3, rng.choice((1, 2))))
    parts = [TokenPart(name, heads, channels, item) for name in "kv"]
    if rng.random() < 0.4:
        parts += [TokenPart(f"{name}.scale", heads, rng.choice((1, 2)), 4) for name in "kv"]
    if rng.random() < 0.3:
        parts.append(TokenPart("index", 1, 3, rng.choice((1, 2))))
    return tuple(parts)


def _draw_state(rng: random.Random, heads: int) -> StateShape:
    return StateShape(
        kind=rng.choice(("gdn", "mamba2")),
        heads=heads,
        groups=rng.choice([count for count in (1, 2, 4, 8) if heads % count == 0]),
        width=rng.choice((2, 3)),
        kernel_rows=rng.randint(1, 4),
        conv_item=rng.choice((1, 2, 4)),
        head_item=rng.choice((2, 4)),
        tensors=rng.choice((1, 1, 2, 3)),
    )


def _draw_side(
    rng: random.Random, heads: int, layers: list[HybridLayer], draft: HybridLayer | None, windows: list[int | None]
) -> HybridSide:
    units = {part.units for layer in layers for part in layer.parts}
    units |= {count for layer in layers if layer.state for count in (layer.state.heads, layer.state.groups)}
    mine = [*layers, draft] if draft and rng.random() < 0.5 else list(layers)
    stages = rng.choice((1, 1, 2, 3))
    cuts = sorted(rng.randint(0, len(mine)) for _ in range(stages - 1))
    groups = []
    for window in windows:
        block = rng.choice(BLOCKS)
        kernel = rng.choice([size for size in (4, 8, 12, 16) if block % size == 0])
        state = window == -1
        groups.append(GroupSpec(block, block if state else kernel, state, None if state else window))
    names = {part.component for layer in layers for part in layer.parts}
    return HybridSide(
        tp=rng.choice([tp for tp in TP_SIZES if all(allowed(count, tp) for count in units | {heads})]),
        stages=tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, len(mine)], strict=True)),
        layers=tuple(mine),
        groups=tuple(groups),
        order=tuple(rng.sample(range(len(windows)), len(windows))),
        orders={name: rng.choice(ORDERS) for name in sorted(names)},
        conv_layout=rng.choice(("DS", "SD")),
        pad_bytes=rng.choice((0, 0, 5, 32)),
        gap_bytes=rng.choice((0, 0, 8)),
        block_first=rng.random() < 0.5,
        overlay=rng.random() < 0.4,
        num_blocks=50,
    )
