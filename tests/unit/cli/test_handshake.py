"""The command line against live ranks: output for people and scripts, exit status, and what it must not need."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.cli import main
from mooncake_hetero_tp.core.codec import encode
from mooncake_hetero_tp.core.messages import Hello
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import EngineId, Rank
from tests.leftovers import leaves_nothing as leaves_nothing  # noqa: PLC0414 - a fixture
from tests.live import ENGINE, Engine, Producer, dead_address, identity, tables, vllm_answer
from tests.plan_cases import ask, example
from tests.tables import Dense

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LIKE = Dense(8, layers=4, tokens=32, blocks=64, head_size=64, item=2)
TP2 = tables(Dense(**{**vars(LIKE), "tp": 2}))

PATIENT = ("--timeout", "30")
"""For ranks that answer; none takes it."""
HASTY = ("--timeout", "0.5")
"""For ranks that do not."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.of(tables(LIKE)) as made:
        yield made


def probe(engine: Engine, *options: str) -> int:
    return main(["handshake", "probe", engine.url, *PATIENT, *options])


class Told:
    """What a command printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    @property
    def text(self) -> str:
        return self._capsys.readouterr().out

    @property
    def errors(self) -> str:
        return self._capsys.readouterr().err

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(capsys)


# --- who is there ----------------------------------------------------------------------------------------------------


def test_a_producer_is_described_line_by_line(told: Told) -> None:
    with Engine.of(TP2) as engine:
        assert probe(engine) == 0
        lines = told.text.splitlines()
        assert lines[0] == "engine prefill, data-parallel rank 0, TP 2 x PP 1"
        assert lines[1] == "  model: architecture Tiny, layers 4, kv_heads 8, kv_cache_dtype bfloat16"
        for tp in range(2):
            producer = engine.producers[Rank(tp=tp)]
            assert lines[2 + tp].startswith(f"  pp0.tp{tp} at tcp://127.0.0.1:")
            registered = producer.table.buffers[0].length_bytes
            for word in (
                f"incarnation {producer.identity.incarnation}", "layout LBHNC", "encoding packed",
                f"{registered} bytes registered", "4 staging slots of 4096 bytes", "lease 10.0 s", "answers in ",
            ):  # fmt: skip
                assert word in lines[2 + tp]
        assert lines[4] == (
            "  group 0 (attention), each rank: blocks of 32 tokens, kernel blocks of 32; 8 regions of 4 layers; "
            f"64 blocks, {4 * 64 * 32 * 4 * 2 * 64 * 2} bytes"
        )
        assert lines[5:] == ["ok", "engine prefill: all 2 rank(s) answered"]


def test_a_producer_in_json(told: Told) -> None:
    with Engine.of(TP2) as engine:
        assert probe(engine, "--json") == 0
        found = told.json
        assert (found["status"], found["agreement"], found["mismatches"]) == ("ok", None, [])
        assert found["bootstrap"] == engine.url
        (only,) = found["engines"]
        assert {name: only[name] for name in ("engine_id", "dp", "tp", "pp", "missing")} == {
            "engine_id": ENGINE, "dp": 0, "tp": 2, "pp": 1, "missing": [],
        }  # fmt: skip
        assert only["model"]["kv_heads"] == "8"
        second = only["ranks"][1]
        producer = engine.producers[Rank(tp=1)]
        assert 0 < second.pop("latency_ms") < 30_000
        assert second == {
            "pp": 0, "tp": 1, "address": second["address"], "status": "ok", "fault": None,
            "incarnation": producer.identity.incarnation, "protocol_version": 1, "transport_session": "127.0.0.1:7000",
            "lease_s": 10.0, "layout": "LBHNC", "encodings": ["packed"],
            "registered_bytes": producer.table.buffers[0].length_bytes, "staging": {"slot_bytes": 4096, "slots": 4},
            "groups": [{
                "index": 0, "kind": "attention", "block_size": 32, "kernel_block_size": 32, "layers": 4, "regions": 8,
                "num_blocks": 64, "bytes": 4 * 64 * 32 * 4 * 2 * 64 * 2,
            }],
        }  # fmt: skip


# --- who would agree -------------------------------------------------------------------------------------------------


def test_a_decoder_that_agrees(engine: Engine, told: Told) -> None:
    asked = "tp=2,pp=1,block_size=64,kernel_block_size=32,layout=LBHNC,dtype=bfloat16"
    assert probe(engine, "--as", asked, "--json") == 0
    found = told.json
    assert found["status"] == "ok"
    assert found["agreement"]["tp"] == {"producer": 1, "consumer": 2}
    assert found["agreement"]["groups"] == [
        {
            "index": {"producer": 0, "consumer": 0},
            "kind": "attention",
            "block_size": {"producer": 32, "consumer": 64},
            "kernel_block_size": {"producer": 32, "consumer": 32},
        }
    ]
    assert found["agreement"]["bytes_per_token"] == 4 * 8 * 2 * 64 * 2
    assert found["asked"]["block_size"] == [64]
    assert any("attention backend" in assumption for assumption in found["assumptions"])
    assert [one["field"] for one in found["mismatches"]] == ["tp", "block_size of group 0"]


def test_agreement_and_mismatches_have_the_shapes_of_plan(engine: Engine, told: Told) -> None:
    planned = ask(example())
    assert probe(engine, "--as", "tp=2,block_size=64", "--json") == 0
    found = told.json
    assert list(found)[:4] == ["status", "agreement", "mismatches", "why"]
    assert found["agreement"].keys() == planned["agreement"].keys()
    assert found["mismatches"][0].keys() == planned["mismatches"][0].keys()


def test_a_decoder_that_agrees_for_people(engine: Engine, told: Told) -> None:
    assert probe(engine, "--as", "tp=2") == 0
    text = told.text
    for word in (
        "\nok\n", "tensor ranks", "[note] tp: producer has 1, consumer has 2;", "agreed: every byte", "assumed: ",
    ):  # fmt: skip
        assert word in text


def test_a_refused_decoder_reads_the_table_that_the_engine_logs(engine: Engine, told: Told) -> None:
    """The producer is asked in earnest by such a decoder's first rank; its log and the probe say the same."""
    (rank,) = engine.producers
    producer = engine.producers[rank]
    assert probe(engine, "--as", "tp=2,dtype=float16") == 2
    text = told.text
    decoder = refused_decoder()
    producer.answer(encode(Hello(1, 1, (), identity(rank, EngineId("decode")), ENGINE, None, 1, decoder)))
    (logged,) = producer.log
    first, _, table = logged.partition("\n")
    assert first.startswith("refused consumer decode[")
    assert table.startswith("[refuse] ")
    assert "set the same --dtype and --kv-cache-dtype (of states" in table
    assert f"\nrefused\n{table}\n" in text


