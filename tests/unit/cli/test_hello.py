from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from mooncake_hetero_tp.cli.hello import EngineHello, RankHello, SavedHello, read_hello, write_hello
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Incarnation
from tests.live import ENGINE, tables
from tests.tables import Dense


def saved() -> SavedHello:
    ranks = (
        RankHello(
            rank=rank,
            address="tcp://127.0.0.1:1",
            incarnation=Incarnation("00aa"),
            protocol_version=1,
            transport_session="127.0.0.1:2",
            lease_s=30.0,
            latency_ms=0.5,
            table=table,
        )
        for rank, table in tables(Dense(8, tp=2, layers=2)).items()
    )
    return SavedHello(
        bootstrap="http://127.0.0.1:3", engines=(EngineHello(engine_id=ENGINE, dp=0, ranks=tuple(ranks)),)
    )


def test_a_file_holds_all_that_was_said_and_can_be_read_by_people(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_hello(path, saved())
    assert read_hello(path) == saved()
    text = path.read_text()
    assert text.endswith("}\n")
    assert text.count("\n") > 50
    content = json.loads(text)
    (engine,) = content["engines"]
    assert (content["format"], engine["engine_id"]) == ("mooncake-hetero-tp hello", ENGINE)
    assert engine["ranks"][1]["rank"] == {"dp": 0, "pp": 0, "tp": 1}
    assert engine["ranks"][1]["table"]["regions"][0]["layer"] == "layers.0"


def test_stdin_and_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_hello(Path("-"), saved())
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(capsys.readouterr().out.encode())))
    assert read_hello(Path("-")) == saved()


def first_rank(content: dict[str, Any]) -> dict[str, Any]:
    rank: dict[str, Any] = content["engines"][0]["ranks"][0]
    return rank


NO_FILE = "is no file of `handshake dump`"
SPOILT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda content: content.update(format="pcap"), NO_FILE),
    "a later version": (lambda content: content.update(file_version=2), NO_FILE),
    "no engine": (lambda content: content.update(engines=[]), NO_FILE),
    "no rank": (lambda content: content["engines"][0].update(ranks=[]), NO_FILE),
    "no regions": (lambda content: first_rank(content)["table"].pop("regions"), NO_FILE),
    "a rank less": (lambda content: content["engines"][0]["ranks"].pop(), "1 of 2 ranks of engine prefill"),
    "a rank twice": (lambda content: first_rank(content)["rank"].update(tp=1), "2 of 2 ranks of engine prefill"),
    "a huge size": (lambda content: first_rank(content)["table"].update(tp_size=2**70), "ranks of engine prefill"),
    "no buffers": (lambda content: first_rank(content)["table"].update(buffers=[]), "contradicts itself"),
}


@pytest.mark.parametrize("spoil,word", [*SPOILT.values()], ids=[*SPOILT])
def test_a_spoilt_file_is_named(spoil: Callable[[dict[str, Any]], object], word: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_hello(path, saved())
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_hello(path)
    assert word in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"{}"])
def test_no_file_of_ours(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no file of `handshake dump`"):
        read_hello(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_hello(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
        write_hello(tmp_path, saved())
