"""Check what `make build` made: nothing forgotten, the tag true to the content, and it imports where it is installed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "mooncake_hetero_tp"
LIBRARY = f"{PACKAGE}/native/libmht_kernels.so"
USE = f"""
import importlib.metadata, {PACKAGE}
from {PACKAGE}.native import _library, ops
assert {PACKAGE}.__version__ == importlib.metadata.version("mooncake-hetero-tp")
print("native library:", f"ABI {{ops.abi_version()}}, CUDA {{ops.cuda_version()}}" if _library.is_built() else "none")
"""


def tracked(*patterns: str) -> set[str]:
    """Files of the repository that match, those that are new and not yet committed included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


def problems_of_sdist(path: Path) -> list[str]:
    """What the source distribution lacks."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = tracked(PACKAGE, "csrc") | {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    return [f"{path.name} lacks {name}" for name in sorted(wanted - names)]


def problems_of_wheel(path: Path) -> list[str]:
    """What the wheel lacks, has too much, or says wrongly in its name."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    own = {name for name in names if ".dist-info/" not in name}
    wanted = tracked(f"{PACKAGE}/*.py") | {f"{PACKAGE}/py.typed"}
    found = [f"{path.name} lacks {name}" for name in sorted(wanted - own)]
    found += [f"{path.name} holds {name}, which is none of its business" for name in sorted(own - wanted - {LIBRARY})]
    for name in ("entry_points.txt", "licenses/LICENSE"):
        if not any(entry.endswith(f".dist-info/{name}") for entry in names):
            found.append(f"{path.name} lacks {name}")
    if path.name.endswith("-py3-none-any.whl") == (LIBRARY in own):
        found.append(f"{path.name}: the tag does not say whether {LIBRARY} is inside ({LIBRARY in own})")
    return found


def use(wheel: Path) -> None:
    """Install the wheel into a folder of its own and use it from there."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, str(wheel)]
        subprocess.run(pip, check=True)
        subprocess.run([sys.executable, "-c", USE], cwd=folder, check=True)


def main(folder: Path) -> int:
    """Check the one sdist and the one wheel in `folder`."""
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    found = problems_of_sdist(sdist) + problems_of_wheel(wheel)
    print(*found, sep="\n", end="\n" if found else "")
    if not found:
        use(wheel)
        print(f"good: {sdist.name}, {wheel.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
