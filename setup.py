"""Builds libmht_kernels.so with CMake where that is possible; everything else is in pyproject.toml.

The library is optional, so a machine without a compiler still installs the package, and says so in one line.

    MHT_NATIVE  unset: build where CMake and a C++ compiler are found; 0: never; 1: fail where it cannot be built
    MHT_CUDA    AUTO (default), ON or OFF, as in CMakeLists.txt
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
LIBRARY = "libmht_kernels.so"
PACKAGE_PATH = Path("mooncake_hetero_tp", "native", LIBRARY)


def _missing_tools() -> list[str]:
    compilers = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    missing = [] if shutil.which("cmake") else ["cmake"]
    if not any(name and shutil.which(name) for name in compilers):
        missing.append("a C++ compiler")
    return missing


def _compile(build_dir: Path, cuda: str) -> None:
    shutil.rmtree(build_dir, ignore_errors=True)  # CMake caches compilers and refuses a moved source tree
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build_dir), f"-DMHT_CUDA={cuda}"], check=True)
    subprocess.run(["cmake", "--build", str(build_dir), "--parallel", "2"], check=True)


class BuildNative(Command):
    """Compiles the library into the package; a step of `build` (setuptools' SubCommand protocol)."""

    description = "build libmht_kernels.so with CMake"
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        """Set what setuptools may overwrite."""
        self.build_lib: str = ""
        self.build_temp: str = ""
        self.editable_mode = False

    def finalize_options(self) -> None:
        """Take the folders from `build`."""
        command = self.get_finalized_command("build")
        self.build_lib = self.build_lib or command.build_lib
        self.build_temp = self.build_temp or command.build_temp

    @property
    def target(self) -> Path:
        """Where the library ends up: in the source tree for an editable install."""
        return (ROOT if self.editable_mode else Path(self.build_lib)) / PACKAGE_PATH

    def run(self) -> None:
        """Build and copy, or say why not."""
        self.target.unlink(missing_ok=True)  # a library of older sources is worse than none
        wanted = os.environ.get("MHT_NATIVE", "")
        missing = _missing_tools()
        if wanted == "0":
            self._say("not built (MHT_NATIVE=0)")
        elif missing and wanted != "1":
            self._say(f"not built ({' and '.join(missing)} not found); the numpy reference is used instead")
        else:
            self._build(required=wanted == "1")

    def _build(self, *, required: bool) -> None:
        cuda = os.environ.get("MHT_CUDA", "AUTO")
        build_dir = Path(self.build_temp) / "native"
        for attempt in [cuda] if cuda != "AUTO" else ["AUTO", "OFF"]:
            try:
                _compile(build_dir, attempt)
            except (OSError, subprocess.CalledProcessError) as error:
                self._say(f"build with MHT_CUDA={attempt} failed: {error}")
                continue
            self.target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build_dir / LIBRARY, self.target)
            self._say(f"built, {self.target.stat().st_size} bytes")
            return
        if required or cuda == "ON":
            raise SystemExit(f"{LIBRARY} could not be built, and MHT_NATIVE=1 or MHT_CUDA=ON asks for it")
        self._say("not built (see above); the numpy reference is used instead")

    def _say(self, what: str) -> None:
        print(f"{LIBRARY}: {what}", flush=True)

    def get_source_files(self) -> list[str]:
        """What belongs into an sdist."""
        sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
        return ["CMakeLists.txt", *sorted(str(path.relative_to(ROOT)) for path in sources)]

    def get_outputs(self) -> list[str]:
        """What was built."""
        return [str(self.target)] if self.target.exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is linked back: an editable install builds in place."""
        return {}


class Build(build):
    """`build` with the native library."""

    sub_commands: ClassVar[list[tuple[str, object]]] = [*build.sub_commands, ("build_native", None)]


class PlatformWheel(bdist_wheel):
    """`py3-none-<platform>` with the library inside, `py3-none-any` without: no Python ABI is involved."""

    def run(self) -> None:
        """Build the library first: whether it is there decides the tag."""
        self.run_command("build_native")
        if self.get_finalized_command("build_native").get_outputs():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # or setuptools lays the package out as pure Python
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, no ABI."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": PlatformWheel})
