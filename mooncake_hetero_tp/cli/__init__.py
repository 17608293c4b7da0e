"""The command line: `mooncake-hetero-tp` (or `python -m mooncake_hetero_tp.cli`), one file per subcommand.

Works without vLLM, torch, Mooncake and a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mooncake_hetero_tp import __version__
from mooncake_hetero_tp.cli import handshake, plan
from mooncake_hetero_tp.cli.outcome import Outcome

TYPER_USAGE_STATUS = 2
WRONG_USAGE = 1
"""Our status for a command line that cannot be read: 2 means "refused" here."""

app = typer.Typer(
    name="mooncake-hetero-tp",
    help="Explain KV transfers between vLLM engines of unlike tensor-parallel size, block size and KV layout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("plan")(plan.plan)
app.add_typer(handshake.app, name="handshake")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all subcommands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the subcommand's exit status, 1 for wrong usage."""
    outcome = Outcome()
    try:
        app(args=None if arguments is None else list(arguments), obj=outcome)
    except SystemExit as end:
        if end.code:
            return WRONG_USAGE if end.code == TYPER_USAGE_STATUS else int(end.code)
    return outcome.status
