"""What a store's URL says, and what is wrong with others."""

from __future__ import annotations

import pytest

from engine.config import ConfigError
from engine.store.store_url import StoreAddress, parse_store_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mooncake://10.0.0.7:50051", StoreAddress("10.0.0.7", 50051, 9003, 256 << 20, None)),
        (
            "mooncake://master:1/?segment_mb=0&host=10.0.0.8&admin_port=9",
            StoreAddress("master", 1, 9, 0, "10.0.0.8"),
        ),
    ],
)
def test_a_store_url_says_where_and_how_much(url: str, address: StoreAddress) -> None:
    assert parse_store_url(url) == address


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://host:1", "redis"),
        ("mooncake://host", "mooncake://host"),
        ("mooncake://:50051", "50051"),
        ("mooncake://host:notaport", "notaport"),
        ("mooncake://host:99999", "99999"),
        ("mooncake://me@host:1", "me@host"),
        ("mooncake://host:1/path", "path"),
        ("mooncake://host:1#part", "part"),
        ("mooncake://host:1?segment_mb", "segment_mb"),
        ("mooncake://host:1?segment_mb=-1", "segment_mb=-1"),
        ("mooncake://host:1?segment_mb=15", "segment_mb=15"),
        ("mooncake://host:1?segment_mb=1e3", "segment_mb=1e3"),
        ("mooncake://host:1?segment_mb=1&segment_mb=2", "twice"),
        ("mooncake://host:1?admin_port=0", "admin_port=0"),
        ("mooncake://host:1?host=", "host="),
        ("mooncake://host:1?sgement_mb=1", "sgement_mb"),
    ],
)
def test_a_wrong_store_url_is_refused_in_four_parts(url: str, found: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_store_url(url)
    field, _, rest = str(refused.value).partition(": found ")
    said, _, rest = rest.partition(", allowed ")
    allowed, _, remedy = rest.partition("; ")
    assert field == "--cluster-store"
    assert found in said
    assert allowed
    assert remedy
