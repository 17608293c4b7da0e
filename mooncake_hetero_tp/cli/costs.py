"""Which way a case's bytes would travel, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from mooncake_hetero_tp.config import SETTINGS
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.chunks import Chunks, cut_chunks, smallest_slot
from mooncake_hetero_tp.core.cost import Choice, Mode, Rates, choose
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.types import Rank, TokenRange

_DEFAULTS = {setting.name: setting.default for setting in SETTINGS}
DEFAULT_SLOT_MIB = int(str(_DEFAULTS["staging_slot_mib"]))
_RING_MIB = int(str(_DEFAULTS["staging_mib"]))


class Terms(msgspec.Struct, frozen=True):
    """What the choice of a mode depends on beside the case: the connector's settings, and rates."""

    rates: Rates = Rates()
    mode: Mode = Mode.AUTO
    slot_mib: int = DEFAULT_SLOT_MIB

    @property
    def slot_bytes(self) -> int:
        return self.slot_mib << 20

    @property
    def slots(self) -> int:
        """Of the connector's default ring, or the one that is longer than it."""
        return max(_RING_MIB // self.slot_mib, 1)


@dataclass(frozen=True)
class Reading:
    """What one consumer rank reads from one producer rank, both ways."""

    consumer: Rank
    producer: Rank
    plan: PairPlan
    ranges: Sequence[TokenRange]
    direct: Descriptors
    slot_bytes: int

    @property
    def fits_slots(self) -> bool:
        return smallest_slot(self.plan) <= self.slot_bytes

    @cached_property
    def chunks(self) -> Chunks:
        """For plans that fit the slots."""
        return cut_chunks(self.plan, self.ranges, self.slot_bytes)

    def descriptors(self, mode: Mode) -> int:
        """What would go to the engine."""
        return self.chunks.reads if mode is Mode.STAGED else self.direct.count


def choice_of(readings: Iterable[Reading], terms: Terms) -> tuple[Mode, str]:
    """(mode, why) of a case, by what the consumer rank would take that reads directly for longest."""
    per_rank: dict[Rank, list[Reading]] = {}
    for reading in readings:
        per_rank.setdefault(reading.consumer, []).append(reading)
    if not per_rank:
        return Mode.DIRECT, f"direct: nothing to read ({terms.rates})"
    obstacle = _obstacle([reading for own in per_rank.values() for reading in own], terms)
    choices = {rank: _choice(own, terms, obstacle) for rank, own in per_rank.items()}
    busiest = max(choices, key=lambda rank: choices[rank].direct_s)
    length = sum(reading.direct.bytes for reading in per_rank[busiest])
    why = f"{choices[busiest].why}, for the {length} bytes of the busiest consumer rank, pp{busiest.pp}.tp{busiest.tp}"
    return choices[busiest].mode, f"{why} ({terms.rates})"


def _obstacle(readings: Iterable[Reading], terms: Terms) -> str | None:
    longest = max((smallest_slot(reading.plan) for reading in readings if not reading.fits_slots), default=None)
    if longest is None:
        return None
    return f"a piece of {longest} bytes stays whole and a slot holds {terms.slot_bytes}"


def _choice(own: Sequence[Reading], terms: Terms, obstacle: str | None) -> Choice:
    return choose(
        terms.rates,
        terms.mode,
        descriptors=sum(reading.direct.count for reading in own),
        length_bytes=sum(reading.direct.bytes for reading in own),
        chunks=0 if obstacle else sum(reading.chunks.count for reading in own),
        slots=terms.slots,
        obstacle=obstacle,
    )
