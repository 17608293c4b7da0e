"""What a prefill worker and decode workers in two processes need to know of the caches that they pull between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import TokenRange
from tests.benchmarks.caches import CROWD, SHAPES
from tests.benchmarks.hybrids import HYBRID
from tests.oracle_memory import Ints


class Opened(Protocol):
    """One side's memory."""

    @property
    def table(self) -> RankTable: ...

    @property
    def address(self) -> int:
        """Of its first byte."""

    def fill(self) -> None:
        """The same bytes in every process."""


class Pullable(Protocol):
    """A pair of caches, and what of them is pulled."""

    @property
    def name(self) -> str: ...

    def open(self, side: str) -> Opened:
        """The memory of `producer` or `consumer`."""

    def kept(self, blocks: int) -> tuple[tuple[Ints, ...], int]:
        """The producer's first blocks of tokens, per group, and how many tokens they hold."""

    def wanted(self, ids: Ints) -> tuple[tuple[TokenRange, ...], tuple[Ints, ...]]:
        """Ranges and the consumer's blocks, per group, of a pull into these blocks of tokens."""


_ALL: tuple[Pullable, ...] = (*SHAPES.values(), CROWD, HYBRID)
BY_NAME: Mapping[str, Pullable] = {made.name: made for made in _ALL}
"""So that two processes mean the same."""
