"""The API key that `serve` prints: given on the command line, or its own, which persists."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.cli.home import KEY_PREFIX, secret_file
from gateway.cli.problem import Problem

MIN_KEY_CHARACTERS = 16


def serve_key(home: Path, *, literal: str | None, file: Path | None) -> tuple[Path, str]:
    """(file to hand to the gateway, secret). Secrets travel in files: arguments are public."""
    if literal is not None and file is not None:
        raise Problem(
            "--api-key",
            found="both --api-key and --api-key-file",
            allowed="one of them, or none for the key in home",
            remedy="leave one away",
        )
    if literal is not None:
        require_key(literal, "--api-key")
        given = home / "given-api.key"
        write_secret(given, literal)
        return given, literal
    if file is not None:
        try:
            secret = file.read_text().strip()
        except OSError as error:
            raise Problem(
                "--api-key-file",
                found=f"{file}: {error.strerror}",
                allowed="a readable file with the key in its first line",
                remedy="create it, or leave the flag away",
            ) from error
        require_key(secret, "--api-key-file")
        return file.absolute(), secret
    own = home / "api.key"
    return own, secret_file(own, prefix=KEY_PREFIX)


def require_key(secret: str, flag: str) -> None:
    if len(secret) < MIN_KEY_CHARACTERS or not secret.isprintable() or " " in secret:
        raise Problem(
            flag,
            found=f"{len(secret)} characters",
            allowed=f"at least {MIN_KEY_CHARACTERS} printable characters without spaces",
            remedy="leave the flag away and let kagari draw a key",
        )


def write_secret(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secret + "\n")
