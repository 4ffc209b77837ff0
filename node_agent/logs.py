"""structlog as JSON lines on stderr."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import structlog


def _render(value: Any, **_: Any) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode()


def configure_logs(**bound: str) -> None:
    """Call once, first thing in the process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_render),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
