"""`make bench`: all rows into build/bench.json and a table.

    python -m tests.benchmarks [--only NAME] [--keep] [--quick] [--minutes N] [--output FILE]

`--only` takes the start of a row's name or a section's name and may be repeated; `--quick` repeats less and
leaves the long prompts and NixlConnector out. Every row is written, those that were not measured with null
figures and the reason. Status 1 only where something crashed or bytes were wrong; a missed target is a figure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.benchmarks import bind, counts, crowd, engines, gpu, hybrid, kernels, payload, reads, staged
from tests.benchmarks.rows import Report, Row

OUTPUT = Path("build/bench.json")
BUDGET_MIN = 20.0
"""Nothing is begun after so long; what is under way ends within minutes."""


class Section(NamedTuple):
    """Rows that are measured together."""

    name: str
    rows: Sequence[Row]
    measure: Callable[[Report], None]


class Options(argparse.Namespace):
    """The command line."""

    only: list[str]
    quick: bool
    output: Path
    minutes: float
    keep: bool


def options() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description="measure, and write build/bench.json"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="rows or sections to measure")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no long prompts")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--minutes", type=float, default=BUDGET_MIN, help="begin nothing more after so long")
    parser.add_argument(
        "--keep", action="store_true", help="with --only: keep the file's other rows, and say so in them"
    )
    return parser.parse_args(namespace=Options())


def sections(quick: bool, say: Callable[[str], None]) -> list[Section]:
    """In the order in which they run: what needs a quiet machine comes before the engines."""
    pairs = engines.Engines(say, quick=quick)
    return [
        Section("plan", bind.rows(), lambda report: bind.measure(report, quick=quick)),
        Section("kernels", kernels.rows(), lambda report: kernels.measure(report, quick=quick)),
        Section("gpu", gpu.rows(), lambda report: gpu.measure(report, quick=quick)),
        Section("control", payload.rows(), payload.measure),
        Section("reads", reads.rows(), lambda report: reads.measure(report, quick=quick)),
        Section("counts", counts.rows(), counts.measure),
        Section("staged", staged.rows(), lambda report: staged.measure(report, quick=quick)),
        Section("hybrid", hybrid.rows(), lambda report: hybrid.measure(report, quick=quick)),
        Section("crowd", crowd.rows(), lambda report: crowd.measure(report, quick=quick)),
        Section("engines", engines.rows(), pairs.measure),
    ]


def is_wanted(section: str, only: Sequence[str], row: str) -> bool:
    """Whether a row is asked for, by the start of its name or by its section."""
    return not only or any(wanted == section or row.startswith(wanted) for wanted in only)


def run(section: Section, report: Report) -> bool:
    """Measure one section; False: it crashed, or bytes were wrong."""
    try:
        section.measure(report)
    except Exception as error:  # noqa: BLE001 - the other rows are measured all the same
        traceback.print_exc()
        report.excuse(section.rows, f"not measured: {type(error).__name__}: {str(error)[:300]}")
        return False
    report.excuse(section.rows, "not measured in this run")
    return True


def table_of(report: Report) -> Table:
    """What build/bench.json says, for people."""
    table = Table(title="benchmarks", caption="ratio = value / baseline; spread = quartile distance / median")
    for title in ("row", "value", "unit", "baseline", "ratio", "target", "met", "n", "spread"):
        table.add_column(title, justify="right" if title in {"value", "baseline", "ratio", "n", "spread"} else "left")
    for row in report.rows.values():
        met = {True: "[green]yes", False: "[red]no", None: ""}[row.met]
        figures = (_number(row.value), row.unit, _number(row.baseline_value), _number(row.ratio))
        table.add_row(row.name, *figures, row.target or "", met, str(row.repeats), _number(row.spread))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def main() -> int:
    """Run what is asked for and return the exit status."""
    chosen = options()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake's own chatter
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console()
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    report = Report(chosen.output, deadline=began + 60 * chosen.minutes)
    planned = sections(chosen.quick, say)
    for section in planned:
        report.plan(section.rows, partial(is_wanted, section.name, chosen.only))
    if chosen.keep:
        report.keep_earlier()
    good = True
    for section in planned:
        if report.wants(section.rows):
            say(f"{section.name} ...")
            good &= run(section, report)
    report.write()
    console.print(table_of(report))
    for row in report.rows.values():
        if row.note:
            console.print(f"{row.name}: {row.note}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{chosen.output}, after {time.monotonic() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
