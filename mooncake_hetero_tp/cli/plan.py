"""`mooncake-hetero-tp plan CASE.json`: what a pull would do, without engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_hetero_tp.cli.answer import Answer, answer
from mooncake_hetero_tp.cli.costs import DEFAULT_SLOT_MIB, Terms
from mooncake_hetero_tp.cli.model_case import model_case
from mooncake_hetero_tp.cli.outcome import Outcome
from mooncake_hetero_tp.cli.report import show
from mooncake_hetero_tp.cli.wish import read_wish
from mooncake_hetero_tp.core.cost import Mode, Rates
from mooncake_hetero_tp.errors import ConfigError

EXIT_STATUS = {"ok": 0, "refused": 2, "invalid": 1}
STDIN = Path("-")
_KNOWN = "tp, pp, block_size, kernel_block_size, layout, dtype, as in tp=2,block_size=64."
_RATES = ", ".join(Rates.__struct_fields__)


def plan(
    context: typer.Context,
    case: Annotated[
        Path | None, typer.Argument(metavar="[CASE.json]", help="One case or a list of cases; - reads stdin.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="In place of a case: a directory with a Hugging Face config.json."),
    ] = None,
    prefill: Annotated[str, typer.Option(metavar="SETTINGS", help="With --model: the prefill engine's " + _KNOWN)] = "",
    decode: Annotated[str, typer.Option(metavar="SETTINGS", help="With --model: the decode engine's " + _KNOWN)] = "",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Answer in JSON: one object for one case, a list of them for a list."),
    ] = False,
    rates_file: Annotated[
        Path | None,
        typer.Option(
            "--rates",
            metavar="FILE",
            help="Rates in place of the built-in ones, all optional: " + _RATES + ".",
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="How to read; auto takes the faster of the other two.")] = Mode.AUTO,
    slot_mib: Annotated[int, typer.Option(min=1, max=1 << 20, help="MiB of one staging slot.")] = DEFAULT_SLOT_MIB,
) -> None:
    """Explain offline what a pull between two engines would do.

    A case is {"producer": {"tp", "pp", "layout", "block_size", "num_blocks", "kernel_block_size"?,
    "page_size_padded"?}, "consumer": {the same}, "dtype", "layers": [{"name", "kind", "group"?, ...}], "request"?: {"tokens", "skip_tokens", "producer_blocks", "consumer_blocks"}}.
    Without a request the answer predicts counts. --model makes a case from a model's config.json and two engines'
    settings; what is not named there is set as vLLM does, which the answer tells.

    By kind a layer also has: attention: kv_heads, head_size; sliding_window: these and window; mla, replicated:
    bytes_per_token; gdn: key_heads, value_heads, key_head_size, value_head_size, conv_kernel; mamba2: heads, groups,
    head_size, state_size, conv_kernel. The last two may have conv_layout (DS, SD), conv_dtype and state_dtype.

    Exit status: 0 all ok, 2 a case is refused, 1 a case is invalid or wrong usage.
    """
    terms = Terms(Rates() if rates_file is None else _read_rates(rates_file), mode, slot_mib)
    if (case is None) == (model is None):
        raise typer.BadParameter("give either CASE.json or --model DIR")
    if model is None and (prefill or decode):
        raise typer.BadParameter("--prefill and --decode go with --model; a case names its own settings")
    given = _read_json(case) if case is not None else None
    if model is not None:
        answers = [_model_answer(model, {"prefill": prefill, "decode": decode}, terms)]
    else:
        answers = [answer(one, terms) for one in (given if isinstance(given, list) else [given])]
    if as_json:
        _print_json(answers if isinstance(given, list) else answers[0])
    else:
        show(answers)
    context.ensure_object(Outcome).status = _exit_status(answers)


def _model_answer(directory: Path, settings: Mapping[str, str], terms: Terms) -> Answer:
    try:
        sides = {name: read_wish(text, f"--{name}") for name, text in settings.items()}
        made = model_case(directory, sides)
    except ConfigError as error:
        return Answer(status="invalid", why=str(error))
    found = answer(made.case, terms)
    found.assumptions = made.assumptions
    return found


def _exit_status(answers: list[Answer]) -> int:
    """An invalid case outweighs a refused one: what was refused may not be what was meant."""
    seen = {one.status for one in answers}
    return next((EXIT_STATUS[status] for status in ("invalid", "refused") if status in seen), 0)


def _print_json(found: Answer | list[Answer]) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror or error}") from error


def _read_json(path: Path) -> Any:
    try:
        return msgspec.json.decode(_read(path))
    except (msgspec.DecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not JSON that can be read: {error}") from error


def _read_rates(path: Path) -> Rates:
    try:
        return msgspec.json.decode(_read(path), type=Rates)
    except (msgspec.DecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{path} holds no rates: {error}; expected some of {_RATES}") from error
