"""Nothing that a deployment starts outlives it, however it ends; with plain processes in place of engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import Deployment, DeploymentError, EngineConfig
from guard import descendants

from tests.e2e.residue import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"

# A service as hard to end as any: it has a child in a session of its own and ignores SIGTERM.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "600"])
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
time.sleep(600)
"""


class Stubborn(EngineConfig):
    def command(self) -> list[str]:
        return [sys.executable, "-c", STUBBORN]


class Failing(EngineConfig):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "print('port 1 is in use'); raise SystemExit(3)"]


def config(kind: type[EngineConfig]) -> EngineConfig:
    return kind(name="service", model=Path("none"), role="kv_both")


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.STOP_GRACE_S", 0.5)


def test_stop_ends_the_whole_tree(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        service = deployment.start(config(Stubborn))
        assert eventually(lambda: "ready" in service.tail())
        tree = [service.pid, *descendants(service.pid)]
        assert len(tree) == 4
    assert gone(tree)


def test_service_that_ends_early_is_named_with_its_last_words(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start(config(Failing))
        with pytest.raises(DeploymentError, match=r"service ended with status 3(?s:.*)port 1 is in use"):
            deployment.wait_healthy(20.0)


def test_service_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start(config(Stubborn))
        with pytest.raises(DeploymentError, match="not healthy after 1 s"):
            deployment.wait_healthy(1.0)


# A program with one stubborn service, which then waits for a signal.
PROGRAM = f"""
import sys, time
sys.path[:0] = [{str(EXAMPLES)!r}, {str(EXAMPLES.parent)!r}]
from pathlib import Path
import deployment
from tests.e2e.test_deployment import Stubborn, config
deployment.STOP_GRACE_S = 0.5
deployment.end_on_signals()
with deployment.Deployment(Path(sys.argv[1])) as running:
    service = running.start(config(Stubborn))
    while "ready" not in service.tail():
        time.sleep(0.05)
    print("up", flush=True)
    running.watch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_program_that_is_signalled_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout
        assert program.stdout.readline() == b"up\n"
        tree = descendants(program.pid)
        assert len(tree) == 4
        os.kill(program.pid, number)
        program.wait(20)
    assert eventually(lambda: gone(tree))