def refused_decoder() -> RankTable:
    return tables(Dense(**{**vars(LIKE), "tp": 2}), dtype="float16")[Rank(tp=1)]


@pytest.mark.parametrize(
    "wish,status,word",
    [
        ("tp=2", 0, "agreed"),
        ("", 0, "agreed"),
        ("tp=16,layout=BHLNC", 0, "agreed"),
        ("layout=LBNHC,block_size=16", 0, "each a descriptor of its own"),
        ("tp=3", 2, "choose a tensor_parallel_size that divides the KV heads"),
        ("dtype=float32", 2, "set the same --dtype"),
        ("layout=LBHCN", 2, "use a layout that ends in C"),
        ("kernel_block_size=16,layout=BLHNC", 2, "use LBHNC or LBNHC"),
        ("kernel_block_size=24", 1, "does not divide"),
        ("pp=9", 1, "without a KV cache layer"),
    ],
)
def test_exit_status_and_remedy(wish: str, status: int, word: str, engine: Engine, told: Told) -> None:
    assert probe(engine, "--as", wish) == status
    assert word in told.text
    assert probe(engine, "--as", wish, "--json") == status
    found = told.json
    assert found["status"] == {0: "ok", 1: "invalid", 2: "refused"}[status]
    assert (found["agreement"] is None) == (status != 0)
    assert word in json.dumps(found)


