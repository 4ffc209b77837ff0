"""`kagari config check` and `show`: the configuration as the gateway itself would read it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gateway.cli.problem import Problem
from gateway.config import ConfigError, Loaded, load


def loaded(file: Path | None) -> Loaded:
    try:
        return load(file)
    except ConfigError as error:
        raise Problem(
            error.name, found=error.found, allowed=error.allowed, remedy=error.remedy
        ) from error


def check_config(file: Path | None, *, as_json: bool) -> None:
    rows = loaded(file).rows()
    changed = sum(origin != "default" for _, _, origin in rows)
    if as_json:
        write_json({"ok": True, "settings": len(rows), "changed": changed})
        return
    sys.stdout.write(f"ok: {len(rows)} settings, {changed} not at their default\n")


def show_config(file: Path | None, *, origin: bool, as_json: bool) -> None:
    rows = loaded(file).rows()
    if as_json:
        write_json([{"name": name, "value": value, "origin": from_} for name, value, from_ in rows])
        return
    names = max(len(name) for name, _, _ in rows)
    values = max(len(shown(value)) for _, value, _ in rows)
    for name, value, from_ in rows:
        line = f"{name:<{names}}  {shown(value):<{values}}  {from_ if origin else ''}"
        sys.stdout.write(line.rstrip() + "\n")


def shown(value: object) -> str:
    """As TOML would hold it; what is not set is a dash."""
    return "-" if value is None else msgspec.json.encode(value, enc_hook=str).decode()


def write_json(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")
