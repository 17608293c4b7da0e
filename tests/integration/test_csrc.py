"""The C++ tests, with everything but the CUDA part under ASan and UBSan."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    """What a command says; a failure shows it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_sanitized(tmp_path: Path) -> None:
    if not all(shutil.which(tool) for tool in ("cmake", "ctest", "c++")):
        pytest.skip("no CMake or no C++ compiler here")
    # Debug: quickly built, and the sanitizers see what an optimiser would have removed.
    options = ["-DMHT_SANITIZE=ON", "-DMHT_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
    run("cmake", "-S", str(ROOT), "-B", str(tmp_path), *options)
    run("cmake", "--build", str(tmp_path), "--parallel", "2")
    said = run("ctest", "--test-dir", str(tmp_path), "--output-on-failure", "--timeout", "240")
    assert "100% tests passed, 0 tests failed out of 3" in said