def test_a_decoder_meets_every_data_parallel_rank(engine: Engine, told: Told) -> None:
    other = msgspec.structs.replace(tables(LIKE)[Rank()], model={"architecture": "Other"})
    engine.add(Rank(dp=1), other, EngineId("prefill_dp1"))
    assert probe(engine, "--as", "tp=2", "--json") == 0
    assert [one["engine_id"] for one in told.json["engines"]] == ["prefill", "prefill_dp1"]


def test_probing_leaves_the_producer_as_it_was(engine: Engine) -> None:
    machine = engine.producers[Rank()].machine
    for options in ((), ("--as", "tp=2"), ("--as", "tp=3"), ("--as", "dtype=float16")):
        probe(engine, *options)
    assert (len(machine._sessions), machine.next_deadline(), machine.drained) == (0, None, True)
    assert engine.producers[Rank()].log == []


# --- who is not ------------------------------------------------------------------------------------------------------


def test_a_dead_host(told: Told) -> None:
    url = dead_address().replace("tcp", "http")
    start = time.monotonic()
    assert main(["handshake", "probe", url, *PATIENT]) == 1
    assert time.monotonic() - start < 15.0
    assert f"the bootstrap server at {url} does not answer" in told.text
    assert main(["handshake", "probe", url, "--json", *PATIENT]) == 1
    assert told.json["status"] == "unreachable"


def test_a_dead_rank_is_named_and_the_others_are_described(engine: Engine, told: Told) -> None:
    dead = dead_address()
    engine.register(Rank(tp=1), dead)
    assert probe(engine, "--as", "tp=2", "--json") == 1
    found = told.json
    assert (found["status"], found["agreement"]) == ("unreachable", None)
    assert f"engine prefill: dp0.pp0.tp1 at {dead} cannot be reached" in found["why"]
    assert [rank["status"] for rank in found["engines"][0]["ranks"]] == ["ok", "unreachable"]


def test_a_silent_rank_is_named_in_time(told: Told) -> None:
    with Engine() as engine:
        engine.register(Rank(), engine.silent_address())
        start = time.monotonic()
        assert probe(engine, *HASTY) == 1
        assert time.monotonic() - start < 20.0
        assert "answers no hello within 0.5 s" in told.text


def test_an_engine_that_is_still_registering_is_named(told: Told) -> None:
    with Engine.of(TP2, [Rank(tp=1)]) as engine:
        assert probe(engine, "--as", "tp=1") == 1
        text = told.text
        assert "  pp0.tp0: not registered" in text
        assert "engine prefill has registered 1 of 2 ranks; pp0.tp0 missing: still starting, or ended" in text


def test_a_server_that_knows_no_engine(told: Told) -> None:
    with Engine() as engine:
        assert probe(engine) == 1
        assert "knows no engine" in told.text


@pytest.mark.parametrize("options", [(), ("--as", "tp=2"), ("--json",)])
def test_vllms_own_connector_is_named(options: tuple[str, ...], told: Told) -> None:
    with Engine() as engine:
        engine.register(Rank(), engine.router(vllm_answer).address)
        assert probe(engine, *options) == 1
        text = told.text
        assert "is vLLM's own MooncakeConnector" in text
        assert "MooncakeHeteroTPConnector" in text
        assert "foreign" in text


def test_a_stale_registration_is_named(told: Told) -> None:
    with Engine() as engine:
        other = Producer(identity(Rank(), EngineId("other")), tables(LIKE)[Rank()])
        engine.register(Rank(), engine.router(other.answer).address)
        assert probe(engine) == 1
        assert "its registration is stale" in told.text


@pytest.mark.parametrize("frame", [b"", b"garbage", b"\x01\x00"])
def test_garbage(frame: bytes, told: Told) -> None:
    with Engine() as engine:
        engine.register(Rank(), engine.router(lambda _: frame).address)
        assert probe(engine) == 1
        assert "sends no message of this connector" in told.text


