"""Who may import whom: core <- io, native <- vllm_adapter <- connector, and what each may take from outside.

Read from the source, so that an import inside a function or behind TYPE_CHECKING counts too; what `import` really
loads is then measured in a fresh interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "mooncake_hetero_tp"
ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))

# What each room may import of this package, itself and BASE apart. `testing` holds doubles, which nothing else needs.
BASE = {"errors", "types"}
ROOMS: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    "types": set(),
    "config": set(),
    "core": set(),
    "native": {"core"},
    "io": {"config", "core", "native"},
    "vllm_adapter": {"config", "core", "io", "native"},
    "connector": {"config", "core", "io", "native", "vllm_adapter"},
    "testing": {"config", "core", "io", "native"},
    "cli": {"config", "connector", "core", "io", "native", "testing", "vllm_adapter"},
}

# Modules that only the named files or folders may import, relative to the package.
RESERVED: dict[str, tuple[str, ...]] = {
    "vllm": ("connector.py", "vllm_adapter/"),
    "mooncake": ("io/engine.py",),
    "ctypes": ("native/_library.py", "testing/loopback.py"),
    "zmq": ("io/",),
    "torch": ("connector.py", "vllm_adapter/", "io/"),
    "typer": ("cli/",),
    "rich": ("cli/",),
}

# core holds rules, never a thread, a socket or a clock.
CORE_THIRD_PARTY = {"numpy", "msgspec"}
CORE_FORBIDDEN = {
    "asyncio", "concurrent", "ctypes", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "queue",
    "sched", "select", "selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess", "tempfile",
    "threading", "time", "urllib",
}  # fmt: skip


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=name, names=names, level=0):
                yield from (f"{name}.{alias.name}" for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                parents = module.split(".") if is_package else module.split(".")[:-1]
                base = parents[: len(parents) - level + 1] + ([name] if name else [])
                yield from (".".join([*base, alias.name]) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def breaches(path: str, source: str) -> list[str]:
    """Every import in the file at `path` (relative to the package) that its room may not have."""
    parts = path.removesuffix(".py").split("/")
    is_package = parts[-1] == "__init__"
    parts = parts[:-1] if is_package else parts
    room = parts[0] if parts else ""
    found = []
    for name in imported(ast.parse(source), ".".join([PACKAGE, *parts]), is_package=is_package):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            other = rest.partition(".")[0]
            if other != room and other not in BASE | ROOMS[room] and other != "__version__":
                found.append(f"{path}: {room or 'the package'} may not import {name}")
            continue
        if top in RESERVED and not any(path == place or path.startswith(place) for place in RESERVED[top]):
            found.append(f"{path}: only {', '.join(RESERVED[top])} may import {name}")
        elif room in {"core", *BASE} and (
            top in CORE_FORBIDDEN or top not in CORE_THIRD_PARTY | sys.stdlib_module_names
        ):
            found.append(f"{path}: core takes the pure standard library, numpy and msgspec, not {name}")
    return found


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in SOURCES])
def test_every_import_is_allowed(path: Path) -> None:
    assert breaches(path.relative_to(ROOT / PACKAGE).as_posix(), path.read_text()) == []


def test_every_room_is_known() -> None:
    rooms = {path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert rooms - {"__init__"} <= set(ROOMS)


@pytest.mark.parametrize(
    "path,source",
    [
        ("core/plan.py", "import time"),
        ("core/plan.py", "import torch"),
        ("core/plan.py", "def f():\n    from vllm import config"),
        ("core/plan.py", "from mooncake_hetero_tp.io import engine"),
        ("core/plan.py", "from mooncake_hetero_tp import io"),
        ("core/plan.py", "from ..io import engine"),
        ("core/__init__.py", "from ..native import ops"),
        ("core/plan.py", "from mooncake_hetero_tp.testing import FakeClock"),
        ("types.py", "import requests"),
        ("io/control.py", "import mooncake.engine"),
        ("io/control.py", "import importlib\nimportlib.import_module('mooncake.engine')"),
        ("io/runtime.py", "from mooncake_hetero_tp.vllm_adapter import worker"),
        ("native/ops.py", "import ctypes"),
        ("vllm_adapter/worker.py", "from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector"),
        ("cli/plan.py", "import vllm"),
        ("testing/linked.py", "import vllm"),
        ("__init__.py", "from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector"),
    ],
)
def test_a_breach_is_found(path: str, source: str) -> None:
    assert len(breaches(path, source)) == 1


@pytest.mark.parametrize(
    "path,source",
    [
        (
            "core/plan.py",
            "import numpy as np\nimport msgspec\nfrom . import regions\nfrom mooncake_hetero_tp.types import Span",
        ),
        ("io/engine.py", "import threading, mooncake.engine\nfrom mooncake_hetero_tp.core.plan import Plan"),
        ("connector.py", "from vllm.config import VllmConfig\nfrom .vllm_adapter import worker"),
        (
            "cli/plan.py",
            "import typer\nfrom mooncake_hetero_tp import __version__\nfrom mooncake_hetero_tp.core import plan",
        ),
    ],
)
def test_the_design_is_allowed(path: str, source: str) -> None:
    assert breaches(path, source) == []


def loaded_by(module: str) -> set[str]:
    """Top-level modules that importing `module` loads in a fresh interpreter."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_package_is_cheap_to_import() -> None:
    assert not loaded_by(PACKAGE) & {"torch", "vllm", "zmq", "numpy", "mooncake", "msgspec", "ctypes"}
