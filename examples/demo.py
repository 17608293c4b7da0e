"""`make demo`: prefill at TP1, decode at TP2, every answer compared with the decode engine alone.

Sends prompts without common prefixes through `vllm-router`, a few at a time, then asks the decode
engine alone for each of them, and prints what was pulled and whether the answers are identical.
Writes build/demo.json. Status 0 only if every answer is identical, nothing failed and the workers'
counters show exactly the bytes that the covered tokens have. Everything started here ends with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from client import Answer, alone, complete, completion_body
from deployment import Deployment, DeploymentError, end_on_signals
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from serve_1p1d import BUILD, start_1p1d
from tiny_model import TinyModel, ensure_tiny_model
from transfers import Transfer, counted, logged_transfers, of_answer

ANSWER_TOKENS = 16
LONGEST_PROMPT = 900
SEED = 1
COUNTERS_WITHIN_S = 10.0

Prompt = list[int]


def make_prompts(count: int, longest: int = LONGEST_PROMPT, seed: int = SEED) -> list[Prompt]:
    """Prompts of 1 to `longest` tokens, both lengths included, no two with the same first token."""
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    vocabulary = range(1, TinyModel().vocabulary)  # 0 ends the text
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    draw.shuffle(lengths)
    firsts = draw.sample(vocabulary, count)
    return [[first, *draw.choices(vocabulary, k=length - 1)] for first, length in zip(firsts, lengths, strict=True)]


def covered_bytes(prompts: Sequence[Prompt]) -> int:
    """KV bytes that have to be pulled: all tokens but the last, which the decode engine always computes itself."""
    return sum(len(prompt) - 1 for prompt in prompts) * TinyModel().kv_bytes_per_token


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt: the answer through the pair, the decode engine's own, and what was pulled."""

    prompt_tokens: int
    paired: Answer
    alone: Answer
    transfer: Transfer

    @property
    def error(self) -> str | None:
        return self.paired.error or self.alone.error

    @property
    def identical(self) -> bool:
        return self.error is None and self.paired.tokens == self.alone.tokens


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of build/demo.json: `bytes_pulled` and `descriptors` as counted by the workers, `seconds` of
    traffic through the pair.
    """

    requests: int
    identical: int
    errors: int
    bytes_pulled: int
    descriptors: int
    seconds: float


class Display:
    """A bar per stage on a terminal; elsewhere a line when a stage begins and one when it has ended."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=not self.live)

    def say(self, text: str) -> None:
        if not self.live:
            self.console.print(text, soft_wrap=True)

    def waiting(self, text: str, total: int) -> Callable[[list[str]], None]:
        """A stage that lists what has not started yet."""
        task = self.progress.add_task(text, total=total)

        def show(missing: list[str]) -> None:
            names = f" ({', '.join(missing)})" if missing else ""
            self.progress.update(task, description=f"{text}{names}", completed=total - len(missing))

        self.say(f"{text} ...")
        return show

    def map_with_bar(self, text: str, workers: int, call: Callable[[int], Answer], count: int) -> list[Answer]:
        """`call(0) .. call(count - 1)`, `workers` at a time, with a bar."""
        task = self.progress.add_task(text, total=count)
        started = time.monotonic()
        self.say(f"{text} ...")
        pool = ThreadPoolExecutor(workers)
        try:
            futures = [pool.submit(call, index) for index in range(count)]
            for _ in as_completed(futures):
                self.progress.advance(task)
            answers = [future.result() for future in futures]
        finally:
            # After a Ctrl-C nobody waits here: the calls under way end when their engines do.
            pool.shutdown(wait=False, cancel_futures=True)
        self.say(f"{text}: {count} answers after {time.monotonic() - started:.1f} s")
        return answers


def counted_when_settled(url: str, expected_bytes: int) -> Transfer:
    """The counters once they show what is expected, or after a while whatever they show.

    vLLM exports a worker's counters with the engine's next step, so they may lag a moment.
    """
    deadline = time.monotonic() + COUNTERS_WITHIN_S
    while (seen := counted(url)).bytes != expected_bytes and time.monotonic() < deadline:
        time.sleep(0.2)
    return seen


