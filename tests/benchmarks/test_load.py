"""Verdicts on traffic: an error is a missed target, a wrong answer ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.load import Load, compare, rows_beside
from tests.benchmarks.pairs import MOONCAKE
from tests.benchmarks.rows import Report

THEIRS = Load(seconds=20.0, errors=3, identical=1, wrong=0, first_error="HTTP 500")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    planned = Report(tmp_path / "bench.json")
    planned.plan(rows_beside(MOONCAKE))
    return planned


def verdicts(report: Report) -> list[bool | None]:
    return [row.met for row in report.rows.values()]


def test_faster_and_all_right(report: Report) -> None:
    compare(report, MOONCAKE, Load(10.0, 0, 4, 0, ""), THEIRS)
    assert verdicts(report) == [True, True, True]
    assert [row.ratio for row in report.rows.values()] == [0.5, 0.0, 4.0]


def test_an_error_of_ours_misses_two_targets(report: Report) -> None:
    compare(report, MOONCAKE, Load(10.0, 1, 3, 0, "HTTP 500"), None, "did not start")
    assert verdicts(report) == [None, False, False]


def test_a_wrong_answer_is_written_and_then_raised(report: Report) -> None:
    with pytest.raises(WrongBytes, match="1 answers"):
        compare(report, MOONCAKE, Load(10.0, 0, 3, 1, ""), THEIRS)
    assert verdicts(report) == [True, True, False]
