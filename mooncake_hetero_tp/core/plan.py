"""From two region tables to copies: which producer rank gives which units, and how pages map.

The chain is `plan_pulls` (here: pairing by name, refusals; `core/cover.py`: which rank gives what) -> `PairPlan`
(`core/pairing.py`: classes and templates) -> `prove` (`core/proof.py`) -> `bind`
(`core/binding.py`: blocks and addresses). Token cuts are in `core/runs.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mooncake_hetero_tp.core.copies import Loop, StridedCopy
from mooncake_hetero_tp.core.cover import Key, Lack, cover_units
from mooncake_hetero_tp.core.engine_tables import check_same_engine
from mooncake_hetero_tp.core.pairing import PairPlan, RegionPair, make_pair_plan
from mooncake_hetero_tp.core.proof import prove
from mooncake_hetero_tp.core.regions import RankTable, Region, page_extent, unserved_drafts
from mooncake_hetero_tp.core.runs import RunTable, cut_runs
from mooncake_hetero_tp.errors import IncompatiblePeer, PeerProtocolError
from mooncake_hetero_tp.types import Mismatch, Rank, Severity

__all__ = [
    "Loop",
    "PairPlan",
    "RegionPair",
    "RunTable",
    "StridedCopy",
    "cut_runs",
    "cuts_between_units",
    "pair_mismatches",
    "plan_pulls",
    "prove",
]


def plan_pulls(
    consumer: RankTable,
    producers: Mapping[Rank, RankTable],
    *,
    prefer: int = 0,
) -> dict[Rank, PairPlan]:
    """What this consumer rank reads from each producer rank; ranks that are not needed are absent.

    Every (layer, component, global unit) the consumer holds comes from exactly one rank. Few ranks
    are chosen, but ranks that hold the same share its layers where that is worth it; `prefer` (say, the
    consumer's TP rank) tells which (`core/cover.py`). Layers only the producer has are skipped; layers
    only the consumer has are refused unless they are a draft model's (vllm#49230).

    Raises:
        IncompatiblePeer: with every reason at once: something is not covered, types differ, or an
            opaque encoding would have to be cut.
        PeerProtocolError: a table names one (layer, component) twice, or the producer ranks are not of one engine.
    """
    check_same_engine(producers)
    held = {rank: _by_key(table, f"producer rank {rank}") for rank, table in sorted(producers.items())}
    unserved = unserved_drafts(consumer, producers.values())
    wanted = {key: region for key, region in _by_key(consumer, "consumer").items() if key[0] not in unserved}
    refused = list(_unlike(consumer, producers, wanted, held))
    cover = cover_units(consumer, wanted, held, prefer)
    pairs = {
        rank: [RegionPair(wanted[key], held[rank][key], cuts) for key, cuts in chosen.items()]
        for rank, chosen in cover.chosen.items()
    }
    refused += [_uncovered(wanted[key], lack) for key, lack in cover.lacking.items()]
    refused += [why for chosen in pairs.values() for pair in chosen if pair.whole_pages for why in _opaque_cut(pair)]
    if refused:
        refuse(refused)
    return {rank: make_pair_plan(consumer, producers[rank], pairs[rank]) for rank in sorted(pairs)}


def refuse(mismatches: Sequence[Mismatch]) -> None:
    """Raises IncompatiblePeer with all mismatches, like ones of several layers told once."""
    told = collapse(mismatches)
    lines = "\n".join(f"  - {mismatch}" for mismatch in told)
    raise IncompatiblePeer(f"these two sides cannot exchange KV:\n{lines}", told)


def collapse(mismatches: Iterable[Mismatch]) -> tuple[Mismatch, ...]:
    """One mismatch for all layers that differ in the same way: the first layer's, with their number."""
    alike: dict[tuple[str, str, str, str], list[Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        alike[(mismatch.field, mismatch.producer, mismatch.consumer, mismatch.effect)].append(mismatch)
    return tuple(_told_once(same) for same in alike.values())


def _told_once(same: Sequence[Mismatch]) -> Mismatch:
    first = same[0]
    layers = list(dict.fromkeys(mismatch.layer for mismatch in same))
    if len(layers) == 1:
        return first
    return Mismatch(
        field=first.field,
        producer=first.producer,
        consumer=first.consumer,
        severity=first.severity,
        effect=first.effect,
        remedy=first.remedy,
        layer=f"{first.layer} and {len(layers) - 1} more",
    )


def _by_key(table: RankTable, whose: str) -> dict[Key, Region]:
    """Regions by (layer, component).

    Raises:
        PeerProtocolError: one named twice; pairing by position would then write the wrong layer
            (vllm#56033).
    """
    found: dict[Key, Region] = {}
    for region in table.regions:
        key = (region.layer, region.component)
        if key in found:
            raise PeerProtocolError(
                f"{region.name}: the {whose} lists it twice (bases {found[key].base} and {region.base}); "
                f"expected each layer component once; give layers distinct names"
            )
        found[key] = region
    return found


def _unlike(
    consumer: RankTable,
    producers: Mapping[Rank, RankTable],
    wanted: Mapping[Key, Region],
    held: Mapping[Rank, Mapping[Key, Region]],
) -> Iterable[Mismatch]:
    for rank, regions in held.items():
        for key, want in wanted.items():
            have = regions.get(key)
            if have is not None:
                yield from pair_mismatches(consumer, want, producers[rank], have)


def pair_mismatches(consumer: RankTable, want: Region, producer: RankTable, have: Region) -> Iterable[Mismatch]:
    """What makes one shared layer component impossible to copy, apart from which units are held."""
    state = consumer.groups[want.group].is_state
    if state != producer.groups[have.group].is_state:
        kinds = (producer.groups[have.group].kind, consumer.groups[want.group].kind)
        yield _differs(want, "group kind", *kinds, "tokens and state slots do not map to each other")
    theirs = have.dtype, have.item_bytes, have.channel.count
    ours = want.dtype, want.item_bytes, want.channel.count
    if theirs != ours:
        for field, mine, other in zip(("dtype", "item bytes", "channels"), theirs, ours, strict=True):
            if mine != other:
                yield _differs(want, field, mine, other, "its values mean something else on the other side")
    if state and have.token.count != want.token.count:
        yield _differs(want, "state rows", have.token.count, want.token.count, "slots differ in shape")
    if want.is_opaque or have.is_opaque:
        yield from _opaque_mismatches(want, have)


def _opaque_mismatches(want: Region, have: Region) -> Iterable[Mismatch]:
    effect = "a page whose inner order is unknown moves only whole, between equal pages"
    if want.encoding != have.encoding:
        yield _differs(want, "encoding", have.encoding, want.encoding, effect)
    if want.token.count != have.token.count:
        yield _differs(want, "kernel block size", have.token.count, want.token.count, effect)
    if (want.token.stride, want.channel.stride) != (have.token.stride, have.channel.stride):
        theirs = f"token {have.token.stride}, channel {have.channel.stride}"
        ours = f"token {want.token.stride}, channel {want.channel.stride}"
        yield _differs(want, "strides", theirs, ours, effect)


def _opaque_cut(pair: RegionPair) -> Iterable[Mismatch]:
    want, have = pair.consumer, pair.producer
    if not cuts_between_units(pair):
        yield _differs(
            want,
            "units of an opaque page",
            f"{have.unit.count} ({have.encoding})",
            f"{want.unit.count} ({want.encoding})",
            "cutting it between units would cut somewhere inside its content",
        )


def cuts_between_units(pair: RegionPair) -> bool:
    """Whether what is cut from a page whose inner order is not known is whole, or whole units of it.

    Units may be taken apart only where they are outermost in the page, on both sides. Known orders are cut anywhere.
    """
    want, have = pair.consumer, pair.producer
    if not pair.whole_pages or (_whole(pair) and want.unit == have.unit):
        return True
    return _unit_outermost(want) and _unit_outermost(have)


def _whole(pair: RegionPair) -> bool:
    return len(pair.cuts) == 1 and pair.units == pair.consumer.unit.count == pair.producer.unit.count


def _unit_outermost(region: Region) -> bool:
    """Whether one unit's bytes end before the next unit's begin."""
    one_unit = page_extent(region) - (region.unit.count - 1) * region.unit.stride
    return region.unit.count == 1 or region.unit.stride >= one_unit


_SAME_DTYPES = "set the same --dtype and --kv-cache-dtype (of states --mamba-cache-dtype and --mamba-ssm-cache-dtype) on both sides"
_REMEDIES = {
    "group kind": "serve the same model with the same attention and state layers on both sides",
    "dtype": _SAME_DTYPES,
    "item bytes": _SAME_DTYPES,
    "channels": "serve the same model (head size) on both sides",
    "state rows": "serve the same model with the same speculative tokens on both sides",
    "encoding": "use the same attention backend on both sides, declared alike (backend_encodings) if it is not a known one",
    "kernel block size": "set the same --block-size on both sides or use a backend with a known or declared encoding",
    "strides": "use the same attention backend and KV layout on both sides",
    "units of an opaque page": "use equal TP sizes or a backend with a known encoding",
    "layer set": "serve the same model on both sides",
    "units": "start every producer rank, and serve the same model on both sides",
}


def _differs(region: Region, field: str, producer: object, consumer: object, effect: str) -> Mismatch:
    return Mismatch(
        field=field,
        producer=str(producer),
        consumer=str(consumer),
        severity=Severity.REFUSE,
        effect=effect,
        remedy=_REMEDIES[field],
        layer=region.name,
    )


def _uncovered(region: Region, lack: Lack) -> Mismatch:
    lacking = ", ".join(f"{span.global_start}..{span.global_start + span.count - 1}" for span in lack.missing)
    if not lack.offers:
        return _differs(region, "layer set", "no such layer component", "it", "it would stay unread")
    offered = ", ".join(
        f"{rank}: {span.global_start}..{span.global_start + span.count - 1}"
        for rank, spans in lack.offers
        for span in spans
    )
    return _differs(region, "units", offered, f"needs {lacking}", "these units would stay unread")
