"""Lets this package's log lines come out where vLLM's do."""

from __future__ import annotations

import logging

PACKAGE = "mooncake_hetero_tp"


def adopt_vllm_logging() -> None:
    """Give the package logger vLLM's handlers and level.

    vLLM configures only its own `vllm` logger, so without this everything below WARNING would be lost.
    Where the application (or pytest) has configured the root logger, that one decides.
    """
    package, vllm = logging.getLogger(PACKAGE), logging.getLogger("vllm")
    if package.handlers or not vllm.handlers or logging.getLogger().handlers:
        return
    for handler in vllm.handlers:
        package.addHandler(handler)
    package.setLevel(vllm.level)
    package.propagate = False
