"""The rows that need engines: which pairs run together, and what is asked of them in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from tests.benchmarks import latency, load
from tests.benchmarks.load import Load, Traffic
from tests.benchmarks.pairs import MOONCAKE, NIXL_NAME, OURS, Pair, nixl_is_installed, running
from tests.benchmarks.rows import Report, Row

# isort: split
from deployment import DeploymentError

Say = Callable[[str], None]
NEEDS_NIXL = "nixl is not installed; run tools/setup_env.sh --bench"
NIXL_NEEDS_S = 240.0
"""To start, and to send 200 requests; its first pulls are slow."""
LONG_NEEDS_S = 180.0
NO_TIME = "no time was left"
NOT_WHEN_QUICK = "left out by --quick"


def rows() -> list[Row]:
    """Everything that `Engines.measure` fills in."""
    return [*latency.rows(), *load.rows()]


class Engines:
    """Runs the pairs; keeps between the parts what the consumer alone answered and how ours did."""

    def __init__(self, say: Say, *, quick: bool) -> None:
        self._say = say
        self._quick = quick
        self._traffic: Traffic | None = None
        self._own: Load | None = None

    def measure(self, report: Report) -> None:
        """All rows, with two pairs up at a time at most.

        Raises:
            WrongBytes: an answer of ours is not that of the consumer alone.
        """
        with ExitStack() as stack:
            self._side_by_side(self._both(stack), report)
        if report.wants(load.rows_beside(NIXL_NAME)):
            self._beside_nixl(report)

    def _side_by_side(self, pairs: Mapping[str, Pair], report: Report) -> None:
        """Ours and vLLM's MooncakeConnector in turns.

        The long prompts come last: vLLM's own connector may not serve anything after one.
        """
        if report.wants(latency.rows()):
            latency.measure_short(pairs, report, self._say, quick=self._quick)
        if report.wants(load.rows()):
            self._traffic, self._own = load.measure(pairs, report, self._say, quick=self._quick)
        if self._quick or not report.has_time(LONG_NEEDS_S + NIXL_NEEDS_S):
            report.excuse(latency.rows(), NOT_WHEN_QUICK if self._quick else NO_TIME)
        elif report.wants(latency.rows()):
            latency.measure_long(pairs, report, self._say)

    def _both(self, stack: ExitStack) -> Mapping[str, Pair]:
        """Both pairs, or ours alone where the baseline does not come up."""
        try:
            pairs = stack.enter_context(running((OURS, MOONCAKE)))
        except DeploymentError as error:
            self._say(f"not both pairs came up, trying ours alone: {error}")
            pairs = stack.enter_context(running((OURS,)))
        self._say(f"running: {', '.join(pairs)}")
        return pairs

    def _beside_nixl(self, report: Report) -> None:
        """The traffic of `_side_by_side` through NixlConnector."""
        rows_beside = load.rows_beside(NIXL_NAME)
        if self._traffic is None or self._own is None:
            report.excuse(rows_beside, "needs the figures of ours, which were not measured")
        elif self._quick or not nixl_is_installed():
            report.excuse(rows_beside, NOT_WHEN_QUICK if self._quick else NEEDS_NIXL)
        elif not report.has_time(NIXL_NEEDS_S):
            report.excuse(rows_beside, NO_TIME)
        else:
            self._run_nixl(report, self._traffic, self._own)

    def _run_nixl(self, report: Report, traffic: Traffic, own: Load) -> None:
        """A baseline that does not come up is no crash of ours."""
        try:
            with running((NIXL_NAME,)) as pairs:
                load.measure_nixl(pairs, report, self._say, traffic, own)
        except DeploymentError as error:
            load.compare(report, NIXL_NAME, own, None, f"did not start: {str(error)[-300:]}")
