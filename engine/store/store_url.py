"""`--cluster-store URL`: where a Mooncake Store is, and what this engine gives to it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from engine.config import ConfigError

FIELD = "--cluster-store"
FORM = "mooncake://MASTER:PORT[?segment_mb=256&host=ADDRESS&admin_port=9003]"
LEAST_SEGMENT_MB = 16  # Mooncake refuses a smaller one


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is, and what this engine gives to it."""

    master_host: str
    master_port: int
    admin_port: int  # the master's metrics port, which lists the keys: a purge needs it
    segment_bytes: int  # memory for the store's objects; 0: only use it
    host: str | None  # under which other nodes reach this one; None: as the master sees it


def parse_store_url(url: str) -> StoreAddress:
    """Raises ConfigError on anything but FORM."""

    def wrong(found: object, allowed: str = FORM, remedy: str = "") -> ConfigError:
        return ConfigError(
            FIELD, found=found, allowed=allowed, remedy=remedy or "see docs/cluster-store.md"
        )

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise wrong(f"{url!r} ({error})") from error
    if parts.scheme != "mooncake":
        raise wrong(repr(url), remedy="the store must be a Mooncake Store")
    if not host or not port or parts.path not in ("", "/") or parts.fragment or "@" in parts.netloc:
        raise wrong(repr(url), remedy="name the master's host and RPC port, and nothing after them")
    given = dict(options)
    if len(given) < len(options):
        raise wrong(f"an option twice in {url!r}")

    def number(name: str, default: int, low: int, high: int) -> int:
        text = given.pop(name, str(default))
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise wrong(f"{name}={text}", f"{low} to {high}", f"set {name} to a whole number")
        return int(text)

    segment_mb = number("segment_mb", 256, 0, 1 << 20)
    if 0 < segment_mb < LEAST_SEGMENT_MB:
        raise wrong(
            f"segment_mb={segment_mb}",
            f"0, or {LEAST_SEGMENT_MB} and more",
            "give the store more memory, or none",
        )
    admin_port = number("admin_port", 9003, 1, 65535)
    own_host = given.pop("host", None)
    if own_host == "":
        raise wrong("host=", "an address or a name", "leave host out, or name this machine")
    if given:
        raise wrong(f"option {min(given)!r}", "segment_mb, host, admin_port", "leave it out")
    return StoreAddress(host, port, admin_port, segment_mb << 20, own_host)