@pytest.mark.parametrize(
    "arguments",
    [
        ["handshake"],
        ["handshake", "probe"],
        ["handshake", "probe", "http://127.0.0.1:1", "--as", "tp=x"],
        ["handshake", "probe", "http://127.0.0.1:1", "--timeout", "0"],
        ["handshake", "probe", "http://127.0.0.1:1", "--timeout", "nan"],
        ["handshake", "probe", "http://127.0.0.1:1", "--engine", "x"],
        ["handshake", "dump", "http://127.0.0.1:1"],
        ["handshake", "diff"],
        ["handshake", "diff", "/nowhere"],
        ["handshake", "diff", "/nowhere", "/nowhere"],
        ["handshake", "shake"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert main(arguments) == 1


# --- saved hellos ----------------------------------------------------------------------------------------------------


def dump(held: dict[Rank, RankTable], path: Path) -> str:
    with Engine.of(held) as engine:
        assert main(["handshake", "dump", engine.url, "-o", str(path), *PATIENT]) == 0
    return str(path)


def test_two_saved_hellos_are_judged_offline(tmp_path: Path, told: Told) -> None:
    one, two = dump(tables(LIKE), tmp_path / "1.json"), dump(TP2, tmp_path / "2.json")
    assert "saved 2 rank(s) of 1 engine(s) to " in told.text
    assert main(["handshake", "diff", one, two, "--json"]) == 0
    found = told.json
    assert found["agreement"]["tp"] == {"producer": 1, "consumer": 2}
    assert "engines" not in found
    assert main(["handshake", "diff", two, one]) == 0
    other = dump(tables(LIKE, dtype="float16"), tmp_path / "3.json")
    assert main(["handshake", "diff", one, other]) == 2
    assert "[refuse] model.kv_cache_dtype: producer has bfloat16, consumer has float16" in told.text


@pytest.mark.parametrize("wish,status", [("tp=2,block_size=64", 0), ("tp=3", 2), ("kernel_block_size=24", 1)])
def test_a_saved_hello_and_a_decoder(wish: str, status: int, tmp_path: Path, told: Told) -> None:
    with Engine.of(tables(LIKE)) as engine:
        path = tmp_path / "1.json"
        assert main(["handshake", "dump", engine.url, "-o", str(path), *PATIENT]) == 0
        assert probe(engine, "--as", wish, "--json") == status
        live = json.loads(told.text.partition("\n")[2])
    assert main(["handshake", "diff", str(path), "--as", wish, "--json"]) == status
    assert {name: value for name, value in live.items() if name not in ("bootstrap", "engines")} == told.json


def test_both_or_neither_side_is_wrong_usage(tmp_path: Path) -> None:
    one = dump(tables(LIKE), tmp_path / "1.json")
    assert main(["handshake", "diff", one]) == 1
    assert main(["handshake", "diff", one, one, "--as", "tp=2"]) == 1


def test_an_incomplete_engine_is_not_saved(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "1.json"
    with Engine.of(TP2, [Rank(tp=1)]) as engine:
        assert main(["handshake", "dump", engine.url, "-o", str(path), *PATIENT]) == 1
    assert "has registered 1 of 2 ranks" in told.errors
    assert not path.exists()


def test_a_hello_on_stdout_is_nothing_but_the_hello(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine.of(tables(LIKE)) as engine:
        assert main(["handshake", "dump", engine.url, "-o", "-", *PATIENT]) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["format"] == "mooncake-hetero-tp hello"
    assert "saved 1 rank(s)" in seen.err


# --- what it must not need -------------------------------------------------------------------------------------------

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} must not be needed")
sys.meta_path.insert(0, Blocked())
from mooncake_hetero_tp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without(modules: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.replace("BLOCKED:", f"{modules!r}:")
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_probing_needs_no_vllm_torch_or_mooncake(engine: Engine, tmp_path: Path) -> None:
    heavy = {"vllm", "torch", "mooncake", "mooncake_transfer_engine"}
    found = run_without(heavy, "handshake", "probe", engine.url, *PATIENT, "--as", "tp=2", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["status"] == "ok"
    path = str(tmp_path / "1.json")
    assert run_without(heavy, "handshake", "dump", engine.url, *PATIENT, "-o", path).returncode == 0
    offline = run_without(heavy | {"zmq"}, "handshake", "diff", path, "--as", "tp=3")
    assert (offline.returncode, offline.stderr) == (2, "")
