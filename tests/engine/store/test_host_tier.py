"""The host tier's memory: given or its own, refused in words."""

import mmap

import pytest

from engine.config import ConfigError
from engine.store.host import HostTier
from engine.store.page_codec import PageLayout
from engine.store.tier import Status
from tests.engine.store.tier_factories import LAYOUT, NEVER, key_of, payload_of, record_of

HUGE = PageLayout("bf16", num_layers=1 << 12, num_kv_heads=1 << 12, page_size=1024, head_dim=1024)


def test_memory_of_its_own_keeps_pages() -> None:
    tier = HostTier(LAYOUT, 2)
    payload = memoryview(payload_of(key_of(1)))
    assert tier.put([record_of(1)], [payload], NEVER) == [Status.OK]
    view = memoryview(bytearray(LAYOUT.page_bytes))
    assert tier.get([key_of(1)], [view], NEVER) == [Status.OK]
    assert view == payload
    tier.close()


def test_an_arena_may_be_larger_but_not_smaller() -> None:
    size = 2 * LAYOUT.page_bytes
    HostTier(LAYOUT, 2, arena=memoryview(mmap.mmap(-1, size + 1))).close()
    with pytest.raises(ValueError, match=f"arena has {size - 1} bytes, want {size}"):
        HostTier(LAYOUT, 2, arena=memoryview(bytearray(size - 1)))


def test_memory_that_the_machine_has_not_is_refused_in_four_parts() -> None:
    with pytest.raises(ConfigError, match=r"--kv-host-mb: found .*, allowed .*; lower") as refused:
        HostTier(HUGE, 1 << 12)
    assert refused.value.field == "--kv-host-mb"
