"""What a pull takes, read directly or staged, from measured rates; and which of the two is faster.

Two lines, no more. A direct read is bound by its descriptors or by its bytes, whichever takes longer. A staged one is
a pipeline of gather, read and scatter: all three for the first chunk, after the request for it, and the slowest of
them for each chunk more.

Neglected: what a descriptor takes is one rate, though over TCP pieces of 32 and 64 KiB take 30 to 70 us where shorter
ones take 25 to 40, so a path is measured in pieces as long as its own; several pulls at once, which share the wire and
the cores; that gather and scatter of pieces below 4 KiB run slower than of longer ones; what a half-empty last chunk
saves. Near the crossover the two modes differ by less than that.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]

DEFAULT_SLOTS: Final = 4
"""Slots that one pull may have in flight (`ConsumerConfig.staging_window`)."""


class Mode(StrEnum):
    """How a pull's bytes travel."""

    AUTO = "auto"
    """Whichever of the other two is estimated to be faster."""
    DIRECT = "direct"
    """One descriptor for each run that is contiguous on both sides."""
    STAGED = "staged"
    """Packed into slots at the producer, read in large pieces, unpacked at the consumer."""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of one path between two machines, and of packing at its ends.

    The defaults are Mooncake Transfer Engine 0.3.13 over TCP loopback on 2 cores: pieces of 32 MiB pass at 1.6 GB/s,
    and no descriptor, however short, takes less than about 25 us. One thread gathers pieces of 4 to 32 KiB at 13 to
    17 GB/s into memory that was touched before. The last two are what two Python threads and a loopback socket take.
    """

    descriptor_s: Positive = 25e-6
    """What a descriptor takes at least, beside others: of a path that was measured, one as long as its pieces."""
    bytes_per_s: Positive = 1.6e9
    gather_bytes_per_s: Positive = 13e9
    scatter_bytes_per_s: Positive = 13e9
    round_trip_s: Positive = 500e-6
    """From asking for a chunk to its answer, without gathering it."""
    chunk_s: Positive = 300e-6
    """What each chunk takes beside its bytes: tables on both sides, thread switches, the cores it shares."""

    def __str__(self) -> str:
        return (
            f"{self.descriptor_s * 1e6:g} us a descriptor, {self.bytes_per_s / 1e9:g} GB/s; "
            f"gather {self.gather_bytes_per_s / 1e9:g} GB/s, scatter {self.scatter_bytes_per_s / 1e9:g} GB/s, "
            f"{self.chunk_s * 1e6:g} us a chunk, {self.round_trip_s * 1e6:g} us a round trip"
        )

    def direct_s(self, descriptors: int, length_bytes: int) -> float:
        """Seconds to read `length_bytes` with so many descriptors: whichever bound is the slower.

        The two overlap: measured, 32 KiB descriptors take 27 us, 16 KiB ones 25, not the sum of both.
        """
        return max(descriptors * self.descriptor_s, length_bytes / self.bytes_per_s)

    def staged_s(self, chunks: int, length_bytes: int, slots: int = DEFAULT_SLOTS) -> float:
        """Seconds to read `length_bytes` in chunks, of which `slots` may be on their way at a time.

        A slot is taken from the request for a chunk until its scatter is done, so few slots let the round trip and
        all three stages show.
        """
        if not chunks:
            return 0.0
        each = length_bytes / chunks
        gather, scatter = each / self.gather_bytes_per_s, each / self.scatter_bytes_per_s
        read = each / self.bytes_per_s + self.descriptor_s + self.chunk_s
        first = self.round_trip_s + gather + read + scatter
        return first + (chunks - 1) * max(gather, read, scatter, first / slots)


class Choice(msgspec.Struct, frozen=True):
    """How to read, why (one sentence), and both estimates in seconds; `staged_s` is None where it is impossible."""

    mode: Mode
    why: str
    direct_s: float
    staged_s: float | None


def choose(
    rates: Rates,
    wanted: Mode,
    *,
    descriptors: int,
    length_bytes: int,
    chunks: int,
    slots: int = DEFAULT_SLOTS,
    obstacle: str | None = None,
) -> Choice:
    """Direct or staged, for one pull: as `wanted`, or the faster one.

    `obstacle` says why it cannot be staged; then it is direct whatever is wanted.
    """
    direct_s = rates.direct_s(descriptors, length_bytes)
    directly = f"{_ms(direct_s)} in {_counted(descriptors, 'descriptor')}"
    if obstacle is not None:
        return Choice(Mode.DIRECT, f"direct: {directly}; not staged because {obstacle}", direct_s, None)
    staged_s = rates.staged_s(chunks, length_bytes, slots)
    through = f"{_ms(staged_s)} in {_counted(chunks, 'chunk')}"
    faster = Mode.STAGED if staged_s < direct_s else Mode.DIRECT
    mode = faster if wanted is Mode.AUTO else wanted
    told = (directly, f"staged {through}") if mode is Mode.DIRECT else (through, f"direct {directly}")
    set_so = "" if wanted is Mode.AUTO else ", as set"
    return Choice(mode, f"{mode}{set_so}: {told[0]}, {told[1]}", direct_s, staged_s)


def _ms(seconds: float) -> str:
    return f"about {seconds * 1e3:.3g} ms"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def crossover_bytes(rates: Rates, length_bytes: int, slot_bytes: int, slots: int = DEFAULT_SLOTS) -> float:
    """Length of the pieces from which on a pull of `length_bytes` is faster read directly than staged.

    The bulk rate bounds both modes alike, so it is the pieces whose descriptors take as long as staging does.
    """
    chunks = -(-length_bytes // slot_bytes)
    return rates.descriptor_s * length_bytes / rates.staged_s(chunks, length_bytes, slots)


# --- measuring -------------------------------------------------------------------------------------------------------

WEIGHT: Final = 0.25
"""Share of the latest observation: a changed path is believed after about eight of them."""
LARGEST_JUMP: Final = 4.0
"""One observation, however odd (a stall, a clock step), counts as at most so much faster or slower than believed."""
FADING: Final = 1 / 64
"""Share of the way back to the built-in rates that what is known of staging goes with each pull that is not staged."""
FEWEST_DESCRIPTORS: Final = 16
FEWEST_BYTES: Final = 1 << 20
"""Smaller transfers tell of thread switches, not of the path."""
_OF_STAGING: Final = ("gather_bytes_per_s", "scatter_bytes_per_s", "round_trip_s", "chunk_s")
_SECONDS: Final = (1e-8, 1.0)
_BYTES_PER_S: Final = (1e6, 1e13)


class Measured(msgspec.Struct, frozen=True):
    """Rates as observed so far; each method gives the record after one more observation.

    Averages are of logarithms, so that a rate stays positive and twice as fast weighs as much as half as fast.
    """

    rates: Rates = Rates()

    def read(self, descriptors: int, length_bytes: int, seconds: float) -> Measured:
        """After one read of so many descriptors: it tells of the bound that it ran into, and only of that."""
        by_count = descriptors * self.rates.descriptor_s >= length_bytes / self.rates.bytes_per_s
        if by_count:
            return self._takes("descriptor_s", descriptors, seconds, FEWEST_DESCRIPTORS)
        return self._moves("bytes_per_s", length_bytes, seconds)

    def staged(self, chunks: int, length_bytes: int, seconds: float) -> Measured:
        """After so many chunks of one path were read: what they took beside their bytes.

        Not of the bulk rate, unless it was beaten: packing and unpacking share the cores with these reads, which
        slows them down and no direct read.
        """
        beside_s = seconds - length_bytes / self.rates.bytes_per_s
        if beside_s <= 0:
            return self._moves("bytes_per_s", length_bytes, seconds)
        return self._takes("chunk_s", chunks, beside_s) if length_bytes >= FEWEST_BYTES else self

    def gathered(self, length_bytes: int, seconds: float) -> Measured:
        """After one gather."""
        return self._moves("gather_bytes_per_s", length_bytes, seconds)

    def scattered(self, length_bytes: int, seconds: float) -> Measured:
        """After one scatter."""
        return self._moves("scatter_bytes_per_s", length_bytes, seconds)

    def answered(self, seconds: float) -> Measured:
        """After one request for a chunk was answered; `seconds` without gathering and without waiting for a slot."""
        return self._takes("round_trip_s", 1, seconds)

    def not_staged(self) -> Measured:
        """After one pull that was read directly because that seemed faster: what is known of staging ages.

        Nothing else would ever correct it, and a busy minute would keep pulls from being staged for good.
        """
        built_in = Rates()
        aged = {name: _between(getattr(self.rates, name), getattr(built_in, name)) for name in _OF_STAGING}
        return Measured(msgspec.structs.replace(self.rates, **aged))

    def _takes(self, name: str, count: int, seconds: float, fewest: int = 1) -> Measured:
        if count < fewest or seconds <= 0:
            return self
        return self._refined(name, seconds / count, _SECONDS)

    def _moves(self, name: str, length_bytes: int, seconds: float) -> Measured:
        if length_bytes < FEWEST_BYTES or seconds <= 0:
            return self
        return self._refined(name, length_bytes / seconds, _BYTES_PER_S)

    def _refined(self, name: str, seen: float, bounds: tuple[float, float]) -> Measured:
        believed: float = getattr(self.rates, name)
        change = min(max(seen / believed, 1 / LARGEST_JUMP), LARGEST_JUMP)
        value = min(max(believed * change**WEIGHT, bounds[0]), bounds[1])
        return Measured(msgspec.structs.replace(self.rates, **{name: value}))


def _between(believed: float, built_in: float) -> float:
    faded: float = believed * (built_in / believed) ** FADING
    return faded
