"""Whether two engines would agree, judged from the region tables of all their ranks as the engines themselves do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from mooncake_hetero_tp.core.handshake import Agreement, agree, combine, compare, explain
from mooncake_hetero_tp.core.plan import collapse, plan_pulls, prove
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import HeteroTPError, IncompatiblePeer
from mooncake_hetero_tp.types import Mismatch, Rank, Severity

Tables = Mapping[Rank, RankTable]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`agreement` is None where the pair is refused; `mismatches` hold every difference, harmless ones too."""

    status: str
    agreement: Agreement | None = None
    mismatches: list[Mismatch] = []
    why: str


def judge(producers: Tables, consumers: Tables) -> Verdict:
    """What a producer and a consumer engine, each complete, settle on or are refused for.

    The order is that of the engines: each producer rank compares tables in its answer to Hello; what it lets
    pass is planned, and the plan proven, by each consumer rank.
    """
    found = collapse(one for consumer in consumers.values() for one in _compared(producers, consumer))
    if _any_refusal(found):
        return refused(found)
    try:
        agreements = [one for rank, table in consumers.items() for one in _agreements(producers, rank, table)]
    except IncompatiblePeer as error:
        return refused([*error.mismatches, *found])
    except HeteroTPError as error:
        return Verdict(status="refused", mismatches=list(found), why=str(error))
    if not agreements:
        return Verdict(status="refused", mismatches=list(found), why="the two engines share no layer")
    return Verdict(status="ok", agreement=combine(agreements), mismatches=list(found), why=_agreed(consumers))


def judge_all(pairs: Iterable[tuple[Tables, Tables]]) -> Verdict:
    """One verdict of several pairs of engines (data-parallel ranks): refused if one is."""
    verdicts = [judge(*pair) for pair in pairs]
    differences = collapse(one for verdict in verdicts for one in verdict.mismatches)
    if _any_refusal(differences):
        return refused(differences)
    decisive = next((one for one in verdicts if one.status == "refused"), verdicts[0])
    return msgspec.structs.replace(decisive, mismatches=list(differences))


def refused(found: Iterable[Mismatch]) -> Verdict:
    """A refusal, in the words of the engines' logs."""
    told = collapse(found)
    return Verdict(status="refused", mismatches=list(told), why=explain(told))


def _any_refusal(found: Iterable[Mismatch]) -> bool:
    return any(one.severity is Severity.REFUSE for one in found)


def _compared(producers: Tables, consumer: RankTable) -> Iterator[Mismatch]:
    for producer in producers.values():
        yield from compare(producer, consumer)


def _agreements(producers: Tables, rank: Rank, consumer: RankTable) -> Iterator[Agreement]:
    plans = plan_pulls(consumer, producers, prefer=rank.tp)
    prove(consumer, plans)
    for plan in plans.values():
        yield agree(plan.producer, plan.consumer)


def _agreed(consumers: Tables) -> str:
    return f"agreed: every byte that the consumer's {len(consumers)} rank(s) need comes from exactly one place"
