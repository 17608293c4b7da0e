"""Fixtures for the native library: a machine that can build it must have it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake_hetero_tp.native import _library, ops, reference
from mooncake_hetero_tp.native.executor import Executor
from tests.unit.native.emulation import Emulation, build


@pytest.fixture
def library() -> ctypes.CDLL:
    """The built library; skipped only where no tools to build it exist."""
    if not _library.is_built() and not (shutil.which("cmake") and shutil.which("c++")):
        pytest.skip("no CMake or no C++ compiler here, so no native library")
    return _library.load()


@pytest.fixture
def compile_library(tmp_path: Path) -> Callable[[str], Path]:
    """A function that compiles C source into a shared library of its own."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler here")

    def compile_source(source: str) -> Path:
        path = tmp_path / "libother.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
        return path

    return compile_source


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """The device code on the host; skipped where no compiler is."""
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    return Emulation(build(tmp_path_factory.mktemp("emulation")))


@pytest.fixture(params=["reference", "library", "emulation"])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Each implementation of `Executor` in turn."""
    if request.param == "reference":
        return reference
    found = request.getfixturevalue(request.param)
    return ops if request.param == "library" else found
