"""Prompts: are two the same, and how a producer's is shortened by one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """What decides a prompt's KV: tokens or embeddings, media and LoRA adapter."""

    token_ids: list[int] | None
    embeds: torch.Tensor | None
    media: tuple[str, ...]
    lora: str | None

    @classmethod
    def of(cls, request: Any) -> Prompt:
        """The prompt of a vLLM request; keeps references, copies nothing."""
        return cls(
            token_ids=request.prompt_token_ids,
            embeds=request.prompt_embeds,
            media=tuple(str(feature.identifier) for feature in request.mm_features or ()),
            lora=None if request.lora_request is None else str(request.lora_request.lora_name),
        )

    def same_as(self, other: Prompt) -> bool:
        """Whether both have the same KV, as the children of one `n > 1` request do."""
        return (
            self.token_ids == other.token_ids
            and self.media == other.media
            and self.lora == other.lora
            and _same_embeds(self.embeds, other.embeds)
        )


def _same_embeds(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def is_turned_away(request: Any) -> bool:
    """A stand-in with a prompt of one token 0, which vLLM's API server sends for a request that it refused.

    It is aborted at once, only so that connectors hear of its `kv_transfer_params`
    (`AsyncLLM.notify_kv_transfer_request_rejected`).
    """
    return bool(getattr(request, "abort_immediately", False))


def truncate_prompt(request: Any) -> None:
    """Drop the last prompt token, which the consumer runs itself, and generate one token.

    A prefill of N tokens would leave a window or chunk one token further than a consumer that starts at
    N-1 needs. Not where the prefix cache is skipped (prompt logprobs): nothing is loaded then. The
    caller sees to it that a request is truncated once (vllm#47466).
    """
    if request.num_prompt_tokens <= 1 or request.skip_reading_prefix_cache:
        return
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-1]  # a new list: n > 1 children share the old one
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    request._all_token_ids.pop()  # noqa: SLF001  # in place: vLLM's read-only views are bound to this list
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
