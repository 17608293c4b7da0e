from __future__ import annotations

import re
from pathlib import Path

import pytest

from mooncake_hetero_tp.cli.wish import Wish, read_wish
from mooncake_hetero_tp.errors import ConfigError


def test_all_settings() -> None:
    text = "tp=2,pp=1,block_size=64,kernel_block_size=32,layout=BLHNC,dtype=bfloat16"
    assert read_wish(text) == Wish(
        tp=2, pp=1, block_size=(64,), kernel_block_size=(32,), layout="BLHNC", dtype="bfloat16"
    )


@pytest.mark.parametrize(
    "text,wish",
    [
        ("", Wish()),
        (" tp = 2 , ", Wish(tp=2)),
        ("block_size=16/1024", Wish(block_size=(16, 1024))),
        ("dtype=half", Wish(dtype="float16")),
        ("dtype=float", Wish(dtype="float32")),
        ("dtype=fp8", Wish(dtype="fp8")),
    ],
)
def test_what_is_not_named_is_the_producers(text: str, wish: Wish) -> None:
    assert read_wish(text) == wish


@pytest.mark.parametrize(
    "text,word",
    [
        ("tps=2", "'tps' is unknown; settings: tp, pp, block_size"),
        ("tp", "tp=: expected a number"),
        ("tp=0", "from 1 to 256"),
        ("tp=257", "from 1 to 256"),
        ("tp=-1", "from 1 to 256"),
        ("tp=2.0", "from 1 to 256"),
        ("tp=²", "from 1 to 256"),
        ("tp=" + "9" * 5000, "from 1 to 256"),
        ("tp=2,tp=4", "'tp' is named twice"),
        ("tp=32,pp=32", "at most 256 ranks"),
        ("block_size=16/", "block_size=: expected a number"),
        ("block_size=" + "/".join(["16"] * 1025), "lists 1025 groups"),
        ("layout=HND", "layout=HND"),
        ("dtype=int4", "dtype=int4 is unknown"),
        ("=", "'' is unknown"),
    ],
)
def test_what_cannot_be_meant_is_named(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_wish(text)
    assert word in str(caught.value)


def test_what_the_readme_asks_can_be_read() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    wishes = re.findall(r"--as ([a-z_]+=\S+)", readme)
    assert wishes
    for wish in wishes:
        read_wish(wish)
