"""From the producer's `request_finished` to the consumer's `get_finished`, on one clock, with real engines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tests.benchmarks.pairs import MOONCAKE, OURS, Pair, Stamp, new_prompt

# isort: split
from client import Answer

from tests.benchmarks.rows import Report, Row, Sample

AIM = 0.8
STAMPS_WITHIN_S = 5.0
LONG = 24_000
REPEATS = {500: 9, 4_000: 7, LONG: 2}
"""By prompt length."""
BASELINE_REPEATS = {LONG: 1}
"""vLLM's own connector does not survive the long prompt over TCP: one try, after everything else."""

Ask = Callable[[Pair, Sequence[int]], Answer]


class Order(NamedTuple):
    """How a proxy asks the two engines."""

    name: str
    words: str
    ask: Ask


ORDERS = (
    Order("router", "vllm-router: producer, then consumer", lambda pair, prompt: pair.through_router(prompt, 1)),
    Order("at_once", "vLLM's example proxy: both at once", lambda pair, prompt: pair.both_at_once(prompt, 1)),
)


def row_of(order: Order, tokens: int) -> Row:
    return Row(
        name=f"finished_to_ready_{order.name}_{tokens}",
        sizes={"prompt_tokens": tokens, "tp": "1 -> 2", "order": order.words},
        unit="ms",
        baseline="vLLM MooncakeConnector",
        target=f"ratio <= {AIM}",
    )


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [row_of(order, tokens) for order in ORDERS for tokens in REPEATS]


class Spent(NamedTuple):
    """One hand-over: milliseconds from `request_finished`, or why there is no such time."""

    ms: float | None
    error: str = ""
    marks: Mapping[str, float] = {}
    """Milliseconds from `request_finished` to other calls of vLLM's, the last of each kind."""


def hand_over(pair: Pair, order: Order, tokens: int) -> Spent:
    """One request alone on both engines."""
    began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    answer = order.ask(pair, new_prompt(tokens))
    if answer.error:
        return Spent(None, answer.error)
    deadline = time.monotonic() + STAMPS_WITHIN_S
    while time.monotonic() < deadline:
        producer, consumer = (since(pair.stamps(engine), began) for engine in (pair.prefill, pair.decode))
        finished = [stamp.at_ns for stamp in producer if stamp.event == "finished"]
        ready = [stamp.at_ns for stamp in consumer if stamp.event == "ready"]
        if finished and len(ready) == pair.decode.tensor_parallel:
            return Spent((max(ready) - finished[0]) / 1e6, marks=marks_of(finished[0], producer, consumer))
        time.sleep(0.05)
    return Spent(None, "the engines wrote no stamps")


def since(stamps: Sequence[Stamp], began_ns: int) -> list[Stamp]:
    return [stamp for stamp in stamps if stamp.at_ns >= began_ns]


def marks_of(zero: int, producer: Sequence[Stamp], consumer: Sequence[Stamp]) -> dict[str, float]:
    """What happened between the two ends, in milliseconds from the first."""
    named = [(stamp, f"producer {stamp.event}") for stamp in producer if stamp.event == "started"]
    named += [(stamp, f"consumer {stamp.event}") for stamp in consumer if stamp.event in {"asked", "started", "ready"}]
    return {name: (stamp.at_ns - zero) / 1e6 for stamp, name in named}


def words_of(name: str, spent: Sequence[Spent]) -> str:
    """Where the time goes, as medians, and what failed."""
    done, failed = ([found for found in spent if (found.ms is None) == wrong] for wrong in (False, True))
    marks = {
        mark: statistics.median(found.marks[mark] for found in done if mark in found.marks) for mark in _marks(done)
    }
    words = ", ".join(f"{mark} {at:.1f}" for mark, at in sorted(marks.items(), key=lambda item: item[1]))
    trouble = f"{len(failed)} of {len(spent)} failed, the first with {failed[0].error[:160]}" if failed else ""
    return "; ".join(f"{name}: {text}" for text in (words, trouble) if text)


def _marks(spent: Sequence[Spent]) -> dict[str, None]:
    return {mark: None for found in spent for mark in found.marks}


def measure_short(pairs: Mapping[str, Pair], report: Report, say: Callable[[str], None], *, quick: bool) -> None:
    """The prompts that both connectors survive, in turns."""
    for tokens, repeats in REPEATS.items():
        for order in ORDERS if tokens != LONG else ():
            _one_row(pairs, order, tokens, report, say, 3 if quick else repeats)


def measure_long(pairs: Mapping[str, Pair], report: Report, say: Callable[[str], None]) -> None:
    """The long prompts: ours, then once the baseline's."""
    for order in ORDERS:
        _one_row(pairs, order, LONG, report, say, REPEATS[LONG])


def _one_row(
    pairs: Mapping[str, Pair], order: Order, tokens: int, report: Report, say: Callable[[str], None], repeats: int
) -> None:
    spent: dict[str, list[Spent]] = {name: [] for name in (OURS, MOONCAKE) if name in pairs}
    limits = {OURS: repeats, MOONCAKE: min(repeats, BASELINE_REPEATS.get(tokens, repeats))}
    for turn in range(repeats):
        for name, found in spent.items():
            if turn < limits[name] and report.has_time():
                found.append(hand_over(pairs[name], order, tokens))
    own, theirs = (_sample(spent.get(name, [])) for name in (OURS, MOONCAKE))
    notes = [words_of(name, found) for name, found in spent.items()]
    say(f"{row_of(order, tokens).name}: {'; '.join(filter(None, notes))}")
    if not own.values:
        report.add(row_of(order, tokens).unmeasured("; ".join(filter(None, notes)) or "no time was left"))
        return
    report.add(
        row_of(order, tokens).measured(
            own,
            theirs if theirs.values else None,
            met=lambda row: None if row.ratio is None else row.ratio <= AIM,
            note="; ".join(filter(None, notes)),
        )
    )


def _sample(spent: Sequence[Spent]) -> Sample:
    return Sample.of(found.ms for found in spent if found.ms is not None)
