"""The README's settings, ports and examples are the ones the code knows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from mooncake_hetero_tp.config import SETTINGS, Environment, HeteroTPConfig

README = (Path(__file__).parents[2] / "README.md").read_text()


def table_rows(heading: str) -> dict[str, str]:
    """First two columns of the table whose header row starts with `heading`."""
    table = README.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0].strip("`"): row[1] for row in rows}


def test_settings_table_lists_exactly_the_known_settings() -> None:
    rows = table_rows("setting")
    assert list(rows) == [setting.name for setting in SETTINGS]
    for setting in SETTINGS:
        if setting.default:
            shown = f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
            assert rows[setting.name] == f"`{shown}`"


def test_environment_table_has_the_defaults() -> None:
    rows = table_rows("variable")
    defaults = Environment()
    assert rows["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == f"`{defaults.bootstrap_port}`"
    assert rows["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] == f"`{defaults.keep_s:g}`"
    assert rows["VLLM_MOONCAKE_CONNECTOR_TIMEOUT"] == f"`{defaults.connector_timeout_s:g}`"


def test_every_kv_transfer_config_in_it_is_valid() -> None:
    configs = [json.loads(text) for text in re.findall(r"--kv-transfer-config \\\n\s*'([^']+)'", README)]
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    for config in configs:
        HeteroTPConfig.from_extra_config(config.get("kv_connector_extra_config"))


def test_the_example_case_is_planned(tmp_path: Path) -> None:
    (case,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "case.json"
    path.write_text(case)
    command = [sys.executable, "-m", "mooncake_hetero_tp.cli", "plan", str(path), "--json"]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (only,) = answer if isinstance(answer, list) else [answer]
    # 70 tokens, 8 heads of 128 bf16 elements, K and V, halved over two ranks.
    assert [pull["bytes"] for pull in only["pulls"]] == [70 * 4 * 128 * 2 * 2] * 2
