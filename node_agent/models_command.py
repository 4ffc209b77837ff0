"""`python -m node_agent models list|pull|show|spec`: what the command line asks about models."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from node_agent.catalogue import Catalogue, load_catalogue
from node_agent.checkpoints import Checkpoint, ensure, models_folder, prepare, resolve
from node_agent.config import default_home
from node_agent.errors import NodeError
from node_agent.pull import pip_fetch, pull

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
        return [
            _describe(resolve(name, catalogue, folder), catalogue) for name in catalogue.names()
        ]
    checkpoint = resolve(options.name, catalogue, folder)
    if options.command == "show":
        return _describe(checkpoint, catalogue)
    progress = _ProgressLines(as_json=options.json)
    if options.command == "pull":
        if checkpoint.file is not None:
            file = checkpoint.file
            pull(file, folder, fetch=pip_fetch(file), progress=progress)
        return _describe(checkpoint, catalogue)
    ensure(checkpoint, progress=progress)
    prepared = prepare(checkpoint, bundle_caches=bundle_caches(folder, default_home()))
    return {"model_spec": prepared.spec, "bundle_path": str(prepared.bundle_path)}


def bundle_caches(folder: Path, home: Path) -> tuple[Path, ...]:
    """Where built bundles are kept: beside the models, or at home when that is read-only."""
    return (folder / "bundles", home / "bundles")


def _describe(checkpoint: Checkpoint, catalogue: Catalogue) -> dict[str, object]:
    entry, file = checkpoint.entry, checkpoint.file
    return {
        "name": checkpoint.name,
        "title": entry.title if entry else checkpoint.name,
        "present": checkpoint.path.exists(),
        "default": checkpoint.name == catalogue.default,
        "format": checkpoint.format,
        "context_tokens": entry.context_tokens if entry else None,
        "bytes": file.file_bytes if file else None,
        "download_bytes": file.wheel_bytes if file else None,
        "sha256": file.file_sha256 if file else None,
        "licence": file.licence if file else None,
        "source": f"{file.package} {file.package_version} (package index)" if file else "local",
        "labels": list(entry.labels) if entry else [],
        "aliases": list(entry.aliases) if entry else [],
        "path": str(checkpoint.path),
    }


def _table(answer: object) -> str:
    assert isinstance(answer, dict | list)
    if isinstance(answer, dict):
        width = max(len(key) for key in answer)
        return "".join(f"{key:<{width}}  {_cell(value)}\n" for key, value in answer.items())
    columns = ("name", "present", "context_tokens", "bytes", "licence", "labels")
    rows = [columns, *(tuple(_cell(row[column]) for column in columns) for row in answer)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(str, value)) or "-"
    return str(value)


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
        if stage == self._stage and done < total and now - self._said_at < PROGRESS_EVERY_S:
            return
        self._stage, self._said_at = stage, now
        if self._as_json:
            line = {"event": "progress", "stage": stage, "bytes": done, "total_bytes": total}
            sys.stderr.write(msgspec.json.encode(line).decode() + "\n")
        else:
            sys.stderr.write(f"{stage}: {done >> 20} of {total >> 20} MiB\n")
        sys.stderr.flush()
