"""`make demo` itself: its figures, its exit status, and that everything it starts ends with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import covered_bytes, make_prompts
from guard import descendants

from tests.e2e.residue import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
REQUESTS = 24


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(DEMO), "--output", str(tmp_path / "demo.json"), "--logs", str(tmp_path / "logs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def read_until(demo: subprocess.Popen[str], text: str) -> None:
    assert demo.stdout
    assert any(text in line for line in demo.stdout), f"ended without printing {text!r}"


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_all_answers_are_identical_and_the_bytes_are_those_of_the_covered_tokens(
    demo: subprocess.Popen[str], tmp_path: Path
) -> None:
    read_until(demo, "prompts through the pair ...")
    tree = descendants(demo.pid)
    output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert eventually(lambda: gone(tree))
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures.keys() == {"requests", "identical", "errors", "bytes_pulled", "descriptors", "seconds"}
    assert (figures["requests"], figures["identical"], figures["errors"]) == (REQUESTS, REQUESTS, 0)
    assert figures["bytes_pulled"] == covered_bytes(make_prompts(REQUESTS))
    assert figures["descriptors"] > 0


@pytest.mark.parametrize("moment", ["router start ...", "prompts through the pair ..."])
def test_ctrl_c_leaves_nothing_behind(demo: subprocess.Popen[str], moment: str) -> None:
    read_until(demo, moment)
    assert eventually(lambda: len(descendants(demo.pid)) >= 4)  # two guards and what they guard
    tree = descendants(demo.pid)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate()
    assert demo.returncode == 130, output
    assert gone(tree)
