"""A saved hello: what every rank of a producer said of itself, as a JSON file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import ConfigError, PeerProtocolError
from mooncake_hetero_tp.types import EngineId, Incarnation, Rank

FORMAT: Final = "mooncake-hetero-tp hello"
STDIO: Final = Path("-")


class RankHello(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: who and where it is, and its region table."""

    rank: Rank
    address: str
    incarnation: Incarnation
    protocol_version: int
    transport_session: str
    lease_s: float
    latency_ms: float | None = None
    table: RankTable


class EngineHello(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with all of its ranks."""

    engine_id: EngineId
    dp: int
    ranks: Annotated[tuple[RankHello, ...], Meta(min_length=1)]

    @property
    def tables(self) -> dict[Rank, RankTable]:
        return {one.rank: one.table for one in self.ranks}


class SavedHello(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Addresses and sizes are in bytes, block sizes in tokens."""

    format: Literal["mooncake-hetero-tp hello"] = FORMAT
    file_version: Literal[1] = 1
    bootstrap: str
    engines: Annotated[tuple[EngineHello, ...], Meta(min_length=1)]


def read_hello(path: Path) -> SavedHello:
    """A file that `handshake dump` wrote; `-` reads stdin.

    Raises:
        ConfigError: it cannot be read, or holds no such thing; says where and why.
    """
    try:
        content = sys.stdin.buffer.read() if path == STDIO else path.read_bytes()
        saved = msgspec.json.decode(content, type=SavedHello)
        for one in (one for engine in saved.engines for one in engine.ranks):
            validate_table(one.table)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of `handshake dump`: {error}") from error
    except PeerProtocolError as error:
        raise ConfigError(f"{path} holds a table that contradicts itself: {error}") from error
    for engine in saved.engines:
        _check_complete(path, engine)
    return saved


def write_hello(path: Path, saved: SavedHello) -> None:
    """Writes a file for people and `read_hello`; `-` is stdout.

    Raises:
        ConfigError: it cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n"
    try:
        if path == STDIO:
            sys.stdout.write(content.decode())
        else:
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _check_complete(path: Path, engine: EngineHello) -> None:
    listed = engine.tables
    wanted = max(table.tp_size for table in listed.values()) * max(table.pp_size for table in listed.values())
    if len(listed) != wanted or len(engine.ranks) != wanted:
        raise ConfigError(
            f"{path} holds {len(engine.ranks)} of {wanted} ranks of engine {engine.engine_id}; expected each once"
        )
