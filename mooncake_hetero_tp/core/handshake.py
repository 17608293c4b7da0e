"""What two ranks settle on, or every reason why they cannot.

`compare` lists the differences (see `core/comparison.py` for the rules), `agree` turns them into an Agreement
or a refusal, `explain` into text. Both sides and the command line print the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from mooncake_hetero_tp.core.comparison import compare, group_pairs, page_runs, pair_regions
from mooncake_hetero_tp.core.pairing import RegionPair
from mooncake_hetero_tp.core.plan import collapse, refuse
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import Mismatch, Severity

__all__ = ["Agreement", "GroupAgreement", "Sides", "agree", "combine", "compare", "explain"]

T = TypeVar("T")


class Sides(msgspec.Struct, Generic[T], frozen=True):
    """One value of the producer beside the same value of the consumer."""

    producer: T
    consumer: T


class GroupAgreement(msgspec.Struct, frozen=True):
    """One KV cache group both sides hold layers of; sizes in tokens."""

    index: Sides[int]
    kind: str
    block_size: Sides[int]
    kernel_block_size: Sides[int]


class Agreement(msgspec.Struct, frozen=True):
    """What two ranks settled on."""

    tp: Sides[int]
    pp: Sides[int]
    layout: Sides[str]
    groups: tuple[GroupAgreement, ...]
    encodings: tuple[Sides[str], ...]
    layers: tuple[str, ...]
    """Layers both hold, in the consumer's order."""
    bytes_per_token: int
    """Bytes of one token that the consumer can read from the producer, over all shared layers with tokens."""
    bytes_per_slot: int
    """Bytes of one request's state that it can read, over all shared state layers."""
    run_bytes: int
    """Shortest contiguous copy between two full pages; 0 where nothing is shared."""


def agree(producer: RankTable, consumer: RankTable) -> Agreement:
    """What the two ranks settle on; both tables must be valid by themselves.

    Raises:
        IncompatiblePeer: something differs that must not; carries every such mismatch.
    """
    refusals = [found for found in compare(producer, consumer) if found.severity is Severity.REFUSE]
    if refusals:
        refuse(refusals)
    pairs = pair_regions(producer, consumer)
    return Agreement(
        tp=Sides(producer.tp_size, consumer.tp_size),
        pp=Sides(producer.pp_size, consumer.pp_size),
        layout=Sides(producer.layout, consumer.layout),
        groups=_agreed_groups(producer, consumer, pairs),
        encodings=tuple(dict.fromkeys(Sides(pair.producer.encoding, pair.consumer.encoding) for pair in pairs)),
        layers=tuple(dict.fromkeys(pair.consumer.layer for pair in pairs)),
        bytes_per_token=sum(pair.token_bytes for pair in pairs if not _is_state(pair, consumer)),
        bytes_per_slot=sum(pair.token_bytes * pair.consumer.token.count for pair in pairs if _is_state(pair, consumer)),
        run_bytes=min((page.shortest_bytes for page in page_runs(producer, consumer, pairs)), default=0),
    )


def combine(agreements: Sequence[Agreement]) -> Agreement:
    """The agreement of two engines, from those of the pairs of ranks that exchange bytes (at least one)."""
    return msgspec.structs.replace(
        agreements[0],
        groups=tuple(dict.fromkeys(group for one in agreements for group in one.groups)),
        encodings=tuple(dict.fromkeys(names for one in agreements for names in one.encodings)),
        layers=tuple(dict.fromkeys(layer for one in agreements for layer in one.layers)),
        bytes_per_token=sum(one.bytes_per_token for one in agreements),
        bytes_per_slot=sum(one.bytes_per_slot for one in agreements),
        run_bytes=min((one.run_bytes for one in agreements if one.run_bytes), default=0),
    )


def explain(mismatches: Iterable[Mismatch]) -> str:
    """A plain-text list for logs and people, worst first; a difference that many layers share is told once."""
    ranked = sorted(collapse(mismatches), key=lambda found: list(Severity).index(found.severity))
    return "\n".join(f"[{found.severity}] {found}" for found in ranked)


def _agreed_groups(producer: RankTable, consumer: RankTable, pairs: Sequence[RegionPair]) -> tuple[GroupAgreement, ...]:
    return tuple(
        GroupAgreement(
            index=Sides(ours.index, theirs.index),
            kind=theirs.kind,
            block_size=Sides(ours.block_size, theirs.block_size),
            kernel_block_size=Sides(ours.kernel_block_size, theirs.kernel_block_size),
        )
        for ours, theirs in group_pairs(producer, consumer, pairs)
    )


def _is_state(pair: RegionPair, consumer: RankTable) -> bool:
    return consumer.groups[pair.consumer.group].is_state
