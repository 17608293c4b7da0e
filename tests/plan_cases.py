"""Cases for `mooncake-hetero-tp plan`, and readers of its answers; shared by several test files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake_hetero_tp.cli.answer import answer
from mooncake_hetero_tp.cli.costs import Terms
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS

Json = dict[str, Any]


def side(tp: int = 1, layout: str = "LBHNC", block_size: int | list[int] = 16, **more: object) -> Json:
    return {"tp": tp, "pp": 1, "layout": layout, "block_size": block_size, "num_blocks": 64, **more}


def attention(name: str, kv_heads: int = 8, head_size: int = 128, **more: object) -> Json:
    return {"name": name, "kind": "attention", "kv_heads": kv_heads, "head_size": head_size, **more}


def layers(count: int, kv_heads: int = 8, head_size: int = 128) -> list[Json]:
    return [attention(f"model.layers.{place}.self_attn.attn", kv_heads, head_size) for place in range(count)]


def make_case(
    producer: Json, consumer: Json, of: list[Json], request: Json | None = None, dtype: str = "bfloat16"
) -> Json:
    found = {"producer": producer, "consumer": consumer, "dtype": dtype, "layers": of}
    return found if request is None else {**found, "request": request}


def example() -> Json:
    """The case of the interface's description."""
    return make_case(
        side(),
        side(2, "BLHNC", 64),
        layers(1),
        {"tokens": 70, "skip_tokens": 0, "producer_blocks": [[3, 9, 4, 7, 11]], "consumer_blocks": [[5, 2]]},
    )


def ask(case: object, mode: Mode = Mode.AUTO, slot_mib: int = 8) -> Json:
    """The answer as a script gets it."""
    found: Json = json.loads(msgspec.json.encode(answer(case, Terms(mode=mode, slot_mib=slot_mib))))
    return found


def pull_of(found: Json, consumer_tp: int, producer_tp: int) -> Json:
    names = ({"pp": 0, "tp": consumer_tp}, {"pp": 0, "tp": producer_tp})
    return next(pull for pull in found["pulls"] if (pull["consumer_rank"], pull["producer_rank"]) == names)


def spots(pull: Json) -> list[tuple[int, int, int]]:
    return [(copy["src"], copy["dst"], copy["bytes"]) for copy in pull["copies"]]


def changed(path: str, value: object) -> Json:
    """The example with one field replaced; a value of `...` removes it."""
    case: Any = example()
    *steps, last = path.split(".")
    where = case
    for step in steps:
        where = where[int(step)] if step.isdigit() else where[step]
    if value is ...:
        del where[last]
    else:
        where[int(last) if last.isdigit() else last] = value
    return dict(case)


def per_group(value: int | list[int], group: int) -> int:
    return value[group] if isinstance(value, list) else value


def random_side(draw: random.Random, heads: Sequence[int], groups: int) -> Json:
    fits = [tp for tp in (1, 2, 3, 4, 6, 8) if all(count % tp == 0 or tp % count == 0 for count in heads)]
    sizes = [draw.choice([4, 6, 8, 12, 16]) for _ in range(groups)]
    chosen = side(draw.choice(fits), draw.choice(VLLM_LAYOUTS), sizes if groups > 1 else sizes[0])
    chosen |= {"pp": draw.choice([1, 1, 2, 3]), "num_blocks": draw.randint(7, 9)}
    special = draw.random()
    if special < 0.2 and chosen["layout"] in {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}:
        chosen["page_size_padded"] = 8 * max(sizes) * max(heads) * 2 * 3 + 8 * draw.randint(0, 5)
    elif special < 0.5 and chosen["layout"] in {"LBHNC", "LBNHC"}:
        chosen["kernel_block_size"] = [draw.choice([1, 2, size // 2, size]) for size in sizes]
        chosen["kernel_block_size"] = [
            k if s % k == 0 else 1 for k, s in zip(chosen["kernel_block_size"], sizes, strict=True)
        ]
    return chosen


def random_case(seed: int) -> Json:
    draw = random.Random(seed)
    groups = draw.choice([1, 1, 2])
    of: list[Json] = []
    for place in range(draw.randint(1, 5)):
        heads = draw.choice([1, 2, 4, 6, 8]) if place == 0 or draw.random() < 0.2 else of[-1]["kv_heads"]
        of.append(attention(f"layer.{place}", heads, draw.choice([1, 1, 2]), group=draw.randrange(groups)))
    heads = [layer["kv_heads"] for layer in of]
    sides = [random_side(draw, heads, groups) for _ in range(2)]
    limit = min(min(np.atleast_1d(one["block_size"])) * one["num_blocks"] for one in sides)
    tokens = draw.randint(1, min(int(limit), 40))
    skip = draw.randint(0, tokens - 1) if draw.random() < 0.5 else 0
    request: Json = {"tokens": tokens, "skip_tokens": skip}
    for name, one, first in (("producer_blocks", sides[0], 0), ("consumer_blocks", sides[1], skip)):
        request[name] = [
            draw.sample(range(one["num_blocks"]), -(-tokens // size) - first // size)
            for size in [per_group(one["block_size"], group) for group in range(groups)]
        ]
    return make_case(sides[0], sides[1], of, request, "float64")
