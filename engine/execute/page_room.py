"""Whether memory holds the pages that were asked for: refused at the start, not found out later."""

from __future__ import annotations

import torch

from engine.config import ConfigError
from engine.memory import available_bytes
from engine.store.page_codec import PageLayout

STEP_BYTES = 128 << 20  # what a first long step and its sampling may touch beside pages


def free_bytes(device: torch.device) -> int | None:
    """Memory that pages may still take; None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def require_room(layout: PageLayout, num_pages: int, free: int | None) -> None:
    """Raises ConfigError unless num_pages of the layout, and the null page, fit in free bytes."""
    needed = (num_pages + 1) * layout.page_bytes
    if free is None or needed + STEP_BYTES <= free:
        return
    fitting = max(0, free - STEP_BYTES) // layout.page_bytes - 1
    smaller = "" if layout.is_quantised else ", or pass --kv-dtype int8 for pages of half the size"
    raise ConfigError(
        "--kv-device-tokens",
        found=f"{num_pages * layout.page_size} tokens in {layout.precision} pages, "
        f"{needed / 1e6:.0f} MB",
        allowed=f"up to {max(0, fitting) * layout.page_size}: {free / 1e6:.0f} MB of memory are "
        f"free, of which a step takes {STEP_BYTES / 1e6:.0f}",
        remedy=f"lower it{smaller}",
    )
