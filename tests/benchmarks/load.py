"""200 requests, 32 in flight, through each connector: errors, answers like those of the consumer alone, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.pairs import MOONCAKE, NIXL_NAME, OURS, Pair

# isort: split
from client import Answer, alone, complete, completion_body
from demo import ANSWER_TOKENS, make_prompts

from tests.benchmarks.rows import Report, Row, Sample

REQUESTS = 200
IN_FLIGHT = 32
QUICK_REQUESTS = 64
REFERENCES_IN_FLIGHT = 8
SEED = 3
LIMIT_S = 360.0
"""What has not been sent by then counts as an error; a connector that hangs must not hang the run."""

WORDS = {MOONCAKE: "vLLM MooncakeConnector", NIXL_NAME: "vLLM NixlConnector"}


def row_of(figure: str, unit: str, rival: str, target: str) -> Row:
    return Row(
        name=f"load_{figure}_beside_{rival}",
        sizes={
            "requests": REQUESTS,
            "in_flight": IN_FLIGHT,
            "prompt_tokens": "1..900",
            "answer_tokens": ANSWER_TOKENS,
            "tp": "1 -> 2",
        },
        unit=unit,
        baseline=WORDS[rival],
        target=target,
    )


def rows_beside(rival: str) -> list[Row]:
    """What `compare` fills in for one other connector."""
    return [
        row_of("seconds", "s", rival, "ratio < 1"),
        row_of("errors", "requests", rival, "value = 0"),
        row_of("identical", "requests", rival, f"value = {REQUESTS}"),
    ]


def rows() -> list[Row]:
    """Everything that is filled in."""
    return [row for rival in WORDS for row in rows_beside(rival)]


class Load(NamedTuple):
    """What came of the traffic through one connector."""

    seconds: float
    errors: int
    identical: int
    wrong: int
    """Answered without an error, but not as the consumer alone does."""
    first_error: str

    @property
    def words(self) -> str:
        text = f"{self.identical} identical, {self.errors} errors, {self.wrong} wrong in {self.seconds:.1f} s"
        return f"{text} (first error: {self.first_error[:160]})" if self.first_error else text


class Traffic:
    """The prompts, and what the consumer alone answers to them."""

    def __init__(self, pair: Pair, count: int) -> None:
        """Ask the consumer of `pair`, without any pull and past the prefix cache that pulls fill."""
        self.bodies = [completion_body(prompt, ANSWER_TOKENS) for prompt in make_prompts(count, seed=SEED)]
        url = pair.decode.url

        def reference(index: int) -> Answer:
            return alone(url, self.bodies[index], f"alone-{index}")

        with ThreadPoolExecutor(REFERENCES_IN_FLIGHT) as pool:
            self.expected = list(pool.map(reference, range(count)))
        if broken := [answer.error for answer in self.expected if answer.error]:
            raise RuntimeError(f"the consumer alone failed: {broken[0]}")

    def through(self, pair: Pair) -> Load:
        """Send everything through a pair's router."""
        url = pair.router.url
        began = time.monotonic()

        def ask(body: dict[str, object]) -> Answer:
            if time.monotonic() - began > LIMIT_S:
                return Answer((), 0.0, error=f"not sent within {LIMIT_S:g} s")
            return complete(url, body)

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = list(pool.map(ask, self.bodies))
        seconds = time.monotonic() - began
        errors = [answer.error for answer in answers if answer.error]
        same = [
            got.error is None and got.tokens == want.tokens for got, want in zip(answers, self.expected, strict=True)
        ]
        identical = sum(same)
        return Load(seconds, len(errors), identical, len(answers) - len(errors) - identical, (errors or [""])[0])


def compare(report: Report, rival: str, own: Load, theirs: Load | None, why: str = "") -> None:
    """Fill in the rows of one other connector.

    Raises:
        WrongBytes: an answer of ours is not that of the consumer alone.
    """
    asked = own.errors + own.identical + own.wrong
    note = f"ours: {own.words}; {rival}: {theirs.words if theirs else why}"
    for row, figure, met in zip(rows_beside(rival), _FIGURES, _verdicts(asked), strict=True):
        sized = replace(row, sizes={**row.sizes, "requests": asked})
        baseline = Sample.of([figure(theirs)]) if theirs else None
        report.add(sized.measured(Sample.of([figure(own)]), baseline, met=met, note=note))
    if own.wrong:
        raise WrongBytes(f"{own.wrong} answers differ from the consumer's own")


_FIGURES: tuple[Callable[[Load], float], ...] = (
    lambda load: load.seconds,
    lambda load: float(load.errors),
    lambda load: float(load.identical),
)


def _verdicts(asked: int) -> Sequence[Callable[[Row], bool | None]]:
    return (
        lambda row: None if row.ratio is None else row.ratio < 1,
        lambda row: row.value == 0,
        lambda row: row.value == asked,
    )


def measure(
    pairs: Mapping[str, Pair], report: Report, say: Callable[[str], None], *, quick: bool
) -> tuple[Traffic, Load]:
    """Ours beside vLLM's MooncakeConnector; what comes back serves for the next connector."""
    traffic = Traffic(pairs[OURS], QUICK_REQUESTS if quick else REQUESTS)
    own = traffic.through(pairs[OURS])
    say(f"load ours: {own.words}")
    theirs = None
    if MOONCAKE in pairs:
        theirs = traffic.through(pairs[MOONCAKE])
        say(f"load {MOONCAKE}: {theirs.words}")
    compare(report, MOONCAKE, own, theirs, "did not run")
    return traffic, own


def measure_nixl(
    pairs: Mapping[str, Pair], report: Report, say: Callable[[str], None], traffic: Traffic, own: Load
) -> None:
    """The same traffic through NixlConnector."""
    theirs = traffic.through(pairs[NIXL_NAME])
    say(f"load {NIXL_NAME}: {theirs.words}")
    compare(report, NIXL_NAME, own, theirs)
