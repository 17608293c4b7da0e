"""Which producer rank gives which units of which layers to one consumer rank.

First few ranks are chosen that hold all the units together: each rank more is a session, a claim and a grant for
every request. Then ranks that hold the very same units share the layers among them. What every rank holds whole (MLA
latents, indexer caches beside sharded heads, vllm#55523) would else come through one rank's network card while the
others idle. Shares are consecutive layers, so no copy becomes shorter than a layer's page, and
what lies together in memory mostly stays together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncake_hetero_tp.core.regions import RankTable, Region, Span, UnitCut, intersect
from mooncake_hetero_tp.types import Rank

Key = tuple[str, str]
"""(layer, component): what the two sides are paired by, never by position."""
Spans = tuple[Span, ...]
Cuts = tuple[UnitCut, ...]
Offers = tuple[tuple[Rank, Spans], ...]
Demand = tuple[Spans, Offers]
"""Spans a consumer region wants and what each producer rank holds: equal for all like layers."""

SHARE_TOKENS: Final = 1_024
SHARE_BYTES: Final = 2 << 20
"""A rank shares only if it gives this much of a request of `SHARE_TOKENS` tokens.

The policy's one number: 2 MiB take 80 us at 200 Gb/s, about what a rank more costs in messages. A DeepSeek-V3 (61
layers of 1,152 bytes a token) is shared by up to 34 ranks, a model of two small layers by none."""


@dataclass(frozen=True)
class Lack:
    """Units of a component that nobody offers."""

    missing: Spans
    offers: Offers


@dataclass
class Cover:
    """Per producer rank what it gives; and what cannot be had."""

    chosen: dict[Rank, dict[Key, Cuts]] = field(default_factory=dict)
    lacking: dict[Key, Lack] = field(default_factory=dict)


def cover_units(
    consumer: RankTable, wanted: Mapping[Key, Region], held: Mapping[Rank, Mapping[Key, Region]], prefer: int
) -> Cover:
    """Gives each wanted unit to one rank: few ranks, replicas sharing; `prefer` tells consumer ranks apart."""
    demands: dict[Demand, list[Key]] = defaultdict(list)
    for key, region in wanted.items():
        offers = tuple([(rank, regions[key].spans) for rank, regions in held.items() if key in regions])
        demands[(region.spans, offers)].append(key)
    missing = {demand: demand[0] for demand in demands}
    cover = Cover()
    while (rank := _best_rank(held, demands, missing, prefer)) is not None:
        for demand, keys in demands.items():
            if cuts := _takes(demand, missing[demand], rank):
                missing[demand] = _without(missing[demand], cuts)
                for giver, part in _shares(consumer, wanted, demand, (rank, keys, cuts), prefer):
                    cover.chosen.setdefault(giver, {}).update(dict.fromkeys(part, cuts))
    for demand, left in missing.items():
        cover.lacking |= dict.fromkeys(demands[demand] if left else (), Lack(left, demand[1]))
    cover.chosen = {rank: taken for rank, taken in cover.chosen.items() if taken}
    return cover


def _best_rank(
    held: Mapping[Rank, object],
    demands: Mapping[Demand, Sequence[Key]],
    missing: Mapping[Demand, Spans],
    prefer: int,
) -> Rank | None:
    """The rank to take next; None when no rank adds anything."""
    gains: dict[Rank, int] = {}
    for rank in held:
        gains[rank] = sum(
            len(keys) * sum(cut.count for cut in _takes(demand, missing[demand], rank))
            for demand, keys in demands.items()
        )
    most = max(gains.values(), default=0)
    equals = [rank for rank, gain in gains.items() if gain == most]
    return equals[prefer % len(equals)] if most else None


def _takes(demand: Demand, missing: Spans, rank: Rank) -> Cuts:
    spans = dict(demand[1]).get(rank, ())
    return tuple(sorted(intersect(missing, spans)))


# --- replicas share -------------------------------------------------------------------------------


def _shares(
    consumer: RankTable,
    wanted: Mapping[Key, Region],
    demand: Demand,
    taken: tuple[Rank, Sequence[Key], Cuts],
    prefer: int,
) -> Iterable[tuple[Rank, Sequence[Key]]]:
    """What was taken from one rank, over that rank alone or over replicas of it.

    As many replicas as the bytes are worth and as leave some to the other consumer ranks.
    """
    rank, keys, cuts = taken
    spans = dict(demand[1])
    replicas = [other for other, theirs in demand[1] if theirs == spans[rank]]
    most = len(replicas) // _readers(consumer, demand)
    if most < 2:
        return [(rank, keys)]
    units = _units(cuts)
    weights = {key: units * _unit_bytes(consumer, wanted[key]) for key in keys}
    count = min(most, sum(weights.values()) // SHARE_BYTES)
    if count < 2:
        return [(rank, keys)]
    parts = _split(weights, count)
    return [(replicas[(prefer * count + place) % len(replicas)], part) for place, part in enumerate(parts)]


def _unit_bytes(consumer: RankTable, region: Region) -> int:
    """Bytes of one unit in a request of `SHARE_TOKENS` tokens, or in a state slot."""
    rows = region.token.count if consumer.groups[region.group].is_state else SHARE_TOKENS
    return rows * region.channel.count * region.item_bytes


def _units(pieces: Iterable[Span | UnitCut]) -> int:
    return sum(piece.count for piece in pieces)


def _readers(consumer: RankTable, demand: Demand) -> int:
    """How many consumer ranks, this one included, want the same units: they spread over the replicas by themselves."""
    total = max(span.global_start + span.count for _, spans in demand[1] for span in spans)
    return max(consumer.tp_size * _units(demand[0]) // total, 1)


def _split(weights: Mapping[Key, int], parts: int) -> list[list[Key]]:
    """Keys in `parts` of consecutive layers, about equal in weight; a layer is never split."""
    layers: dict[str, list[Key]] = defaultdict(list)
    for key in weights:
        layers[key[0]].append(key)
    total, before = sum(weights.values()), 0
    split: list[list[Key]] = [[] for _ in range(parts)]
    for keys in layers.values():
        weight = sum(weights[key] for key in keys)
        split[(2 * before + weight) * parts // (2 * total)].extend(keys)
        before += weight
    return split


# --- spans ----------------------------------------------------------------------------------------


def _without(spans: Spans, cuts: Iterable[UnitCut]) -> Spans:
    """Spans less the units of `cuts`."""
    left = list(spans)
    for cut in cuts:
        left = [piece for span in left for piece in _minus(span, cut.global_start, cut.count)]
    return tuple(left)


def _minus(span: Span, start: int, count: int) -> Iterable[Span]:
    end, span_end = start + count, span.global_start + span.count
    if end <= span.global_start or span_end <= start:
        yield span
        return
    if span.global_start < start:
        yield Span(span.local_start, span.global_start, start - span.global_start)
    if end < span_end:
        yield Span(span.local_start + end - span.global_start, end, span_end - end)
