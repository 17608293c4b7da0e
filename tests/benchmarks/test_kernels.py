"""The kernel benchmarks check what they time, and say where they cannot run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mooncake_hetero_tp.native import _library
from tests.benchmarks import gpu, kernels
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.rows import Report


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> kernels.Side:
    if not _library.is_built():
        pytest.skip("no native library here")
    monkeypatch.setattr(kernels, "MOVED", 1 << 20)
    return kernels.Side.of(np.ones(2 << 20, np.uint8), np.ones(1 << 20, np.uint8), 256, 1)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_right_bytes_pass(side: kernels.Side, operation: str) -> None:
    side.check(operation)
    assert side.table.bytes == side.packed.size


def test_wrong_bytes_are_seen(side: kernels.Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Side, "run", lambda self, operation: lambda: None)
    with pytest.raises(WrongBytes, match="gather of 256 B segments"):
        side.check("gather")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_every_row_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "bench.json")
    report.plan(gpu.rows())
    gpu.measure(report, quick=True)
    report.excuse(gpu.rows(), "not measured in this run")
    assert all(row.note.startswith("no GPU here: ") for row in report.rows.values())
    assert gpu.main() == 0
    assert capsys.readouterr().out.startswith("nothing measured: no GPU here: ")
