"""The report itself: every row is written, and a figure is what it says it is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as bench
from tests.benchmarks import payload
from tests.benchmarks.rows import Report, Round, Row, Sample, interleaved

PLAN = Row(name="speed", sizes={"n": 1}, unit="ms", baseline="theirs", target="ratio <= 0.5")
KEYS = {"name", "sizes", "value", "unit", "baseline", "baseline_value", "ratio", "target", "met", "repeats", "spread"}


def test_a_measured_row_is_the_median_beside_the_baseline() -> None:
    row = PLAN.measured(Sample.of([1.0, 2.0, 9.0]), Sample.of([4.0]), met=lambda filled: filled.ratio == 0.5)
    assert (row.value, row.baseline_value, row.ratio, row.met, row.repeats) == (2.0, 4.0, 0.5, True, 3)
    assert row.spread == 2.0


def test_without_a_baseline_there_is_no_ratio() -> None:
    assert PLAN.measured(Sample.of([1.0])).ratio is None
    assert PLAN.measured(Sample.of([0.0]), Sample.of([0.0])).ratio is None


def test_of_rounds_the_one_with_the_median_ratio_is_told() -> None:
    rounds = [Round(10.0, 10.0), Round(900.0, 1000.0), Round(1.0, 0.5)]
    row = PLAN.measured_in_rounds(rounds, met=lambda filled: filled.ratio == 1.0, note="of 3")
    assert (row.value, row.baseline_value, row.ratio, row.met) == (10.0, 10.0, 1.0, True)
    assert (row.repeats, row.note) == (3, "of 3")
    assert row.spread == pytest.approx((1.5 - 0.95) / 1.0)
    assert PLAN.measured_in_rounds(rounds[1:]).ratio == 0.9


def test_runs_take_turns() -> None:
    order: list[str] = []
    found = interleaved({"a": partial(order.append, "a"), "b": partial(order.append, "b")}, repeats=2)
    assert order == ["a", "b"] * 3
    assert [sample.repeats for sample in found.values()] == [2, 2]


def test_rows_that_nobody_measures_are_written_with_the_reason(tmp_path: Path) -> None:
    report = Report(tmp_path / "bench.json")
    other = Row(name="other", sizes={}, unit="s")
    report.plan([PLAN, other], lambda name: name == "speed")
    assert not bench.run(bench.Section("one", [PLAN], _crash), report)
    rows = json.loads(report.path.read_text(encoding="utf-8"))["rows"]
    assert [row["value"] for row in rows] == [None, None]
    assert [row["note"] for row in rows] == ["not measured: ValueError: broken", "left out by --only"]
    assert all(row.keys() >= KEYS for row in rows)


def test_rows_of_an_earlier_run_can_be_kept(tmp_path: Path) -> None:
    first = Report(tmp_path / "bench.json")
    first.plan([PLAN])
    first.add(PLAN.measured(Sample.of([3.0]), note="quick"))
    later = Report(first.path)
    later.plan([PLAN], lambda _name: False)
    later.keep_earlier()
    assert (later.rows["speed"].value, later.rows["speed"].note) == (3.0, "(earlier run) quick")


def _crash(report: Report) -> None:
    raise ValueError("broken")


def test_an_unplanned_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="never planned"):
        Report(tmp_path / "bench.json").add(PLAN)


@pytest.mark.parametrize("blocks", [1, 250])
def test_control_messages_stay_small(blocks: int) -> None:
    carried = payload.load(payload.linked(), payload.Names.new(), blocks)
    assert set(carried) == {"Pull", "Waiting", "Ready", "Claim", "Grant", "Release", "ReleaseAck"}
    assert sum(carried.values()) <= payload.allowed(blocks)
