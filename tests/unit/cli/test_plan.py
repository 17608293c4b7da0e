"""The command itself: files, answers in JSON and for people, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from mooncake_hetero_tp.cli import main
from tests.plan_cases import ask, changed, example, layers, make_case, side, spots

RATES = {
    "descriptor_s": 25e-6, "bytes_per_s": 1.6e9, "gather_bytes_per_s": 13e9, "scatter_bytes_per_s": 13e9,
    "round_trip_s": 500e-6, "chunk_s": 300e-6,
}  # fmt: skip


def run(tmp_path: Path, case: object, *options: str) -> int:
    path = tmp_path / "case.json"
    path.write_text(case if isinstance(case, str) else json.dumps(case))
    return main(["plan", str(path), *options])


def test_the_example_answers_as_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, example(), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"status", "agreement", "mismatches", "mode", "why", "pulls"} <= set(found)
    assert (found["status"], found["mode"]) == ("ok", "direct")
    assert [(pull["consumer_rank"], pull["producer_rank"]) for pull in found["pulls"]] == [
        ({"pp": 0, "tp": rank}, {"pp": 0, "tp": 0}) for rank in range(2)
    ]
    for pull in found["pulls"]:
        assert set(pull) == {"consumer_rank", "producer_rank", "descriptors", "bytes", "copies"}
        assert set(pull["copies"][0]) == {"layer", "component", "src", "dst", "bytes"}
        assert pull["bytes"] == 70 * 4 * 512
        assert pull["descriptors"] == len(pull["copies"]) == 4 * 5
    assert spots(found["pulls"][1])[0] == (11 * 65536 + 4 * 8192, 2 * 131072, 6 * 512)
    assert "0.5 ms in 20 descriptors, staged about 0.937 ms in 1 chunk" in found["why"]  # a round trip more
    assert "25 us a descriptor, 1.6 GB/s" in found["why"]
    assert found["rates"] == RATES


def test_a_bad_case_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [example(), changed("consumer.tp", 3), 7, changed("dtype", "int4"), example()]
    assert run(tmp_path, cases, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in found] == ["ok", "refused", "invalid", "invalid", "ok"]
    assert found[0] == found[4] == ask(example())


@pytest.mark.parametrize(
    "cases,status",
    [
        (example(), 0),
        ([example()], 0),
        ([], 0),
        (changed("consumer.tp", 3), 2),
        ([changed("consumer.tp", 3), example()], 2),
        (changed("dtype", "int4"), 1),
        ([changed("consumer.tp", 3), changed("dtype", "int4")], 1),
        ([[example()]], 1),
        ("null", 1),
    ],
)
def test_exit_status_and_shape_of_the_answer(
    cases: object, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, cases, "--json") == status
    assert isinstance(json.loads(capsys.readouterr().out), list) == isinstance(cases, list)
    assert run(tmp_path, cases) == status


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [example(), changed("request", None), changed("consumer.tp", 3), changed("dtype", "int4")]
    assert run(tmp_path, cases) == 1
    out = capsys.readouterr().out
    for word in (
        "case 1 of 4: ok", "case 2 of 4: ok", "case 3 of 4: refused", "case 4 of 4: invalid", "BLHNC", "143360",
        "predicted for 64 tokens", "25 us a descriptor", "tensor_parallel_size", "int4",
    ):  # fmt: skip
        assert word in out


@pytest.mark.parametrize(
    "arguments",
    [[], ["plan"], ["plan", "--json"], ["plan", "a.json", "b.json"], ["plan", "a.json", "--nonsense"], ["nonsense"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "Usage" in captured.err + captured.out


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "nowhere.json"), "--json"]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--json"]) == 1
    assert "directory" in capsys.readouterr().err
    for text in ("", "{", "{'tp': 1}", "[1, 2", "[" * 100_000):
        assert run(tmp_path, text, "--json") == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "JSON" in captured.err
    (tmp_path / "case.json").write_bytes(b'"\xff\xfe"')
    assert main(["plan", str(tmp_path / "case.json")]) == 1


def test_rates_are_replaceable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text('{"descriptor_s": 1e-3, "bytes_per_s": 25e9}')
    assert run(tmp_path, example(), "--json", "--rates", str(rates)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why"].startswith("staged: about 1.83 ms in 1 chunk, direct about 20 ms in 20 descriptors")
    assert "(1000 us a descriptor, 25 GB/s; " in found["why"]
    assert found["rates"] == RATES | {"descriptor_s": 1e-3, "bytes_per_s": 25e9}
    for wrong in ('{"descriptor_s": 0}', '{"bandwidth": 1}', "[]", "x"):
        rates.write_text(wrong)
        assert run(tmp_path, example(), "--rates", str(rates)) == 1
        assert "expected some of descriptor_s, bytes_per_s, gather_bytes_per_s" in capsys.readouterr().err


def test_mode_and_slot_size_are_settable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    like = layers(4)
    blocks = [[3, 9, 4, 7], [5, 2, 1, 8]]
    request = {"tokens": 4 * 256, "producer_blocks": [blocks[0]], "consumer_blocks": [blocks[1]]}
    case = make_case(side(block_size=256), side(2, "BLNHC", 256), like, request)
    found = {}
    for options in ((), ("--mode", "staged"), ("--mode", "direct"), ("--mode", "staged", "--slot-mib", "2")):
        assert run(tmp_path, case, "--json", *options) == 0
        answer = json.loads(capsys.readouterr().out)
        found[options] = (answer["mode"], [pull["descriptors"] for pull in answer["pulls"]])
    assert list(found.values()) == [
        ("staged", [1, 1]),  # 8 MiB for each rank
        ("staged", [1, 1]),
        ("direct", [4 * 4 * 256 * 4] * 2),
        ("staged", [4, 4]),
    ]
    for wrong in (("--mode", "fast"), ("--slot-mib", "0"), ("--slot-mib", "x")):
        assert run(tmp_path, case, *wrong) == 1


def test_a_case_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(json.dumps(example()).encode())))
    assert main(["plan", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ask(example())


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out[0].isdigit()
    assert main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "one object for one case, a list of" in out
    assert "2 a case is refused" in out


BLOCKED = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "torch", "mooncake", "zmq", "ctypes"}:
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Wall())
for name in ("vllm", "torch", "mooncake"):
    assert name not in sys.modules
from mooncake_hetero_tp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_works_without_vllm_torch_and_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps([example(), changed("consumer.tp", 3)]))
    for options in (["--json"], []):
        command = [sys.executable, "-c", BLOCKED, "plan", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2, done.stderr
        assert done.stderr == ""
        if options:
            assert json.loads(done.stdout)[0] == ask(example())