def measure(
    display: Display, router: str, decode: str, decode_log: Path, *, prompts: list[Prompt], in_flight: int
) -> tuple[list[Row], Summary]:
    """Send the traffic, ask the decode engine alone for the same, and add up."""
    bodies = [completion_body(prompt, ANSWER_TOKENS) for prompt in prompts]
    before, started = counted(decode), time.monotonic()
    paired = display.map_with_bar(
        "prompts through the pair", in_flight, lambda i: complete(router, bodies[i]), len(bodies)
    )
    seconds = time.monotonic() - started
    own = display.map_with_bar(
        "the decode engine alone", in_flight, lambda i: alone(decode, bodies[i], f"alone-{i}"), len(bodies)
    )
    counts = counted_when_settled(decode, before.bytes + covered_bytes(prompts)) - before
    logged = logged_transfers(decode_log)
    rows = [
        Row(len(prompt), answer, reference, of_answer(logged, answer.id))
        for prompt, answer, reference in zip(prompts, paired, own, strict=True)
    ]
    errors = sum(row.error is not None for row in rows)
    identical = sum(row.identical for row in rows)
    return rows, Summary(len(rows), identical, errors, counts.bytes, counts.descriptors, round(seconds, 3))


def run(display: Display, prompts: list[Prompt], in_flight: int, logs: Path) -> tuple[list[Row], Summary]:
    """Start the pair and measure it."""
    with Deployment(logs) as deployment:
        starting = display.waiting("prefill TP1, decode TP2 and router start", total=3)
        router, decode = start_1p1d(deployment, ensure_tiny_model(BUILD / "models"), starting)
        starting([])
        log = logs / f"{decode.name}.log"
        return measure(display, router.url, decode.url, log, prompts=prompts, in_flight=in_flight)


def table_of(rows: list[Row]) -> Table:
    """One line per prompt, shortest first."""
    table = Table(title="KV pulled from prefill TP1 to decode TP2")
    for title in ("prompt tokens", "bytes pulled", "descriptors", "ms"):
        table.add_column(title, justify="right")
    table.add_column("identical?")
    for row in sorted(rows, key=lambda row: row.prompt_tokens):
        verdict = "[green]yes" if row.identical else f"[red]{row.error or 'NO'}"
        figures = (row.prompt_tokens, row.transfer.bytes, row.transfer.descriptors, round(row.paired.seconds * 1000))
        table.add_row(*(f"{figure:,}" for figure in figures), verdict)
    return table


def failures(summary: Summary, expected_bytes: int) -> list[str]:
    """Why the demo failed, if it did."""
    found = []
    if summary.errors:
        found.append(f"{summary.errors} of {summary.requests} requests failed")
    if summary.identical != summary.requests:
        found.append(f"only {summary.identical} of {summary.requests} answers are identical")
    if summary.bytes_pulled != expected_bytes:
        found.append(f"the workers counted {summary.bytes_pulled:,} bytes, the covered tokens have {expected_bytes:,}")
    return found


def main() -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(description="TP1 -> TP2 pull between two vLLM engines on this machine's CPU")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--output", type=Path, default=BUILD / "demo.json")
    parser.add_argument("--logs", type=Path, default=BUILD / "demo", help="folder for the services' logs")
    arguments = parser.parse_args()
    end_on_signals()
    console = Console()
    prompts = make_prompts(arguments.requests)
    display = Display(console)
    try:
        with display.progress:
            rows, summary = run(display, prompts, arguments.in_flight, arguments.logs)
    except DeploymentError as error:
        console.print(str(error), markup=False)
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n", encoding="utf-8")
    console.print(table_of(rows))
    found = failures(summary, covered_bytes(prompts))
    console.print(
        f"{summary.identical} of {summary.requests} answers identical, {summary.errors} errors, "
        f"{summary.bytes_pulled:,} bytes in {summary.descriptors:,} descriptors, {summary.seconds:.1f} s of traffic; "
        f"{arguments.output}"
    )
    for text in found:
        console.print(f"FAILED: {text}; logs in {arguments.logs}", style="red")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; nothing is left running", file=sys.stderr)
        sys.exit(130)
