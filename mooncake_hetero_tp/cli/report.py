"""Answers as tables, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mooncake_hetero_tp.cli.answer import Answer, Count, Geometry, Pull
from mooncake_hetero_tp.core.handshake import Agreement
from mooncake_hetero_tp.types import Mismatch

STATUS_STYLES = {"ok": "bold green", "refused": "bold yellow", "invalid": "bold red"}
SEVERITY_STYLES = {"refuse": "red", "staging": "yellow", "note": "dim"}


def show(answers: Sequence[Answer], console: Console | None = None) -> None:
    """Prints all answers, in order."""
    console = console or Console()
    for number, answer in enumerate(answers, start=1):
        title = f"case {number} of {len(answers)}: " if len(answers) > 1 else ""
        console.print(Text(title).append(answer.status, style=STATUS_STYLES[answer.status]))
        console.print(Group(*_parts(answer)))


def _parts(answer: Answer) -> Iterator[RenderableType]:
    if answer.agreement is not None:
        yield agreement_table(answer.agreement)
    if isinstance(answer.geometry, Geometry):
        yield _geometry(answer.geometry)
    if answer.mismatches:
        yield _mismatches(answer.mismatches)
    if answer.pulls:
        yield _pulls("pulls", answer.pulls)
    if answer.predicted:
        yield _pulls(f"predicted for {answer.predicted.tokens} tokens in scattered blocks", answer.predicted.pulls)
    if answer.status != "refused":
        yield Text(answer.why)
    if isinstance(answer.assumptions, list):
        yield from (Text(f"assumed: {told}", style="dim") for told in answer.assumptions)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def agreement_table(agreed: Agreement) -> Table:
    """What two engines settled on, side by side."""
    table = _table("agreement", "", "producer", "consumer")
    table.add_row("tensor ranks", str(agreed.tp.producer), str(agreed.tp.consumer))
    table.add_row("pipeline stages", str(agreed.pp.producer), str(agreed.pp.consumer))
    table.add_row("layout", agreed.layout.producer, agreed.layout.consumer)
    for group in agreed.groups:
        logical, kernel = group.block_size, group.kernel_block_size
        table.add_row(
            f"block of group {group.index.consumer} ({group.kind})",
            f"{logical.producer} tokens, kernel {kernel.producer}",
            f"{logical.consumer} tokens, kernel {kernel.consumer}",
        )
    table.add_section()
    table.add_row("layers", str(len(agreed.layers)), str(len(agreed.layers)))
    table.add_row("bytes a token", "", str(agreed.bytes_per_token))
    table.add_row("shortest copy, bytes", "", str(agreed.run_bytes))
    return table


def _geometry(geometry: Geometry) -> Table:
    table = _table("memory of each rank", "side", "stage", "layers", "shape", "strides, bytes", "bytes")
    for side, stages in (("producer", geometry.producer), ("consumer", geometry.consumer)):
        for stage in stages:
            for array in stage.arrays:
                table.add_row(
                    side,
                    str(stage.pp),
                    str(len(array.layers)),
                    _by_dim(array.shape),
                    _by_dim(array.strides),
                    str(array.length_bytes),
                )
    return table


def _by_dim(values: dict[str, int]) -> str:
    return " ".join(f"{dim}={value}" for dim, value in values.items())


def _mismatches(found: Sequence[Mismatch]) -> Table:
    table = _table("differences", "what", "producer", "consumer", "effect and remedy")
    for one in found:
        what = f"{one.severity}: {one.field}" + (f" of {one.layer}" if one.layer else "")
        cells = (what, one.producer, one.consumer, f"{one.effect}; {one.remedy}")
        table.add_row(*map(escape, cells), style=SEVERITY_STYLES[one.severity])
    return table


def _pulls(title: str, pulls: Sequence[Pull | Count]) -> Table:
    table = _table(title, "consumer rank", "producer rank", "descriptors", "bytes", "bytes a descriptor")
    for pull in pulls:
        cells = (pull.consumer_rank, pull.producer_rank, pull.descriptors, pull.bytes, pull.bytes // pull.descriptors)
        table.add_row(*map(str, cells))
    return table
