"""logs: our lines come out where vLLM's do, unless somebody else decides."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_hetero_tp.vllm_adapter.logs import PACKAGE, adopt_vllm_logging


@contextmanager
def bare_loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """The package's and vLLM's logger with nothing configured, pytest's root handlers included; then as before."""
    loggers = (logging.getLogger(PACKAGE), logging.getLogger("vllm"), logging.getLogger())
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = []
    try:
        yield loggers[0], loggers[1]
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate


def test_handlers_and_level_are_taken_once() -> None:
    with bare_loggers() as (package, vllm):
        handler = logging.NullHandler()
        vllm.addHandler(handler)
        vllm.setLevel(logging.DEBUG)
        adopt_vllm_logging()
        adopt_vllm_logging()
        assert package.handlers == [handler]
        assert package.level == logging.DEBUG
        assert not package.propagate


def test_a_configured_root_logger_decides() -> None:
    with bare_loggers() as (package, vllm):
        vllm.addHandler(logging.NullHandler())
        logging.getLogger().addHandler(logging.NullHandler())
        adopt_vllm_logging()
        assert package.handlers == []
        assert package.propagate


def test_without_vllm_handlers_nothing_changes() -> None:
    with bare_loggers() as (package, _):
        adopt_vllm_logging()
        assert package.handlers == []
