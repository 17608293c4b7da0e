"""prompts: equality of what decides the KV, and truncation by exactly one token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mooncake_hetero_tp.vllm_adapter.prompts import Prompt, truncate_prompt
from tests.unit.vllm_adapter.requests import make_request


def embeds_request(embeds: torch.Tensor) -> Any:
    return SimpleNamespace(prompt_token_ids=None, prompt_embeds=embeds, mm_features=[], lora_request=None)


def test_same_tokens_are_the_same_prompt() -> None:
    one, other = make_request("a", 5), make_request("b", 5)
    assert Prompt.of(one).same_as(Prompt.of(other))
    assert not Prompt.of(one).same_as(Prompt.of(make_request("c", 6)))


def test_media_and_adapter_count() -> None:
    """Placeholder tokens of two images are equal, their KV is not."""
    one, other = make_request("a", 5), make_request("b", 5)
    other.mm_features = [SimpleNamespace(identifier="image-1")]
    assert not Prompt.of(one).same_as(Prompt.of(other))
    third = make_request("c", 5)
    third.lora_request = SimpleNamespace(lora_name="french")
    assert not Prompt.of(one).same_as(Prompt.of(third))


def test_embeddings_are_compared_by_value() -> None:
    one = Prompt.of(embeds_request(torch.ones(3, 2)))
    assert one.same_as(Prompt.of(embeds_request(torch.ones(3, 2))))
    assert not one.same_as(Prompt.of(embeds_request(torch.zeros(3, 2))))
    assert not one.same_as(Prompt.of(embeds_request(torch.ones(2, 2))))
    assert not one.same_as(Prompt.of(make_request("a", 3)))


def test_truncation_drops_one_token_everywhere() -> None:
    request = make_request("a", 10)
    shared = request.prompt_token_ids
    truncate_prompt(request)
    assert request.prompt_token_ids == list(range(1, 10))
    assert shared == list(range(1, 11)), "children of one request share the list"
    assert list(request.all_token_ids) == list(range(1, 10))
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (9, 9, 1)


def test_truncation_of_embeddings() -> None:
    request = make_request("a", 10)
    request.prompt_token_ids, request.prompt_embeds = None, torch.ones(10, 4)
    truncate_prompt(request)
    assert request.prompt_embeds.shape == (9, 4)


def test_one_token_and_prompt_logprobs_are_left_alone() -> None:
    for request in (make_request("a", 1), make_request("b", 10, prompt_logprobs=1)):
        before = request.num_prompt_tokens
        truncate_prompt(request)
        assert (request.num_prompt_tokens, request.max_tokens) == (before, 5)
