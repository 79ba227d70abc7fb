"""Errors on tensors without values are raised, and told once: torch logs their tracebacks too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Inside, torch does not log the traceback of an error that it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
