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
NOT_WHEN_QUICK = "left out by --quick"


def rows() -> list[Row]:
    """What `Engines.measure` fills in."""
    return [*latency.rows(), *load.rows_beside(MOONCAKE)]


def nixl_rows() -> list[Row]:
    """What `Engines.measure_nixl` fills in."""
    return load.rows_beside(NIXL_NAME)


class Engines:
    """Runs the pairs; keeps between the parts what the consumer alone answered and how ours did."""

    def __init__(self, say: Say, *, quick: bool) -> None:
        self._say = say
        self._quick = quick
        self._traffic: Traffic | None = None
        self._own: Load | None = None

    def measure(self, report: Report) -> None:
        """Ours and vLLM's MooncakeConnector, both pairs up at once and asked in turns.

        The long prompts come last: vLLM's own connector may not serve anything after one.
        """
        with ExitStack() as stack:
            pairs = self._both(stack)
            if report.wants(latency.rows()):
                latency.measure_short(pairs, report, self._say, quick=self._quick)
            if report.wants([*load.rows_beside(MOONCAKE), *nixl_rows()]):
                self._traffic, self._own = load.measure(pairs, report, self._say, quick=self._quick)
            if report.wants(latency.rows()) and not self._quick:
                latency.measure_long(pairs, report, self._say)
        if self._quick:
            report.excuse(rows(), NOT_WHEN_QUICK)

    def _both(self, stack: ExitStack) -> Mapping[str, Pair]:
        """Both pairs, or ours alone where the baseline does not come up."""
        try:
            pairs = stack.enter_context(running((OURS, MOONCAKE)))
        except DeploymentError as error:
            self._say(f"not both pairs came up, trying ours alone: {error}")
            pairs = stack.enter_context(running((OURS,)))
        self._say(f"running: {', '.join(pairs)}")
        return pairs

    def measure_nixl(self, report: Report) -> None:
        """The traffic of `measure` through NixlConnector."""
        if self._traffic is None or self._own is None:
            report.excuse(nixl_rows(), "needs the figures of ours, which were not measured")
        elif self._quick or not nixl_is_installed():
            report.excuse(nixl_rows(), NOT_WHEN_QUICK if self._quick else NEEDS_NIXL)
        else:
            self._run_nixl(report, self._traffic, self._own)

    def _run_nixl(self, report: Report, traffic: Traffic, own: Load) -> None:
        """A baseline that does not come up is no crash of ours."""
        try:
            with running((NIXL_NAME,)) as pairs:
                load.measure_nixl(pairs, report, self._say, traffic, own)
        except DeploymentError as error:
            load.compare(report, NIXL_NAME, own, None, f"did not start: {str(error)[-300:]}")
