"""What a probe found out about a producer's engines, summed up for people and scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from mooncake_hetero_tp.cli.answer import RankName
from mooncake_hetero_tp.cli.hello import EngineHello, RankHello
from mooncake_hetero_tp.core.messages import Welcome
from mooncake_hetero_tp.core.regions import Group, RankTable, Region
from mooncake_hetero_tp.types import Rank

if TYPE_CHECKING:  # it loads ZeroMQ, which `plan` needs not
    from mooncake_hetero_tp.io.inquiry import EngineReport, RankReport


class GroupSummary(msgspec.Struct, frozen=True):
    """One KV cache group on one rank; block sizes in tokens, blocks are logical ones."""

    index: int
    kind: str
    block_size: int
    kernel_block_size: int
    layers: int
    regions: int
    num_blocks: int
    bytes: int
    """Of KV cache, padding not counted."""


class StagingSummary(msgspec.Struct, frozen=True):
    """A rank's staging ring."""

    slot_bytes: int
    slots: int


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank; what only it can say is empty where there is a fault."""

    pp: int
    tp: int
    address: str
    status: str
    """`ok`, or the kind of the fault."""
    fault: str | None = None
    incarnation: str | None = None
    latency_ms: float | None = None
    protocol_version: int | None = None
    transport_session: str | None = None
    lease_s: float | None = None
    layout: str | None = None
    encodings: list[str] = []
    registered_bytes: int | None = None
    staging: StagingSummary | None = None
    """Slots that it packs into; None: it is read directly."""
    groups: list[GroupSummary] = []


class EngineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, which is one data-parallel rank of a deployment."""

    engine_id: str
    dp: int
    tp: int | None
    pp: int | None
    model: dict[str, str]
    missing: list[RankName]
    """Ranks that its TP and PP size imply and that it has not registered."""
    ranks: list[RankSummary]


def sum_up(report: EngineReport) -> EngineSummary:
    """What is known of an engine, complete or not."""
    tables = _tables(report)
    first = tables[0] if tables else None
    return EngineSummary(
        engine_id=report.engine_id,
        dp=report.dp,
        tp=first.tp_size if first else None,
        pp=first.pp_size if first else None,
        model=first.model if first else {},
        missing=[RankName(rank.pp, rank.tp) for rank in missing_ranks(report)],
        ranks=[_rank(one) for one in report.ranks],
    )


def troubles(report: EngineReport) -> Iterator[str]:
    """Why the engine cannot be judged, a sentence each; none: all of its ranks said who they are."""
    if not report.ranks:
        yield f"engine {report.engine_id} has registered no rank yet"
    for one in report.ranks:
        if not isinstance(one.answer, Welcome):
            yield f"engine {report.engine_id}: {one.rank} at {one.address} {one.answer.text}"
    if missing := missing_ranks(report):
        names = ", ".join(str(RankName(rank.pp, rank.tp)) for rank in missing[:16])
        yield (
            f"engine {report.engine_id} has registered {len(report.ranks)} of {len(report.ranks) + len(missing)} ranks; "
            f"{names}{' and more' if len(missing) > 16 else ''} missing: still starting, or ended"
        )


def missing_ranks(report: EngineReport) -> list[Rank]:
    """Ranks that the answers' TP and PP sizes imply and that are not registered."""
    tables = _tables(report)
    stages = max((table.pp_size for table in tables), default=0)
    tensor_ranks = max((table.tp_size for table in tables), default=0)
    listed = {one.rank for one in report.ranks}
    all_of_them = (Rank(dp=report.dp, pp=pp, tp=tp) for pp in range(stages) for tp in range(tensor_ranks))
    return [rank for rank in all_of_them if rank not in listed]


def hello_of(report: EngineReport) -> EngineHello:
    """The hello of an engine that has no `troubles`."""
    return EngineHello(
        engine_id=report.engine_id,
        dp=report.dp,
        ranks=tuple(
            RankHello(
                rank=one.rank,
                address=one.address,
                incarnation=one.answer.identity.incarnation,
                protocol_version=one.answer.version,
                transport_session=one.answer.transport_session,
                lease_s=one.answer.lease_s,
                latency_ms=_milliseconds(one.latency_s),
                table=one.answer.table,
            )
            for one in report.ranks
            if isinstance(one.answer, Welcome)
        ),
    )


def _tables(report: EngineReport) -> list[RankTable]:
    return [one.answer.table for one in report.ranks if isinstance(one.answer, Welcome)]


def _rank(one: RankReport) -> RankSummary:
    place = RankSummary(pp=one.rank.pp, tp=one.rank.tp, address=one.address, status="ok", incarnation=one.incarnation)
    answer = one.answer
    if not isinstance(answer, Welcome):
        return msgspec.structs.replace(place, status=answer.kind.value, fault=answer.text)
    table = answer.table
    return msgspec.structs.replace(
        place,
        incarnation=answer.identity.incarnation,
        latency_ms=_milliseconds(one.latency_s),
        protocol_version=answer.version,
        transport_session=answer.transport_session,
        lease_s=answer.lease_s,
        layout=table.layout,
        encodings=list(dict.fromkeys(region.encoding for region in table.regions)),
        registered_bytes=sum(buffer.length_bytes for buffer in table.buffers),
        staging=None if answer.staging is None else StagingSummary(answer.staging.slot_bytes, answer.staging.slots),
        groups=[_group(group, table) for group in table.groups],
    )


def _group(group: Group, table: RankTable) -> GroupSummary:
    own = [region for region in table.regions if region.group == group.index]
    return GroupSummary(
        index=group.index,
        kind=group.kind,
        block_size=group.block_size,
        kernel_block_size=group.kernel_block_size,
        layers=len({region.layer for region in own}),
        regions=len(own),
        num_blocks=max((region.num_blocks // group.kernel_pages for region in own), default=0),
        bytes=sum(map(_cache_bytes, own)),
    )


def _cache_bytes(region: Region) -> int:
    return region.num_blocks * region.unit.count * region.token.count * region.channel.count * region.item_bytes


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
