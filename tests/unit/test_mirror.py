"""tests/unit mirrors the package: one test file per module, under the same path."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mooncake_hetero_tp"
UNIT = ROOT / "tests" / "unit"

# About the package as a whole.
ABOUT_ALL = {"test_import_rule.py", "test_mirror.py", "test_readme.py"}


def test_every_unit_test_mirrors_a_module() -> None:
    strays = []
    for path in UNIT.rglob("test_*.py"):
        folder, name = path.relative_to(UNIT).parent, path.stem.removeprefix("test_")
        candidates = [f"{name}.py", f"_{name}.py", f"{name}/__init__.py"]
        if path.name not in ABOUT_ALL and not any((PACKAGE / folder / candidate).exists() for candidate in candidates):
            strays.append(str(path.relative_to(ROOT)))
    assert strays == []
