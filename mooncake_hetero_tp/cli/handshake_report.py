"""Answers of `handshake probe` and `diff` for people: one line a fact, so that they can be searched."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from mooncake_hetero_tp.cli.engines import EngineSummary, GroupSummary, RankSummary
from mooncake_hetero_tp.cli.handshake_answer import HandshakeAnswer
from mooncake_hetero_tp.cli.report import agreement_table
from mooncake_hetero_tp.core.handshake import explain

STATUS_STYLES = {"ok": "bold green", "refused": "bold yellow", "unreachable": "bold red", "invalid": "bold red"}


def show(answer: HandshakeAnswer, console: Console | None = None) -> None:
    """Engines first, then the verdict: differences in the very lines of the engines' logs."""
    console = console or Console()
    for engine in answer.engines or ():
        for line in _engine(engine):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(answer.status, style=STATUS_STYLES[answer.status]))
    if answer.agreement is not None:
        console.print(agreement_table(answer.agreement))
    for line in _verdict(answer):
        console.print(Text(line), soft_wrap=True)


def _verdict(answer: HandshakeAnswer) -> Iterator[str]:
    differences = explain(answer.mismatches)
    if differences:
        yield differences
    if answer.why != differences:
        yield answer.why
    yield from (f"assumed: {assumption}" for assumption in answer.assumptions or ())


def _engine(engine: EngineSummary) -> Iterator[str]:
    size = f", TP {engine.tp} x PP {engine.pp}" if engine.tp else ""
    yield f"engine {engine.engine_id}, data-parallel rank {engine.dp}{size}"
    if engine.model:
        yield "  model: " + ", ".join(f"{name} {value}" for name, value in engine.model.items())
    for rank in engine.ranks:
        yield f"  {_name(rank)} at {rank.address}: {_rank(rank)}"
    for missing in engine.missing:
        yield f"  {missing}: not registered"
    yield from _groups(engine)


def _rank(rank: RankSummary) -> str:
    if rank.status != "ok":
        return rank.status
    ring = rank.staging
    staging = f"{ring.slots} staging slots of {ring.slot_bytes} bytes" if ring else "no staging"
    return (
        f"incarnation {rank.incarnation}, layout {rank.layout}, encoding {', '.join(rank.encodings) or 'none'}, "
        f"{rank.registered_bytes} bytes registered, {staging}, lease {rank.lease_s} s, answers in {rank.latency_ms} ms"
    )


def _groups(engine: EngineSummary) -> Iterator[str]:
    """One line for all ranks whose group is alike."""
    alike: dict[GroupSummary, list[str]] = {}
    for rank in engine.ranks:
        for group in rank.groups:
            alike.setdefault(group, []).append(_name(rank))
    for group, ranks in alike.items():
        where = "each rank" if len(ranks) == len(engine.ranks) else ", ".join(ranks)
        yield (
            f"  group {group.index} ({group.kind}), {where}: blocks of {group.block_size} tokens, kernel blocks of "
            f"{group.kernel_block_size}; {group.regions} regions of {group.layers} layers; {group.num_blocks} blocks, "
            f"{group.bytes} bytes"
        )


def _name(rank: RankSummary) -> str:
    return f"pp{rank.pp}.tp{rank.tp}"
