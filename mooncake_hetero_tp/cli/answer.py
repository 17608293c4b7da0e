"""What `mooncake-hetero-tp plan` answers to one case; all planning is the core's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mooncake_hetero_tp.cli.case import Case, InvalidCase, Request, read_case
from mooncake_hetero_tp.cli.copies import Copy, copies_of
from mooncake_hetero_tp.cli.costs import Reading, Terms, choice_of
from mooncake_hetero_tp.cli.layers import Layer
from mooncake_hetero_tp.cli.memory import Array, RankMemory, engine_memory, refusals
from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.cost import Mode, Rates
from mooncake_hetero_tp.core.handshake import Agreement, agree, combine, compare, explain
from mooncake_hetero_tp.core.pairing import make_pair_plan
from mooncake_hetero_tp.core.plan import PairPlan, collapse, plan_pulls, prove
from mooncake_hetero_tp.errors import ConfigError, IncompatiblePeer
from mooncake_hetero_tp.types import Mismatch, Rank, TokenRange


class RankName(msgspec.Struct, frozen=True):
    """A rank of one engine, as the answer names it."""

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp}.tp{self.tp}"


class Pull(msgspec.Struct, frozen=True):
    """What one consumer rank reads from one producer rank."""

    consumer_rank: RankName
    producer_rank: RankName
    descriptors: int
    bytes: int
    copies: list[Copy]


class Count(msgspec.Struct, frozen=True):
    """Predicted size of one pull."""

    consumer_rank: RankName
    producer_rank: RankName
    descriptors: int
    bytes: int


class Prediction(msgspec.Struct, frozen=True):
    """Counts for a request of `tokens` tokens, no two neighbouring blocks of which lie side by side."""

    tokens: int
    pulls: list[Count]


class StageGeometry(msgspec.Struct, frozen=True):
    """Arrays of each tensor rank of one pipeline stage."""

    pp: int
    arrays: tuple[Array, ...]


class Geometry(msgspec.Struct, frozen=True):
    """The abstract memory of both sides."""

    producer: list[StageGeometry]
    consumer: list[StageGeometry]


class Answer(msgspec.Struct, kw_only=True):
    """The answer to one case. The first six fields are always there; see `mooncake-hetero-tp plan --help`."""

    status: str
    agreement: Agreement | None = None
    mismatches: list[Mismatch] = []
    mode: str | None = None
    why: str
    pulls: list[Pull] = []
    geometry: Geometry | msgspec.UnsetType = msgspec.UNSET
    predicted: Prediction | msgspec.UnsetType = msgspec.UNSET
    rates: Rates | msgspec.UnsetType = msgspec.UNSET
    assumptions: list[str] | msgspec.UnsetType = msgspec.UNSET
    """What a case that was made from a model takes for granted."""


def answer(given: object, terms: Terms) -> Answer:
    """Reads and plans one decoded case; what is wrong with it is told in the answer, never raised."""
    try:
        return _planned(read_case(given), terms)
    except (InvalidCase, ConfigError) as error:
        return Answer(status="invalid", why=str(error))
    except IncompatiblePeer as error:
        found = list(error.mismatches)
        return Answer(status="refused", mismatches=found, why=explain(found))


def _planned(case: Case, terms: Terms) -> Answer:
    if found := refusals(case):
        raise IncompatiblePeer("the case cannot be laid out", collapse(found))
    engines = _Engines.of(case)
    request = case.request or _likely_request(case)
    meant = case if case.request else _with_room(case, request)
    placed = _Placed.of(meant, request, terms)
    readings = list((engines if meant is case else _Engines.of(meant)).readings(placed))
    mode, why = choice_of(readings, terms)
    told = Answer(
        status="ok",
        agreement=combine([agree(plan.producer, plan.consumer) for _, _, plan in engines.plans]),
        mismatches=engines.mismatches(),
        mode=mode,
        why=why,
        geometry=Geometry(_geometry(engines.producers), _geometry(engines.consumers)),
        rates=terms.rates,
    )
    if case.request:
        told.pulls = [engines.pull(placed, reading, mode) for reading in readings]
    else:
        told.predicted = Prediction(request.tokens, [Count(*_count(reading, mode)) for reading in readings])
    return told


@dataclass(frozen=True)
class _Engines:
    """Both memories and the proven plans of all pairs of ranks that exchange bytes, by consumer rank."""

    producers: Mapping[Rank, RankMemory]
    consumers: Mapping[Rank, RankMemory]
    plans: Sequence[tuple[Rank, Rank, PairPlan]]

    @classmethod
    def of(cls, case: Case) -> _Engines:
        producers, consumers = engine_memory(case, "producer"), engine_memory(case, "consumer")
        tables = {rank: memory.table for rank, memory in producers.items()}
        plans = []
        for rank, memory in consumers.items():
            chosen = plan_pulls(memory.table, tables, prefer=rank.tp)
            prove(memory.table, chosen)
            plans += [(rank, producer, plan) for producer, plan in chosen.items()]
        return cls(producers, consumers, plans)

    def mismatches(self) -> list[Mismatch]:
        return list(collapse(found for _, _, plan in self.plans for found in compare(plan.producer, plan.consumer)))

    def readings(self, placed: _Placed) -> Iterator[Reading]:
        """Of all pairs of ranks, without those that would move nothing."""
        for consumer, producer, plan in self.plans:
            whole = placed.bind(plan)
            if whole.bytes:
                yield Reading(consumer, producer, plan, placed.ranges, whole, placed.terms.slot_bytes)

    def pull(self, placed: _Placed, reading: Reading, mode: Mode) -> Pull:
        sources, targets = self.producers[reading.producer], self.consumers[reading.consumer]
        plan = reading.plan
        copies = [
            copy
            for (layer, component), part in _components(plan)
            for copy in copies_of(placed.bind(part), placed.layers[layer], component, (sources, targets))
        ]
        copies.sort(key=lambda copy: copy.place)
        return Pull(*_count(reading, mode), copies)


@dataclass(frozen=True)
class _Placed:
    """A request's token ranges and complete block lists, per group."""

    terms: Terms
    layers: Mapping[str, Layer]
    ranges: list[TokenRange]
    producer_blocks: list[np.ndarray[Any, np.dtype[np.int64]]]
    consumer_blocks: list[np.ndarray[Any, np.dtype[np.int64]]]

    @classmethod
    def of(cls, case: Case, request: Request, terms: Terms) -> _Placed:
        """Puts a place-holder before the consumer's list for each page that it leaves out; none is ever read."""
        whole = TokenRange(request.skip_tokens, request.tokens)
        skipped = [request.skip_tokens // case.consumer.block_size_of(group) for group in case.groups]
        consumer_blocks = zip(skipped, request.consumer_blocks, strict=True)
        return cls(
            terms=terms,
            layers={layer.name: layer for layer in case.layers},
            ranges=[case.tokens_read(group, whole) for group in case.groups],
            producer_blocks=[np.array(blocks, np.int64) for blocks in request.producer_blocks],
            consumer_blocks=[np.array([0] * pages + blocks, np.int64) for pages, blocks in consumer_blocks],
        )

    def bind(self, plan: PairPlan) -> Descriptors:
        """The descriptors of one pair of ranks; block 0 is a block like any other here."""
        return bind(plan, self.ranges, self.producer_blocks, self.consumer_blocks, null_block=None)


def _components(plan: PairPlan) -> Iterator[tuple[tuple[str, str], PairPlan]]:
    """The plan of each (layer, component), in its order."""
    for pair in plan.pairs:
        key = (pair.consumer.layer, pair.consumer.component)
        yield key, make_pair_plan(plan.consumer, plan.producer, [pair])


def _likely_request(case: Case) -> Request:
    """As many tokens as the largest block of tokens holds, no two neighbouring blocks of which lie side by side."""
    paged = [group for group in case.groups if not case.is_state(group)] or case.groups
    tokens = max(side.block_size_of(group) for side in case.sides.values() for group in paged)
    blocks = [
        [list(range(0, 2 * -(-tokens // side.block_size_of(group)), 2)) for group in case.groups]
        for side in (case.producer, case.consumer)
    ]
    return Request(tokens=tokens, producer_blocks=blocks[0], consumer_blocks=blocks[1])


def _with_room(case: Case, request: Request) -> Case:
    """The case with caches that hold the blocks of `request`."""
    larger = [
        msgspec.structs.replace(side, num_blocks=max(side.num_blocks, 2 * max(len(blocks) for blocks in lists)))
        for side, lists in ((case.producer, request.producer_blocks), (case.consumer, request.consumer_blocks))
    ]
    return msgspec.structs.replace(case, producer=larger[0], consumer=larger[1], request=request)


def _count(reading: Reading, mode: Mode) -> tuple[RankName, RankName, int, int]:
    """What `Pull` and `Count` have in common."""
    return _name(reading.consumer), _name(reading.producer), reading.descriptors(mode), reading.direct.bytes


def _name(rank: Rank) -> RankName:
    return RankName(rank.pp, rank.tp)


def _geometry(memory: Mapping[Rank, RankMemory]) -> list[StageGeometry]:
    return [StageGeometry(rank.pp, one.arrays) for rank, one in memory.items() if rank.tp == 0]
