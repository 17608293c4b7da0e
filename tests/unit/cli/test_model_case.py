"""cli/model_case.py: block sizes as vLLM aligns them, groups, and the command on a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_hetero_tp.cli import main
from mooncake_hetero_tp.cli.model_case import aligned_block, model_case
from mooncake_hetero_tp.cli.wish import Wish
from mooncake_hetero_tp.errors import ConfigError
from tests.unit.cli.test_models import DENSE, HYBRID, MLA, SPARSE, write

LARGE_HYBRID = HYBRID | {"num_hidden_layers": 60}


@pytest.mark.parametrize(
    "block,kernel,token,state,expected",
    [
        (16, 32, 512, 2_134_016, 4192),
        (16, 64, 256, 533_504, 2112),
        (16, 16, 512, 2_134_016, 4176),
        (64, 16, 512, 2_134_016, 4224),
        (16, 16, 512, 8192, 16),
        (64, 16, 512, 512, 64),
    ],
)
def test_blocks_are_aligned_as_vllm_does(block: int, kernel: int, token: int, state: int, expected: int) -> None:
    """vllm#49612: 4192 and 2112 tokens at TP1 and TP4 of one model; 4176 in steps of 16 (vllm#42895)."""
    assert aligned_block(block, kernel, token, state) == expected


def case_of(tmp_path: Path, config: object, prefill: Wish, decode: Wish) -> dict[str, Any]:
    return model_case(write(tmp_path, config), {"prefill": prefill, "decode": decode}).case


def test_groups_are_those_of_vllm(tmp_path: Path) -> None:
    """45 states and 15 attention layers: three groups of states, layers dealt out in turn, and one of attention."""
    found = case_of(tmp_path, LARGE_HYBRID, Wish(), Wish(tp=2))
    groups = [layer["group"] for layer in found["layers"]]
    assert groups[:9] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [groups.count(group) for group in range(4)] == [15] * 4
    nearly_equal = DENSE | {"model_type": "gemma2", "sliding_window": 8, "layer_types": [
        *["sliding_attention"] * 5, *["full_attention"] * 7]}  # fmt: skip
    assert {layer["group"] for layer in case_of(tmp_path, nearly_equal, Wish(), Wish())["layers"]} == {0, 1}
    assert {layer["group"] for layer in case_of(tmp_path, SPARSE, Wish(), Wish())["layers"]} == {0}


def test_pages_of_a_hybrid_are_alike(tmp_path: Path) -> None:
    found = case_of(tmp_path, LARGE_HYBRID, Wish(), Wish(tp=2, block_size=(64,), kernel_block_size=(32,)))
    for side, heads in ((found["producer"], 2), (found["consumer"], 1)):
        page = side["block_size"] * heads * 2 * 256 * 2
        assert side["page_size_padded"] == [page, page, page, None]
        state = ((2 * 16 + 32) * 128 * 3 + 32 * 128 * 128) * 2 // (2 // heads)
        assert page >= state > page - 64 * heads * 2 * 256 * 2
    assert found["consumer"]["kernel_block_size"] == [found["consumer"]["block_size"]] * 3 + [32]
    assert found["consumer"]["block_size"] % 64 == 0


@pytest.mark.parametrize(
    "config,prefill,decode,words",
    [
        (DENSE, {"dtype": "fp8"}, {}, ["--prefill fp8", "--decode bfloat16"]),
        (SPARSE, {}, {"pp": 2}, ["--decode pp=2", "12 layers", "24", "pp=1"]),
        (DENSE, {"block_size": (16, 32)}, {}, ["--prefill", "block_size", "2 groups"]),
        (LARGE_HYBRID, {"tp": 3}, {}, ["TP size 3", "KV heads"]),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    config: object, prefill: dict[str, Any], decode: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as found:
        case_of(tmp_path, config, Wish(**prefill), Wish(**decode))
    for word in words:
        assert word in str(found.value)


@pytest.mark.parametrize(
    "config",
    [DENSE, MLA, SPARSE, LARGE_HYBRID, DENSE | {"model_type": "gemma3_text", "sliding_window": 32}],
    ids=lambda config: str(config["model_type"]),
)
def test_a_model_is_planned(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pp = 1 if config is SPARSE else 2
    settings = ["--prefill", f"tp=2,pp={pp}", "--decode", "tp=4,block_size=64"]
    assert main(["plan", "--model", str(write(tmp_path, config)), *settings, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "ok"
    ranks = {(pull["consumer_rank"]["tp"], pull["producer_rank"]["pp"]) for pull in found["predicted"]["pulls"]}
    assert ranks == {(tp, stage) for tp in range(4) for stage in range(pp)}
    assert any(config["model_type"] in told for told in found["assumptions"])
    assert main(["plan", "--model", str(tmp_path), *settings]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "assumed: prefill: blocks of" in out
    if config is LARGE_HYBRID:
        assert "instead of 16, as vLLM aligns them at TP2" in out


def test_wrong_usage_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = write(tmp_path, DENSE) / "config.json"
    for arguments in (["--model", str(tmp_path), str(case)], [str(case), "--decode", "tp=2"], ["--prefill", "tp=2"]):
        assert main(["plan", *arguments]) == 1
        captured = capsys.readouterr()
        assert "Usage" in captured.err + captured.out
    assert main(["plan", "--model", str(tmp_path), "--decode", "tp=x", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], "--decode: tp=x" in found["why"]) == ("invalid", True)
