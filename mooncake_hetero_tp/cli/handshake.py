"""`mooncake-hetero-tp handshake probe|dump|diff`: who a live producer is, and who would agree with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mooncake_hetero_tp.cli.handshake_answer import HandshakeAnswer, hello, judge_two, judge_wish
from mooncake_hetero_tp.cli.handshake_answer import probe as answer_probe
from mooncake_hetero_tp.cli.handshake_report import show
from mooncake_hetero_tp.cli.hello import STDIO, SavedHello, read_hello, write_hello
from mooncake_hetero_tp.cli.outcome import Outcome
from mooncake_hetero_tp.cli.wish import Wish, read_wish
from mooncake_hetero_tp.errors import ConfigError

EXIT_STATUS = {"ok": 0, "refused": 2, "unreachable": 1, "invalid": 1}

app = typer.Typer(
    help="Ask a live producer who it is, and find out who would agree with it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="The producer's bootstrap server: http://HOST:PORT.")]
Settings = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="SETTINGS",
        help="A decoder to judge, as tp=2,pp=1,block_size=64,kernel_block_size=32,layout=BLHNC,dtype=bfloat16. What "
        "is not named is the producer's. With several KV cache groups: block_size=16/32.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
TimeoutS = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0.01, max=3600.0, help="Seconds for the whole inquiry.")
]


@app.command("probe")
def probe(
    context: typer.Context, url: Url, settings: Settings = None, as_json: Json = False, timeout_s: TimeoutS = 5.0
) -> None:
    """Ask a producer's bootstrap server and all of its ranks who they are; leaves no state there.

    With --as, judges such a decoder: what it would agree on, or be refused for, and the remedy.

    Exit status: 0 agreed (without --as: every rank answered), 2 refused, 1 unreachable or wrong usage.
    """
    wish = None if settings is None else _read_wish(settings)
    _end(context, answer_probe(url, wish, timeout_s=timeout_s), as_json)


@app.command("dump")
def dump(
    context: typer.Context,
    url: Url,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to; - writes to stdout.")],
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Save what every rank of a producer says of itself, its region table included, as JSON.

    Exit status: 0 saved, 1 some rank did not answer (nothing is written) or wrong usage.
    """
    try:
        saved = hello(url, timeout_s=timeout_s)
        write_hello(output, saved)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        context.ensure_object(Outcome).status = EXIT_STATUS["unreachable"]
        return
    ranks = sum(len(engine.ranks) for engine in saved.engines)
    typer.echo(f"saved {ranks} rank(s) of {len(saved.engines)} engine(s) to {output}", err=output == STDIO)


@app.command("diff")
def diff(
    context: typer.Context,
    producer: Annotated[Path, typer.Argument(metavar="A", help="The producer, saved by `handshake dump`.")],
    consumer: Annotated[Path | None, typer.Argument(metavar="[B]", help="The consumer, saved alike.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Judge offline whether two saved engines would agree, or one with the decoder that --as describes.

    Exit status: 0 agreed, 2 refused, 1 wrong usage.
    """
    if (consumer is None) == (settings is None):
        raise typer.BadParameter("give either a second file or --as")
    saved = _read_hello(producer)
    if consumer is not None:
        _end(context, judge_two(saved, _read_hello(consumer)), as_json)
    elif settings is not None:
        _end(context, judge_wish([engine.tables for engine in saved.engines], _read_wish(settings)), as_json)


def _end(context: typer.Context, answer: HandshakeAnswer, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
    else:
        show(answer)
    context.ensure_object(Outcome).status = EXIT_STATUS[answer.status]


def _read_wish(settings: str) -> Wish:
    try:
        return read_wish(settings)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _read_hello(path: Path) -> SavedHello:
    try:
        return read_hello(path)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
